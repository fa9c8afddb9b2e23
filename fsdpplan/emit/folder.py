"""The files of a job folder, as text: whoever calls this writes them."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.emit.alerts import alert_rules
from fsdpplan.emit.header import plan_digest
from fsdpplan.emit.job import Job, Trainer
from fsdpplan.emit.quoting import shell_word
from fsdpplan.emit.script import render_launch
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

SCRIPT_NAME = "job.sbatch"
PLAN_NAME = "fsdpplan.json"
TRAINER_NAME = "trainer"
ALERTS_NAME = "alerts.yml"


def job_folder_files(
    *, plan: Plan, plan_json: str, job: Job, version: str, folder: str
) -> dict[str, str]:
    """File name -> text of the job folder at the absolute path `folder`.

    The script runs the trainer in `folder`, wherever it is submitted from: SLURM runs a copy of
    the script out of its own spool folder, so a path beside the script would lead nowhere.
    """
    if not isinstance(job.program, Trainer):
        raise SpecError(
            "a job folder holds a copy of the reference trainer: leave out --script, or --out"
        )
    if not folder.startswith("/"):
        raise SpecError(f"the job folder must be an absolute path, not {folder!r}")
    script = render_launch(
        plan=plan,
        plan_json=plan_json,
        job=replace(job, trainer_folder=f"{folder.rstrip('/')}/{TRAINER_NAME}"),
        version=version,
    )
    return {
        SCRIPT_NAME: script,
        PLAN_NAME: plan_json.rstrip("\n") + "\n",
        ALERTS_NAME: alert_rules(plan, digest=plan_digest(plan_json)),
        "README.md": _readme(plan=plan, plan_json=plan_json, folder=folder, version=version),
    }


def _readme(*, plan: Plan, plan_json: str, folder: str, version: str) -> str:
    several = plan.cluster.nodes > 1 and plan.cluster.device.kind == "cuda"
    here = " (inside an allocation)" if several else ""
    return f"""\
# A training job, planned by fsdpplan {version}

    cd {shell_word(folder)}
    sbatch {SCRIPT_NAME}
    bash {SCRIPT_NAME}{here}

- `{SCRIPT_NAME}`: the launch script, with the plan inside.
- `{PLAN_NAME}`: the plan, sha256 `{plan_digest(plan_json)[:12]}`.
- `{ALERTS_NAME}`: rules for Prometheus, for a run with `--prometheus`.
- `{TRAINER_NAME}/`: the training program. It is yours: it needs torch, not fsdpplan.

The script names this folder by its full path: after moving it, emit it again.
"""

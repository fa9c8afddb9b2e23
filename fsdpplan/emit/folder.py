"""The files of a job folder, as text: whoever calls this writes them."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.emit.alerts import alert_rules
from fsdpplan.emit.job import Job
from fsdpplan.emit.safe_text import shell_word
from fsdpplan.emit.slurm.header import PLAN_NAME, plan_digest
from fsdpplan.emit.slurm.node import TRAINER_NAME
from fsdpplan.emit.slurm.node_check import (
    NEAR_NAME,
    NODE_CHECK_NAME,
    binds,
    near_check,
    node_check,
)
from fsdpplan.emit.slurm.parts import part_names, part_text
from fsdpplan.emit.slurm.script import render_launch
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

SCRIPT_NAME = "job.sbatch"
ALERTS_NAME = "alerts.yml"


def job_folder_files(
    *, plan: Plan, plan_json: str, job: Job, version: str, folder: str
) -> dict[str, str]:
    """File name -> text of the job folder at the absolute path `folder`.

    The script calls the others by the path of `folder`, wherever it is submitted from: SLURM runs
    a copy of it out of its own spool folder, so a path beside the script would lead nowhere.
    """
    if not isinstance(job.program, Trainer):
        raise SpecError(
            "a job folder holds a copy of the reference trainer: leave out --script, or --out"
        )
    if not folder.startswith("/"):
        raise SpecError(f"the job folder must be an absolute path, not {folder!r}")
    job = replace(job, folder=folder.rstrip("/"))
    script = render_launch(plan=plan, plan_json=plan_json, job=job, version=version)
    parts = {f"parts/{name}.sh": part_text(name) for name in part_names(plan=plan, job=job)}
    return {
        SCRIPT_NAME: script,
        **parts,
        NODE_CHECK_NAME: node_check(several=plan.cluster.nodes > 1),
        **({NEAR_NAME: near_check()} if binds(plan) else {}),
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

- `{SCRIPT_NAME}`: the launch script. It calls the others.
- `parts/`: how a job lives, in files that are the same in every job, and what each node looks for
  in itself before it starts.
- `{PLAN_NAME}`: the plan, sha256 `{plan_digest(plan_json)[:12]}`.
- `{ALERTS_NAME}`: rules for Prometheus, for a run with `--prometheus`.
- `{TRAINER_NAME}/`: the training program. It is yours: it needs torch, not fsdpplan.

The script names this folder by its full path, in the line `export FSDPPLAN_JOB_FOLDER=`: after
moving it, correct that line.
"""

"""Which script to run: the one that stands in the folder, or one emitted from the plan."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fsdpplan import __version__
from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.slurm.header import (
    MAX_SCRIPT_BYTES,
    PLAN_NAME,
    job_plan,
    plan_digest,
    read_header,
    read_job_folder,
    read_own_program,
    read_plan_json,
)
from fsdpplan.emit.slurm.script import render_launch
from fsdpplan.emit.targets import ON_KUBERNETES, OTHER_TRAINERS, Target, render
from fsdpplan.emit.trainer_program import Trainer, planned_steps, said_steps
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import carried_json
from fsdpplan.files.table import read_text
from fsdpplan.run.plans import plan_from_json, read_plan
from fsdpplan.run.script_plan import plan_text
from fsdpplan.run.time_limit import with_grace, with_time_to_save
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.search.rules.program import script_problem
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan

Source = Literal["script", "plan"]
Kind = Literal["script", "manifest"]
"""What bash and sbatch take; what kubectl takes."""

_NAMES: dict[Kind, str] = {"script": SCRIPT_NAME, "manifest": "job.yaml"}
FILE_NAMES = tuple(_NAMES.values())
"""What a run's folder may have."""
_COMMENTS = re.compile("^#.*$", re.MULTILINE)
_CHECKPOINTS = re.compile(
    r"""(?<!\S)(?:'--checkpoint-dir\b[^']*'(?:"'"'[^']*')*|--checkpoint-dir\b(?:[= ]\S+)?)"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A script that is ready to run."""

    script: str
    """Its text."""
    plan: Plan
    """The plan that it runs."""
    origin: str
    """Where it came from, in words."""
    kind: Kind = "script"
    plan_file: str | None = None
    """Text of the plan where it is a file beside the script, in place of being inside."""
    shrunk: bool = False
    """Whether a tiny model stands for the plan's."""

    @property
    def file_name(self) -> str:
        """What it is called in a run's folder."""
        return _NAMES[self.kind]

    @property
    def own_program(self) -> str | None:
        """The user's own program that it runs; None: the reference trainer."""
        return read_own_program(self.script)

    @property
    def predicts(self) -> bool:
        """Whether its plan prices the model that it trains: an own program shrinks nothing."""
        return not self.shrunk or self.own_program is None

    @property
    def saves(self) -> bool:
        """Whether it keeps checkpoints, which another job can go on from."""
        return checkpoints_word(self.script) is not None


def checkpoints_word(script: str) -> str | None:
    """The option by which `script` keeps checkpoints, as it stands there; None where it keeps
    none."""
    plan = read_plan_json(script) or ""
    found = _CHECKPOINTS.search(_COMMENTS.sub("", script.replace(plan, "")))
    return None if found is None else found[0]


def require_program(plan: Plan, job: Job) -> None:
    """Raise SpecError where the job's own program cannot run the plan."""
    problem = program_problem(plan.layout, plan, job)
    if problem is not None:
        assert isinstance(job.program, UserProgram)
        raise SpecError(
            f"--script {job.program.script} cannot run this plan: {problem}. Plan again for what "
            "it trains: fsdpplan recommend with --program own, or with --program hf for a Hugging "
            "Face model"
        )


def program_problem(layout: Layout, plan: Plan, job: Job) -> str | None:
    """Why the job's own program cannot run `plan` in `layout`; None where it may."""
    if not isinstance(job.program, UserProgram):
        return None
    return script_problem(replace(plan.case, layout=layout))


def job_as_planned(plan: Plan, job: Job) -> Job:
    """`job` with the trainer told what the plan says of documents and tokens. Raises SpecError
    where the plan was not made for what the job asks for."""
    if not isinstance(job.program, Trainer):
        return job
    planned_steps(job.program, plan.training)
    program = replace(job.program, steps=said_steps(job.program, plan.training))
    return replace(job, program=_packed_as_planned(plan, program))


def job_in_time(plan: Plan, job: Job) -> Job:
    """`job` as planned, and told early enough before its time limit to save."""
    return with_time_to_save(job_as_planned(plan, job), plan)[0]


def _packed_as_planned(plan: Plan, program: Trainer) -> Trainer:
    if plan.training.packed and program.pack is False:
        raise SpecError(
            "the plan is of packed documents, in time and memory: leave --no-pack out, or plan "
            "again with fsdpplan recommend --no-pack"
        )
    if plan.training.packed:
        return replace(program, pack=True)
    if program.pack:
        _require_packable(plan)
    return program


def _require_packable(plan: Plan) -> None:
    packed = replace(plan.case, training=replace(plan.training, packed=True))
    problem = legal_layout_problem(packed)
    if problem is not None and legal_layout_problem(plan.case) is None:
        raise SpecError(f"--pack with this plan: {problem}; or plan again with --pack")


def emit_script(plan: Plan, job: Job) -> str:
    """The job script of `plan`, for this version of fsdpplan."""
    require_program(plan, job)
    job = job_in_time(plan, job)
    carried = job_plan(plan)
    return render_launch(
        plan=carried, plan_json=carried_json(carried), job=job, version=__version__
    )


def launch_text(target: Target, *, plan: Plan, job: Job, pods: Pods | None = None) -> str:
    """The text that launches `plan` at `target`, by this version of fsdpplan."""
    if target not in OTHER_TRAINERS:
        require_program(plan, job)
        job = job_in_time(plan, job) if target == "slurm" else job_as_planned(plan, job)
    if target in ON_KUBERNETES:
        pods = with_grace(pods or Pods(), plan, job)
    carried = job_plan(plan)
    order = Order(
        plan=carried,
        plan_json=carried_json(carried),
        job=job,
        version=__version__,
        pods=pods or Pods(),
    )
    return render(target, order)


def resolve_launch(
    folder: Path,
    *,
    plan_file: Path | None = None,
    job: Job | None = None,
    source: Source | None = None,
) -> Launch:
    """The script to run in `folder`.

    `job` is None when no job option was given; `source` settles a disagreement between a script
    that stands there and the plan.
    """
    script_path, plan_path = folder / SCRIPT_NAME, plan_file or folder / PLAN_NAME
    if source == "plan" or not os.path.exists(script_path):
        return _from_plan(plan_path, job=job or Job(), folder=folder)
    if job is not None:
        raise SpecError(
            f"{script_path} stands here with job options of its own: run it without any, or type "
            "--from plan to emit a new script from the plan"
        )
    launch = read_launch(script_path)
    if source is None and os.path.exists(plan_path):
        _require_same_plan(script_path, plan_path, inside=launch.plan)
    return launch


def is_plan(path: Path) -> bool:
    """Whether there is JSON at `path`, by its name or its first character: no script is that."""
    if path.suffix == ".json":
        return True
    if not os.path.isfile(path):
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(64).lstrip().startswith("{")


def read_launch(path: Path) -> Launch:
    """The job script or manifest of ours at `path`; anything else is refused."""
    script = read_text(path, limit_bytes=MAX_SCRIPT_BYTES, what="job script")
    _require_shebang_first(script, path)
    text = _plan_text(script, path)
    return Launch(
        script=script,
        plan=plan_from_json(text, where=f"the plan of {path}"),
        origin=str(path),
        kind="script" if script.startswith("#!") else "manifest",
        plan_file=None if read_job_folder(script) is None else text + "\n",
    )


def _require_shebang_first(script: str, path: Path) -> None:
    """Refuse a job script of ours that something was put above: the first line says what runs a
    script, and options of sbatch count before the first command only."""
    lines = script.splitlines()
    begins = next((number for number, line in enumerate(lines) if line.startswith("#!")), None)
    asks = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    if begins is None and not asks:
        return  # a manifest
    if begins is None:
        raise SpecError(
            f"{path} asks things of sbatch and does not begin with #!/bin/bash: put that into its "
            "first line"
        )
    if begins:
        above = next(filter(None, map(str.strip, lines[:begins])), None)
        stray = "an empty line" if above is None else repr(above)
        raise SpecError(
            f"{path} has {stray} above its {lines[begins]}, which must be the first line of a job "
            "script: remove what is above it"
        )
    commands = (n for n, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    first = next(commands, len(lines))
    if asks and first < asks[0]:
        raise SpecError(
            f"{path} has a command in line {first + 1} ({lines[first].strip()!r}) above its "
            "#SBATCH lines, which sbatch then ignores: move it below them, or emit it by "
            "--env-setup"
        )


def _from_plan(plan_path: Path, *, job: Job, folder: Path) -> Launch:
    if not os.path.exists(plan_path):
        raise SpecError(
            f"there is neither {SCRIPT_NAME} in {folder} nor the plan {plan_path}: type "
            "fsdpplan recommend --params 8e9 --gpus 8 first, which saves one"
        )
    plan = read_plan(plan_path)
    return Launch(script=emit_script(plan, job), plan=plan, origin=f"emitted from {plan_path}")


def _plan_text(script: str, path: Path) -> str:
    """The plan of a job script of ours, as JSON; anything else is refused."""
    choices = _choices(path)
    if not script.strip():
        raise SpecError(f"{path} is empty: {choices}")
    header, text = read_header(script), plan_text(script, path)
    if header is not None and text is None and (folder := read_job_folder(script)) is not None:
        raise SpecError(
            f"{path} is the script of the job folder {folder}, and the plan is neither there nor "
            f"beside it: {choices}"
        )
    if header is None or text is None:
        raise SpecError(
            f"{path} is no job script of fsdpplan (it has no header of ours): {choices}"
        )
    if plan_digest(text) != header.digest:
        raise SpecError(f"the plan of {path} was changed after it was emitted: {choices}")
    return text


def _choices(path: Path) -> str:
    """What to type where `path` cannot be run."""
    if path.suffix in (".yaml", ".yml"):
        return f"type fsdpplan emit-launch --target kubernetes --image IMAGE > {path} to write one"
    return (
        f"type --from plan to run the plan instead, or fsdpplan emit-launch > {SCRIPT_NAME} to "
        f"write it again, or bash {path} to run it as it is"
    )


def _require_same_plan(script_path: Path, plan_path: Path, *, inside: Plan) -> None:
    if _what_runs(read_plan(plan_path)) != _what_runs(inside):
        raise SpecError(
            f"{script_path} runs another plan than {plan_path} holds: type --from script to run "
            f"the script, --from plan to run the plan, or fsdpplan emit-launch > {SCRIPT_NAME} to "
            "write the script again"
        )


def _what_runs(plan: Plan) -> tuple[object, ...]:
    """What two plans have in common whose job is the same: they may predict it differently, as one
    does that leaves weak nodes out, and a script knows the torch of its job better."""
    cluster = plan.cluster
    machines = (cluster.name, cluster.device.name, cluster.gpus, cluster.gpus_per_node)
    return (plan.model, replace(plan.training, torch=None), plan.layout, machines)

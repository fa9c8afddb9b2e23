"""`fsdpplan emit-launch`: the launch script of a plan, or a job folder."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json, PlanFile
from fsdpplan.cli.options.job import (
    ContainerOptions,
    JobOptions,
    PodOptions,
    ProgramOptions,
    SurvivalOptions,
)
from fsdpplan.cli.options.parse import choice, path, whole
from fsdpplan.cli.options.question import Torch
from fsdpplan.cli.resolve.job import job_of, pods_of
from fsdpplan.cli.resolve.torch import settled_plan, torch_of_job
from fsdpplan.cli.views.told import tell
from fsdpplan.emit.job import excluded_hosts
from fsdpplan.emit.targets import Target
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import GateFailed, SpecError
from fsdpplan.run import rehearse as program
from fsdpplan.run.rehearse_ranks import DEFAULT_RANKS, chosen_ranks
from fsdpplan.search.weak_nodes import price_of_weak_nodes, without_excluded
from fsdpplan.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """Which layout of the plan, and where the script goes."""

    HEADING: ClassVar[str] = "Script"

    target: Annotated[
        Target | None,
        Flag(
            metavar="NAME",
            parse=choice(Target),
            help=f"What starts the job: {', '.join(get_args(Target))}. Default: slurm.",
        ),
    ] = None
    rank: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Another layout of the plan's list."),
    ] = None
    torch: Torch = None
    out: Annotated[
        Path | None,
        Flag(
            metavar="DIR",
            parse=path,
            help="Write a job folder: script, plan, alert rules and the trainer's source.",
        ),
    ] = None
    alerts: Annotated[
        Path | None,
        Flag(metavar="FILE.yml", parse=path, help="Write alert rules of the plan for Prometheus."),
    ] = None
    rehearsed: Annotated[
        bool | None,
        Flag(name="--rehearsed", help="Rehearse the plan first, and emit nothing if that fails."),
    ] = None


def emit_launch(
    *,
    plan: PlanFile = DEFAULT_PLAN,
    emit: EmitOptions,
    job: JobOptions,
    trainer: Trainer,
    program: ProgramOptions,
    survival: SurvivalOptions,
    container: ContainerOptions,
    pods: PodOptions,
    json: Json = False,
) -> None:
    """Print what launches a plan: for Slurm, Kubernetes or others."""
    from fsdpplan.cli.resolve import job as launch
    from fsdpplan.emit.folder import SCRIPT_NAME
    from fsdpplan.emit.nccl_cloud import gap_of
    from fsdpplan.run.folder import write_job_folder

    target = emit.target or "slurm"
    launch.require_meaning(target, out=emit.out, alerts=emit.alerts, rehearsed=bool(emit.rehearsed))
    asked = job_of(job, trainer, program, survival, container)
    if target in launch.SAME_PYTHON:
        asked = launch.with_this_python(asked, given=job)
    own_program = program.script is not None
    chosen = launch.ranked(
        plan, emit.rank, own_program=own_program or target in launch.OTHER_TRAINERS
    )
    excluded = excluded_hosts(asked)
    for sentence in price_of_weak_nodes(chosen, excluded):
        tell(sentence)
    chosen = without_excluded(chosen, excluded)
    python = launch.python_here(asked) if target in launch.SAME_PYTHON else None
    image = pods.image if asked.container is None else asked.container.image
    its_torch = torch_of_job(emit.torch, image=image, python=python)
    settled = settled_plan(chosen, its_torch, own_program=own_program)
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    if (gap := gap_of(chosen, asked)) is not None:
        tell(gap.sentences)
    if emit.rehearsed:
        require_rehearsed(chosen, own_program=own_program, python=python)
    if emit.alerts is not None:
        launch.write_alerts(emit.alerts, chosen)
        typer.echo(f"wrote {emit.alerts}, for a run with --prometheus", err=True)
    text = launch.emitted(target, chosen, asked, pods_of(pods))
    if emit.out is not None:
        write_job_folder(emit.out, plan=chosen, job=asked)
        text = (emit.out / SCRIPT_NAME).read_text(encoding="utf-8")
        typer.echo(f"wrote {emit.out}; next: sbatch {emit.out / SCRIPT_NAME}", err=True)
    if target not in launch.OTHER_TRAINERS and (trial := launch.trial_sentence(asked)):
        tell(trial)
    if json:
        typer.echo(launch.script_json(text, target, chosen, asked, emit.out))
    elif emit.out is None:
        typer.echo(text, nl=False)


def require_rehearsed(plan: Plan, *, own_program: bool, python: str | None = None) -> None:
    """Raise GateFailed unless the plan's own program goes through its rehearsal as predicted."""
    if own_program:
        raise SpecError(
            "--rehearsed rehearses fsdpplan's own trainer, not a --script: rehearse a model of "
            "yours with fsdpplan rehearse --build FILE.py:FUNCTION"
        )
    ranks = chosen_ranks(plan.model, plan.layout, DEFAULT_RANKS)
    found = program.rehearse(plan, ranks, python=None if python == sys.executable else python)
    if not found.agrees:
        raise GateFailed(
            f"the plan did not rehearse, so nothing is emitted: {'; '.join(found.said)}; type "
            "fsdpplan rehearse for all of it"
        )

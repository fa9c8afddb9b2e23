"""`fsdpplan emit-launch`: the launch script of a plan, or a job folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.expand import Flag
from fsdpplan.cli.job_options import JobOptions, ProgramOptions, TrainerOptions, job_of
from fsdpplan.cli.options import DEFAULT_PLAN, Json, PlanFile
from fsdpplan.cli.parse import path, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """Which layout of the plan, and where the script goes."""

    HEADING: ClassVar[str] = "Script"

    rank: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Another layout of the plan's list."),
    ] = None
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
    trainer: TrainerOptions,
    program: ProgramOptions,
    json: Json = False,
) -> None:
    """Print the launch script of a plan, for sbatch and for bash."""
    from fsdpplan.cli import launch, rehearsal
    from fsdpplan.emit.folder import SCRIPT_NAME
    from fsdpplan.run.folder import write_job_folder
    from fsdpplan.run.launch import emit_script

    asked = launch.with_this_python(job_of(job, trainer, program), given=job)
    chosen = launch.ranked(plan, emit.rank, own_program=program.script is not None)
    for sentence in launch.price_of_weak_nodes(chosen, asked):
        typer.echo(f"fsdpplan: {sentence}", err=True)
    chosen = launch.without_excluded(chosen, asked)
    if emit.rehearsed:
        rehearsal.require_rehearsed(chosen, own_program=program.script is not None)
    if emit.alerts is not None:
        launch.write_alerts(emit.alerts, chosen)
        typer.echo(f"wrote {emit.alerts}, for a run with --prometheus", err=True)
    if emit.out is None:
        script = emit_script(chosen, asked)
    else:
        write_job_folder(emit.out, plan=chosen, job=asked)
        script = (emit.out / SCRIPT_NAME).read_text(encoding="utf-8")
        typer.echo(f"wrote {emit.out}; next: sbatch {emit.out / SCRIPT_NAME}", err=True)
    if json:
        typer.echo(launch.script_json(script, chosen, asked, emit.out))
    elif emit.out is None:
        typer.echo(script, nl=False)

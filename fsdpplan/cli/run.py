"""`fsdpplan run`: start the job here or by Slurm, follow it, compare it with the prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import typer

from fsdpplan.cli.expand import Flag
from fsdpplan.cli.job_options import JobOptions, ProgramOptions, TrainerOptions
from fsdpplan.cli.options import DEFAULT_PLAN, Json, LedgerOptions, PlanFile
from fsdpplan.cli.parse import choice, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What is run, and where."""

    HEADING: ClassVar[str] = "Run"

    source: Annotated[
        Literal["script", "plan"] | None,
        Flag(
            name="--from",
            metavar="script|plan",
            parse=choice(Literal["script", "plan"]),
            help="Run job.sbatch as it stands here, or emit from the plan.",
        ),
    ] = None
    target: Annotated[
        Literal["here", "slurm"] | None,
        Flag(
            metavar="here|slurm",
            parse=choice(Literal["here", "slurm"]),
            help="Default: here where the plan fits, else Slurm.",
        ),
    ] = None
    smoke: Annotated[
        bool | None,
        Flag(
            name="--smoke",
            help="Train the same layout, shrunk, on a few CPU processes with a tiny model.",
        ),
    ] = None
    allow_sockets: Annotated[
        bool | None,
        Flag(
            name="--allow-sockets",
            help="Train on where NCCL uses sockets between nodes with RDMA adapters.",
        ),
    ] = None
    fallback: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=2),
            help="Where memory runs out, try up to N leaner layouts of the same global batch, from "
            "the checkpoint if there is one.",
        ),
    ] = None
    dry_run: Annotated[
        bool | None, Flag(name="--dry-run", help="Print the command and the script; run nothing.")
    ] = None


def run(
    *,
    plan: PlanFile = DEFAULT_PLAN,
    options: RunOptions,
    job: JobOptions,
    trainer: TrainerOptions,
    program: ProgramOptions,
    ledger: LedgerOptions,
    json: Json = False,
) -> None:
    """Run the job and compare it with the prediction."""
    from fsdpplan.cli import session, session_ledger
    from fsdpplan.cli.render import columns

    remembered = session_ledger.wanted(ledger, is_smoke=bool(options.smoke))
    started = session.prepare(plan, options, session.job_given(job, trainer, program))
    if options.dry_run:
        typer.echo(session.dry_run_json(started) if json else started.launch.script, nl=json)
        typer.echo(f"would run: {' '.join(started.command)}", err=True)
        return
    attempts = session.follow(
        started, allow_sockets=bool(options.allow_sockets), fallback=options.fallback or 0
    )
    if json:
        typer.echo(session.outcome_json(attempts))
    else:
        typer.echo(session.outcome_table(attempts, width=columns()))
    if remembered is not None:
        typer.echo(session_ledger.recorded(started, attempts, remembered), err=True)
    raise typer.Exit(attempts[-1].outcome.exit_code)

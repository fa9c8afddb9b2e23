"""The options of `fsdpplan run`: what is run, where, and a run that was started before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import typer

from fsdpplan.cli.options import offered
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import choice, line, whole

LaunchFile = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="A plan, or a job script or Kubernetes manifest of fsdpplan. Default: job.sbatch "
        "here, else the plan.",
        show_default=False,
    ),
]


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
    chain: Annotated[
        int | None,
        Flag(
            metavar="N",
            parse=whole(example=4),
            help="Submit N jobs, each to go on from the last checkpoint of the one before it.",
        ),
    ] = None
    cancel_on_exit: Annotated[
        bool | None,
        Flag(name="--cancel-on-exit", help="Ctrl-C ends the job, in place of leaving it running."),
    ] = None
    dry_run: Annotated[
        bool | None, Flag(name="--dry-run", help="Print the command and the script; run nothing.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainOptions:
    """A run that was started before."""

    HEADING: ClassVar[str] = "Come back"

    attach: Annotated[
        bool | None,
        Flag(name="--attach", help="Follow a run of this folder that was left, to its end."),
    ] = None
    resume: Annotated[
        bool | None,
        Flag(name="--resume", help="Start a run that has ended again, from its last checkpoint."),
    ] = None
    job: Annotated[
        str | None,
        Flag(
            metavar="ID",
            parse=line,
            help="Which one. Default: the newest of this folder.",
            offered=offered.runs,
        ),
    ] = None

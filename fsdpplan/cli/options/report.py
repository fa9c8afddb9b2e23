"""The options of what a report holds beside the plan itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import path
from fsdpplan.cli.options.scaling import Counts, counts
from fsdpplan.units import parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentOptions:
    """What else is in it."""

    HEADING: ClassVar[str] = "What is in it"

    run: Annotated[
        Path | None,
        Flag(
            metavar="RUN|newest",
            parse=path,
            help="A run's folder, its metrics file, or newest: what was measured, how it went, "
            "what NCCL did and what was learnt. Without PLAN, of the plan that it ran.",
        ),
    ] = None
    gpus: Annotated[
        Counts | None,
        Flag(
            metavar="8:512|8,16",
            parse=counts,
            help="How the plan scales over these numbers of GPUs, each of which is searched.",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Flag(
            metavar="15T",
            parse=parse_count,
            help="Tokens in all, for the time to train. Default: those of the plan.",
        ),
    ] = None
    quick: Annotated[
        bool | None,
        Flag(
            name="--quick",
            help="Only what the plan says itself: without other layouts and without what it hangs "
            "on.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile:
    """A page beside the screen."""

    HEADING: ClassVar[str] = "Report"

    report: Annotated[
        Path | None,
        Flag(
            metavar="FILE",
            parse=path,
            help="Write the answer as one HTML page, too, as fsdpplan report does a plan.",
        ),
    ] = None

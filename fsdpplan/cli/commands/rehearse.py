"""`fsdpplan rehearse`: the plan's own training program at full world size, on this CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import line
from fsdpplan.cli.options.question import DEFAULT_PLAN, Json, PlanFile, Torch
from fsdpplan.cli.views.told import tell


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseOptions:
    """Which ranks of which program."""

    HEADING: ClassVar[str] = "Rehearsal"

    ranks: Annotated[
        str | None,
        Flag(
            metavar="RANKS",
            parse=line,
            help="Numbers, last, stages and kinds (one of equal stages), separated by commas. "
            "Default: 0,last,kinds.",
        ),
    ] = None
    build: Annotated[
        str | None,
        Flag(
            metavar="FILE.py:FUNCTION",
            parse=line,
            help="Rehearse the model that this function makes, in place of the plan's.",
        ),
    ] = None
    python: Annotated[
        str | None,
        Flag(
            metavar="PATH",
            parse=line,
            help="Rehearse with this Python and its torch. Default: the one that runs fsdpplan.",
        ),
    ] = None
    torch: Torch = None
    whole_step: Annotated[
        bool | None,
        Flag(
            name="--whole-step",
            help="All micro-batches; by default as many as show all that the step does.",
        ),
    ] = None


def rehearse(
    *, plan: PlanFile = DEFAULT_PLAN, options: RehearseOptions, json: Json = False
) -> None:
    """Run the plan's program at full size on one CPU; no GPU."""
    from fsdpplan.cli.resolve import job as launch
    from fsdpplan.cli.resolve import job_torch
    from fsdpplan.cli.views import rehearsal
    from fsdpplan.cli.views.render import columns
    from fsdpplan.run.rehearse import rehearse as rehearse_plan
    from fsdpplan.run.rehearse_ranks import DEFAULT_RANKS, chosen_ranks

    chosen = launch.ranked(plan, None, own_program=False)
    settled = job_torch.settled(
        chosen, job_torch.given(options.torch), own_program=options.build is not None
    )
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    ranks = chosen_ranks(chosen.model, chosen.layout, options.ranks or DEFAULT_RANKS)
    found = rehearse_plan(
        chosen,
        ranks,
        build=options.build,
        whole_step=bool(options.whole_step),
        python=options.python,
    )
    typer.echo(rehearsal.as_json(found) if json else rehearsal.screen(found, width=columns()))
    failure = rehearsal.failure(found)
    if failure is not None and not json:
        raise failure
    if failure is not None:  # the document has it
        tell(str(failure))
        raise typer.Exit(failure.exit_code)

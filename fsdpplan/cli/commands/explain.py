"""`fsdpplan explain`: what stands behind a saved plan: its terms, or its environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.parse import whole
from fsdpplan.cli.options.question import DEFAULT_PLAN, Json, PlanFile, Torch
from fsdpplan.cli.views.told import tell


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """Which layout of the plan, and what of it."""

    HEADING: ClassVar[str] = "Explain"

    nccl: Annotated[
        bool | None,
        Flag(
            name="--nccl",
            help="The variables that its job gets, with reason, versions and source, and those "
            "that are left alone.",
        ),
    ] = None
    torch: Torch = None
    rank: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Another layout of the plan's list."),
    ] = None


def explain(*, plan: PlanFile = DEFAULT_PLAN, options: ExplainOptions, json: Json = False) -> None:
    """Explain a plan: its terms, or by --nccl its environment."""
    from fsdpplan.cli.resolve import job_torch
    from fsdpplan.cli.resolve.job import ranked
    from fsdpplan.cli.views import explanation
    from fsdpplan.cli.views.render import columns

    chosen = ranked(plan, options.rank, own_program=True)
    settled = job_torch.settled(chosen, job_torch.given(options.torch), own_program=False)
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    if options.nccl:
        text = (
            explanation.nccl_json(chosen)
            if json
            else explanation.nccl_screen(chosen, width=columns())
        )
    elif json:
        text = explanation.terms_json(chosen)
    else:
        text = explanation.terms_screen(chosen, width=columns())
    typer.echo(text)

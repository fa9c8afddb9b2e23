"""`fsdpplan diff`: what two saved plans say otherwise."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdpplan.cli.options.files import Json
from fsdpplan.cli.views.plan_diff import PlanDiff, diff_json, diff_screen
from fsdpplan.cli.views.render import columns
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from fsdpplan.run.plans import read_plan
from fsdpplan.search.advice.difference import Priced
from fsdpplan.validate.check.lock import plan_differences

Before = Annotated[str, typer.Argument(metavar="BEFORE", help="A saved plan.")]
After = Annotated[str, typer.Argument(metavar="AFTER", help="Another one.")]


def diff(*, before: Before, after: After, json: Json = False) -> None:
    """What two saved plans say otherwise, term by term.

    Inputs, layout, step time and memory by their terms, and versions, as they are saved: nothing
    is predicted again (`compare` does). Exit code 0 also where they differ.
    """
    if not (before and after):  # one that was not typed arrives as None
        raise SpecError("diff takes two saved plans: type fsdpplan diff a.json b.json")
    one, other = read_plan(before), read_plan(after)
    found = PlanDiff(
        places=(before, after),
        before=Priced(case=one.case, estimate=one.estimate),
        after=Priced(case=other.case, estimate=other.estimate),
        differs=plan_differences(one, other),
        is_same=plan_json(one) == plan_json(other),
    )
    typer.echo(diff_json(found) if json else diff_screen(found, width=columns()))

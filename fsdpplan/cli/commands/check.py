"""`fsdpplan check`: a saved plan against conditions, and against its lock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json, PlanFile
from fsdpplan.cli.options.goal import PriceOptions
from fsdpplan.cli.options.parse import line, path
from fsdpplan.cli.resolve.goal import price_per_gpu_hour, require_one_price
from fsdpplan.cli.views.check import PlanCheck, check_json, check_screen, quantities_screen
from fsdpplan.cli.views.render import columns, tell
from fsdpplan.cost.goodput import goodput
from fsdpplan.cost.step import estimate
from fsdpplan.errors import SpecError
from fsdpplan.run.detect import software_here
from fsdpplan.run.known import known_reliability
from fsdpplan.run.plans import read_plan
from fsdpplan.spec.plan import Plan
from fsdpplan.validate.check.conditions import NUMBER, Quantity
from fsdpplan.validate.check.conditions import check as condition
from fsdpplan.validate.check.lock import lock_differences, locked, read_lock, write_lock
from fsdpplan.validate.check.quantities import SAY_TOKENS, plan_quantities


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What is checked of a plan."""

    HEADING: ClassVar[str] = "Check"

    conditions: Annotated[
        tuple[str, ...],
        Flag(
            name="--assert",
            metavar="CONDITION",
            parse=line,
            many=True,
            help="Exit 6 where it is false, such as 'mfu >= 0.38 and peak_reserved <= 72GiB'; may "
            "be repeated.",
        ),
    ] = ()
    lock: Annotated[
        Path | None,
        Flag(
            metavar="FILE",
            parse=path,
            help="Exit 6 where inputs, layout, prediction, versions or profiles differ from those "
            "of this lock.",
        ),
    ] = None
    write_lock: Annotated[
        bool | None,
        Flag(name="--write-lock", help="Write --lock anew, if no condition is false."),
    ] = None
    again: Annotated[
        bool | None,
        Flag(name="--again", help="Predict again, by this fsdpplan; else what the plan says."),
    ] = None
    show: Annotated[
        bool | None,
        Flag(name="--list", help="List the quantities that a condition may name."),
    ] = None


def check(
    *,
    plan: PlanFile = DEFAULT_PLAN,
    options: CheckOptions,
    price: PriceOptions,
    json: Json = False,
) -> None:
    """Check a saved plan: conditions on its numbers, and its lock.

    Exit code 6 where a condition is false, or the plan is not as it was locked.
    """
    if options.write_lock and options.lock is None:
        raise SpecError("--write-lock needs the file: add --lock plan.lock")
    if not (options.conditions or options.lock or options.show):
        raise SpecError(
            "nothing is to be checked: add --assert 'mfu >= 0.38' or --lock plan.lock, or --list "
            "to see what can be named"
        )
    found = read_plan(plan)
    if options.again:
        found = replace(found, estimate=estimate(found.case), alternatives=())
    quantities = plan_quantities(found)
    quantities |= of_its_machines(found, price, gpu_hours=quantities["gpu_hours"])
    conditions = tuple(condition(text, quantities) for text in options.conditions)
    differs, written = None, None
    if options.lock is not None:
        lock, place = locked(found, software_here()), options.lock
        holds = all(one.holds for one in conditions)
        if not options.write_lock or place.exists():
            differs = lock_differences(read_lock(place), lock)
        if options.write_lock and holds:
            write_lock(lock, place)
            written = str(place)
    answer = PlanCheck(
        place=plan,
        plan=found,
        again=bool(options.again),
        quantities=quantities if options.show else {},
        conditions=conditions,
        lock=None if options.lock is None else str(options.lock),
        written=written,
        differs=differs,
    )
    failed = answer.failed
    if json:
        typer.echo(check_json(answer, failed))
    elif options.show and not (options.conditions or options.lock):
        typer.echo(quantities_screen(answer, width=columns()))
    else:
        typer.echo(check_screen(answer, width=columns()))
    if failed is not None:
        tell(str(failed))
        raise typer.Exit(failed.exit_code)


SAY_PRICE = "say what a GPU hour costs: --price 2.10, or --provider lambda"


def of_its_machines(plan: Plan, price: PriceOptions, *, gpu_hours: Quantity) -> dict[str, Quantity]:
    """What the plan's machines keep of its time and cost: `goodput`, of failures as `recommend
    --goodput` knows them, and `cost` in dollars; None where nobody knows."""
    require_one_price(price)
    known = None if plan.terms is None else plan.terms.price
    hourly = price_per_gpu_hour(price, plan.cluster, today=date.today(), known=known).value
    kept, cost = None, None
    if hourly is not None and isinstance(gpu_hours.value, float | int):
        cost = gpu_hours.value * hourly
    if plan.cluster.device.kind == "cuda" or plan.failures is not None:
        reliability = known_reliability(plan.cluster, plan.failures).value
        kept = goodput(plan.case, plan.estimate, reliability).fraction.expected
    return {
        "goodput": Quantity(value=kept, kind=NUMBER),
        "cost": Quantity(
            value=cost,
            kind=NUMBER,
            to_know=SAY_TOKENS if hourly is not None else SAY_PRICE,
        ),
    }

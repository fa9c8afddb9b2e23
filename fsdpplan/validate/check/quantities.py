"""The quantities of a plan that conditions may name.

Each value of the plan's JSON has its path, `estimate.memory.peak_reserved_bytes`, and its own name,
`peak_reserved_bytes`, and that without the unit, `peak_reserved`: where several have the same name
it is that of the first in `_SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdpplan.files.plans import (
    cluster_document,
    estimate_document,
    layout_document,
    model_document,
    training_document,
)
from fsdpplan.search.advice.difference import Priced
from fsdpplan.spec.plan import Plan
from fsdpplan.validate.check.conditions import (
    BYTES,
    NUMBER,
    RATE,
    SECONDS,
    Kind,
    Quantity,
    Value,
)

_SECTIONS = (
    "estimate",
    "estimate.time",
    "estimate.memory",
    "layout",
    "training",
    "cluster",
    "model",
)
"""In which of them a name is looked up first."""

_UNITS: dict[str, Kind] = {
    "_bytes_per_second": RATE,
    "_bytes": BYTES,
    "_seconds": SECONDS,
    "_fraction": NUMBER,
}
"""End of a name -> what it measures."""

_AS_TEXT = ("layout.reshard_after_forward", "layout.checkpoint_blocks")
"""Words or numbers, which are compared as texts."""

STEP = "step"

SAY_TOKENS = "plan it with the tokens in all, such as recommend --tokens 1T, or leave it out"


def plan_quantities(plan: Plan) -> dict[str, Quantity]:
    """By all their names; short ones first."""
    by_path = dict(_flat(_documents(plan)))
    short: dict[str, Quantity] = {}
    step = plan.estimate.step_seconds
    for name, seconds in (
        (STEP, step.expected),
        (f"{STEP}.lower", step.lower),
        (f"{STEP}.upper", step.upper),
    ):
        short[name] = Quantity(value=seconds, kind=SECONDS)
    for section in _SECTIONS:
        for path, one in by_path.items():
            holder, _, name = path.rpartition(".")
            if holder == section:
                short.setdefault(_without_unit(name), one)
    short |= {name: one for name, one in _of_the_training(plan).items() if name not in short}
    for section in _SECTIONS:
        for path, one in by_path.items():
            holder, _, name = path.rpartition(".")
            if holder == section:
                short.setdefault(name, one)
    return {**short, **by_path}


def short_names(quantities: dict[str, Quantity]) -> list[str]:
    """Those to show: one for each quantity that has a name without a path and a unit."""
    return [
        name
        for name in quantities
        if ("." not in name or name.startswith(f"{STEP}.")) and _without_unit(name) == name
    ]


def _documents(plan: Plan) -> dict[str, Any]:
    return {
        "estimate": estimate_document(plan.estimate),
        "layout": layout_document(plan.layout),
        "training": training_document(plan.training),
        "cluster": cluster_document(plan.cluster),
        "model": model_document(plan.model),
    }


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Quantity]]:
    """The values of a document by their paths; those of lists have none."""
    for name, one in value.items():
        here = f"{path}.{name}" if path else name
        if isinstance(one, dict):
            yield from _flat(one, here)
        elif not isinstance(one, list | tuple):
            yield here, _quantity(here, one)


def _quantity(path: str, value: Value | None) -> Quantity:
    if path in _AS_TEXT:
        return Quantity(value=str(value), kind="text")
    if isinstance(value, bool):
        return Quantity(value=value, kind="truth")
    if isinstance(value, str):
        return Quantity(value=value, kind="text")
    return Quantity(value=value, kind=_kind(path))


def _kind(path: str) -> Kind:
    """By the unit in the name of the value or of what holds it (`step_seconds.upper`)."""
    for part in reversed(path.split(".")):
        for unit, kind in _UNITS.items():
            if part.endswith(unit):
                return kind
    return NUMBER


def _without_unit(name: str) -> str:
    return next((name.removesuffix(unit) for unit in _UNITS if name.endswith(unit)), name)


def _of_the_training(plan: Plan) -> dict[str, Quantity]:
    """What all of its tokens take, where their number is known."""
    tokens, priced = plan.training.tokens, Priced(case=plan.case, estimate=plan.estimate)
    seconds = None if tokens is None else priced.seconds_for(tokens)
    hours = None if tokens is None else priced.gpu_hours_for(tokens)
    return {
        "time_to_train": Quantity(value=seconds, kind=SECONDS, to_know=SAY_TOKENS),
        "gpu_hours": Quantity(value=hours, kind=NUMBER, to_know=SAY_TOKENS),
    }

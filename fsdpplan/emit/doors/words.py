"""What a launcher of its own kind can say of a plan, field by field.

A target that runs its own program has a table with every field of Layout and of Training: how it
says the field, or which values it can say and why not the others. What it cannot say is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from fsdpplan.emit.order import Order
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a target says of one field."""

    says: str
    """How it is said, in the target's own names; or what makes it idle."""
    values: tuple[object, ...] | None = None
    """All that can be said; None: any."""
    why: str = ""
    """What stands in the way of another value."""

    def problem(self, name: str, value: object) -> str | None:
        """The value that cannot be said, and what could be."""
        if self.values is None or value in self.values:
            return None
        flag = "--" + name.replace("_", "-")
        can = " or ".join(_flag_value(flag, known) for known in self.values)
        return f"{name} {value} ({self.why}): plan again with {can}"


Words = Mapping[str, Word]
"""Field -> word, for all fields of Layout and Training."""

MOST_SHOWN = 2
"""Problems in one sentence."""

Problems = Callable[[Plan], Iterable[str]]
"""What of several fields together cannot be said."""


def require_sayable(order: Order, *, target: str, words: Words, problems: Problems) -> None:
    """Raise SpecError, in one sentence, for what `target` cannot say of the plan."""
    plan = order.plan
    found = [*unsayable(plan, words), *_stage_problems(plan.layout), *problems(plan)]
    if found:
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        raise SpecError(
            f"--target {target} cannot express {'; nor '.join(found[:MOST_SHOWN])}{more}"
        )


def unsayable(plan: Plan, words: Words) -> list[str]:
    """What of single fields cannot be said."""
    found = []
    for values in (plan.layout, plan.training):
        for name in field_names(type(values)):
            problem = words[name].problem(name, getattr(values, name))
            found += [] if problem is None else [problem]
    return found


def _stage_problems(layout: Layout) -> Iterator[str]:
    """Stages that no schedule has: torch's and Megatron's names would hide the difference."""
    virtual = layout.virtual_stages
    one = layout.schedule in ("none", "gpipe", "1f1b")
    if one and virtual > 1:
        yield f"virtual_stages {virtual} with schedule {layout.schedule}: use --virtual-stages 1"
    if not one and virtual == 1:
        yield f"schedule {layout.schedule} with one stage a rank: use --virtual-stages 2"
    if layout.pp == 1 and layout.stage_blocks:
        yield "stage_blocks without a pipeline: use --pp 2"
    if layout.pp > 1 and not layout.stage_blocks:
        yield f"pp {layout.pp} of a plan that does not name its stage_blocks: plan again"


def field_names(kind: type[Layout] | type[Training]) -> tuple[str, ...]:
    """Names of the fields that a target must have a word for."""
    return tuple(field.name for field in fields(kind))


def _flag_value(flag: str, value: object) -> str:
    match value:
        case True:
            return flag
        case False:
            return "--no-" + flag.removeprefix("--")
        case ():
            return f"no {flag}"
    return f"{flag} {value}"

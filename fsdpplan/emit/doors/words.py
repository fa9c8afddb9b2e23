"""Refusing what a program of its own kind has no word for."""

from __future__ import annotations

from fsdpplan.emit.order import Order
from fsdpplan.errors import SpecError
from fsdpplan.spec.programs.words import Vocabulary

MOST_SHOWN = 2
"""Problems in one sentence."""


def require_sayable(order: Order, *, target: str, vocabulary: Vocabulary) -> None:
    """Raise SpecError, in one sentence, for what `target` cannot say of the plan."""
    layout = order.plan.layout
    found = [one.words for one in vocabulary.problems(order.plan.case)]
    if layout.pp > 1 and not layout.stage_blocks:
        found.append(f"pp {layout.pp} of a plan that does not name its stage_blocks: plan again")
    if found:
        more = f"; and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        hint = f"; recommend --program {target} plans what it can say"
        raise SpecError(
            f"--target {target} cannot express {'; nor '.join(found[:MOST_SHOWN])}{more}"
            + ("" if order.plan.training.program == target else hint)
        )

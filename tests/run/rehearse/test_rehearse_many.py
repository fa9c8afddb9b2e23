"""Recommended plans pass their own rehearsal; `make rehearse-many` tries a hundred of them."""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest

from fsdpplan.spec.plan import Plan
from tests.benchmarks.rehearse_many import plans, problems_of

SEED = 2
NUMBER = 6
MOST_LAYERS = 4
"""So that six take a minute; `make rehearse-many` has up to 16."""


@cache
def drawn() -> tuple[Plan, ...]:
    """Planned when the first test begins, and not by who only lists the tests."""
    return tuple(plan for _, plan in islice(plans(SEED, MOST_LAYERS), NUMBER))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(NUMBER))
def test_what_is_recommended_passes_its_rehearsal(number: int) -> None:
    assert problems_of(drawn()[number]) == ()

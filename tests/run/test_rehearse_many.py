"""Recommended plans pass their own rehearsal; `make rehearse-many` tries a hundred of them."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.benchmarks.rehearse_many import plans, problems_of

SEED = 2
NUMBER = 4


@pytest.mark.parametrize(
    ("asked", "plan"), [pytest.param(*one, id=one[0].words) for one in islice(plans(SEED), NUMBER)]
)
def test_what_is_recommended_passes_its_rehearsal(asked: object, plan: object) -> None:
    assert problems_of(plan) == ()  # type: ignore[arg-type]

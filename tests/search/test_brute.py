"""The search against brute force on small problems; `make brute` has more of them."""

from __future__ import annotations

import pytest

from tests.search.brute import IN_CI, fastest


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IN_CI)
def test_nothing_is_faster_than_what_the_search_finds(name: str) -> None:
    asked = IN_CI[name]
    found, best = asked.answer().fastest, fastest(asked)
    assert found is not None
    assert found.estimate.step_seconds.expected <= best.seconds * (1 + 1e-9), best.layout

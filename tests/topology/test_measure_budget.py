"""Time is shared out so that everything gets some and nothing takes it all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.measure.runner import (
    FEWEST,
    MOST,
    Known,
    expected_seconds,
    is_affordable,
    repeats,
    share_seconds,
)

SECONDS = st.floats(1e-7, 1e4)


def test_a_call_is_expected_to_take_time_in_proportion_to_its_work() -> None:
    assert expected_seconds(Known(work=2.0, seconds=0.5), 8.0) == 2.0


def test_nothing_is_expected_of_a_series_that_has_not_begun_or_is_all_overhead() -> None:
    assert expected_seconds(None, 8.0) == 0.0
    assert expected_seconds(Known(work=1.0, seconds=1e-4), 1e6) == 0.0


@given(once=SECONDS, share=st.floats(0, 1e4))
def test_a_call_is_repeated_as_often_as_its_share_allows_within_limits(
    once: float, share: float
) -> None:
    count = repeats(once, share=share)
    assert FEWEST <= count <= MOST
    assert count == FEWEST or count * once <= share * (1 + 1e-9)


@given(once=SECONDS, share=SECONDS)
def test_more_time_never_makes_a_call_too_expensive(once: float, share: float) -> None:
    if is_affordable(once, share=share):
        assert is_affordable(once, share=2 * share)
        assert is_affordable(once / 2, share=share)


def test_a_share_is_what_is_left_for_each_and_never_negative() -> None:
    assert share_seconds(elapsed=10, until=20, left=5) == 2
    assert share_seconds(elapsed=30, until=20, left=5) == 0
    assert share_seconds(elapsed=10, until=20, left=0) == 10

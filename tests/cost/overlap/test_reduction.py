"""Reduction: what buckets expose beside the pass that they belong to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.overlap.exposed import ddp_exposed_seconds, gather_exposed_seconds

SECONDS = st.floats(0, 1)
BUCKETS = st.lists(st.tuples(SECONDS, st.integers(1, 100)), min_size=1, max_size=8)


def test_ddp_exposes_the_last_bucket_and_what_queued_before_it() -> None:
    hidden = ddp_exposed_seconds(
        bucket_seconds=(0.1, 0.1, 0.1), bucket_bytes=(1, 1, 1), backward_seconds=3.0
    )
    assert hidden == pytest.approx(0.1)
    queued = ddp_exposed_seconds(
        bucket_seconds=(2.0, 2.0, 2.0), bucket_bytes=(1, 1, 1), backward_seconds=3.0
    )
    assert queued == pytest.approx(1.0 + 6.0 - 3.0)


@given(BUCKETS, SECONDS)
def test_ddp_exposes_at_least_its_last_bucket(
    buckets: list[tuple[float, int]], backward: float
) -> None:
    seconds, sizes = zip(*buckets, strict=True)
    exposed = ddp_exposed_seconds(
        bucket_seconds=seconds, bucket_bytes=sizes, backward_seconds=backward
    )
    assert seconds[-1] - 1e-9 <= exposed <= sum(seconds) + 1e-9


@given(BUCKETS, SECONDS)
def test_gathering_before_forward_mirrors_reducing_after_backward(
    buckets: list[tuple[float, int]], seconds: float
) -> None:
    """The first bucket is waited for in whole, as the last one is in backward; each in reverse."""
    times, sizes = zip(*buckets, strict=True)
    gathered = gather_exposed_seconds(
        bucket_seconds=times, bucket_bytes=sizes, forward_seconds=seconds
    )
    reduced = ddp_exposed_seconds(
        bucket_seconds=times[::-1], bucket_bytes=sizes[::-1], backward_seconds=seconds
    )
    assert gathered == pytest.approx(reduced, abs=1e-9)
    assert times[0] - 1e-9 <= gathered <= sum(times) + 1e-9

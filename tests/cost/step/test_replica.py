"""Replica: what buckets expose beside the pass that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.play.clocks import played
from fsdpplan.cost.step.replica import (
    BucketSeconds,
    ReplicaBatch,
    backward_pass,
    forward_pass,
    replica_step,
)

SECONDS = st.floats(0, 1)
BUCKETS = st.lists(st.tuples(SECONDS, st.integers(1, 100)), min_size=1, max_size=8)


def batch(
    buckets: Sequence[tuple[float, float]],
    *,
    forward: float = 0.0,
    backward: float = 0.0,
    gather: float = 0.0,
    overlaps: bool = True,
) -> ReplicaBatch:
    """Of buckets of (seconds of the all-reduce, size)."""
    whole = sum(size for _, size in buckets)
    return ReplicaBatch(
        forward=forward,
        backward=backward,
        buckets=tuple(
            BucketSeconds(share=size / whole, all_reduce=seconds, gather=gather * seconds)
            for seconds, size in buckets
        ),
        overlaps_reduction=overlaps,
        overlaps_gather=overlaps,
    )


def reduced(buckets: Sequence[tuple[float, float]], backward: float) -> float:
    """What a backward pass waits for its reductions."""
    one = batch(buckets, backward=backward)
    return played(backward_pass(one, reduces=True)).exposed


def by_hand(buckets: Sequence[tuple[float, float]], backward: float) -> float:
    """The same: a bucket is ready when backward has done its part, and they queue."""
    whole, done, clock = sum(size for _, size in buckets), 0.0, 0.0
    for seconds, size in buckets:
        done += size
        clock = max(clock, backward * done / whole) + seconds
    return max(0.0, clock - backward)


def test_ddp_exposes_the_last_bucket_and_what_queued_before_it() -> None:
    assert reduced([(0.1, 1)] * 3, backward=3.0) == pytest.approx(0.1)
    assert reduced([(2.0, 1)] * 3, backward=3.0) == pytest.approx(1.0 + 6.0 - 3.0)


@given(BUCKETS, SECONDS, st.integers(1, 200))
def test_buckets_queue_behind_the_pass_that_fills_them(
    buckets: list[tuple[float, int]], backward: float, alike: int
) -> None:
    every = [*buckets, *([buckets[-1]] * alike)]
    exposed = reduced(every, backward)
    assert exposed == pytest.approx(by_hand(every, backward), abs=1e-9)
    assert every[-1][0] - 1e-9 <= exposed <= sum(seconds for seconds, _ in every) + 1e-9


@given(BUCKETS, SECONDS)
def test_gathering_before_forward_mirrors_reducing_after_backward(
    buckets: list[tuple[float, int]], seconds: float
) -> None:
    """The bucket that forward needs first is waited for in whole, as the last one is in backward:
    the two are each other's passes, run backwards."""
    one = batch(buckets, forward=seconds, gather=1.0)
    gathered = played(forward_pass(one, is_first=True)).exposed
    assert gathered == pytest.approx(reduced(buckets, seconds), abs=1e-9)
    assert played(forward_pass(one, is_first=False)).exposed == 0


@given(BUCKETS, SECONDS, SECONDS, st.integers(1, 9), st.booleans(), st.booleans())
def test_a_step_is_what_it_computes_and_what_each_pass_waits_for(
    buckets: list[tuple[float, int]],
    forward: float,
    backward: float,
    number: int,
    reduces_all: bool,
    overlaps: bool,
) -> None:
    one = batch(buckets, forward=forward, backward=backward, gather=0.5, overlaps=overlaps)
    step = played(replica_step(one, num_microbatches=number, reduces_all=reduces_all))
    reductions = number if reduces_all else 1
    if overlaps:
        once = played(backward_pass(one, reduces=True)).exposed
        gathered = played(forward_pass(one, is_first=True)).exposed
    else:
        once, gathered = one.reduction, one.gather
    assert step.waited["reduction"] == pytest.approx(reductions * once, abs=1e-9)
    assert step.waited["all_gather"] == pytest.approx(gathered, abs=1e-9)
    whole = number * (forward + backward) + reductions * once + gathered
    assert step.seconds == pytest.approx(whole, abs=1e-9)

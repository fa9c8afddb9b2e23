"""Order: what is not told apart, and which of it goes first."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.search.order import (
    Entry,
    in_order,
    is_tied,
    kinds,
    seconds,
)
from fsdpplan.spec.estimate import Estimate
from tests.search.entries import entry

DEVICE_BYTES = 80 * 2**30


def uncertain(fraction: float) -> object:
    """A difference that is the same for all pairs."""

    def difference(one: Estimate, other: Estimate) -> float:
        return fraction

    return difference


def ordered(*entries: Entry, fraction: float = 0.02) -> list[Entry]:
    """All of them, the preferred first."""
    groups = in_order(
        list(entries),
        difference=uncertain(fraction),  # type: ignore[arg-type]
        device_bytes=DEVICE_BYTES,
    )
    return [one for tied in groups for one in tied.entries]


def test_head_room_decides_between_layouts_that_are_not_told_apart() -> None:
    fast = entry(compute=10.0, device_bytes=72 * 2**30)
    roomy = entry(compute=10.1, device_bytes=63 * 2**30, micro_batch=2)
    assert ordered(fast, roomy) == [roomy, fast]
    assert ordered(fast, roomy, fraction=0.005) == [fast, roomy]


def test_a_little_more_head_room_decides_nothing_nor_does_more_than_enough() -> None:
    for fast_gib, roomy_gib in ((70, 63), (60, 10)):
        fast = entry(compute=10.0, device_bytes=fast_gib * 2**30)
        roomy = entry(compute=10.1, device_bytes=roomy_gib * 2**30, micro_batch=2)
        assert ordered(fast, roomy) == [fast, roomy]


def test_a_gain_past_3_percent_always_decides() -> None:
    fast = entry(compute=10.0, device_bytes=72 * 2**30)
    roomy = entry(compute=10.31, device_bytes=1, micro_batch=2)
    assert ordered(fast, roomy, fraction=0.5) == [fast, roomy]


def test_as_much_head_room_leaves_it_to_the_simpler() -> None:
    split = entry(compute=10.0, tp=2, sequence_parallel=True, loss_parallel=True)
    plain = entry(compute=10.1, device_bytes=41 * 2**30)
    assert kinds(plain[0]) < kinds(split[0])
    assert ordered(split, plain) == [plain, split]
    wide = entry(compute=10.0, wrap_blocks=4)
    assert ordered(wide, plain) == [plain, wide]


def test_then_to_the_faster() -> None:
    slow, fast = entry(compute=10.1), entry(compute=10.0, micro_batch=2)
    assert ordered(slow, fast) == [fast, slow]


ENTRIES = st.lists(
    st.builds(
        entry,
        compute=st.floats(1.0, 1.2),
        device_bytes=st.integers(0, DEVICE_BYTES),
        micro_batch=st.integers(1, 64),
        wrap_blocks=st.sampled_from([1, 2]),
    ),
    max_size=12,
    unique_by=lambda one: repr(one[0]),
)


@given(ENTRIES, st.randoms(use_true_random=False), st.floats(0, 0.1))
def test_the_order_is_total_and_does_not_depend_on_how_it_began(
    entries: list[Entry], random: object, fraction: float
) -> None:
    mixed = list(entries)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    found = ordered(*entries, fraction=fraction)
    assert found == ordered(*mixed, fraction=fraction)
    assert sorted(map(repr, found)) == sorted(map(repr, entries))


@given(ENTRIES, st.floats(0, 0.1))
def test_none_stands_before_one_that_is_faster_for_sure(
    entries: list[Entry], fraction: float
) -> None:
    groups = in_order(
        entries,
        difference=uncertain(fraction),  # type: ignore[arg-type]
        device_bytes=DEVICE_BYTES,
    )
    reach = 1 + min(fraction, MOST_INDISTINGUISHABLE_FRACTION)
    for tied in groups:
        assert tied.leader in tied.entries
        for one in tied.entries:
            assert (
                seconds(tied.leader) <= seconds(one) <= seconds(tied.leader) * reach * (1 + 1e-12)
            )
            assert is_tied(one, tied.leader, uncertain(fraction))  # type: ignore[arg-type]
    for before, after in pairwise(groups):
        assert seconds(before.leader) <= seconds(after.leader)
        assert seconds(after.leader) > seconds(before.leader) * reach * (1 - 1e-12)


@pytest.mark.parametrize("fraction", [0.0, 0.02])
def test_one_that_is_alone_is_first(fraction: float) -> None:
    alone = entry()
    assert ordered(alone, fraction=fraction) == [alone]
    assert ordered(fraction=fraction) == []

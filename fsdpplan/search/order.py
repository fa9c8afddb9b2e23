"""Order: which layouts the model cannot tell apart, and which of those goes first.

Fastest first would call a gain real that is smaller than the error of the prediction. So layouts
are taken in groups: the fastest one that is left leads, and all that its error cannot tell apart
from it stand with it: those with more head-room first, then the simpler. Each
layout is compared with the leader of its group only, which makes this a total order: there are no
cycles, and none is put before one that is told apart from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fsdpplan.cost.band import MOST_INDISTINGUISHABLE_FRACTION
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import DDP_BUCKET_BYTES, Layout

Entry = tuple[Layout, Estimate]
Difference = Callable[[Estimate, Estimate], float]
"""Share of the step time by which the second must be slower than the first to be told apart."""

HEADROOM_STEP_FRACTION = 0.1
"""Head-room counts in steps of this share of the device's memory: predicted peaks are off by half
of it in the median and by more at the worst, so that a smaller difference is no reason to shard,
split or recompute."""

ENOUGH_HEADROOM_FRACTION = 0.3
"""A layout that leaves this share of the device's memory free has head-room enough, more than twice
the worst miss of a predicted peak: to leave still more is no reason either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """Layouts that are not told apart from the fastest of them, the preferred one first."""

    leader: Entry
    """The fastest."""
    entries: tuple[Entry, ...]
    """All of them, the leader too."""


def seconds(entry: Entry) -> float:
    """The expected step."""
    return entry[1].step_seconds.expected


def by_time(entry: Entry) -> tuple[float, int, str]:
    """Time, then memory, then a stable text: no tie is left to the order of the search."""
    layout, result = entry
    return (seconds(entry), result.memory.peak_device_bytes, repr(layout))


def kinds(layout: Layout) -> int:
    """Kinds of parallelism and of overlap beyond whole copies: fewer is simpler."""
    return sum(
        (
            layout.tp > 1,
            layout.pp > 1,
            layout.cp > 1,
            layout.ep > 1,
            layout.sharding != "ddp",
            layout.async_tp,
            layout.offload != "none",
        )
    )


def settings(layout: Layout) -> int:
    """Settings that are not the default: fewer is simpler."""
    return sum(
        (
            layout.wrap_blocks > 1,
            layout.ddp_bucket_bytes != DDP_BUCKET_BYTES,
            layout.loss_chunks > 1,
        )
    )


def headroom_steps(entry: Entry, leader: Entry, *, device_bytes: int) -> int:
    """Whole steps of head-room that `entry` leaves beyond what `leader` does; fewer is negative."""
    enough = (1 - ENOUGH_HEADROOM_FRACTION) * device_bytes
    used, most = (max(enough, one[1].memory.peak_device_bytes) for one in (entry, leader))
    return int((most - used) / (HEADROOM_STEP_FRACTION * device_bytes))


def in_order(entries: list[Entry], *, difference: Difference, device_bytes: int) -> list[Tied]:
    """The groups of `entries`, the fastest leader first."""

    def preference(entry: Entry, leader: Entry) -> tuple[int, int, int, tuple[float, int, str]]:
        steps = headroom_steps(entry, leader, device_bytes=device_bytes)
        return (-steps, kinds(entry[0]), settings(entry[0]), by_time(entry))

    left = sorted(entries, key=by_time)
    groups = []
    while left:
        leader = left[0]
        tied = [entry for entry in left if is_tied(entry, leader, difference)]
        groups.append(
            Tied(leader=leader, entries=tuple(sorted(tied, key=partial(preference, leader=leader))))
        )
        left = [entry for entry in left if not is_tied(entry, leader, difference)]
    return groups


def is_tied(entry: Entry, leader: Entry, difference: Difference) -> bool:
    """Whether `entry`, which is no faster, cannot be told apart from `leader`."""
    behind = seconds(entry) / seconds(leader) - 1
    if behind > MOST_INDISTINGUISHABLE_FRACTION:
        return False
    return entry is leader or behind <= difference(leader[1], entry[1])

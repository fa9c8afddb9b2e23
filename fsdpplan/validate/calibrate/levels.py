"""Calibrate levels: the numbers of each level of links from collectives measured on its groups.

Through the formulas that predict (`fsdpplan.cost.network`: collectives on a group's placement), so
that what they do not say of a machine shows as the fit's residual. Levels are fitted from the
inside out: rows that leave a level are predicted with the numbers that were found inside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import Placement, group_placement
from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.spec.measurement import MeasuredCall
from fsdpplan.validate.fit.robust import FittedNumber, Numbers, Sought, robust_fit

WEIGHTS = ((2**26, 9.0), (2**20, 3.0), (0, 1.0))
"""(From so many bytes, a call counts as so many): large ones are what a step waits for."""
WIDE = 2.3
"""Log spread of times and sizes around what the profile has: a factor of ten."""
NARROW = 1.0
"""That of shares of the bandwidth."""
UNKNOWN_SECONDS = 1e-5
"""Where the profile has no time, the search begins here: what one kernel launch costs."""
UNKNOWN_BYTES = 1e6
"""The same of chunks."""
DIGITS = 4
"""Significant digits of a measured number."""
SWITCH_RANKS = 3
"""Fewest ranks that a switch reduces for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelFit:
    """One level after its rows."""

    level: Level
    """With the numbers that were found."""
    numbers: Mapping[str, FittedNumber]
    """By field of `Level`."""
    residual_fraction: float
    """Root mean square of log(predicted / measured)."""
    rows: int
    largest_bytes: int
    """Largest buffer measured."""


def level_of(call: MeasuredCall, cluster: Cluster) -> int | None:
    """Index of the outermost level that the group crosses; None for one rank."""
    return len(placement_of(call, cluster).levels) - 1 if call.ranks > 1 else None


def placement_of(call: MeasuredCall, cluster: Cluster) -> Placement:
    """Where the measured group lies.

    A pair may straddle domains that a mesh axis of two does not: it is placed on two neighbouring
    domains of the level below the one at which its ranks part.
    """
    if call.group != "pair":
        return group_placement(
            cluster=cluster,
            ranks=call.ranks,
            stride=call.stride,
            groups_at_once=call.groups_at_once,
        )
    inner_gpus, kept = 1, []
    for level in cluster.levels:
        kept.append(level)
        first, last = call.first_rank, call.first_rank + call.stride
        if first // level.domain_gpus == last // level.domain_gpus:
            break
        inner_gpus = level.domain_gpus
    kept[-1] = replace(kept[-1], domain_gpus=2 * inner_gpus, whole_gpus=None)
    two = replace(cluster, gpus=2 * inner_gpus, gpus_per_node=2 * inner_gpus, levels=tuple(kept))
    return group_placement(
        cluster=two, ranks=2, stride=inner_gpus, groups_at_once=call.groups_at_once
    )


def predicted_call_seconds(call: MeasuredCall, cluster: Cluster) -> float:
    """What the cost model says of a measured call."""
    return collective_seconds(
        collective=call.collective,
        gathered_bytes=call.gathered_bytes,
        placement=placement_of(call, cluster),
    )


def calibrate_levels(
    calls: Sequence[MeasuredCall], cluster: Cluster
) -> tuple[LevelFit | None, ...]:
    """One fit a level, innermost first; None for a level without rows of its own.

    Pairs of neighbours tell links apart and are left out: they are many, and alike.
    """
    fits: list[LevelFit | None] = []
    alike = middle_calls(call for call in calls if call.group != "pair")
    for index in range(len(cluster.levels)):
        mine = [call for call in alike if level_of(call, cluster) == index]
        fit = _fitted(mine, cluster, index) if mine else None
        fits.append(fit)
        if fit is not None:
            cluster = _with_level(cluster, index, fit.level)
    return tuple(fits)


def middle_calls(calls: Iterable[MeasuredCall]) -> list[MeasuredCall]:
    """One call for all groups of a shape that made it at the same time: each takes as long as the
    group in the middle."""
    alike: dict[MeasuredCall, list[float]] = {}
    for call in calls:
        alike.setdefault(replace(call, first_rank=0, seconds=()), []).append(median(call.seconds))
    return [replace(call, seconds=(median(times),)) for call, times in alike.items()]


def _fitted(calls: Sequence[MeasuredCall], cluster: Cluster, index: int) -> LevelFit:
    level = cluster.levels[index]

    def predicted(numbers: Numbers) -> list[float]:
        tried = _with_level(cluster, index, with_numbers(level, numbers))
        placements = {_shape(call): placement_of(call, tried) for call in calls}
        return [
            collective_seconds(
                collective=call.collective,
                gathered_bytes=call.gathered_bytes,
                placement=placements[_shape(call)],
            )
            for call in calls
        ]

    found = robust_fit(
        predicted,
        [median(call.seconds) for call in calls],
        _sought(level, calls),
        weights=[_weight(call) for call in calls],
    )
    values = {name: float(f"{one.value:.{DIGITS}g}") for name, one in found.numbers.items()}
    fitted = with_numbers(level, values)
    if cluster.device.kind == "cpu":
        fitted = _without_datasheet(fitted)
    return LevelFit(
        level=fitted,
        numbers=found.numbers,
        residual_fraction=found.residual_fraction,
        rows=found.rows,
        largest_bytes=max(call.gathered_bytes for call in calls),
    )


def _weight(call: MeasuredCall) -> float:
    return next(weight for least, weight in WEIGHTS if call.gathered_bytes >= least)


def _shape(call: MeasuredCall) -> tuple[int, ...]:
    """What its placement depends on."""
    return call.ranks, call.stride, call.groups_at_once


def _sought(level: Level, calls: Sequence[MeasuredCall]) -> dict[str, Sought]:
    """The numbers of a level that calls can tell. Chunks larger than all calls would only be half
    of the bandwidth, whatever the bytes."""
    largest_bytes = max(call.gathered_bytes for call in calls)
    sought = {
        "bandwidth_fraction": Sought(
            expected=level.bandwidth_fraction,
            spread=NARROW,
            lowest=1e-5,
            highest=1e3,
            starts=(level.bandwidth_fraction / 4,),
        ),
        "half_bandwidth_bytes": Sought(
            expected=level.half_bandwidth_bytes or UNKNOWN_BYTES,
            spread=WIDE,
            lowest=1e2,
            highest=max(largest_bytes, level.half_bandwidth_bytes),
            starts=(1e5, 1e7),
        ),
        "base_seconds": Sought(
            expected=level.base_seconds or UNKNOWN_SECONDS, spread=WIDE, lowest=1e-8, highest=0.5
        ),
        "latency_seconds": Sought(
            expected=level.latency_seconds or UNKNOWN_SECONDS,
            spread=WIDE,
            lowest=1e-8,
            highest=0.5,
        ),
    }
    reduced = (call.collective == "all_reduce" and call.ranks >= SWITCH_RANKS for call in calls)
    if level.multicast_fraction and any(reduced):
        sought["multicast_fraction"] = Sought(
            expected=level.multicast_fraction,
            spread=NARROW,
            lowest=1e-3,
            highest=1.0,
            starts=(0.9,),
        )
    return sought


def with_numbers(level: Level, numbers: Numbers) -> Level:
    """`level` with other numbers. Where more goes through the ports than the profile gives them,
    the profile is wrong, and its ports get what goes through."""
    fraction = numbers.get("bandwidth_fraction", level.bandwidth_fraction)
    return replace(
        level,
        port_bandwidth_bytes_per_second=level.port_bandwidth_bytes_per_second * max(1.0, fraction),
        bandwidth_fraction=min(1.0, fraction),
        half_bandwidth_bytes=numbers.get("half_bandwidth_bytes", level.half_bandwidth_bytes),
        base_seconds=numbers.get("base_seconds", level.base_seconds),
        latency_seconds=numbers.get("latency_seconds", level.latency_seconds),
        multicast_fraction=numbers.get("multicast_fraction", level.multicast_fraction),
    )


def _without_datasheet(level: Level) -> Level:
    """Links between processes of a CPU have no data sheet: what was measured is all of it."""
    reached = level.port_bandwidth_bytes_per_second * level.bandwidth_fraction
    return replace(level, port_bandwidth_bytes_per_second=reached, bandwidth_fraction=1.0)


def _with_level(cluster: Cluster, index: int, level: Level) -> Cluster:
    levels = list(cluster.levels)
    levels[index] = level
    return replace(cluster, levels=tuple(levels))

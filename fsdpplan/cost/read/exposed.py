"""Exposed: which collectives a step waits for, what the hidden ones cost, and its bottleneck."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.cost.traffic.calls import (
    Calls,
    call_seconds,
    full_rate_bytes_per_second,
    group_level,
)
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.plan import TIME_WORDS, CollectiveCost, TimeBreakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedSeconds:
    """Waiting by its cause, in one step."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0
    all_to_all: float = 0.0
    """Of an optimizer that needs whole matrices: nothing runs beside it."""
    by_axis: tuple[tuple[str, float], ...] = ()
    """Beside those of data parallelism, by mesh axis: tp, cp, ep, pp; an axis may stand twice."""

    @property
    def data_parallel(self) -> float:
        """What data parallelism waits."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all

    @property
    def total(self) -> float:
        """All of it."""
        return self.data_parallel + sum(seconds for _, seconds in self.by_axis)


def collective_costs(
    calls: list[Calls], *, cluster: Cluster, exposed: ExposedSeconds
) -> tuple[CollectiveCost, ...]:
    """One row for each collective, axis, group and dtype; waiting is split by seconds."""
    rows = _rows(calls, cluster)
    data_parallel: dict[str, float] = {}
    axes: dict[str, float] = {}
    for row in rows:
        key, totals = (
            (row.collective, data_parallel) if is_data_parallel(row.axis) else (row.axis, axes)
        )
        totals[key] = totals.get(key, 0.0) + row.seconds
    waiting = own_waiting(exposed, data_parallel)
    by_axis: dict[str, float] = {}
    for axis, seconds in exposed.by_axis:
        by_axis[axis] = by_axis.get(axis, 0.0) + seconds
    return tuple(
        row.cost(
            _share(row.seconds, waiting.get(row.collective, 0.0), data_parallel[row.collective])
            if is_data_parallel(row.axis)
            else _share(row.seconds, by_axis.get(row.axis, 0.0), axes[row.axis])
        )
        for row in rows
    )


def is_data_parallel(axis: str) -> bool:
    """A group of ranks with other tokens: its collectives are those of FSDP, DDP and ZeRO."""
    return axis.startswith("dp")


@dataclass(slots=True)
class _Row:
    """Calls that are added up; private to one list of costs."""

    collective: str
    axis: str
    ranks: int
    level: str
    dtype: str
    count: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def cost(self, exposed_seconds: float) -> CollectiveCost:
        """With what is waited for."""
        return CollectiveCost(
            collective=self.collective,
            axis=self.axis,
            ranks=self.ranks,
            level=self.level,
            dtype=self.dtype,
            count=self.count,
            bytes=self.bytes,
            seconds=self.seconds,
            exposed_seconds=exposed_seconds,
        )


def _rows(calls: list[Calls], cluster: Cluster) -> list[_Row]:
    rows: dict[tuple[str, str, int, str], _Row] = {}
    for call in calls:
        group = call.group
        key = (call.collective, group.axis, group.ranks, call.dtype)
        row = rows.get(key)
        if row is None:
            row = rows[key] = _Row(
                call.collective, group.axis, group.ranks, group_level(cluster, group), call.dtype
            )
        row.count += call.count
        row.bytes += call.count * call.call_bytes
        row.seconds += call_seconds(call, cluster)
    return list(rows.values())


def _share(seconds: float, waiting: float, total: float) -> float:
    return min(seconds, waiting * seconds / total) if total else 0.0


def own_waiting(exposed: ExposedSeconds, totals: dict[str, float]) -> dict[str, float]:
    """Data parallelism's waiting by collective, of each at most what its calls take.

    A collective that is waited for has often waited itself, behind another one of its
    communicator or its links: what exceeds its own time is theirs. Parameters that are broadcast
    are not gathered.
    """
    gathers = "broadcast" if "broadcast" in totals else "all_gather"
    waiting = {
        "reduce_scatter": exposed.reduce_scatter,
        "all_reduce": exposed.all_reduce,
        gathers: exposed.all_gather,
    }
    if "all_to_all" in totals:
        waiting["all_to_all"] = exposed.all_to_all
    behind = 0.0
    for name, seconds in waiting.items():
        waiting[name] = min(seconds, totals.get(name, 0.0))
        behind += seconds - waiting[name]
    for name, seconds in waiting.items():
        taken = min(behind, totals.get(name, 0.0) - seconds)
        waiting[name] += taken
        behind -= taken
    return waiting


def slowdown_seconds(communication: tuple[CollectiveCost, ...], device: Device) -> float:
    """What kernels lose to collectives that run beside them.

    fraction * sum over collectives (hidden seconds * min(1, wire rate / (memory rate / 8)))
    """
    full_rate = full_rate_bytes_per_second(device)
    lost = 0.0
    for row in communication:
        hidden = row.seconds - row.exposed_seconds
        if hidden <= 0:
            continue
        wire = wire_bytes(
            collective=row.collective,  # type: ignore[arg-type]
            gathered_bytes=row.bytes,
            ranks=row.ranks,
        )
        lost += hidden * min(1.0, wire / row.seconds / full_rate)
    return device.fit.overlap_slowdown_fraction * lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What a step waits for where one level of the network has more to carry than there is time."""

    level: str = ""
    """Of the network; empty where all have time enough."""
    seconds: float = 0.0
    communication: tuple[CollectiveCost, ...] = ()
    """The collectives, those of the level exposed for so much longer, each by what was hidden."""


def level_seconds(communication: tuple[CollectiveCost, ...]) -> dict[str, float]:
    """Seconds of what passes each level of the network, one after another."""
    passing: dict[str, float] = {}
    for row in communication:
        passing[row.level] = passing.get(row.level, 0.0) + row.seconds
    return passing


def link_queue(communication: tuple[CollectiveCost, ...], *, step_seconds: float) -> Queue:
    """What waits for the level that carries most, where a step would else be shorter than that.

        T >= max over levels (sum of the seconds of the collectives that pass it)

    The seconds of a collective are those of a rank that has its share of the level to itself. Of
    two at once, from any axes, each has less, and both together take no less than one after the
    other.
    """
    passing = level_seconds(communication)
    level = max(passing, key=lambda name: passing[name], default="")
    waiting = passing[level] - step_seconds if level else 0.0
    if waiting <= 0:
        return Queue(communication=communication)
    hidden = sum(row.seconds - row.exposed_seconds for row in communication if row.level == level)
    share = waiting / hidden
    rows = tuple(
        replace(
            row, exposed_seconds=row.exposed_seconds + share * (row.seconds - row.exposed_seconds)
        )
        if row.level == level
        else row
        for row in communication
    )
    return Queue(level=level, seconds=waiting, communication=rows)


def inside_seconds(communication: tuple[CollectiveCost, ...], cluster: Cluster) -> float:
    """Waiting for collectives that stay on the innermost level of the network."""
    innermost = cluster.levels[0].name
    return sum(row.exposed_seconds for row in communication if row.level == innermost)


def bottleneck(time: TimeBreakdown, communication: tuple[CollectiveCost, ...]) -> str:
    """The largest part of the step; of communication the collective that is waited for most."""
    largest = max(time.terms, key=lambda name: time.terms[name])
    if largest != TIME_WORDS["exposed_communication_seconds"]:
        return largest
    waits: dict[str, float] = {}
    for row in communication:
        name = f"{row.collective} over {row.axis} ({row.level})"
        waits[name] = waits.get(name, 0.0) + row.exposed_seconds
    return max(waits, key=lambda name: waits[name])

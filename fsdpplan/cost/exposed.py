"""Exposed: which collectives a step waits for, and what to call its bottleneck."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdpplan.cost.timing import group_level, group_seconds
from fsdpplan.cost.traffic import Calls
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import CollectiveCost, TimeBreakdown

COMPUTE_BOUND_FRACTION = 0.1
"""Below this share of waiting and optimizer, a step is called compute-bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExposedSeconds:
    """Waiting by its cause, in one step."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.all_gather + self.reduce_scatter + self.all_reduce


def call_seconds(call: Calls, cluster: Cluster) -> float:
    """Seconds of all calls, one after another."""
    return call.count * group_seconds(cluster, call.group, call.collective, call.call_bytes)


def collective_costs(
    calls: list[Calls], *, cluster: Cluster, exposed: ExposedSeconds, tp_exposed: bool
) -> tuple[CollectiveCost, ...]:
    """One row for each collective, axis, group and dtype; waiting is split by seconds."""
    rows: dict[tuple[str, str, int, str], CollectiveCost] = {}
    for call in calls:
        key = (call.collective, call.group.axis, call.group.ranks, call.dtype)
        seconds = call_seconds(call, cluster)
        old = rows.get(key)
        rows[key] = CollectiveCost(
            collective=call.collective,
            axis=call.group.axis,
            ranks=call.group.ranks,
            level=group_level(cluster, call.group),
            dtype=call.dtype,
            count=call.count + (old.count if old else 0),
            bytes=call.count * call.call_bytes + (old.bytes if old else 0),
            seconds=seconds + (old.seconds if old else 0.0),
            exposed_seconds=0.0,
        )
    totals: dict[str, float] = {}
    for row in rows.values():
        if row.axis.startswith("dp"):
            totals[row.collective] = totals.get(row.collective, 0.0) + row.seconds
    waiting = own_waiting(exposed, totals)
    return tuple(
        replace(row, exposed_seconds=_row_exposed(row, totals, waiting, tp_exposed))
        for row in rows.values()
    )


def own_waiting(exposed: ExposedSeconds, totals: dict[str, float]) -> dict[str, float]:
    """Waiting by collective, of each at most what its calls take.

    A collective that is waited for has often waited itself, behind another one of its
    communicator or its links: what exceeds its own time is theirs.
    """
    waiting = {
        "reduce_scatter": exposed.reduce_scatter,
        "all_reduce": exposed.all_reduce,
        "all_gather": exposed.all_gather,
    }
    behind = 0.0
    for name, seconds in waiting.items():
        waiting[name] = min(seconds, totals.get(name, 0.0))
        behind += seconds - waiting[name]
    for name, seconds in waiting.items():
        taken = min(behind, totals.get(name, 0.0) - seconds)
        waiting[name] += taken
        behind -= taken
    return waiting


def _row_exposed(
    row: CollectiveCost, totals: dict[str, float], waiting: dict[str, float], tp_exposed: bool
) -> float:
    if row.axis == "tp":
        return row.seconds if tp_exposed else 0.0
    total = totals.get(row.collective, 0.0)
    return waiting.get(row.collective, 0.0) * row.seconds / total if total else 0.0


def bottleneck(time: TimeBreakdown, communication: tuple[CollectiveCost, ...]) -> str:
    """The largest part of the step that is not compute, or `compute`."""
    waits = {
        "pipeline bubble": time.bubble_seconds,
        "optimizer": time.optimizer_seconds,
    }
    for row in communication:
        name = f"{row.collective} over {row.axis} ({row.level})"
        waits[name] = waits.get(name, 0.0) + row.exposed_seconds
    waiting = time.total_seconds - time.compute_seconds
    if waiting < COMPUTE_BOUND_FRACTION * time.total_seconds:
        return "compute"
    return max(waits, key=lambda name: waits[name])

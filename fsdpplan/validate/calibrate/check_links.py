"""Check links: levels against the profile, groups and neighbouring ranks against their equals.

Calls count by what they show: a level's bandwidth where more than half of the predicted time goes
with the bytes, else its latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMachine
from fsdpplan.validate.calibrate.check_pairs import pair_gates
from fsdpplan.validate.calibrate.levels import level_of, middle_calls, predicted_call_seconds
from fsdpplan.validate.compare.gates import (
    Gate,
    GateSubject,
    Timed,
    gate,
    middle,
    timed,
    undisturbed,
)

TINY_BYTES = 1
"""Size of a call that has only a start."""


def link_gates(
    calls: Sequence[MeasuredCall],
    cluster: Cluster,
    machine: MeasuredMachine,
    *,
    tolerance: float,
) -> tuple[Gate, ...]:
    """All gates of links: pairs first, then groups, then levels."""
    groups = [call for call in calls if call.group != "pair"]
    pairs = [call for call in calls if call.group == "pair"]
    return (
        *pair_gates(pairs, cluster, machine, tolerance=tolerance),
        *_group_gates(groups, cluster, machine, tolerance),
        *_level_gates(groups, cluster, tolerance),
    )


def _level_gates(
    groups: Sequence[MeasuredCall], cluster: Cluster, tolerance: float
) -> Iterator[Gate]:
    by_part: dict[tuple[int, str], list[Timed]] = {}
    for call in middle_calls(groups):
        index = level_of(call, cluster)
        assert index is not None
        row = timed(call.seconds, predicted_call_seconds(call, cluster))
        by_part.setdefault((index, _shows(call, cluster)), []).append(row)
    error = cluster.device.error
    for (index, shows), rows in sorted(by_part.items()):
        known = error.across_fraction if index else error.inside_fraction
        is_measured = cluster.device.evidence == "measured"
        part = GateSubject(
            kind="level", where=f"level {cluster.levels[index].name}", what=shows, level=index
        )
        allowance = 0.0 if is_measured else NORMAL_80 * known
        yield gate(part, rows, tolerance=tolerance, allowance=allowance)


def _shows(call: MeasuredCall, cluster: Cluster) -> Literal["bandwidth", "latency"]:
    expected = predicted_call_seconds(call, cluster)
    start = predicted_call_seconds(replace(call, gathered_bytes=TINY_BYTES), cluster)
    return "bandwidth" if start < expected / 2 else "latency"


def _group_gates(
    groups: Sequence[MeasuredCall], cluster: Cluster, machine: MeasuredMachine, tolerance: float
) -> Iterator[Gate]:
    """Groups of one shape that called at the same time: one host's links, one rail."""
    for shows in ("bandwidth", "latency"):
        mine = [call for call in groups if _shows(call, cluster) == shows]
        for call, members in _beside_equals(mine).items():
            level = level_of(call, cluster)
            for first, rows in members.items():
                name = _group_name(replace(call, first_rank=first), machine)
                part = GateSubject(
                    kind="group", where=name, what=f"{call.group} {shows}", level=level
                )
                yield gate(part, rows, tolerance=tolerance)


def _beside_equals(calls: Sequence[MeasuredCall]) -> dict[MeasuredCall, dict[int, list[Timed]]]:
    """Rows of each group over those of its equals, by shape and first rank; shapes of which there
    is only one group are left out."""
    alike: dict[MeasuredCall, dict[int, tuple[float, ...]]] = {}
    for call in calls:
        key = replace(call, first_rank=0, seconds=())
        alike.setdefault(key, {})[call.first_rank] = call.seconds
    found: dict[MeasuredCall, dict[int, list[Timed]]] = {}
    for key, members in alike.items():
        if len(members) > 1:
            expected = undisturbed(middle(members.values()))
            shape = replace(key, collective="all_gather", gathered_bytes=0)
            rows = found.setdefault(shape, {})
            for first, seconds in members.items():
                rows.setdefault(first, []).append(timed(seconds, expected))
    return found


def _group_name(call: MeasuredCall, machine: MeasuredMachine) -> str:
    per_node = machine.ranks_per_node
    if call.group == "inside":
        return f"links inside host {machine.hosts[call.first_rank // per_node]}"
    if call.group == "across":
        return f"links of local rank {call.first_rank}"
    last = call.first_rank + (call.ranks - 1) * call.stride
    return f"links of {call.axis or call.group} ranks {call.first_rank} to {last}"

"""Check links: levels against the profile, groups and neighbouring ranks against their equals.

Calls count by what they show: a level's bandwidth where more than half of the predicted time goes
with the bytes, else its latency.

Check pairs: each link between neighbouring ranks against those that part at the same level.

Slow pairs that have a host, two hosts or a rank in common are named by that: it is one adapter or
cable, not several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMachine
from fsdpplan.validate.calibrate.levels import level_of, middle_calls, predicted_call_seconds
from fsdpplan.validate.compare.gates import (
    Gate,
    GateSubject,
    Timed,
    gate,
    healthy,
    middle,
    timed,
    undisturbed,
)

FEWEST_TOGETHER = 2
"""One slow pair is named by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two neighbouring ranks."""

    first: int
    last: int
    level: int
    """Index of the level at which they part."""
    level_name: str
    row: Timed


def pair_gates(
    calls: Sequence[MeasuredCall],
    cluster: Cluster,
    machine: MeasuredMachine,
    *,
    tolerance: float,
) -> tuple[Gate, ...]:
    """One gate for each pair that has an equal, or for several slow ones that go together."""
    pairs = _pairs(calls, cluster)
    slow = [pair for pair in pairs if not _gate([pair], "", tolerance).passed]
    gates = []
    for name, together in _together(slow, pairs, machine):
        gates.append(_gate(together, name, tolerance))
        slow = [pair for pair in slow if pair not in together]
    told = [pair for pair in pairs if pair in slow or _gate([pair], "", tolerance).passed]
    return (*gates, *(_gate([pair], _name(pair, machine), tolerance) for pair in told))


def _pairs(calls: Sequence[MeasuredCall], cluster: Cluster) -> list[_Pair]:
    """Pairs and their largest message, over that of a healthy pair of its level."""
    largest = max((call.gathered_bytes for call in calls), default=0)
    levels: dict[int, dict[tuple[int, int], MeasuredCall]] = {}
    for call in calls:
        index = level_of(call, cluster)
        if call.gathered_bytes == largest and index is not None:
            ends = (call.first_rank, call.first_rank + call.stride)
            levels.setdefault(index, {})[ends] = call
    return [
        _Pair(
            first=first,
            last=last,
            level=index,
            level_name=cluster.levels[index].name,
            row=timed(call.seconds, undisturbed(healthy(one.seconds for one in members.values()))),
        )
        for index, members in sorted(levels.items())
        if len(members) > 1
        for (first, last), call in sorted(members.items())
    ]


def _gate(pairs: Sequence[_Pair], name: str, tolerance: float) -> Gate:
    level = min(pair.level for pair in pairs)
    part = GateSubject(kind="pair", where=name, what=f"{pairs[0].level_name} messages", level=level)
    return gate(part, [pair.row for pair in pairs], tolerance=tolerance)


def _together(
    slow: Sequence[_Pair], pairs: Sequence[_Pair], machine: MeasuredMachine
) -> Iterator[tuple[str, list[_Pair]]]:
    """What slow pairs have in common, with its pairs, all of which are slow; none has two names."""
    left = list(slow)
    for name, mine in _common(pairs, machine):
        if len(mine) >= FEWEST_TOGETHER and all(pair in left for pair in mine):
            left = [pair for pair in left if pair not in mine]
            yield name, mine


def _common(pairs: Sequence[_Pair], machine: MeasuredMachine) -> Iterator[tuple[str, list[_Pair]]]:
    """What may be at fault and all pairs that have it, widest first: a host between others, what
    lies between two hosts, a rank."""
    between = [pair for pair in pairs if len(set(_hosts(pair, machine))) > 1]
    for host in machine.hosts:
        mine = [pair for pair in between if host in _hosts(pair, machine)]
        if len({_hosts(pair, machine) for pair in mine}) > 1:
            yield f"links of host {host}", mine
    for ends in dict.fromkeys(_hosts(pair, machine) for pair in between):
        yield f"link {'-'.join(ends)}", [p for p in between if _hosts(p, machine) == ends]
    ranks: dict[tuple[int, str], list[_Pair]] = {}
    for pair in pairs:
        for rank in (pair.first, pair.last):
            ranks.setdefault((rank, pair.level_name), []).append(pair)
    for (rank, _), mine in ranks.items():
        host = machine.hosts[rank // machine.ranks_per_node]
        yield f"links of rank {rank} on host {host}", mine


def _hosts(pair: _Pair, machine: MeasuredMachine) -> tuple[str, str]:
    per_node = machine.ranks_per_node
    return machine.hosts[pair.first // per_node], machine.hosts[pair.last // per_node]


def _name(pair: _Pair, machine: MeasuredMachine) -> str:
    one, other = _hosts(pair, machine)
    if one == other:
        return f"link {pair.first}-{pair.last} on host {one}"
    return f"link {one}-{other}, ranks {pair.first}-{pair.last}"


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

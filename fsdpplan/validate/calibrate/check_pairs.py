"""Check pairs: each link between neighbouring ranks against those that part at the same level.

Slow pairs that have a host, two hosts or a rank in common are named by that: it is one adapter or
cable, not several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMachine
from fsdpplan.validate.calibrate.levels import level_of
from fsdpplan.validate.compare.gates import (
    Gate,
    GateSubject,
    Timed,
    gate,
    healthy,
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

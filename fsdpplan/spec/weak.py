"""Weak spots: parts of some nodes that are slower than their equals, and so slow all others."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Cluster, WeakSpot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """The least that is left of each part over some weak spots."""

    device: float
    levels: dict[str, float]


def weakened(cluster: Cluster, spots: Collection[WeakSpot]) -> Cluster:
    """`cluster` with these weak spots beside its own: each part runs at the pace of its slowest.

    A ring is as fast as its slowest link, and a step as its slowest rank. Raises SpecError where a
    spot names a level that the cluster does not have.
    """
    names = [level.name for level in cluster.levels]
    for spot in spots:
        if spot.level is not None and spot.level not in names:
            raise SpecError(
                f"a weak spot names the level {spot.level!r}, but there are only "
                f"{', '.join(names)}: name one of these, or none"
            )
    return _paced(cluster, (*cluster.weak, *spots))


def without_nodes(cluster: Cluster, nodes: Collection[str]) -> Cluster:
    """The same number of nodes, but none of `nodes`: others stand in for them."""
    spots = (
        (spot, tuple(node for node in spot.nodes if node not in nodes)) for spot in cluster.weak
    )
    return _paced(cluster, tuple(replace(spot, nodes=left) for spot, left in spots if left))


def weak_nodes(cluster: Cluster) -> tuple[str, ...]:
    """Names of the nodes that hold the others back, each once."""
    return tuple(dict.fromkeys(node for spot in cluster.weak for node in spot.nodes))


def _paced(cluster: Cluster, spots: tuple[WeakSpot, ...]) -> Cluster:
    before, after = _pace(cluster.weak), _pace(spots)
    levels = tuple(
        replace(
            level,
            port_bandwidth_bytes_per_second=level.port_bandwidth_bytes_per_second
            * (after.levels.get(level.name, 1.0) / before.levels.get(level.name, 1.0)),
        )
        for level in cluster.levels
    )
    sustained = cluster.device.fit.sustained_fraction * after.device / before.device
    fit = replace(cluster.device.fit, sustained_fraction=min(1.0, sustained))
    return replace(cluster, levels=levels, device=replace(cluster.device, fit=fit), weak=spots)


def _pace(spots: Collection[WeakSpot]) -> _Pace:
    levels: dict[str, float] = {}
    device = 1.0
    for spot in spots:
        if spot.level is None:
            device = min(device, spot.remaining_fraction)
        else:
            levels[spot.level] = min(levels.get(spot.level, 1.0), spot.remaining_fraction)
    return _Pace(device=device, levels=levels)

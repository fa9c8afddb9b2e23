"""Nodes of several types in one job: every part runs at the pace of its slowest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Cluster, Device, Evidence, Level, WeakSpot
from fsdpplan.spec.weak import weak_nodes, weakened, without_nodes
from fsdpplan.units import format_bandwidth, format_gib

_WEAKEST: tuple[Evidence, ...] = ("datasheet", "fitted", "measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCluster:
    """The whole cluster as it would be with nodes of one type only."""

    cluster: Cluster
    node: str
    """Profile of the nodes."""
    num_nodes: int
    """Nodes of this type in the real cluster."""


def slowest_of(parts: Sequence[UniformCluster]) -> tuple[Cluster, tuple[str, ...]]:
    """One cluster at the pace of the slowest type in each respect, and sentences on who that is.

    Ranks have equal shares of the work, so that all wait for the slowest device, all fit into the
    smallest memory, and a ring is as fast as its slowest link. Raises SpecError where the types do
    not have the same levels of links.
    """
    counts = {len(part.cluster.levels) for part in parts}
    if len(counts) > 1:
        raise SpecError(
            "nodes of a mixed cluster have the same number of levels of links, not "
            f"{', '.join(f'{len(p.cluster.levels)} ({p.node})' for p in parts)}: say in the file, "
            "by [[levels]], what joins them"
        )
    healthy = [
        replace(part, cluster=without_nodes(part.cluster, weak_nodes(part.cluster)))
        for part in parts
    ]
    slow = min(healthy, key=lambda part: _rate(part.cluster.device))
    levels = tuple(
        min(same, key=_gpu_bandwidth)
        for same in zip(*(part.cluster.levels for part in healthy), strict=True)
    )
    hosts = [part.cluster.host_memory_bytes_per_second for part in healthy]
    cluster = replace(
        slow.cluster,
        device=_slowest_device(slow, healthy),
        levels=levels,
        network=None,
        host_memory_bytes_per_second=min((each for each in hosts if each), default=None),
    )
    spots = [
        spot
        for part, whole in zip(parts, healthy, strict=True)
        for spot in _spots(part.cluster.weak, whole.cluster, cluster)
    ]
    return weakened(cluster, _weakest(spots)), tuple(_sentences(healthy, slow, cluster))


def _spots(weak: Sequence[WeakSpot], own: Cluster, mixed: Cluster) -> Iterator[WeakSpot]:
    """`weak` of the nodes that are healthy as `own`, as shares of what `mixed` has; none of what
    still is as fast as that."""
    for spot in weak:
        left, name = spot.remaining_fraction, spot.level
        if name is None:
            left *= _rate(own.device) / _rate(mixed.device)
        else:
            place = [level.name for level in own.levels].index(name)
            left *= _gpu_bandwidth(own.levels[place]) / _gpu_bandwidth(mixed.levels[place])
            name = mixed.levels[place].name
        if left < 1:
            yield replace(spot, level=name, remaining_fraction=left)


def _weakest(spots: Sequence[WeakSpot]) -> list[WeakSpot]:
    """Each once: one that may be of several types of nodes is taken for the slowest's."""
    least: dict[WeakSpot, WeakSpot] = {}
    for spot in spots:
        key = replace(spot, remaining_fraction=1.0)
        known = least.get(key)
        if known is None or spot.remaining_fraction < known.remaining_fraction:
            least[key] = spot
    return list(least.values())


def _rate(device: Device) -> float:
    """FLOP/s of large matmuls in training."""
    return (
        device.peak_bf16_flops_per_second
        * device.fit.matmul_fraction
        * device.fit.sustained_fraction
    )


def _gpu_bandwidth(level: Level) -> float:
    return level.ports * level.port_bandwidth_bytes_per_second * level.bandwidth_fraction


def _slowest_device(slow: UniformCluster, parts: Sequence[UniformCluster]) -> Device:
    devices = [part.cluster.device for part in parts]
    names = dict.fromkeys(device.name for device in devices)
    return replace(
        slow.cluster.device,
        name="+".join(names),
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bandwidth_bytes_per_second=min(
            device.memory_bandwidth_bytes_per_second for device in devices
        ),
        host_link_bytes_per_second=min(device.host_link_bytes_per_second for device in devices),
        peak_fp8_flops_per_second=None
        if any(device.peak_fp8_flops_per_second is None for device in devices)
        else slow.cluster.device.peak_fp8_flops_per_second,
        evidence=min((device.evidence for device in devices), key=_WEAKEST.index),
        compute_capability=_oldest([device.compute_capability for device in devices]),
        skypilot_name=slow.cluster.device.skypilot_name if len(names) == 1 else None,
    )


def _oldest(capabilities: Sequence[str | None]) -> str | None:
    """The least of them; None where one is not known."""
    known = [one for one in capabilities if one is not None]
    if len(known) < len(capabilities):
        return None
    return min(known, key=lambda one: tuple(map(int, one.split("."))))


def _sentences(
    parts: Sequence[UniformCluster], slow: UniformCluster, cluster: Cluster
) -> list[str]:
    total = sum(part.num_nodes for part in parts)
    said = [
        f"{slow.num_nodes} of {total} nodes are {slow.node}: every step waits for their "
        f"{slow.cluster.device.name}"
    ]
    small = min(parts, key=lambda part: part.cluster.device.memory_bytes)
    if small is not slow:
        memory = format_gib(small.cluster.device.memory_bytes)
        said.append(f"every rank must fit into the {memory} of {small.node}")
    for index, level in enumerate(cluster.levels):
        owner = next(part for part in parts if part.cluster.levels[index] == level)
        bandwidths = {_gpu_bandwidth(part.cluster.levels[index]) for part in parts}
        if len(bandwidths) > 1:
            one = format_bandwidth(level.port_bandwidth_bytes_per_second)
            said.append(f"the {level.name} of {owner.node} ({level.ports} x {one}) sets the ring")
    return said

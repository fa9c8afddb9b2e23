"""Islands: which GPUs of a host reach each other over NVLink."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdpplan.spec.machine import Gpu, GpuFabric, Machine, NvLink
from fsdpplan.spec.topology import Island, IslandKind


def islands_of(machine: Machine, *, others: Sequence[Machine] = ()) -> tuple[Island, ...]:
    """Every GPU of `machine` in exactly one island, in the order of their first GPU.

    Direct links join their two ends; links to switches join all GPUs that have such links and are
    in the same domain. A GPU in MIG mode reads no other GPU (NVIDIA, P2P CUDA transfers: not for
    MIG-backed devices), and a link whose other end is unknown joins nothing.
    `others` are the other hosts that were read: a domain that spans hosts has at least their GPUs.
    """
    groups = _groups(machine.gpus)
    return tuple(_island(group, others) for group in groups)


def inner_links(gpu: Gpu, members: Iterable[Gpu]) -> tuple[NvLink, ...]:
    """Active links of `gpu` that lead to `members`, through a switch or directly."""
    addresses = {other.bus_id for other in members if other.bus_id != gpu.bus_id}
    return tuple(
        link
        for link in gpu.nvlinks
        if link.active
        and (link.remote == "switch" or (link.remote == "gpu" and link.remote_bus_id in addresses))
    )


def _groups(gpus: tuple[Gpu, ...]) -> list[list[Gpu]]:
    """Connected components."""
    waiting = list(gpus)
    groups: list[list[Gpu]] = []
    while waiting:
        group = [waiting.pop(0)]
        for member in group:  # grows while it is walked
            found = [other for other in waiting if _joined(member, other)]
            group += found
            waiting = [other for other in waiting if other not in found]
        groups.append(sorted(group, key=lambda gpu: gpu.index))
    return groups


def _joined(one: Gpu, other: Gpu) -> bool:
    if one.mig_enabled or other.mig_enabled:
        return False
    if _on_switch(one) and _on_switch(other) and one.fabric == other.fabric:
        return True
    return _direct(one, other) and _direct(other, one)


def _on_switch(gpu: Gpu) -> bool:
    return any(link.active and link.remote == "switch" for link in gpu.nvlinks)


def _direct(one: Gpu, other: Gpu) -> bool:
    return other.bus_id is not None and any(
        link.active and link.remote == "gpu" and link.remote_bus_id == other.bus_id
        for link in one.nvlinks
    )


def _island(group: list[Gpu], others: Sequence[Machine]) -> Island:
    first = group[0]
    spans_hosts = first.fabric is not None and _on_switch(first) and not first.mig_enabled
    alone = len(group) == 1 and not spans_hosts
    kind: IslandKind = "alone"
    if not alone:
        kind = "nvswitch" if _on_switch(first) else "nvlink"
    return Island(
        gpus=tuple(gpu.index for gpu in group),
        kind=kind,
        bandwidth_bytes_per_second=None if alone else _bandwidth_bytes_per_second(group),
        domain_gpus=_domain_gpus(first.fabric, others, own=len(group))
        if spans_hosts
        else len(group),
        fabric=f"{first.fabric.cluster_uuid}/{first.fabric.clique}"
        if spans_hosts and first.fabric is not None
        else None,
    )


def _bandwidth_bytes_per_second(group: list[Gpu]) -> float | None:
    """What the GPU with the least has into the island: the slowest sets the ring."""
    sums: list[float] = []
    for gpu in group:
        rates = [link.bandwidth_bytes_per_second for link in inner_links(gpu, group)]
        if not rates or any(rate is None for rate in rates):
            return None
        sums.append(sum(rate for rate in rates if rate is not None))
    return min(sums)


def _domain_gpus(fabric: GpuFabric | None, others: Sequence[Machine], *, own: int) -> int | None:
    """GPUs seen in a domain that spans hosts; one host cannot tell how many there are."""
    if not others:
        return None
    return own + sum(gpu.fabric == fabric for machine in others for gpu in machine.gpus)

"""Node profiles of machines that were found: what was read, and what their relatives say of it.

A machine tells its devices, its links and their rates. What only measuring tells (latencies, shares
of a bandwidth) is taken over from the nearest level of the catalogue, and said to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any

from fsdpplan.errors import ProbeError
from fsdpplan.files.profiles.catalogue import profiles_mentioning
from fsdpplan.files.profiles.devices import DeviceProfile
from fsdpplan.files.profiles.levels import LEVEL_LOAN, Joins, LevelProfile
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.files.profiles.numbers import Sources, taken_over
from fsdpplan.spec.cluster import Level, WeakSpot
from fsdpplan.spec.machine import Gpu
from fsdpplan.spec.nodes import Network
from fsdpplan.spec.topology import FoundLevel, LevelKind

_NAMES: dict[LevelKind, tuple[str, ...]] = {
    "nvlink": ("nvlink",),
    "pcie": ("pcie",),
    "socket": ("socket", "pcie"),
    "infiniband": ("infiniband", "fastrak"),
    "roce": ("roce", "infiniband", "fastrak"),
    "efa": ("efa",),
    "tcpx": ("tcpx", "fastrak", "gpudirect-tcpx"),
    "ethernet": ("ethernet", "tcp", "roce", "efa"),
}
"""Names under which levels of a kind stand in the catalogue, the nearest kind first."""
_READ = ("ports", "port_bandwidth_bytes_per_second", "gpudirect")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedNode:
    """What was found of one node, or of several equal ones."""

    name: str
    """How the profile is called, such as the host's name."""
    hosts: str
    """Hosts that were read, such as `n[01-04]`."""
    gpus: tuple[Gpu, ...]
    levels: tuple[FoundLevel, ...]
    nvlink_switch: bool
    """The GPUs hang on switches, not on each other."""
    network: Network | None
    weak: tuple[WeakSpot, ...]
    date: str
    host_memory_bytes: int | None = None
    """Memory of the host itself; None: not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relative:
    """A level of the catalogue whose fitted numbers another one may take."""

    key: str
    """`node profile:level`."""
    level: Level
    sources: Sources
    """Of the node profile."""
    distance: tuple[int, int, float, int, bool]
    """By kind, then by device, then by bandwidth; then how many levels of the machine its node
    does not have; of equals NVIDIA's own system is nearer than those of clouds."""


def node_of(found: DetectedNode) -> NodeProfile:
    """The profile of what was found.

    Raises ProbeError where its GPUs are of several kinds, are MIG instances, or have no profile,
    and where nothing in the catalogue resembles a level.
    """
    device = _device(found.gpus)
    source = f"found on {found.hosts} by fsdpplan detect, {found.date}"
    sources = [("cluster.gpus_per_node", source)]
    if found.host_memory_bytes is not None:
        sources.append(("cluster.host_memory_bytes", f"{source}; MemTotal of /proc/meminfo"))
    levels = []
    for level in _complete(found, device):
        profile, named = _level(level, found, device, source)
        levels.append(profile)
        sources += named
    network = None if found.network is None else replace(found.network, evidence=source)
    if network is not None:
        sources += [(f"cluster.network.{name}", source) for name in _known(network)]
    sources += [(f"cluster.weak.{index}", source) for index in range(len(found.weak))]
    return NodeProfile(
        name=found.name,
        device=device.device.name,
        own_device=None,
        gpus_per_node=len(found.gpus),
        host_memory_bytes=found.host_memory_bytes,
        levels=tuple(levels),
        network=network,
        weak=found.weak,
        sources=tuple(sources),
    )


def _device(gpus: Sequence[Gpu]) -> DeviceProfile:
    """The catalogue's profile of these GPUs; of several with one name, the nearest by memory."""
    names = sorted({gpu.name for gpu in gpus})
    if len(names) != 1:
        raise ProbeError(
            f"the GPUs of this machine are of several kinds ({', '.join(names)}): choose equal "
            "ones with CUDA_VISIBLE_DEVICES, or name the hardware with --hardware"
        )
    split = [str(gpu.index) for gpu in gpus if gpu.mig_enabled]
    if split:
        raise ProbeError(
            f"GPU {', '.join(split)} of this machine is split by MIG, and NCCL does not join such "
            "parts: leave it out of CUDA_VISIBLE_DEVICES, switch MIG off (nvidia-smi -mig 0), or "
            "name the hardware with --hardware"
        )
    memory = gpus[0].memory_bytes
    fitting = [
        profile
        for profile in profiles_mentioning(names[0])
        if isinstance(profile, DeviceProfile) and names[0] in profile.nvml_names
    ]
    if not fitting:
        raise ProbeError(
            f"no profile has the GPUs of this machine ({len(gpus)} x {names[0]}): name the "
            "hardware with --hardware, a name of `fsdpplan profiles` or a file of your own"
        )
    return min(fitting, key=lambda p: abs(p.device.memory_bytes - (memory or 0)) if memory else 0)


def _complete(found: DetectedNode, device: DeviceProfile) -> Iterator[FoundLevel]:
    """The levels, or for one GPU on its own a level that nothing crosses."""
    if len(found.gpus) == 1 and not any(level.domain_gpus for level in found.levels):
        yield FoundLevel(
            kind="none",
            domain_gpus=1,
            ports=1,
            port_bandwidth_bytes_per_second=device.device.host_link_bytes_per_second,
            healthy_bandwidth_bytes_per_second=device.device.host_link_bytes_per_second,
            gpudirect=True,
            evidence="one GPU has no other one in its node",
        )
    yield from found.levels


def _level(
    level: FoundLevel, found: DetectedNode, device: DeviceProfile, source: str
) -> tuple[LevelProfile, Sources]:
    joins, prefix = _joins(level, found), f"cluster.levels.{level.kind}."
    values, named = _taken(level, found, device)
    own = f"{source}; {level.evidence}"
    named = {name: own for name in _READ} | named
    profile = LevelProfile(
        joins=joins,
        domain_gpus=level.domain_gpus if joins == "domain" else None,
        usable_gpus=None,
        domain_nodes=None,
        oversubscription=None,
        fitted_as=None,
        level=Level(
            name=level.kind,
            domain_gpus=1,
            ports=level.ports,
            port_bandwidth_bytes_per_second=level.healthy_bandwidth_bytes_per_second,
            gpudirect=level.gpudirect,
            **values,
        ),
    )
    return profile, tuple((f"{prefix}{name}", text) for name, text in named.items())


def _taken(
    level: FoundLevel, found: DetectedNode, device: DeviceProfile
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fitted numbers of the nearest relative, and where each comes from."""
    relative = _relative(level, found, device)
    if relative is None:
        values = {"latency_seconds": 0.0, "bandwidth_fraction": 1.0, "half_bandwidth_bytes": 0.0}
        return values, dict.fromkeys(values, "there is no other GPU to reach over this level")
    values = {name: getattr(relative.level, name) for name in LEVEL_LOAN}
    theirs = f"cluster.levels.{relative.level.name}."
    named = taken_over(relative.sources, theirs, LEVEL_LOAN, relative.key)
    named = {field.removeprefix(theirs): text for field, text in named.items()}
    if level.kind == "nvlink" and not found.nvlink_switch:
        values["multicast_fraction"] = 0.0
        named["multicast_fraction"] = "direct links: there is no switch that could reduce"
    return values, named


def _joins(level: FoundLevel, found: DetectedNode) -> Joins:
    if level.domain_gpus is None:
        return "cluster"
    return "node" if level.domain_gpus == len(found.gpus) else "domain"


def _relative(level: FoundLevel, found: DetectedNode, device: DeviceProfile) -> _Relative | None:
    """The level of the catalogue that resembles this one most; None where there is none to cross.

    Nodes of this device come first: where one has a level of the very kind, no other node can be
    nearer.
    """
    if level.kind == "none":
        return None
    near = [name for name in (device.device.name, device.fitted_as) if name is not None]
    best: _Relative | None = None
    for words in ([f'device = "{name}"' for name in near], ['kind = "node"']):
        nodes = [each for each in profiles_mentioning(*words) if isinstance(each, NodeProfile)]
        known = [each for node in nodes for each in _relatives(level, found, node, near)]
        best = min(known, key=lambda each: each.distance, default=None)
        if best is not None and best.distance[0] == 0 and best.distance[1] < len(near):
            return best
    if best is None:
        raise ProbeError(
            f"no profile of the catalogue has a level of the kind {level.kind}, whose numbers this "
            "machine's could take: name the hardware with --hardware"
        )
    return best


def _relatives(
    level: FoundLevel, found: DetectedNode, node: NodeProfile, near: Sequence[str]
) -> Iterator[_Relative]:
    """Levels of the node that could lend their numbers to this one."""
    wanted, rate = _NAMES[level.kind], level.healthy_bandwidth_bytes_per_second
    has = {profile.level.name for profile in node.levels}
    for profile in node.levels:
        other = profile.level
        if other.name in wanted and profile.oversubscription is None:
            yield _Relative(
                key=f"{node.name}:{other.name}",
                level=other,
                sources=node.sources,
                distance=(
                    wanted.index(other.name),
                    near.index(node.device) if node.device in near else len(near),
                    abs(log(other.port_bandwidth_bytes_per_second / rate)),
                    sum(each.kind not in has for each in found.levels),
                    not node.name.startswith("dgx-"),
                ),
            )


def _known(network: Network) -> list[str]:
    """Fields that say something."""
    return [
        field.name
        for field in fields(Network)
        if field.name != "evidence" and getattr(network, field.name) != field.default
    ]

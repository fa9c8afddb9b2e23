"""Fabric: the cluster of a row, from the GPU's name and what is said of the network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import load_node, profile_names, profiles_mentioning
from fsdpplan.files.profiles.devices import DeviceProfile
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.validate.runs.network_words import ports_of
from fsdpplan.validate.runs.skipped import NotExpressed, given

OTHER_PARTS = re.compile(r"\b(PCIe?|NVL|MIG|GH200)\b", re.I)
"""Words of parts that share a name with an SXM part and little else."""

MOST_GPUS = 8
"""GPUs of a node where a table does not say, and its profile has no fewer."""

SPECIAL_NODES = {("H100-80GB", 2): "lambda-2xh100", ("V100-32GB", 16): "dgx-2"}
"""Node profile of machines with an unusual number of the GPU, by its name in tables."""

NETWORKS: tuple[tuple[str, re.Pattern[str], str], ...] = (
    ("A100-40GB", re.compile(r"\bEFA\b"), "p4d-24xlarge"),
    ("A100-80GB", re.compile(r"\bEFA\b"), "p4de-24xlarge"),
    ("H100-80GB", re.compile(r"\bEFA\b"), "p5-48xlarge"),
    ("A100-40GB", re.compile(r"1600 ?Gb.*RoCE", re.I), "hgx-a100-40g-roce1600"),
    ("A100-80GB", re.compile(r"1600 ?Gb.*RoCE", re.I), "hgx-a100-80g-roce1600"),
    ("A100-80GB", re.compile(r"4x100 ?Gb.*RoCE", re.I), "hgx-a100-80g-4x100g"),
    ("A100-80GB", re.compile(r"4x ?Omni-?Path", re.I), "hgx-a100-80g-4xopa"),
    ("H100-80GB", re.compile(r"8x200 ?Gb.*\bTCPXO?\b", re.I), "gcp-a3-megagpu-8g"),
)
"""(GPU, words on its network, node profile): the first that matches goes before the GPU's usual
node. What writers of tables call a network is no fact of a node: it is here and in no profile."""

UNNAMED_GPU = re.compile(r"suggests (V100) class")
"""Words in the notes on what GPU a row's own rate on one GPU suggests."""
SUGGESTED = {"V100": "V100-32GB"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """What to load: a node profile and what the row says instead of it."""

    profile: str
    gpus: int
    gpus_per_node: int
    ports: int | None = None
    """Network ports a node; None: as in the profile."""
    port_bandwidth_bytes_per_second: float | None = None


def cluster_request(run: MeasuredRun) -> tuple[ClusterRequest, tuple[str, ...]]:
    """The cluster of `run`, and what was assumed for it."""
    said: list[str] = []
    gpu = _part(run.gpu, said) if run.gpu else _suggested_gpu(run, said)
    gpus = given(run.gpus, "gpus")
    special = SPECIAL_NODES.get((gpu, run.gpus_per_node or 0))
    profile = special if special and gpus <= 16 else usual_node(gpu)
    # a rack of GB200 is many nodes, however the table counts it
    per_node = min(gpus, run.gpus_per_node or MOST_GPUS, node_gpus(profile))
    if run.gpus_per_node != per_node and gpus > per_node:
        said.append(f"nodes of {per_node} GPUs")
    request = ClusterRequest(profile=profile, gpus=gpus, gpus_per_node=per_node)
    if gpus == per_node:
        return request, tuple(said)
    request, sentence = _with_network(request, run.network, gpu)
    return request, (*said, sentence)


def request_for(
    gpu: str,
    *,
    network: str = "",
    gpus: int = 1,
    gpus_per_node: int = 1,
    profile: str | None = None,
) -> ClusterRequest:
    """The cluster of GPUs that `gpu` names, in nodes of `profile` or of the GPU's usual ones;
    raises NotExpressed where there is no such."""
    name = "" if profile else _part(gpu, [])
    request = ClusterRequest(
        profile=profile or usual_node(name), gpus=gpus, gpus_per_node=gpus_per_node
    )
    if profile or gpus == gpus_per_node:
        return request
    return _with_network(request, network, name)[0]


def _part(words: str, said: list[str]) -> str:
    """The GPU that `words` name, such as `H100-80GB` or `NVIDIA A100-SXM4-80GB`, by the name that
    its profile has for tables.

    Vendors print some sizes a little larger or smaller than torch sees them: the nearest is meant.
    """
    if named(words):
        return words
    gpu = _meant(words)
    if gpu is None or OTHER_PARTS.search(words):
        raise NotExpressed("no hardware profile for the GPU", words)
    said.append(f'GPU "{words}" taken as {gpu}')
    return gpu


def _meant(words: str) -> str | None:
    """The name in tables of the GPU of that family and nearest memory. Of a family the largest
    memory is meant where none is named; a part that has more words in its name, never without its
    last one."""
    plain = re.sub(r"(?i)\b(RTX)[ -]?(\d)", r"\1\2", words)
    family = re.search(r"(?<![A-Z0-9])(" + "|".join(_families()) + r")(?![0-9])", plain, re.I)
    if family is None:
        return None
    parts = _families()[family[1].upper()]
    told = re.search(r"(\d{2,3}) ?G(?:i?B)?\b", words)
    size = int(told[1]) if told else parts[0].gigabytes
    part = min(parts, key=lambda one: abs(one.gigabytes - size))
    if abs(part.gigabytes - size) > part.gigabytes / 10 or part.mark not in words:
        return None
    return part.name


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableGpu:
    name: str
    gigabytes: int
    """By which parts of a family are told apart."""
    mark: str
    """Last of the words behind the memory."""


@lru_cache(maxsize=1)
def _families() -> Mapping[str, tuple[_TableGpu, ...]]:
    """Family -> its parts, the one that is meant where no memory is named first."""
    found: dict[str, list[_TableGpu]] = {}
    for profile in profiles_mentioning("table_name"):
        if isinstance(profile, DeviceProfile) and profile.table_name is not None:
            family, _, rest = profile.table_name.partition("-")
            memory, *words = rest.split("-")
            part = _TableGpu(
                name=profile.table_name,
                gigabytes=int(memory.removesuffix("GB")),
                mark=words[-1] if words else "",
            )
            found.setdefault(family, []).append(part)
    return {
        family: tuple(sorted(parts, key=lambda part: (part.mark, -part.gigabytes)))
        for family, parts in found.items()
    }


@lru_cache(maxsize=64)
def named(gpu: str) -> DeviceProfile | None:
    """The device profile whose name in tables that is."""
    for profile in profiles_mentioning(f'table_name = "{gpu}"'):
        if isinstance(profile, DeviceProfile) and profile.table_name == gpu:
            return profile
    return None


def usual_node(gpu: str) -> str:
    """The node profile of the GPU that tables call so, where they say no other."""
    profile = named(gpu)
    assert profile is not None
    assert profile.table_node is not None
    return profile.table_node


def _by_network(words: str, gpu: str) -> str | None:
    """The profile of a node with that GPU on that network."""
    for one, pattern, profile in NETWORKS:
        if one == gpu and pattern.search(words):
            return profile
    return None


def _suggested_gpu(run: MeasuredRun, said: list[str]) -> str:
    """The GPU that the notes suggest where none is named."""
    found = UNNAMED_GPU.search(run.notes)
    if found is None:
        raise NotExpressed("the GPU is not named")
    gpu = SUGGESTED[found[1]]
    said.append(
        f"GPU {gpu}: none is named, its rate suggests that class; compare rows with each other only"
    )
    return gpu


def _with_network(request: ClusterRequest, words: str, gpu: str) -> tuple[ClusterRequest, str]:
    """The request with the network's ports as `words` describe them, and a sentence on that."""
    profile = _by_network(words, gpu)
    if profile is not None:
        return replace(request, profile=profile), f'"{words}" taken as profile {profile}'
    found = ports_of(words, request.gpus_per_node)
    if found is None:
        why = f'"{words}" gives no bandwidth' if words else "none is named"
        return request, f"network of profile {request.profile}: {why}"
    ports = found.ports or outer_ports(request.profile)
    rate = found.gbits * 1e9 / 8
    request = replace(request, ports=ports, port_bandwidth_bytes_per_second=rate)
    whose = "" if found.ports else f", as many as in profile {request.profile}"
    return request, f'"{words}" taken as {ports} ports of {found.gbits:g} Gb/s a node{whose}'


def names_network(run: MeasuredRun) -> bool:
    """Whether the row says what its nodes are joined by, well enough to know all of its rate."""
    if run.gpus is None or not run.network:
        return False
    if any(pattern.search(run.network) for _, pattern, _ in NETWORKS):
        return True
    found = ports_of(run.network, run.gpus_per_node or MOST_GPUS)
    return found is not None and found.ports is not None


def spans_network(run: MeasuredRun, profile: str) -> bool:
    """Whether the GPUs are joined by more than what is inside a node or a rack."""
    return (run.gpus or 0) > node_gpus(profile) * _nodes_inside(profile)


@lru_cache(maxsize=64)
def node_gpus(profile: str) -> int:
    """GPUs of one node of that profile."""
    return load_node(profile).gpus_per_node or MOST_GPUS


def outer_ports(profile: str) -> int:
    """Network ports of one node of that profile; a rack's are spread over its nodes."""
    node = load_node(profile)
    return max(1, node.levels[-1].level.ports // _nodes_inside(profile))


def _nodes_inside(profile: str) -> int:
    """Nodes that share the ports of the outermost level: those of a rack that NVLink joins."""
    inner = max((one.domain_gpus or 0 for one in load_node(profile).levels[:-1]), default=0)
    return max(1, inner // node_gpus(profile))


@lru_cache(maxsize=64)
def usual_networks(profile: str) -> tuple[str, ...]:
    """The networks, as words, that nodes with the GPU of `profile` have in the catalogue."""
    device = load_node(profile).device
    words = []
    for name in profile_names("node"):
        node = load_node(name)
        outer = node.levels[-1].level
        if node.device != device or len(node.levels) < 2:
            continue
        gbits = outer.port_bandwidth_bytes_per_second * 8 / 1e9
        words.append(f"{outer_ports(name)}x{gbits:g} Gb")
    return tuple(dict.fromkeys(words))


@lru_cache(maxsize=4096)
def load_request(request: ClusterRequest) -> Cluster:
    """The cluster that `request` asks for; raises NotExpressed where no profile makes it."""
    try:
        loaded = load_cluster(
            request.profile, gpus=request.gpus, gpus_per_node=request.gpus_per_node
        )
        cluster = _as_nodes_come(loaded.cluster)
        if request.ports is None or request.port_bandwidth_bytes_per_second is None:
            return cluster
        if len(cluster.levels) == 1:  # a rack that NVLink joins: no port is used
            return cluster
        inside = cluster.levels[-2].domain_gpus // cluster.gpus_per_node
        outer = replace(
            cluster.levels[-1],
            ports=request.ports * max(1, inside),
            port_bandwidth_bytes_per_second=request.port_bandwidth_bytes_per_second,
        )
        return replace(cluster, levels=(*cluster.levels[:-1], outer))
    except (SpecError, ProfileNotFound) as error:
        raise NotExpressed("the hardware profile makes no such cluster", str(error)) from error


def _as_nodes_come(cluster: Cluster) -> Cluster:
    """`cluster` with all GPUs of each domain in use, the next domain where one ends: no row says
    that its nodes were asked for in equal shares of racks, as a plan's script does."""
    levels: list[Level] = []
    more = 1.0
    for level in cluster.levels:
        level = replace(level, ports=round(level.ports * more))
        if level.whole_gpus is not None:
            more = level.whole_gpus / level.domain_gpus
            level = replace(level, domain_gpus=level.whole_gpus, whole_gpus=None)
        levels.append(level)
    return replace(cluster, levels=tuple(levels))

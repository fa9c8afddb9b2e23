"""Fabric: the cluster of a row, from the GPU's name and what is said of the network."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles import load_node, profile_names
from fsdpplan.files.runs import MeasuredRun
from fsdpplan.spec.cluster import Cluster
from fsdpplan.validate.network_words import ports_of
from fsdpplan.validate.skipped import NotExpressed, given

NODES = {
    "V100-16GB": "dgx-1v-16g",
    "V100-32GB": "dgx-1v-32g",
    "A100-40GB": "dgx-a100-40g-hdr",
    "A100-80GB": "dgx-a100-80g-hdr",
    "A800-80GB": "hgx-a800-80g-4x100g",
    "H100-80GB": "dgx-h100",
    "H100-96GB-HBM2e-500W": "grand-teton-h100-96g-500w",
    "H800-80GB": "hgx-h800-ndr",
    "H200-141GB": "dgx-h200",
    "B200-180GB": "dgx-b200",
    "B300-288GB": "dgx-b300",
    "GB200-186GB": "gb200-nvl72",
    "GB300-288GB": "gb300-nvl72",
    "MI300X-192GB": "oci-bm-gpu-mi300x-8",
    "L40S-48GB": "pcie-8xl40s",
    "RTX4090-24GB": "pcie-8xrtx4090",
    "A10-24GB": "oci-bm-gpu-a10-4",
    "L4-24GB": "gcp-g2-standard-96",
}
"""Node profile of each GPU."""

USUAL_MEMORY = {
    "V100": (32, 16),
    "A100": (80, 40),
    "A800": (80,),
    "H100": (80, 96),
    "H800": (80,),
    "H200": (141,),
    "B200": (180,),
    "B300": (288,),
    "GB200": (186,),
    "GB300": (288,),
    "MI300X": (192,),
    "L40S": (48,),
    "RTX4090": (24,),
    "A10": (24,),
    "L4": (24,),
}
"""GiB-like sizes by which parts are told apart, the one taken where none is named first."""

OTHER_PARTS = re.compile(r"\b(PCIe?|NVL|MIG|GH200)\b", re.I)
"""Words of parts that share a name with an SXM part and little else."""

MOST_GPUS = 8
"""GPUs of a node where a table does not say, and its profile has no fewer."""

SPECIAL_NODES = {("H100-80GB", 2): "lambda-2xh100", ("V100-32GB", 16): "dgx-2"}
"""Node profile of machines with an unusual number of the GPU."""

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
"""(GPU, words on its network, node profile): the first that matches goes before `NODES`."""

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
    profile = special if special and gpus <= 16 else NODES[gpu]
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
    request = ClusterRequest(profile=profile or NODES[name], gpus=gpus, gpus_per_node=gpus_per_node)
    if profile or gpus == gpus_per_node:
        return request
    return _with_network(request, network, name)[0]


def _part(words: str, said: list[str]) -> str:
    """The GPU that `words` name, such as `H100-80GB` or `NVIDIA A100-SXM4-80GB`, as `NODES` has it.

    Vendors print some sizes a little larger or smaller than torch sees them: the nearest is meant.
    """
    if words in NODES:
        return words
    plain = re.sub(r"(?i)\b(RTX)[ -]?(\d)", r"\1\2", words)
    family = re.search(r"(?<![A-Z0-9])(" + "|".join(USUAL_MEMORY) + r")(?![0-9])", plain, re.I)
    if family is None or OTHER_PARTS.search(words):
        raise NotExpressed("no hardware profile for the GPU", words)
    name = family[1].upper()
    sizes = USUAL_MEMORY[name]
    named = re.search(r"(\d{2,3}) ?G(?:i?B)?\b", words)
    size = min(sizes, key=lambda one: abs(one - int(named[1]))) if named else sizes[0]
    if named and abs(size - int(named[1])) > size / 10:
        raise NotExpressed("no hardware profile for the GPU", words)
    gpu = next((one for one in NODES if one.startswith(f"{name}-{size}GB")), None)
    if gpu is None or (gpu != f"{name}-{size}GB" and "500W" not in words):
        raise NotExpressed("no hardware profile for the GPU", words)
    said.append(f'GPU "{words}" taken as {gpu}')
    return gpu


def _by_network(words: str, gpu: str) -> str | None:
    """The profile of a node with that GPU on that network."""
    for named, pattern, profile in NETWORKS:
        if named == gpu and pattern.search(words):
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
        cluster = load_cluster(
            request.profile, gpus=request.gpus, gpus_per_node=request.gpus_per_node
        ).cluster
        if request.ports is None or request.port_bandwidth_bytes_per_second is None:
            return cluster
        if len(cluster.levels) == 1:  # a rack that NVLink joins: no port is used
            return cluster
        outer = replace(
            cluster.levels[-1],
            ports=request.ports * _nodes_inside(request.profile),
            port_bandwidth_bytes_per_second=request.port_bandwidth_bytes_per_second,
        )
        return replace(cluster, levels=(*cluster.levels[:-1], outer))
    except (SpecError, ProfileNotFound) as error:
        raise NotExpressed("the hardware profile makes no such cluster", str(error)) from error

"""Fabric: the cluster of a row, from the GPU's name and what is said of the network."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.runs import MeasuredRun
from fsdpplan.spec.cluster import Cluster
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
}
"""GiB-like sizes by which parts are told apart, the one taken where none is named first."""

OTHER_PARTS = re.compile(r"\b(PCIe?|NVL|MIG|GH200|GB200)\b", re.I)
"""Words of parts that share a name with an SXM part and little else."""

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

OMNI_PATH_GBITS = 100.0
"""Rate of an Omni-Path 100 link, the only generation in service to 2024."""

MAX_GBITS = 1e6


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
    per_node = min(gpus, run.gpus_per_node or 8)
    special = SPECIAL_NODES.get((gpu, run.gpus_per_node or 0))
    profile = special if special and gpus <= 16 else NODES[gpu]
    if run.gpus_per_node is None and gpus > per_node:
        said.append(f"nodes of {per_node} GPUs")
    request = ClusterRequest(profile=profile, gpus=gpus, gpus_per_node=per_node)
    if gpus == per_node:
        return request, tuple(said)
    request, sentence = _with_network(request, run.network, gpu)
    return request, (*said, sentence)


def _part(words: str, said: list[str]) -> str:
    """The GPU that `words` name, such as `H100-80GB` or `NVIDIA A100-SXM4-80GB`, as `NODES` has it.

    Vendors print some sizes a little larger or smaller than torch sees them: the nearest is meant.
    """
    if words in NODES:
        return words
    family = re.search(r"(?<![A-Z0-9])(" + "|".join(USUAL_MEMORY) + r")(?![0-9])", words, re.I)
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
    found = _ports(words, request.gpus_per_node)
    if found is None:
        why = f'"{words}" gives no bandwidth' if words else "none is named"
        return request, f"network of profile {request.profile}: {why}"
    ports, gbits = found
    rate = gbits * 1e9 / 8
    request = replace(request, ports=ports, port_bandwidth_bytes_per_second=rate)
    return request, f'"{words}" taken as {ports} ports of {gbits:g} Gb/s a node'


def _ports(words: str, gpus_per_node: int) -> tuple[int, float] | None:
    """(ports a node, Gb/s of each) from words such as `4x100 Gb RoCE per node`.

    A rate without "per GPU" is the node's, shared by one port for each of its GPUs.
    """
    many = re.search(r"(\d{1,3})\s*x\s*(?:(\d{1,6}(?:\.\d+)?)\s*Gb|Omni-Path)", words, re.I)
    if many:
        ports, gbits = int(many[1]), float(many[2] or OMNI_PATH_GBITS)
    else:
        one = re.search(r"(\d{1,6}(?:\.\d+)?)\s*Gb(?:it)?(?:ps|/s)?\b", words)
        if one is None:
            return None
        per_gpu = re.search(r"(?:per|a|/)\s*GPU", words, re.I)
        total = float(one[1]) * (gpus_per_node if per_gpu else 1)
        ports, gbits = gpus_per_node, total / gpus_per_node
    return (ports, gbits) if ports and 0 < gbits <= MAX_GBITS else None


@lru_cache(maxsize=4096)
def load_request(request: ClusterRequest) -> Cluster:
    """The cluster that `request` asks for; raises NotExpressed where no profile makes it."""
    try:
        cluster = load_cluster(
            request.profile, gpus=request.gpus, gpus_per_node=request.gpus_per_node
        ).cluster
        if request.ports is None or request.port_bandwidth_bytes_per_second is None:
            return cluster
        outer = replace(
            cluster.levels[-1],
            ports=request.ports,
            port_bandwidth_bytes_per_second=request.port_bandwidth_bytes_per_second,
        )
        return replace(cluster, levels=(*cluster.levels[:-1], outer))
    except (SpecError, ProfileNotFound) as error:
        raise NotExpressed("the hardware profile makes no such cluster", str(error)) from error

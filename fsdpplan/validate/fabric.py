"""Fabric: the cluster of a row, from the GPU's name and what is said of the network."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles import load_cluster
from fsdpplan.files.runs import MeasuredRun
from fsdpplan.spec.cluster import Cluster
from fsdpplan.validate.skipped import NotExpressed, given

NODES = {
    "A100-40GB": "dgx-a100-40g-hdr",
    "A100-80GB": "dgx-a100-80g-hdr",
    "H100-80GB": "dgx-h100",
    "H100-96GB-HBM2e-500W": "grand-teton-h100-96g-500w",
    "H200-141GB": "dgx-h200",
    "H200": "dgx-h200",
    "B200-180GB": "dgx-b200",
    "B200": "dgx-b200",
}
"""Node profile of each GPU, as tables name them."""

PAIRS = {"H100-80GB": "lambda-2xh100"}
"""Node profile of machines with two of the GPU."""

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
    if not run.gpu:
        raise NotExpressed("the GPU is not named")
    if run.gpu not in NODES:
        raise NotExpressed("no hardware profile for the GPU", run.gpu)
    gpus = given(run.gpus, "gpus")
    said: list[str] = []
    per_node = min(gpus, run.gpus_per_node or 8)
    pair = per_node <= 2 and run.gpus_per_node == 2 and gpus <= 2 and run.gpu in PAIRS
    profile = PAIRS[run.gpu] if pair else NODES[run.gpu]
    if run.gpus_per_node is None and gpus > per_node:
        said.append(f"nodes of {per_node} GPUs")
    request = ClusterRequest(profile=profile, gpus=gpus, gpus_per_node=per_node)
    if gpus == per_node:
        return request, tuple(said)
    request, sentence = _with_network(request, run.network)
    return request, (*said, sentence)


def _with_network(request: ClusterRequest, words: str) -> tuple[ClusterRequest, str]:
    """The request with the network's ports as `words` describe them, and a sentence on that."""
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


@lru_cache(maxsize=1024)
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
    except SpecError as error:
        raise NotExpressed("the hardware profile makes no such cluster", str(error)) from error

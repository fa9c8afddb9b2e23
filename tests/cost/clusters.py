"""Clusters for the tests of the cost model: the profiles' ones, and strategies for any."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.cluster import Cluster

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(name: str) -> dict[str, Any]:
    """The golden table of that name."""
    return tomllib.loads((GOLDEN / f"{name}.toml").read_text())


def cluster(profile: str = "dgx-h100", *, gpus: int = 64) -> Cluster:
    """A cluster of a profile."""
    return load_cluster(profile, gpus=gpus).cluster


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Nodes of any size with any number of ports, at most 96 GPUs."""
    per_node = draw(st.integers(2, 12))
    nodes = draw(st.integers(2, 8))
    base = cluster(gpus=16)
    gigabytes = st.floats(1, 900)
    inner = replace(
        base.levels[0],
        domain_gpus=per_node,
        port_bandwidth_bytes_per_second=1e9 * draw(gigabytes),
        multicast_fraction=draw(st.sampled_from([0.0, 0.7])),
    )
    outer = replace(
        base.levels[1],
        domain_gpus=per_node * nodes,
        ports=draw(st.integers(1, 12)),
        port_bandwidth_bytes_per_second=1e9 * draw(gigabytes),
        gpudirect=draw(st.booleans()),
    )
    return replace(base, gpus=per_node * nodes, gpus_per_node=per_node, levels=(inner, outer))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    """A cluster, and (ranks, stride) of groups that tile it."""
    drawn = draw(clusters())
    ranks = draw(st.sampled_from(_divisors(drawn.gpus)))
    stride = draw(st.sampled_from(_divisors(drawn.gpus // ranks)))
    return drawn, ranks, stride


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

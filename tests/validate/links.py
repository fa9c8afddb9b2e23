"""Links drawn by hypothesis, all of whose numbers show in what calls take."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fsdpplan.spec.cluster import Cluster, Level
from tests.cost.clusters import cluster
from tests.validate.artificial import Clock


def _log(lowest: float, highest: float) -> st.SearchStrategy[float]:
    return st.floats(0, 1).map(lambda share: lowest * (highest / lowest) ** share)


@st.composite
def clocks(draw: st.DrawFn) -> Clock:
    """Up to 2 % of noise, and up to 8 % of repeats that are several times too long."""
    return Clock(
        noise=draw(st.floats(0.001, 0.02)),
        outliers=draw(st.floats(0, 0.08)),
        repeats=50,
        seed=draw(st.integers(0, 10**6)),
    )


@st.composite
def plain_levels(draw: st.DrawFn, level: Level) -> Level:
    """`level` with one protocol and numbers of any size, none of which hides behind another."""
    base = draw(_log(1e-5, 1e-3))
    half = draw(_log(3e5, 3e7))
    return replace(
        level,
        base_seconds=base,
        latency_seconds=base * draw(_log(0.1, 1.0)),
        half_bandwidth_bytes=half,
        port_bandwidth_bytes_per_second=half / (base * draw(_log(2.0, 20.0))),
        bandwidth_fraction=draw(st.floats(0.4, 1.0)),
        low_latency="none",
    )


@st.composite
def machines(draw: st.DrawFn, *, nodes: int) -> Cluster:
    """Nodes of 4, each level slower than the one inside."""
    base = cluster("dgx-h100", gpus=16)
    inside, between = base.levels
    inside = draw(plain_levels(replace(inside, multicast_fraction=0.0, domain_gpus=4)))
    slower = draw(st.floats(3, 20))
    between = draw(plain_levels(replace(between, domain_gpus=4 * nodes, ports=4)))
    between = replace(
        between,
        port_bandwidth_bytes_per_second=inside.port_bandwidth_bytes_per_second / slower,
    )
    levels = (inside, between) if nodes > 1 else (inside,)
    return replace(base, gpus=4 * nodes, gpus_per_node=4, levels=levels, network=None)

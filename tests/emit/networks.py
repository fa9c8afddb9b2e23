"""Networks to plan for: found ones of each kind, and any that could be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from hypothesis import strategies as st

from fsdpplan.spec.nodes import GpuDirect, Network, PciPath, Provider, Transport
from fsdpplan.spec.plan import Plan

EVIDENCE = "found on n01 by fsdpplan detect, 2026-11-22"
INFINIBAND = Network(
    transport="infiniband",
    evidence=EVIDENCE,
    hcas=("mlx5_0", "mlx5_1", "mlx5_4:1"),
    hcas_left_out=("mlx5_2", "mlx5_3"),
    socket_interface="eno1",
    socket_interfaces_left_out=("docker0", "ib0"),
    gpudirect="peermem",
    gpudirect_path="pxb",
    rails=8,
    nccl_version="2.27.3",
)
"""A node whose storage adapters and docker bridge must be told apart from the compute fabric."""
ROCE = replace(INFINIBAND, transport="roce", gid_index=3, traffic_class=106, rails=None)
GIB = Network(
    transport="gib",
    evidence=EVIDENCE,
    provider="gcp",
    env_profiles=("/usr/local/gib/scripts/set_nccl_env.sh",),
)
EFA = Network(
    transport="efa",
    evidence=EVIDENCE,
    provider="aws",
    instance_type="p5.48xlarge",
    net_plugins=("/opt/amazon/ofi-nccl/lib/libnccl-net.so",),
)

NAMES = st.from_regex(r"[a-z][a-z0-9_.]{0,9}(:[12])?", fullmatch=True)


def on(network: Network | None, plan: Plan) -> Plan:
    """`plan`, on nodes joined by `network`."""
    return replace(plan, cluster=replace(plan.cluster, network=network))


def networks() -> st.SearchStrategy[Network]:
    """Whatever could be found."""

    def some(values: Any) -> Any:
        return st.sampled_from((None, *values))

    names = st.lists(NAMES, max_size=4, unique=True).map(tuple)
    return st.builds(
        Network,
        transport=st.sampled_from(get_args(Transport)),
        evidence=st.just(EVIDENCE),
        hcas=names,
        hcas_left_out=names,
        hcas_differ=st.booleans(),
        gid_index=st.none() | st.integers(0, 255),
        traffic_class=st.none() | st.integers(0, 255),
        socket_interface=st.none() | NAMES,
        socket_interfaces_left_out=names,
        gpudirect=some(get_args(GpuDirect)),
        gpudirect_path=some(get_args(PciPath)),
        rails=st.none() | st.integers(1, 16),
        nvlink_switch=some((True, False)),
        provider=some(get_args(Provider)),
        net_plugins=st.sampled_from(((), ("/opt/x y/libnccl-net.so",))),
        env_profiles=st.sampled_from(((), ("/opt/$(touch x)/set.sh",), GIB.env_profiles)),
        nccl_version=some(("2.20.5", "2.21.5", "2.26.2", "2.27.3", "unknown")),
    )

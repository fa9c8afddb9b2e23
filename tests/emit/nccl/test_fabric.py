"""Each rule of the network fires with its evidence, and says what is missing without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.environment import environment, left_unset
from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Level
from fsdpplan.spec.nodes import GpuDirect, Network
from fsdpplan.spec.plan import Plan
from tests.emit.networks import EFA, GIB, INFINIBAND, ROCE, networks, on
from tests.emit.plans import make_plan

PLAN = make_plan("cuda", nodes=4, per_node=8)
AZURE = replace(INFINIBAND, provider="azure", gpudirect_path="sys")


def value(name: str, network: Network, plan: Plan = PLAN) -> str | None:
    """What the plan's job gets on that network, None for nothing."""
    found = [v.value for v in environment(plan=on(network, plan), job=Job()) if v.name == name]
    return found[0] if found else None


def why_not(name: str, network: Network, plan: Plan = PLAN) -> str:
    (item,) = [i for i in left_unset(plan=on(network, plan), job=Job()) if name in i.names]
    return item.why


def device(name: str) -> Plan:
    """The plan on another device."""
    cluster = replace(PLAN.cluster, device=replace(PLAN.cluster.device, name=name))
    return replace(PLAN, cluster=cluster)


def through_host(plan: Plan) -> Plan:
    """The plan without GPUDirect between nodes."""
    inside, between = plan.cluster.levels
    levels = (inside, replace(between, gpudirect=False))
    return replace(plan, cluster=replace(plan.cluster, levels=levels))


def spine(outer_share: float) -> Plan:
    """The plan with rails in a leaf of two nodes, and a spine that gives a GPU that share."""
    inside, between = PLAN.cluster.levels
    leaf = replace(between, name="leaf", domain_gpus=16, ports=8)
    top: Level = replace(between, name="spine", ports=1)
    rate = outer_share * leaf.port_bandwidth_bytes_per_second * 16
    top = replace(top, port_bandwidth_bytes_per_second=rate)
    return replace(PLAN, cluster=replace(PLAN.cluster, levels=(inside, leaf, top)))


@pytest.mark.parametrize(
    ("name", "network", "expected"),
    [
        ("NCCL_IB_HCA", INFINIBAND, "=mlx5_0,mlx5_1,mlx5_4:1"),
        ("NCCL_IB_HCA", ROCE, "=mlx5_0,mlx5_1,mlx5_4:1"),
        ("NCCL_SOCKET_IFNAME", INFINIBAND, "=eno1"),
        ("GLOO_SOCKET_IFNAME", INFINIBAND, "eno1"),
        ("NCCL_IB_TC", ROCE, "106"),
        ("NCCL_IB_GID_INDEX", replace(ROCE, nccl_version="2.20.5"), "3"),
        ("NCCL_NET_GDR_LEVEL", AZURE, "SYS"),
        ("NCCL_NET_GDR_LEVEL", replace(AZURE, gpudirect_path="node"), "PHB"),
        ("NCCL_NET_GDR_LEVEL", replace(AZURE, gpudirect="dmabuf", gpudirect_path="phb"), "PHB"),
    ],
)
def test_a_rule_fires_with_its_evidence(name: str, network: Network, expected: str) -> None:
    assert value(name, network) == expected


@pytest.mark.parametrize(
    ("name", "without", "says"),
    [
        ("NCCL_IB_HCA", replace(INFINIBAND, hcas_left_out=()), "NCCL takes all"),
        ("NCCL_IB_HCA", replace(INFINIBAND, hcas=()), "not known"),
        ("NCCL_IB_HCA", replace(INFINIBAND, hcas_differ=True), "/etc/nccl.conf"),
        ("NCCL_IB_HCA", replace(INFINIBAND, transport="efa"), "does not carry efa"),
        ("NCCL_SOCKET_IFNAME", replace(INFINIBAND, socket_interface=None), "not known"),
        (
            "NCCL_SOCKET_IFNAME",
            replace(INFINIBAND, socket_interfaces_left_out=()),
            "no other is known",
        ),
        ("GLOO_SOCKET_IFNAME", replace(INFINIBAND, socket_interface=None), "not known"),
        ("NCCL_IB_TC", replace(ROCE, traffic_class=None), "operator"),
        ("NCCL_IB_TC", replace(ROCE, transport="infiniband"), "RoCE only"),
        ("NCCL_IB_GID_INDEX", ROCE, "2.21"),
        ("NCCL_IB_GID_INDEX", replace(ROCE, nccl_version=None), "2.21"),
        ("NCCL_IB_GID_INDEX", replace(ROCE, nccl_version="2.20.5", gid_index=None), "no entry"),
        ("NCCL_NET_GDR_LEVEL", replace(AZURE, gpudirect_path="pix"), "PXB"),
        ("NCCL_NET_GDR_LEVEL", replace(AZURE, gpudirect_path=None), "not known"),
        ("NCCL_NET_GDR_LEVEL", replace(AZURE, provider=None), "measuring"),
        ("NCCL_NET_GDR_C2C", replace(INFINIBAND, nccl_version="2.26.2"), "GH200"),
        ("NCCL_CROSS_NIC", replace(INFINIBAND, rails=None), "no rails"),
        ("NCCL_CROSS_NIC", INFINIBAND, "alternates its rings"),
    ],
)
def test_a_rule_without_its_evidence_says_what_is_missing(
    name: str, without: Network, says: str
) -> None:
    assert value(name, without) is None
    assert says in why_not(name, without)


@pytest.mark.parametrize(("version", "expected"), [("2.26.2", "1"), ("2.27.3", None), (None, None)])
def test_grace_needs_one_release_to_be_asked(version: str | None, expected: str | None) -> None:
    network = replace(INFINIBAND, nccl_version=version)
    assert value("NCCL_NET_GDR_C2C", network, device("gb200-186g")) == expected


@pytest.mark.parametrize("name", ["NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_C2C"])
@pytest.mark.parametrize("way", ["peermem", None])
def test_what_is_priced_through_host_memory_is_not_launched_with_gpudirect(
    name: str, way: GpuDirect | None
) -> None:
    grace = device("gb200-186g")
    network = replace(AZURE, gpudirect=way, nccl_version="2.26.2")
    assert value(name, network, grace) is not None
    assert value(name, network, through_host(grace)) is None
    assert "priced so" in why_not(name, network, through_host(grace))


@pytest.mark.parametrize(("outer_share", "expected"), [(0.25, "0"), (1.0, None), (2.0, None)])
def test_rails_are_kept_to_where_crossing_them_is_slower(
    outer_share: float, expected: str | None
) -> None:
    assert value("NCCL_CROSS_NIC", INFINIBAND, spine(outer_share)) == expected


@pytest.mark.parametrize("network", [EFA, GIB, replace(GIB, transport="tcpxo")])
def test_a_clouds_own_network_gets_no_variable_of_the_fabric(network: Network) -> None:
    kinds = {v.kind for v in environment(plan=on(network, PLAN), job=Job())}
    assert not kinds & {"fabric", "sockets"}


@given(network=networks())
def test_values_are_the_networks_own_names_and_numbers(network: Network) -> None:
    for variable in environment(plan=on(network, PLAN), job=Job()):
        match variable.name:
            case "NCCL_IB_HCA":
                assert variable.value == "=" + ",".join(network.hcas)
                assert not network.hcas_differ
                assert network.hcas_left_out
            case "NCCL_SOCKET_IFNAME" | "GLOO_SOCKET_IFNAME":
                assert variable.value.removeprefix("=") == network.socket_interface
            case "NCCL_IB_TC":
                assert variable.value == str(network.traffic_class)


@pytest.mark.parametrize("name", ["$(id)", "a b", "a,b", "^mlx5", "=mlx5", "a;b", "", "é", "a\nb"])
@pytest.mark.parametrize("field", ["hcas", "hcas_left_out", "socket_interface"])
def test_names_that_a_shell_or_nccl_would_read_otherwise_are_refused(name: str, field: str) -> None:
    values: dict[str, Any] = {field: name if field == "socket_interface" else (name,)}
    with pytest.raises(SpecError, match="no name of an adapter"):
        replace(INFINIBAND, **values)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.run.follow.nccl_watch import host_memory_warning, socket_sentence
from fsdpplan.spec.nodes import Network, Transport
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.read.nccl_report import NcclReport
from tests.emit.plans import make_plan
from tests.topology.nccl_logs import read_nccl_log

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings/nccl"
FOLDER = Path("/runs/1")
SOCKETS = "2.14-sockets-ib-disabled"
PREFIX = "n01:1:2 [0] NCCL"


def recorded(name: str, *more: str) -> NcclReport:
    return read_nccl_log([*(RECORDINGS / f"{name}.log").read_text().splitlines(), *more])


def plan_over(level: str, *, gpudirect: bool = True, network: Network | None = None) -> Plan:
    """Two nodes of two GPUs, four ports a node."""
    plan = make_plan("cuda", nodes=2)
    inside, between = plan.cluster.levels
    between = replace(between, name=level, ports=4, gpudirect=gpudirect)
    return replace(plan, cluster=replace(plan.cluster, levels=(inside, between), network=network))


def network_of(transport: Transport) -> Network:
    return Network(transport=transport, evidence="found on n01", hcas=("mlx5_0", "mlx5_1"))


def sentence(report: NcclReport, plan: Plan) -> str | None:
    return socket_sentence(report, plan=plan, folder=FOLDER)


@pytest.mark.parametrize("level", ["infiniband", "roce", "efa", "fastrak", "rdma", "a-rail"])
def test_sockets_where_the_plan_counts_on_adapters_are_wrong(level: str) -> None:
    said = sentence(recorded(SOCKETS), plan_over(level))
    assert said is not None
    assert said.startswith(
        "NCCL carries traffic between n01 and n02 over sockets (eth0) although the plan counts on "
        f"4 {level} ports a node: NCCL_IB_DISABLE=1 is set"
    )


@pytest.mark.parametrize("level", ["ethernet", "tcpx"])
def test_sockets_where_there_is_nothing_else_are_right(level: str) -> None:
    assert sentence(recorded(SOCKETS), plan_over(level, gpudirect=level == "tcpx")) is None


@pytest.mark.parametrize("transport", ["ethernet", "tcpx"])
def test_what_was_found_of_the_network_outweighs_the_name_of_a_level(transport: Transport) -> None:
    plan = plan_over("infiniband", network=network_of(transport))
    assert sentence(recorded(SOCKETS), plan) is None


def test_adapters_that_were_found_are_named_with_who_found_them() -> None:
    plan = plan_over("ethernet", gpudirect=False, network=network_of("roce"))
    said = sentence(recorded(SOCKETS), plan)
    assert said is not None
    assert "although each node has 2 roce adapters (found on n01)" in said


def test_adapters_that_nccl_itself_named_are_evidence() -> None:
    using = f"{PREFIX} INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    said = sentence(recorded(SOCKETS, using), plan_over("ethernet", gpudirect=False))
    assert said is not None
    assert "although NCCL itself found mlx5_0 on n01" in said


@pytest.mark.parametrize(
    "name",
    ["2.10-infiniband", "2.18-infiniband-nvls", "2.21-efa", "2.21-one-node", "2.27-nvl72"],
)
def test_what_uses_no_sockets_is_right(name: str) -> None:
    assert sentence(recorded(name), plan_over("infiniband")) is None


def test_one_node_has_no_traffic_between_nodes() -> None:
    assert sentence(recorded("2.21-one-node"), make_plan("cuda", nodes=1)) is None


def fallback(*messages: str) -> NcclReport:
    """Sockets between two hosts, and what NCCL said before."""
    start = "comm 0x{} rank {} nranks 2 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x7 - Init START"
    return read_nccl_log(
        [
            *(f"{PREFIX} INFO {message}" for message in messages),
            f"n01:1:2 [0] NCCL INFO {start.format(1, 0)}",
            f"n02:1:2 [0] NCCL INFO {start.format(2, 1)}",
            "n01:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
        ]
    )


@pytest.mark.parametrize(
    ("messages", "level", "cause"),
    [
        (["NCCL_IB_DISABLE set by environment to 1."], "roce", "NCCL_IB_DISABLE=1 is set"),
        (["NCCL_NET set by environment to Socket"], "roce", "NCCL_NET=Socket is set"),
        (["Failed to open libibverbs.so[.1]"], "roce", "install rdma-core"),
        (["NET/IB : No device found."], "roce", "look at ibv_devinfo"),
        (
            ["NCCL_IB_HCA set to mlx5_9", "NET/IB : No device found."],
            "roce",
            "NCCL_IB_HCA=mlx5_9 matches no adapter",
        ),
        (
            ["NET/Plugin: Could not find: libnccl-net.so.", "NET/IB : No device found."],
            "efa",
            "aws-ofi-nccl, libnccl-net.so",
        ),
        (["NET/Plugin: No plugin found (libnccl-net.so)"], "fastrak", "TCPXO, libnccl-net.so"),
        (["NCCL_IB_DISABLE set by environment to 0."], "roce", "look at Using network"),
    ],
)
def test_the_reason_is_said_with_what_to_do(messages: list[str], level: str, cause: str) -> None:
    said = sentence(fallback(*messages), plan_over(level))
    assert said is not None
    assert cause in said
    assert "\n" not in said


def test_libfabric_over_tcp_is_sockets_too() -> None:
    said = sentence(recorded("2.27-libfabric-tcp"), plan_over("efa"))
    assert said is not None
    assert "libfabric chose tcp;ofi_rxm, so set FI_PROVIDER=efa" in said


def test_host_memory_in_the_way_is_said_where_the_plan_counts_on_gpudirect() -> None:
    report = recorded("2.23-roce-through-host")
    said = host_memory_warning(report, plan=plan_over("roce"))
    assert said is not None
    assert said.startswith("2 of 2 connections")
    assert "nvidia_peermem" in said
    assert host_memory_warning(report, plan=plan_over("roce", gpudirect=False)) is None
    plan = plan_over("roce")
    device = replace(plan.cluster.device, vendor="amd")
    amd = replace(plan, cluster=replace(plan.cluster, device=device))
    assert "amdkfd" in (host_memory_warning(report, plan=amd) or "")


@pytest.mark.parametrize("name", ["2.10-infiniband", "2.18-infiniband-nvls", SOCKETS, "2.21-efa"])
def test_receivers_decide_on_gpudirect_and_sockets_do_not_count(name: str) -> None:
    # In 2.10-infiniband senders go through host memory, as NCCL prefers there.
    assert host_memory_warning(recorded(name), plan=plan_over("infiniband")) is None

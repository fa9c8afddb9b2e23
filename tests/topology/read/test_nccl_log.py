from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.topology.read.nccl_log import MOST_COMPLAINTS, NcclLogReader
from fsdpplan.topology.read.nccl_report import Adapter, Complaint, Connection, NcclReport, Place
from tests.topology.nccl_logs import read_nccl_log

RECORDINGS = Path(__file__).resolve().parents[2] / "recordings/nccl"
NAMES = sorted(path.stem for path in RECORDINGS.glob("*.log"))

NET, P2P = "NET/IB", "P2P/CUMEM"


def lines_of(name: str) -> list[str]:
    return (RECORDINGS / f"{name}.log").read_text().splitlines()


def recorded(name: str) -> NcclReport:
    return read_nccl_log(lines_of(name))


def ways(report: NcclReport) -> set[tuple[str, bool, bool | None]]:
    """(transport, whether it is known to leave the host, GPUDirect)."""
    return {(one.transport, one.between_hosts, one.gpudirect) for one in report.connections}


def adapters(report: NcclReport) -> list[tuple[str, str, int | None, str | None, bool | None]]:
    return [
        (one.host, one.name, one.port, one.link_layer, one.gpudirect) for one in report.adapters
    ]


def both(*names: str, port: int | None, layer: str | None, gpudirect: bool | None) -> list[Any]:
    return [(host, name, port, layer, gpudirect) for host in ("n01", "n02") for name in names]


@pytest.mark.parametrize(
    ("name", "version", "networks", "bootstrap", "world", "nodes"),
    [
        ("2.10-infiniband", "2.10.3", ("IB",), "eth0", 4, None),
        ("2.14-sockets-ib-disabled", "2.14.3", ("Socket",), "eth0", 4, None),
        ("2.18-infiniband-nvls", "2.18.5", ("IB",), "eth0", 8, None),
        ("2.21-efa", "2.21.5", ("AWS Libfabric",), "ens32", 4, 2),
        ("2.21-one-node", "2.21.5", ("Socket",), "lo", 4, 1),
        ("2.23-roce-through-host", "2.23.4", ("IB",), "bond0", 4, 2),
        ("2.27-broken", "2.27.3", ("IB",), "eth0", 2, None),
        ("2.27-gib-hsdp", "2.27.3", ("gIB",), "eth0", 4, 2),
        ("2.27-libfabric-tcp", "2.27.3", ("Libfabric",), "ens32", 2, 2),
        ("2.27-nvl72", "2.27.3", ("Socket",), "eth0", 8, 1),
        ("2.30-roce-fused", "2.30.7", ("IB",), "eth0", 4, 2),
        ("2.30-sockets-no-adapter", "2.30.7", ("Socket",), "eth0", 4, 2),
    ],
)
def test_what_was_chosen_is_read(
    name: str, version: str, networks: tuple[str, ...], bootstrap: str, world: int, nodes: int
) -> None:
    report = recorded(name)
    assert report.versions == (version,)
    assert report.networks == networks
    assert report.bootstrap == (bootstrap,)
    assert (report.world, report.nodes) == (world, nodes)
    assert len(report.ranks) == world


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2.10-infiniband", {("P2P/IPC", False, None), (NET, True, True), (NET, True, False)}),
        (
            "2.14-sockets-ib-disabled",
            {("P2P/IPC", False, None), ("NET/Socket", True, False)},
        ),
        ("2.18-infiniband-nvls", {(P2P, False, None), (NET, True, True)}),
        ("2.21-efa", {(P2P, False, None), ("NET/AWS Libfabric", True, True)}),
        ("2.21-one-node", {(P2P, False, None)}),
        ("2.23-roce-through-host", {("SHM", False, None), (NET, True, False)}),
        ("2.27-broken", {(NET, True, True)}),
        ("2.27-gib-hsdp", {(P2P, False, None), ("NET/gIB", True, True)}),
        ("2.27-libfabric-tcp", {("NET/Libfabric", True, False)}),
        ("2.27-nvl72", {("P2P/MNNVL", False, None), ("P2P/MNNVL", True, None)}),
        ("2.30-roce-fused", {(P2P, False, None), (NET, True, True)}),
        ("2.30-sockets-no-adapter", {(P2P, False, None), ("NET/Socket", True, False)}),
    ],
)
def test_the_transport_of_each_pair_is_read(
    name: str, expected: set[tuple[str, bool, bool | None]]
) -> None:
    assert ways(recorded(name)) == expected


def test_each_end_of_a_connection_says_its_host_device_and_channels() -> None:
    found = [one for one in recorded("2.10-infiniband").connections if one.sender == 1]
    assert [(one.end, one.host, one.device, one.gpudirect, one.channels) for one in found] == [
        ("receive", "n02", 0, True, (0,)),
        ("receive", "n02", 1, True, (1,)),
        ("send", "n01", 0, False, (0,)),
        ("send", "n01", 1, False, (1,)),
    ]
    assert {one.peer_host for one in found if one.end == "send"} == {"n02"}


def test_the_same_ranks_of_two_communicators_are_kept_apart_by_their_gpus() -> None:
    # Rank 0 to rank 1 is inside the node for shards, and between nodes for replicas.
    found = {
        (one.host, one.transport, one.device): one.peer_host
        for one in recorded("2.27-gib-hsdp").connections
        if (one.sender, one.receiver, one.end) == (0, 1, "send")
    }
    assert found == {
        ("n01", "NET/gIB", 0): "n02",
        ("n01", "NET/gIB", 1): "n02",
        ("n01", P2P, None): "n01",
        ("n02", P2P, None): "n02",
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("2.10-infiniband", both("mlx5_0", "mlx5_1", port=1, layer="IB", gpudirect=None)),
        ("2.14-sockets-ib-disabled", []),
        (
            "2.18-infiniband-nvls",
            both("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", port=1, layer="IB", gpudirect=True),
        ),
        (
            "2.21-efa",
            both("rdmap79s0-rdma", "rdmap80s0-rdma", port=None, layer=None, gpudirect=True),
        ),
        (
            "2.23-roce-through-host",
            both("mlx5_0", "mlx5_1", "mlx5_2", port=1, layer="RoCE", gpudirect=False),
        ),
        ("2.27-gib-hsdp", both("mlx5_0", "mlx5_1", port=None, layer=None, gpudirect=True)),
        ("2.30-roce-fused", both("mlx5_0", "mlx5_1", port=1, layer="RoCE", gpudirect=True)),
        ("2.30-sockets-no-adapter", []),
    ],
)
def test_adapters_are_named_with_port_and_link_layer(name: str, expected: list[Any]) -> None:
    assert adapters(recorded(name)) == expected


def test_adapters_that_no_channel_uses_are_known() -> None:
    used = {(one.name, one.used) for one in recorded("2.23-roce-through-host").adapters}
    assert used == {("mlx5_0", True), ("mlx5_1", True), ("mlx5_2", False)}


def test_where_each_rank_runs() -> None:
    report = recorded("2.18-infiniband-nvls")
    assert report.hosts == ("n01", "n02")
    assert report.ranks[5] == Place(rank=5, host="n02", gpu=1, bus_id="43000")


def test_channels_rings_trees_and_nvls() -> None:
    report = recorded("2.18-infiniband-nvls")
    assert (report.coll_channels, report.nvls_channels, report.p2p_channels) == (4, 16, 4)
    assert report.tree_channels == 4
    assert report.rings == ((0, 1, 2, 3, 4, 5, 6, 7),) * 4
    assert (report.nvls_multicast, report.nvls_connected) == (True, True)
    older = recorded("2.10-infiniband")
    assert (older.coll_channels, older.nvls_channels) == (2, None)
    assert (older.nvls_multicast, older.nvls_connected) == (None, False)
    assert recorded("2.23-roce-through-host").nvls_multicast is False


def test_nvlink_that_leads_to_other_hosts_is_no_network() -> None:
    report = recorded("2.27-nvl72")
    assert report.mnnvl is True
    assert len(report.between) == 2
    assert report.sockets_between == ()


@pytest.mark.parametrize(
    ("name", "sockets"),
    [(name, "sockets" in name or name == "2.27-libfabric-tcp") for name in NAMES],
)
def test_sockets_between_hosts_are_found_under_any_name(name: str, sockets: bool) -> None:
    assert bool(recorded(name).sockets_between) == sockets


def test_what_the_socket_network_would_use() -> None:
    assert recorded("2.14-sockets-ib-disabled").interfaces == ("eth0",)


def test_variables_are_those_that_nccl_took() -> None:
    report = recorded("2.14-sockets-ib-disabled")
    assert report.variables == (("NCCL_IB_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "eth0"))
    assert recorded("2.18-infiniband-nvls").values_of("NCCL_IB_HCA") == ("^mlx5_bond_0",)


def test_complaints_are_counted_by_text() -> None:
    assert recorded("2.27-broken").complaints == (
        Complaint(kind="warning", text="Call to ibv_create_qp failed", hosts=("n01",), count=2),
        Complaint(
            kind="warning",
            text="Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, "
            "curr state INIT, next state RTR",
            hosts=("n02",),
            count=1,
        ),
        Complaint(
            kind="warning",
            text="ncclInternalError: Internal check failed.",
            hosts=("n02",),
            count=1,
        ),
    )
    report = recorded("2.30-sockets-no-adapter")
    assert report.complains("no_device")
    assert report.complains("no_plugin")
    assert not report.complains("no_gpudirect")
    assert recorded("2.23-roce-through-host").complains("no_gpudirect")


def test_a_fabric_that_fails_over_and_over_fills_no_memory() -> None:
    report = read_nccl_log(
        f"n01:1:2 [0] net.cc:1 NCCL WARN request {number} failed" for number in range(1000)
    )
    assert len(report.complaints) == MOST_COMPLAINTS


def test_lines_of_nccl_are_told_from_others() -> None:
    reader = NcclLogReader()
    assert reader.feed("0: n01:1:2 [0] NCCL INFO cudaDriverVersion 12080")
    assert reader.feed("NCCL version 2.18.5+cuda12.2")
    assert not reader.feed("step 1/10 via NET/Socket/0")


@pytest.mark.parametrize(
    "line",
    [
        "a" * 10**6 + " NCCL INFO x",
        "a:1:2 [0] " * 10**5 + "NCCL x",
        "n01:1:2 [0] NCCL INFO NET/IB : Using" + " [0]mlx5_0:1/IB" * 10**5 + " ; OOB eth0",
        "n01:1:2 [0] NCCL INFO Trees" + " [0] 1" * 10**5,
        "NCCL version " * 10**5,
    ],
)
def test_a_line_longer_than_any_of_nccl_s_is_passed_over(line: str) -> None:
    reader = NcclLogReader()
    assert not reader.feed(line)
    assert reader.report() == NcclLogReader().report()


@pytest.mark.parametrize(
    "way",
    [
        *("NET/Socket", "NET/Sock", "NET/Socket/", "NET/Socket/0 step 1", "NET/IB/0/GDRD"),
        *("P2P/CUM", "P2P/", "SHM/dir", "", "COLLNET/SHARP/0"),
    ],
)
def test_a_way_that_is_no_known_one_says_nothing(way: str) -> None:
    for end in ("", " [send]"):
        line = f"n01:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1]{end} via {way}"
        assert read_nccl_log([line]).connections == ()


@pytest.mark.parametrize(
    ("way", "transport"),
    [
        ("P2P/direct pointer/read", "P2P/direct pointer"),
        ("P2P/indirect/3[61000]", "P2P/indirect"),
        ("P2P/CUMEM/read/CE", "P2P/CUMEM"),
        ("direct shared memory", "SHM"),
        ("SHM/direct", "SHM"),
        ("SHM/CE/direct", "SHM"),
    ],
)
def test_ways_inside_a_host_have_one_name_each(way: str, transport: str) -> None:
    line = f"n01:1:2 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[43000] via {way}"
    (found,) = read_nccl_log([line]).connections
    assert found == Connection(
        sender=0,
        receiver=1,
        end="send",
        host="n01",
        peer_host="n01",
        between_hosts=False,
        transport=transport,
        device=None,
        gpudirect=None,
        channels=(0,),
    )


def test_a_peer_that_no_line_places_is_on_an_unknown_host() -> None:
    line = "n01:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"
    report = read_nccl_log([line])
    assert [(one.peer_host, one.between_hosts) for one in report.connections] == [(None, False)]
    assert report.sockets_between == ()


def test_adapters_of_the_plugin_of_hpcx_are_read() -> None:
    using = "NET/IB : Using [0]mlx5_2:1/IB/SHARP [1]mlx5_0:1/IB/SHARP [RO]; OOB ib0:10.0.0.1<0>"
    assert read_nccl_log([f"n01:1:2 [0] NCCL INFO {using}"]).adapters == tuple(
        Adapter(host="n01", name=name, port=1, link_layer="IB", gpudirect=None, used=False)
        for name in ("mlx5_0", "mlx5_2")
    )


@given(st.lists(st.text(max_size=80), max_size=20))
def test_any_text_is_survived(lines: list[str]) -> None:
    assert read_nccl_log(lines).connections == ()


@given(name=st.sampled_from(NAMES), data=st.data())
def test_lines_that_are_cut_or_lost_invent_no_transport_and_no_place(
    name: str, data: st.DataObject
) -> None:
    whole = recorded(name)
    lines = lines_of(name)
    cuts = data.draw(
        st.lists(st.integers(0, 160), min_size=len(lines), max_size=len(lines)), label="cuts"
    )
    cut = read_nccl_log(line[:length] for line, length in zip(lines, cuts, strict=True))
    assert {one.transport for one in cut.connections} <= {
        one.transport for one in whole.connections
    }
    assert len(cut.sockets_between) <= len(whole.sockets_between)
    assert set(cut.hosts) <= set(whole.hosts)
    assert {one.name for one in cut.adapters} <= {one.name for one in whole.adapters}
    kept = [line for line, length in zip(lines, cuts, strict=True) if length > 80]
    assert ways(read_nccl_log(kept)) <= ways(whole) | {
        (transport, False, gpudirect) for transport, _, gpudirect in ways(whole)
    }


@given(name=st.sampled_from(NAMES), data=st.data())
def test_lines_that_run_together_invent_no_transport(name: str, data: st.DataObject) -> None:
    whole = recorded(name)
    lines = lines_of(name)
    glue = data.draw(
        st.lists(
            st.tuples(st.integers(0, 160), st.booleans()),
            min_size=len(lines),
            max_size=len(lines),
        ),
        label="glue",
    )
    pieces = [
        line[:length] + ("" if run_on else "\n")
        for line, (length, run_on) in zip(lines, glue, strict=True)
    ]
    mangled = read_nccl_log("".join(pieces).split("\n"))
    transports = {one.transport for one in whole.connections}
    assert {one.transport for one in mangled.connections} <= transports
    if not whole.sockets_between:
        assert not mangled.sockets_between


@given(name=st.sampled_from(NAMES), data=st.data())
def test_processes_may_speak_in_any_order(name: str, data: st.DataObject) -> None:
    lines = [line for line in lines_of(name) if " NCCL " in line]
    speakers = {line: line.partition(" [")[0].rpartition(":")[0] for line in lines}
    order = data.draw(st.permutations(sorted(set(speakers.values()))), label="order")
    shuffled = sorted(lines, key=lambda line: order.index(speakers[line]))
    assert read_nccl_log(shuffled) == read_nccl_log(lines)

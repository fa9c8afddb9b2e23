from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.topology.conclude.levels import topology_of
from tests.topology.found import (
    machine,
    topology,
    with_gpus,
    with_host,
    with_interfaces,
    with_nics,
    without_gpus,
)


def test_levels_grow_outwards_and_end_with_the_network() -> None:
    levels = topology("pcie-two-sockets").levels
    sizes = [level.domain_gpus for level in levels]
    assert sizes == [2, 4, 8, None]
    assert [level.kind for level in levels] == ["nvlink", "pcie", "socket", "infiniband"]


def test_a_slow_port_sets_its_level_and_what_it_would_be_is_kept() -> None:
    network = topology("nic-slow").levels[-1]
    assert network.port_bandwidth_bytes_per_second == pytest.approx(12.5e9)
    assert network.healthy_bandwidth_bytes_per_second == pytest.approx(50e9)


def test_a_port_that_is_down_leaves_its_share_to_the_others() -> None:
    down = with_nics(machine("dgx-h100"), "mlx5_5", state="down", rate_bytes_per_second=None)
    found = topology_of(down)
    network = found.levels[-1]
    assert network.ports == 8
    assert network.port_bandwidth_bytes_per_second == pytest.approx(50e9 * 7 / 8)
    assert network.healthy_bandwidth_bytes_per_second == pytest.approx(50e9)
    assert found.across_bytes_per_second == pytest.approx(50e9 * 7 / 8)


def test_a_lost_lane_limits_what_leaves_the_node_too() -> None:
    half = with_gpus(machine("dgx-h100"), 5, pcie_width=8)
    found = topology_of(half)
    assert found.inside_bytes_per_second == pytest.approx(450e9)
    assert found.across_bytes_per_second == pytest.approx(31.5e9, rel=1e-3)


def test_the_slowest_pair_decides_inside_of_the_node() -> None:
    assert topology("pcie-two-sockets").inside_bytes_per_second == pytest.approx(10e9)
    one_socket = without_gpus(machine("pcie-two-sockets"), 4, 5, 6, 7)
    assert topology_of(one_socket).inside_bytes_per_second == pytest.approx(31.5e9, rel=1e-3)
    one_pair = without_gpus(machine("pcie-two-sockets"), 2, 3, 4, 5, 6, 7)
    assert topology_of(one_pair).inside_bytes_per_second == pytest.approx(300e9)


def test_one_gpu_has_no_inside_and_a_whole_network() -> None:
    found = topology_of(without_gpus(machine("pcie-two-sockets"), 1, 2, 3, 4, 5, 6, 7))
    assert found.inside_bytes_per_second is None
    assert [level.kind for level in found.levels] == ["infiniband"]
    assert found.across_bytes_per_second == pytest.approx(25e9)


def test_an_unknown_link_between_sockets_leaves_the_inside_unknown() -> None:
    found = topology_of(with_host(machine("rtx-4090"), cpu="Loongson-3C6000"))
    assert [level.kind for level in found.levels] == ["pcie", "ethernet"]
    assert found.inside_bytes_per_second is None


def test_unknown_lanes_leave_the_inside_unknown() -> None:
    found = topology_of(with_gpus(machine("rtx-4090"), 3, pcie_width=None))
    assert [level.kind for level in found.levels] == ["ethernet"]
    assert found.inside_bytes_per_second is None


def test_gpus_that_read_each_other_make_pcie_direct() -> None:
    pcie = {name: topology(name).levels[0] for name in ("rtx-4090", "pcie-half-width")}
    assert not pcie["rtx-4090"].gpudirect
    assert pcie["pcie-half-width"].gpudirect


def test_adapters_read_device_memory_only_where_something_lets_them() -> None:
    host = machine("dgx-h100")
    assert topology_of(host).levels[-1].gpudirect
    assert topology_of(with_host(host, gpudirect="dmabuf")).levels[-1].gpudirect
    assert not topology_of(with_host(host, gpudirect="none")).levels[-1].gpudirect
    assert not topology_of(with_host(host, gpudirect=None)).levels[-1].gpudirect
    consumer = with_gpus(host, name="NVIDIA GeForce RTX 4090")
    assert not topology_of(consumer).levels[-1].gpudirect


def test_a_domain_that_spans_hosts_has_the_ports_of_all_of_them() -> None:
    tray = machine("gb200-tray")
    found = topology_of(tray, others=[tray] * 17)
    assert [(level.kind, level.domain_gpus, level.ports) for level in found.levels] == [
        ("nvlink", 72, 1),
        ("infiniband", None, 72),
    ]
    assert found.across_bytes_per_second == topology_of(tray).across_bytes_per_second


def test_tcpx_needs_its_plugin_its_cloud_and_the_hosts_own_interface_told_apart() -> None:
    google = machine("a3-tcpx")
    kinds = [
        topology_of(without).levels[-1].kind
        for without in (
            replace(google, cloud=None),
            replace(google, software=replace(google.software, net_plugins=())),
        )
    ]
    assert kinds == ["ethernet", "ethernet"]
    unrouted = with_interfaces(google, "eth0", default_route=False)
    assert [level.kind for level in topology_of(unrouted).levels] == ["nvlink"]


def test_a_network_of_unknown_speed_is_no_level() -> None:
    vague = with_interfaces(machine("rtx-4090"), "eno1", speed_bytes_per_second=None)
    found = topology_of(vague)
    assert [level.kind for level in found.levels] == ["pcie", "socket"]
    assert found.across_bytes_per_second is None

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.spec.cluster import WeakSpot
from fsdpplan.spec.machine import Machine
from fsdpplan.topology.conclude.slow_hosts import common_levels, weak_spots
from tests.topology.found import links_down, machine, with_gpus, with_host, with_nics, without_gpus
from tests.topology.hosts import (
    PORT_BYTES_PER_SECOND,
    host,
    hosts,
    in_domain,
    slow_port,
    surveyed,
    weak_links,
)
from tests.topology.recorded import NAMES

WITH_GPUS = [name for name in NAMES if machine(name).gpus]


def only(*machines: Machine) -> WeakSpot:
    (spot,) = weak_spots(surveyed(*machines))
    return spot


@pytest.mark.parametrize("name", [n for n in WITH_GPUS if n not in ("nic-slow", "pcie-half-width")])
def test_a_healthy_machine_holds_nobody_back(name: str) -> None:
    assert weak_spots(surveyed(machine(name))) == ()


def test_a_slow_port_holds_back_even_a_host_alone() -> None:
    spot = only(machine("nic-slow"))
    assert (spot.nodes, spot.level, spot.remaining_fraction) == (("dgx-01",), "infiniband", 0.25)
    assert spot.text == "mlx5_5 runs at 100 Gb/s, the other 7 at 400 Gb/s"


def test_a_half_wide_slot_holds_back_where_gpus_talk_over_pcie() -> None:
    spot = only(machine("pcie-half-width"))
    assert (spot.level, spot.remaining_fraction) == ("pcie", 0.5)
    assert "8 of 16 PCIe lanes" in spot.text


def test_a_half_wide_slot_of_a_gpu_with_nvlink_slows_its_way_to_the_network() -> None:
    spot = only(host(1), with_gpus(host(2), 3, pcie_width=8))
    assert (spot.nodes, spot.level) == (("n02",), "infiniband")
    assert spot.remaining_fraction == pytest.approx(63.015 / 2 / 50, rel=1e-3)
    assert "GPU 3 has 8 of 16 PCIe lanes" in spot.text


def test_a_host_whose_ports_are_all_slow_is_told_against_the_others() -> None:
    first, second, third = hosts(3)
    spot = only(first, slow_port(second), third)
    assert (spot.nodes, spot.remaining_fraction) == (("n02",), 0.25)
    assert spot.text == "its infiniband gives a GPU 12.5 GB/s, that of its equals 50.0 GB/s"


def test_one_host_that_is_faster_than_all_others_makes_none_of_them_weak() -> None:
    first, second, third = hosts(3)
    survey = surveyed(slow_port(first), slow_port(second), third)
    assert weak_spots(survey) == ()
    assert common_levels(survey)[-1].healthy_bandwidth_bytes_per_second == 12.5e9


@pytest.mark.parametrize("slow", [0, 1])
def test_of_two_hosts_the_slower_one_is_weak_in_whatever_order(slow: int) -> None:
    machines = hosts(2)
    machines[slow] = slow_port(machines[slow])
    assert only(*machines).nodes == (f"n{slow + 1:02}",)


def test_a_port_that_is_down_leaves_seven_eighths() -> None:
    spot = only(host(1), with_nics(host(2), "mlx5_5", state="down"))
    assert (spot.nodes, spot.remaining_fraction) == (("n02",), pytest.approx(7 / 8))
    assert "mlx5_5 is down" in spot.text


def test_a_host_without_its_adapters_keeps_what_sockets_carry() -> None:
    spot = only(host(1), replace(host(2), nics=()))
    assert (spot.nodes, spot.level) == (("n02",), "infiniband")
    assert spot.remaining_fraction == pytest.approx(25 / 8 / 50)


def test_links_down_leave_their_share_of_nvlink() -> None:
    spot = only(host(1), weak_links(host(2), down=6))
    assert (spot.nodes, spot.level) == (("n02",), "nvlink")
    assert spot.remaining_fraction == pytest.approx(12 / 18)
    assert "12 of 18 NVLinks up" in spot.text


def test_a_host_whose_nvlinks_are_all_down_keeps_what_pcie_carries() -> None:
    down = replace(host(2), gpus=tuple(links_down(gpu, down=18) for gpu in host(2).gpus))
    (nvlink,) = [s for s in weak_spots(surveyed(host(1), down, host(3))) if s.level == "nvlink"]
    assert nvlink.nodes == ("n02",)
    assert nvlink.remaining_fraction < 0.15


def test_a_power_cap_leaves_the_cube_root_of_the_power() -> None:
    capped = with_gpus(host(2), 0, 1, power_limit_watts=350.0, default_power_limit_watts=700.0)
    spot = only(host(1), capped)
    assert (spot.nodes, spot.level) == (("n02",), None)
    assert spot.remaining_fraction == pytest.approx(0.5 ** (1 / 3))
    assert spot.text == "GPUs 0, 1 may draw 350 W of 700 W"


def test_hosts_that_cannot_take_part_are_no_weak_spots() -> None:
    first, second, third = hosts(3)
    assert weak_spots(surveyed(first, slow_port(without_gpus(second, 5)), third)) == ()


def test_adapters_read_device_memory_only_where_they_do_on_all_hosts() -> None:
    first, second, third = hosts(3)
    survey = surveyed(first, with_host(second, gpudirect="none"), third)
    assert [level.gpudirect for level in common_levels(survey)] == [True, False]


def test_racks_of_unlike_size_are_compared_by_what_a_gpu_gets() -> None:
    trays = hosts(5, "gb200-tray")
    racks = [in_domain(tray, "a") for tray in trays[:3]] + [in_domain(t, "b") for t in trays[3:]]
    survey = surveyed(*racks)
    assert weak_spots(survey) == ()
    assert [(each.domain_gpus, each.ports) for each in common_levels(survey)] == [(8, 1), (None, 8)]
    racks[0] = slow_port(racks[0], "mlx5_0")
    spot = only(*racks)
    assert (spot.nodes, spot.remaining_fraction) == (("n01",), 0.25)


@given(
    rates=st.lists(st.sampled_from([12.5e9, 25e9, 50e9]), min_size=1, max_size=5),
    ports=st.lists(st.sampled_from(["mlx5_0", "mlx5_5", "mlx5_11"]), max_size=2),
)
def test_what_is_left_of_the_common_rate_is_the_pace_of_the_slowest_host(
    rates: list[float], ports: list[str]
) -> None:
    machines = [slow_port(host(at), rate=rate) for at, rate in enumerate(rates)]
    machines[0] = slow_port(machines[0], *(ports or ["mlx5_0"]), rate=12.5e9)
    survey = surveyed(*machines)
    network = common_levels(survey)[-1]
    left = min((spot.remaining_fraction for spot in weak_spots(survey)), default=1.0)
    slowest = min(min(rates), 12.5e9)
    assert network.healthy_bandwidth_bytes_per_second * left == pytest.approx(slowest)
    assert network.healthy_bandwidth_bytes_per_second <= PORT_BYTES_PER_SECOND

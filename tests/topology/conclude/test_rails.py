from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.topology.conclude.levels import topology_of
from fsdpplan.topology.conclude.rails import fabric_of, rails_of
from tests.topology.found import machine, with_nics


def names(name: str) -> list[str]:
    return [nic.name for nic in fabric_of(machine(name)).ports]


def test_storage_ports_that_are_equals_but_farther_away_are_left_out() -> None:
    fabric = fabric_of(machine("dgx-h100"))
    assert len(fabric.ports) == 8
    assert [nic.name for nic in fabric.left_out] == ["mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8"]
    storage = {nic.name: nic for nic in fabric.left_out}["mlx5_1"]
    assert storage.rate_bytes_per_second == fabric.ports[0].rate_bytes_per_second
    assert storage.link_layer == "infiniband"


def test_ports_of_another_link_layer_are_left_out() -> None:
    assert names("pcie-two-sockets") == ["mlx5_0", "mlx5_1"]
    assert names("gb200-tray") == ["mlx5_0", "mlx5_1", "mlx5_4", "mlx5_5"]


def test_a_slow_port_beside_a_gpu_is_a_degraded_rail_not_another_network() -> None:
    slow = [rail for rail in rails_of(machine("nic-slow")) if rail.nic == "mlx5_5"]
    assert slow[0].bandwidth_bytes_per_second == pytest.approx(12.5e9)
    assert slow[0].expected_bytes_per_second == pytest.approx(50e9)
    assert slow[0].gpus == (3,)


def test_the_gpu_of_a_port_that_is_down_goes_through_the_next_ones_of_the_fabric() -> None:
    down = with_nics(machine("dgx-h100"), "mlx5_5", state="down", rate_bytes_per_second=None)
    fabric = fabric_of(down)
    assert [nic.name for nic in fabric.silent] == ["mlx5_5"]
    serving = {rail.nic: rail.path for rail in rails_of(down) if 3 in rail.gpus}
    # the storage port of that socket is as near, and still no part of the fabric
    assert serving == {"mlx5_0": "node", "mlx5_3": "node", "mlx5_4": "node"}


def test_a_port_that_has_gone_from_the_bus_is_missed() -> None:
    """And its GPU does not take a storage port of its socket for one of the fabric."""
    whole = machine("dgx-h100")
    gone = replace(whole, nics=tuple(nic for nic in whole.nics if nic.name != "mlx5_9"))
    fabric = fabric_of(gone)
    assert (fabric.lacking, fabric.missing) == ((5,), 1)
    assert [nic.name for nic in fabric.ports] == [n for n in names("dgx-h100") if n != "mlx5_9"]
    serving = {rail.nic for rail in rails_of(gone) if 5 in rail.gpus}
    assert serving == {"mlx5_6", "mlx5_10", "mlx5_11"}
    assert topology_of(gone).across_bytes_per_second == pytest.approx(7 / 8 * 50e9)


@pytest.mark.parametrize(("name", "gone"), [("dgx-a100", "mlx5_1"), ("p5-efa", "rdmap99s0")])
def test_a_missing_port_is_counted_where_gpus_share_a_switch_or_have_several(
    name: str, gone: str
) -> None:
    whole = machine(name)
    fabric = fabric_of(replace(whole, nics=tuple(n for n in whole.nics if n.name != gone)))
    assert fabric.missing == 1
    assert fabric_of(whole).missing == 0


def test_hosts_with_adapters_below_some_switches_only_lack_nothing() -> None:
    """Half of the GPUs without one is how a host was built."""
    whole = machine("dgx-h100")
    few = ("mlx5_0", "mlx5_3", "mlx5_6", "mlx5_9")
    assert (
        fabric_of(replace(whole, nics=tuple(n for n in whole.nics if n.name in few))).missing == 0
    )


def test_gpus_and_ports_at_one_distance_are_shared_out_evenly() -> None:
    def shares(name: str) -> list[int]:
        return [len(rail.gpus) for rail in rails_of(machine(name))]

    assert shares("dgx-a100") == [1] * 8  # two ports for two GPUs
    assert shares("pcie-two-sockets") == [4, 4]  # one port for four GPUs
    served = [gpu for rail in rails_of(machine("p5-efa")) for gpu in rail.gpus]
    assert all(served.count(gpu) == 4 for gpu in range(8))  # four ports for one GPU


def test_where_the_tree_is_unknown_ports_are_counted_once_a_gpu_at_most() -> None:
    flat = replace(machine("dgx-h100"), pci_paths=())
    rails = rails_of(flat)
    assert len(rails) == 8
    assert all(rail.gpus == tuple(range(8)) and rail.path is None for rail in rails)


def test_a_port_whose_pcie_link_is_degraded_carries_no_more_than_the_link() -> None:
    half = with_nics(machine("dgx-h100"), "mlx5_0", pcie_width=8, pcie_generation=4)
    assert rails_of(half)[0].bandwidth_bytes_per_second == pytest.approx(15.75e9, rel=1e-3)
    assert rails_of(half)[0].expected_bytes_per_second == pytest.approx(50e9)


def test_a_pcie_link_at_its_best_does_not_count_however_slow_it_says_it_is() -> None:
    made_up = {"pcie_width": 1, "pcie_generation": 1, "pcie_max_width": 1, "pcie_max_generation": 1}
    virtual = with_nics(machine("p5-efa"), **made_up)
    assert rails_of(virtual)[0].bandwidth_bytes_per_second == pytest.approx(12.5e9)


@pytest.mark.parametrize(("lanes", "now", "expected"), [(16, 31.5e9, 31.5e9), (8, 15.75e9, 31.5e9)])
def test_two_ports_of_one_card_share_its_pcie_link(lanes: int, now: float, expected: float) -> None:
    """Gen 5 x16 carries 63 GB/s, two ports at 400 Gb/s would take 100."""
    one = next(nic for nic in machine("dgx-h100").nics if nic.name == "mlx5_0")
    card = tuple(replace(one, name=f"mlx5_{n}", port=n + 1, pcie_width=lanes) for n in (0, 1))
    rails = rails_of(replace(machine("dgx-h100"), nics=card))
    assert [rail.bandwidth_bytes_per_second for rail in rails] == pytest.approx([now] * 2, rel=0.01)
    (best,) = {rail.expected_bytes_per_second for rail in rails}
    assert best == pytest.approx(expected, rel=0.01)


def test_a_port_of_unknown_rate_is_no_rail_but_still_belongs_to_the_fabric() -> None:
    vague = with_nics(machine("dgx-h100"), "mlx5_0", rate_bytes_per_second=None)
    assert "mlx5_0" not in [rail.nic for rail in rails_of(vague)]
    assert [nic.name for nic in fabric_of(vague).silent] == ["mlx5_0"]


@pytest.mark.parametrize("name", ["a3-tcpx", "rtx-4090", "nothing", "amd-mi300x"])
def test_without_rdma_adapters_there_are_no_rails(name: str) -> None:
    assert rails_of(machine(name)) == ()


def test_functions_of_shared_adapters_are_equals_whatever_their_number() -> None:
    whole = machine("roce")
    functions = {
        nic.bus_id: f"{nic.bus_id[:-1]}{place % 4 + 1}"
        for place, nic in enumerate(whole.nics)
        if nic.bus_id is not None and nic.name != "mlx5_bond_0"
    }
    shared = replace(
        whole,
        nics=tuple(
            replace(nic, bus_id=functions.get(nic.bus_id, nic.bus_id), virtual_function=True)
            for nic in whole.nics
        ),
        pci_paths=tuple(
            (functions.get(bus_id, bus_id), (*way[:-1], functions.get(bus_id, bus_id)))
            for bus_id, way in whole.pci_paths
        ),
    )
    assert [rail.gpus for rail in rails_of(shared)] == [(gpu,) for gpu in range(8)]

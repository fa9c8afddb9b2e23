from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.spec.machine import Machine
from fsdpplan.spec.nodes import Network
from fsdpplan.topology.conclude.levels import topology_of
from fsdpplan.topology.conclude.network_facts import network_of
from tests.topology.found import machine, with_host, with_interfaces, with_nics, without_gpus


def network(of: Machine, *others: Machine) -> Network:
    found = network_of(of, topology_of(of), others=others)
    assert found is not None
    return found


def named(name: str, host: str) -> Machine:
    return with_host(machine(name), name=host)


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("dgx-h100", "infiniband"),
        ("roce", "roce"),
        ("p5-efa", "efa"),
        ("a3-tcpx", "tcpx"),
        ("rtx-4090", "ethernet"),
    ],
)
def test_the_transport_is_what_the_machine_shows(name: str, transport: str) -> None:
    assert network(machine(name)).transport == transport


def test_gpudirect_holds_where_every_host_has_it_as_the_levels_are_priced() -> None:
    whole = named("dgx-h100", "n01")
    lacking = with_host(whole, name="n02", gpudirect="none")
    assert network(whole, named("dgx-h100", "n02")).gpudirect == "peermem"
    assert network(whole, lacking).gpudirect == "none"
    assert network(lacking, whole).gpudirect == "none"


@pytest.mark.parametrize("name", ["nothing", "amd-mi300x"])
def test_without_gpus_there_is_no_network_to_plan_for(name: str) -> None:
    assert network_of(machine(name), topology_of(machine(name))) is None


def test_the_list_of_adapters_is_that_of_the_compute_fabric() -> None:
    found = network(machine("dgx-h100"))
    assert found.hcas == (
        *("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5"),
        *("mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"),
    )
    assert found.hcas_left_out == ("mlx5_1", "mlx5_2", "mlx5_7", "mlx5_8")
    assert found.gpudirect_path == "pxb"


def test_ports_of_one_adapter_are_told_apart_by_their_numbers() -> None:
    whole = machine("pcie-two-sockets")
    second = replace(whole.nics[0], port=2, state="down", rate_bytes_per_second=None)
    found = network(replace(whole, nics=(*whole.nics, second)))
    assert found.hcas == ("mlx5_0:1", "mlx5_1")
    assert found.hcas_left_out == ("mlx5_2", "mlx5_0:2")


def test_a_degraded_node_does_not_shorten_the_list_for_all() -> None:
    whole = named("dgx-h100", "n01")
    down = with_nics(whole, "mlx5_5", state="down", rate_bytes_per_second=None)
    missing = without_gpus(whole, 5)
    for one, *others in ([whole, down, whole], [down, whole, whole], [missing, whole, whole]):
        assert network(one, *others).hcas == network(whole).hcas


def test_nodes_that_name_their_adapters_differently_have_no_common_list() -> None:
    whole = machine("dgx-h100")
    renamed = replace(
        whole, nics=tuple(replace(nic, name=f"ib{place}") for place, nic in enumerate(whole.nics))
    )
    found = network(whole, renamed)
    assert found.hcas_differ
    assert found.hcas == found.hcas_left_out == ()


def test_efa_and_tcpx_need_no_list_of_adapters() -> None:
    for name in ("p5-efa", "a3-tcpx"):
        assert network(machine(name)).hcas == ()


def test_the_gid_entry_is_roce_v2_with_ipv4_on_all_ports() -> None:
    whole = machine("roce")
    assert network(whole).gid_index == 3
    moved = tuple(replace(gid, index=gid.index + 2) for gid in whole.nics[0].gids)
    assert network(with_nics(whole, "mlx5_0", gids=moved)).gid_index is None
    assert network(whole, with_nics(whole, "mlx5_0", gids=moved)).gid_index is None
    both = (*whole.nics[0].gids, *(gid for gid in moved if gid.index > 3))
    assert network(with_nics(whole, gids=both)).gid_index == 3
    assert network(machine("dgx-h100")).gid_index is None


def test_one_host_only_knows_its_default_route() -> None:
    found = network(machine("rtx-4090"))
    assert found.socket_interface == "eno1"
    assert found.socket_interfaces_left_out == ("docker0",)
    unrouted = with_interfaces(machine("dgx-h100"), "bond0", default_route=False)
    assert network(unrouted).socket_interface is None


def test_several_hosts_use_the_interface_whose_network_all_are_in() -> None:
    first, second = named("dgx-h100", "n01"), named("dgx-h100", "n02")
    assert network(first, second).socket_interface == "bond0"
    elsewhere = with_interfaces(second, "bond0", networks=("10.77.0.0/16",))
    # they still share the storage network
    assert network(first, elsewhere).socket_interface == "ibp41s0f0"


def test_hosts_in_routed_networks_use_the_interface_with_the_default_route() -> None:
    first = machine("p5-efa")
    second = with_interfaces(first, "enp71s0", networks=("10.0.16.0/20",))
    assert network(first, second).socket_interface == "enp71s0"


def test_hosts_whose_interfaces_have_other_names_share_none() -> None:
    first = machine("p5-efa")
    renamed = replace(
        first,
        interfaces=tuple(replace(each, name=f"x{each.name}") for each in first.interfaces),
    )
    assert network(first, renamed).socket_interface is None


def test_bridges_of_containers_are_never_chosen() -> None:
    bridged = with_interfaces(machine("rtx-4090"), "eno1", default_route=False)
    bridged = with_interfaces(bridged, "docker0", default_route=True)
    assert network_of(bridged, topology_of(bridged), others=(bridged,)) is not None
    assert network(bridged, bridged).socket_interface == "eno1"
    assert network(bridged).socket_interface is None


def test_names_that_could_not_stand_in_a_script_are_dropped() -> None:
    hostile = with_interfaces(machine("rtx-4090"), "docker0", name="x;reboot")
    assert network(hostile).socket_interfaces_left_out == ()
    nics = with_nics(machine("dgx-h100"), "mlx5_0", name="$(reboot)")
    assert all("$" not in name for name in network(nics).hcas)


@pytest.mark.parametrize(
    ("name", "reduces"),
    [("dgx-h100", True), ("gb200-tray", True), ("dgx-a100", False), ("pcie-two-sockets", False)],
)
def test_switches_reduce_from_hopper_on(name: str, reduces: bool) -> None:
    assert network(machine(name)).nvlink_switch is reduces


def test_the_cloud_and_its_stack_are_passed_on() -> None:
    found = network(machine("p5-efa"))
    assert (found.provider, found.instance_type) == ("aws", "p5.48xlarge")
    assert found.net_plugins == ("/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so",)
    assert network(machine("dgx-h100")).provider is None


def test_googles_stacks_are_told_apart_by_their_files() -> None:
    tcpx = machine("a3-tcpx")
    tcpxo = replace(
        tcpx,
        software=replace(tcpx.software, net_plugins=("/var/lib/tcpxo/lib64/libnccl-net.so",)),
    )
    assert network(tcpxo).transport == "tcpxo"
    rdma = replace(
        machine("roce"),
        cloud=tcpx.cloud,
        software=replace(
            tcpx.software, env_profiles=("/usr/local/gib/scripts/set_nccl_env.sh",), net_plugins=()
        ),
    )
    assert network(rdma).transport == "gib"


def test_geforce_is_closed_to_adapters() -> None:
    opened = with_host(machine("rtx-4090"), gpudirect="dmabuf")
    assert network(opened).gpudirect == "none"

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.spec.machine import Machine
from fsdpplan.spec.topology import Finding
from fsdpplan.topology.conclude.differences import differences
from tests.topology.found import machine, with_gpus, with_host, with_nics, without_gpus


def nodes(count: int) -> list[Machine]:
    return [with_host(machine("dgx-h100"), name=f"n{number:02}") for number in range(1, count + 1)]


def only(machines: list[Machine]) -> Finding:
    (finding,) = differences(machines)
    return finding


def test_equal_nodes_do_not_differ_whatever_their_number() -> None:
    assert differences(nodes(4)) == ()
    assert differences(nodes(1)) == ()
    assert differences([]) == ()


def test_the_node_that_differs_is_told_against_the_majority() -> None:
    machines = nodes(4)
    machines[2] = without_gpus(machines[2], 5)
    found = only(machines)
    assert (found.host, found.where, found.severity) == ("n03", "GPUs", "broken")
    assert found.text == "GPUs: 7 on n03, 8 on 3 others"


def test_nodes_with_the_same_difference_are_told_together() -> None:
    machines = nodes(6)
    for place in (1, 2, 3, 5)[:2]:
        software = replace(machines[place].software, nccl="2.26.2")
        machines[place] = replace(machines[place], software=software)
    found = only(machines)
    assert found.host == "n[02-03]"
    assert found.text == "NCCL: 2.26.2 on n[02-03], 2.27.5 on 4 others"


def test_of_two_nodes_the_first_is_what_was_meant() -> None:
    first, second = nodes(2)
    assert only([first, with_host(second, gpudirect="none")]).text == (
        "GPUDirect: none on n02, works on the other host"
    )


def test_two_ways_of_gpudirect_are_no_difference() -> None:
    first, second = nodes(2)
    assert differences([first, with_host(second, gpudirect="dmabuf")]) == ()


def test_a_node_that_says_nothing_is_not_compared() -> None:
    machines = nodes(3)
    machines[1] = with_host(machines[1], gpudirect=None)
    machines[2] = replace(machines[2], software=replace(machines[2].software, torch=None))
    assert differences(machines) == ()


@pytest.mark.parametrize(("rate", "slowdown"), [(25e9, 2.0), (100e9, None)])
def test_a_node_whose_ports_are_all_slower_sets_the_ring(
    rate: float, slowdown: float | None
) -> None:
    machines = nodes(3)
    machines[1] = with_nics(machines[1], rate_bytes_per_second=rate)
    found = only(machines)
    assert (found.host, found.where, found.slowdown) == ("n02", "ports", slowdown)


def test_a_node_with_fewer_ports_sets_the_ring_by_what_its_gpus_share() -> None:
    machines = nodes(3)
    half = ("mlx5_3", "mlx5_5", "mlx5_9", "mlx5_11")
    kept = tuple(nic for nic in machines[1].nics if nic.name not in half)
    machines[1] = with_nics(replace(machines[1], nics=kept), rate_bytes_per_second=25e9)
    found = next(each for each in differences(machines) if each.where == "ports")
    assert (
        found.text == "ports: 4 x 200 Gb/s for 8 GPUs on n02, 8 x 400 Gb/s for 8 GPUs on 2 others"
    )
    assert found.slowdown == 4.0


def test_a_node_that_lost_a_gpu_and_the_port_beside_it_has_no_slower_network() -> None:
    machines = nodes(3)
    machines[1] = without_gpus(machines[1], 5)
    assert [each.where for each in differences(machines)] == ["GPUs"]


def test_a_node_with_one_slow_port_does_not_differ_in_its_hardware() -> None:
    machines = nodes(3)
    machines[1] = with_host(machine("nic-slow"), name="n02")
    assert differences(machines) == ()


def test_other_gpus_and_less_memory_are_told() -> None:
    machines = nodes(3)
    machines[0] = with_gpus(machines[0], 3, memory_bytes=40 * 2**30)
    found = only(machines)
    assert found.where == "GPU model"
    assert "40.0 GiB" in found.text


def test_adapters_with_other_names_are_a_note() -> None:
    machines = nodes(3)
    machines[0] = replace(
        machines[0],
        nics=tuple(
            replace(nic, name=nic.name.replace("mlx5", "rocep")) for nic in machines[0].nics
        ),
    )
    found = only(machines)
    assert (found.where, found.severity) == ("adapters", "note")

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.spec.machine import Machine
from fsdpplan.topology.survey import Survey, survey_of
from tests.refusals import check_one_line
from tests.topology.found import findings, machine, with_gpus, with_host, with_nics, without_gpus
from tests.topology.hosts import host, hosts, in_domain, slow_port, surveyed


def typical_name(survey: Survey) -> str:
    return survey.machines[survey.typical].host.name


def without_adapters(of: Machine) -> Machine:
    return replace(of, nics=())


def test_one_host_stands_for_itself_with_its_own_findings() -> None:
    alone = surveyed(machine("nic-slow"))
    assert alone.typical == 0
    assert alone.findings == findings(machine("nic-slow"))
    assert alone.left_out == ()


def test_of_equal_hosts_the_first_stands_for_all() -> None:
    assert typical_name(surveyed(*hosts(3))) == "n01"


def test_the_host_that_stands_for_all_is_the_healthiest_of_those_with_the_commonest_gpus() -> None:
    lost, slow, *whole = hosts(4)
    survey = surveyed(without_gpus(lost, 5), slow_port(slow, "mlx5_5"), *whole)
    assert typical_name(survey) == "n03"
    assert survey.taking_part == (1, 2, 3)
    assert survey.left_out == ("n01",)


def test_of_two_hosts_the_one_with_more_gpus_stands_for_both() -> None:
    first, second = hosts(2)
    survey = surveyed(without_gpus(first, 0), second)
    assert typical_name(survey) == "n02"
    assert survey.left_out == ("n01",)


def test_hosts_without_gpus_never_stand_for_those_with() -> None:
    login = [with_host(machine("nothing"), name=f"login{number}") for number in (1, 2, 3)]
    survey = surveyed(*login, host(1))
    assert typical_name(survey) == "n01"
    assert survey.left_out == ("login1", "login2", "login3")


def test_hosts_without_any_gpu_all_take_part() -> None:
    assert surveyed(machine("nothing")).taking_part == (0,)


def test_other_kinds_of_gpus_cannot_take_part() -> None:
    first, second, third = hosts(3)
    survey = surveyed(first, with_gpus(second, name="NVIDIA H200"), third)
    assert survey.left_out == ("n02",)


def test_two_hosts_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match="2 of the hosts are called n01") as refusal:
        surveyed(host(1), host(1), host(2))
    check_one_line(refusal.value)


def test_findings_on_hosts_that_did_not_answer_come_first() -> None:
    (silent,) = findings(machine("gpu-missing"))
    survey = survey_of(hosts(2), unread=[silent])
    assert survey.findings == (silent,)


def test_a_host_that_has_lost_its_adapters_is_said_to_be_on_another_network() -> None:
    first, second, third = hosts(3)
    survey = surveyed(first, without_adapters(second), third)
    (found,) = [each for each in survey.findings if each.where == "network"]
    assert (found.host, found.severity) == ("n02", "broken")
    assert found.text == "network: ethernet on n02, infiniband on the others"


def test_hosts_with_ports_of_one_kind_are_on_one_network() -> None:
    first, second = hosts(2)
    survey = surveyed(first, slow_port(second))
    assert not [each for each in survey.findings if each.where == "network"]


def test_one_tray_of_a_rack_says_that_it_cannot_count_the_domain() -> None:
    survey = surveyed(machine("gb200-tray"))
    (found,) = survey.findings
    assert (found.kind, found.severity) == ("unread", "note")
    assert "beside these 4" in found.text
    assert "joins 4 GPUs by NVLink" in found.consequence
    assert survey.topologies[0].levels[0].domain_gpus == 4


@pytest.mark.parametrize("trays", [2, 18])
def test_trays_of_one_clique_make_a_domain_of_all_their_gpus(trays: int) -> None:
    survey = surveyed(*hosts(trays, "gb200-tray"))
    assert survey.findings == ()
    for topology in survey.topologies:
        assert topology.islands[0].domain_gpus == 4 * trays
        nvlink, network = topology.levels
        assert nvlink.domain_gpus == 4 * trays
        assert network.ports == 4 * trays
        assert topology.across_bytes_per_second == 50e9


def test_of_racks_of_unlike_size_a_tray_of_the_smallest_stands_for_all() -> None:
    trays = hosts(5, "gb200-tray")
    racks = [in_domain(tray, "a") for tray in trays[:3]] + [in_domain(t, "b") for t in trays[3:]]
    assert typical_name(surveyed(*racks)) == "n04"


def test_the_network_is_that_of_all_hosts() -> None:
    first, second = hosts(2)
    survey = surveyed(first, with_nics(second, "mlx5_5", name="mlx5_7x"))
    assert survey.network is not None
    assert survey.network.hcas_differ

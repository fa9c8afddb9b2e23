from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.spec.machine import GpuFabric
from fsdpplan.topology.conclude.levels import islands_of
from tests.topology.found import links_down, machine, with_gpus


def groups(name: str) -> list[tuple[int, ...]]:
    return [island.gpus for island in islands_of(machine(name))]


def test_switches_join_all_gpus_and_bridges_join_pairs() -> None:
    assert groups("dgx-h100") == [tuple(range(8))]
    assert groups("pcie-two-sockets") == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_without_nvlink_every_gpu_is_alone() -> None:
    islands = islands_of(machine("rtx-4090"))
    assert {island.kind for island in islands} == {"alone"}
    assert all(island.bandwidth_bytes_per_second is None for island in islands)


def test_the_gpu_with_the_fewest_links_up_sets_the_island() -> None:
    whole = machine("dgx-h100")
    weak = replace(whole, gpus=(links_down(whole.gpus[0], down=6), *whole.gpus[1:]))
    (island,) = islands_of(weak)
    assert island.bandwidth_bytes_per_second == pytest.approx(12 * 25e9)


def test_a_gpu_without_any_link_up_is_an_island_of_its_own() -> None:
    whole = machine("dgx-h100")
    cut = replace(whole, gpus=(links_down(whole.gpus[0], down=18), *whole.gpus[1:]))
    assert [island.gpus for island in islands_of(cut)] == [(0,), (1, 2, 3, 4, 5, 6, 7)]


def test_only_links_inside_of_the_island_count() -> None:
    alone, three = islands_of(machine("mig"))
    assert alone.kind == "alone"
    assert three.gpus == (1, 2, 3)
    # each still has 4 links to the GPU in MIG mode
    assert three.bandwidth_bytes_per_second == pytest.approx(8 * 25e9)


def test_one_unknown_link_makes_the_bandwidth_unknown_and_nothing_else() -> None:
    whole = machine("dgx-h100")
    first = whole.gpus[0]
    vague = replace(
        first,
        nvlinks=(replace(first.nvlinks[0], bandwidth_bytes_per_second=None), *first.nvlinks[1:]),
    )
    (island,) = islands_of(replace(whole, gpus=(vague, *whole.gpus[1:])))
    assert island.bandwidth_bytes_per_second is None
    assert island.gpus == tuple(range(8))


def test_links_to_nobody_known_join_nothing() -> None:
    whole = machine("dgx-h100")
    links = tuple(replace(link, remote=None) for link in whole.gpus[0].nvlinks)
    assert len(islands_of(with_gpus(whole, nvlinks=links))) == 8


def test_a_domain_that_spans_hosts_is_as_large_as_the_hosts_that_were_seen() -> None:
    tray = machine("gb200-tray")
    (alone,) = islands_of(tray)
    assert alone.domain_gpus is None
    (seen,) = islands_of(tray, others=[tray] * 17)
    assert seen.domain_gpus == 72
    assert seen.fabric == alone.fabric == "7a3d1c52-b9e0-4f68-90ab-4c17d2e8f035/32766"


def test_gpus_of_another_clique_are_not_in_the_domain() -> None:
    tray = machine("gb200-tray")
    fabric = tray.gpus[0].fabric
    assert fabric is not None
    other = with_gpus(tray, fabric=replace(fabric, clique=1))
    (island,) = islands_of(tray, others=[tray, other])
    assert island.domain_gpus == 8


def test_gpus_of_one_host_in_different_domains_do_not_reach_each_other() -> None:
    tray = machine("gb200-tray")
    other = GpuFabric(cluster_uuid="0f" * 16, clique=1)
    split = with_gpus(tray, 2, 3, fabric=other)
    assert [island.gpus for island in islands_of(split)] == [(0, 1), (2, 3)]

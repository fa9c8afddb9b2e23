"""Levels: measuring an artificial machine gives its numbers back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import group_placement
from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.spec.measurement import MeasuredCall
from fsdpplan.validate.calibrate.levels import (
    calibrate_levels,
    level_of,
    placement_of,
    predicted_call_seconds,
    with_numbers,
)
from fsdpplan.validate.fit.kernels import TABLES, read_tables
from tests.cost.clusters import cluster
from tests.validate.artificial import SIZES, Clock, call_rows
from tests.validate.links import clocks, machines

FITTED = ("bandwidth_fraction", "half_bandwidth_bytes", "base_seconds", "latency_seconds")


def forgotten(level: Level) -> Level:
    """`level` as somebody would guess it who has only the data sheet."""
    return replace(
        level,
        bandwidth_fraction=0.8,
        half_bandwidth_bytes=1e6,
        base_seconds=2e-5,
        latency_seconds=5e-6,
        multicast_fraction=0.6 if level.multicast_fraction else 0.0,
    )


def guessed(true: Cluster) -> Cluster:
    return replace(true, levels=tuple(map(forgotten, true.levels)))


@settings(max_examples=25, deadline=None)
@given(machines(nodes=1), clocks())
def test_all_numbers_of_a_machine_come_back(true: Cluster, clock: Clock) -> None:
    (fit,) = calibrate_levels(list(call_rows(true, clock=clock)), guessed(true))
    assert fit is not None
    for name in FITTED:
        assert fit.numbers[name].value == pytest.approx(getattr(true.levels[0], name), rel=0.05)
    assert fit.residual_fraction < 0.02


@settings(max_examples=15, deadline=None)
@given(machines(nodes=4), clocks())
def test_calls_between_nodes_are_predicted_with_what_was_found(true: Cluster, clock: Clock) -> None:
    start = guessed(true)
    fits = calibrate_levels(list(call_rows(true, clock=clock)), start)
    found = replace(start, levels=tuple(fit.level for fit in fits if fit))
    bandwidths = [
        (level.port_bandwidth_bytes_per_second * level.bandwidth_fraction)
        for cluster in (true, found)
        for level in cluster.levels
    ]
    assert bandwidths[2:] == pytest.approx(bandwidths[:2], rel=0.05)
    for call in call_rows(true, clock=Clock(noise=0.0, outliers=0.0, repeats=1)):
        assert predicted_call_seconds(call, found) == pytest.approx(call.seconds[0], rel=0.05)


@pytest.mark.parametrize("gpus", [8, 32])
@pytest.mark.parametrize("seed", range(3))
def test_a_machine_with_all_protocols_and_a_switch_that_reduces(gpus: int, seed: int) -> None:
    true = cluster(gpus=gpus)
    fits = calibrate_levels(list(call_rows(true, clock=Clock(seed=seed))), guessed(true))
    for level, fit in zip(true.levels, fits, strict=True):
        assert fit is not None
        for name, found in fit.numbers.items():
            within = max(0.05, 3 * found.error_fraction)
            assert found.value == pytest.approx(getattr(level, name), rel=within)
        assert fit.numbers["bandwidth_fraction"].value == pytest.approx(
            level.bandwidth_fraction, rel=0.05
        )
    assert fits[0] is not None
    assert fits[0].numbers["multicast_fraction"].value == pytest.approx(0.672, rel=0.05)


def test_one_node_says_nothing_of_the_network() -> None:
    true = cluster(gpus=16)
    inside = [call for call in call_rows(true) if call.group == "inside"]
    first, second = calibrate_levels(inside, guessed(true))
    assert first is not None
    assert second is None


def test_ports_that_carry_more_than_the_data_sheet_has_are_given_it() -> None:
    level = cluster(gpus=8).levels[0]
    more = with_numbers(level, {"bandwidth_fraction": 1.25})
    assert more.bandwidth_fraction == 1.0
    assert more.port_bandwidth_bytes_per_second == 1.25 * level.port_bandwidth_bytes_per_second


def test_links_of_cpu_processes_have_no_share_of_a_data_sheet() -> None:
    true = cluster("cpu", gpus=4)
    (fit,) = calibrate_levels(list(call_rows(true, sizes=SIZES[:8])), guessed(true))
    assert fit is not None
    assert fit.level.bandwidth_fraction == 1.0
    assert fit.level.port_bandwidth_bytes_per_second == pytest.approx(1e9, rel=0.05)


def test_slow_groups_among_many_do_not_bend_the_fit() -> None:
    true = cluster(gpus=64)
    rows = [
        replace(call, seconds=tuple(5 * one for one in call.seconds))
        if call.group == "inside" and call.first_rank in (8, 16)
        else call
        for call in call_rows(true)
    ]
    fit = calibrate_levels(rows, guessed(true))[0]
    assert fit is not None
    assert fit.numbers["bandwidth_fraction"].value == pytest.approx(0.833, rel=0.05)


@given(st.sampled_from([1, 8]), st.integers(0, 54))
def test_a_pair_of_ranks_parts_at_the_level_between_them(stride: int, first: int) -> None:
    whole = cluster(gpus=64)
    pair = MeasuredCall(
        group="pair",
        axis=None,
        collective="send_recv",
        first_rank=first,
        ranks=2,
        stride=stride,
        groups_at_once=1,
        gathered_bytes=2**20,
        seconds=(1.0,),
    )
    crosses = first // 8 != (first + stride) // 8
    assert level_of(pair, whole) == int(crosses)
    assert placement_of(pair, whole).level_name == whole.levels[int(crosses)].name


def test_a_pair_inside_a_node_is_priced_as_a_group_of_two() -> None:
    whole = cluster(gpus=16)
    pair = next(call for call in call_rows(whole) if call.group == "pair" and call.stride == 1)
    two = group_placement(cluster=whole, ranks=2, stride=1)
    assert predicted_call_seconds(pair, whole) == collective_seconds(
        collective="send_recv", gathered_bytes=pair.gathered_bytes, placement=two
    )


def test_published_tables_give_the_numbers_that_their_own_fit_found() -> None:
    """219 calls on HGX H100 boards: the bandwidth is that of the profile, which another search of
    the same rows wrote."""
    start = cluster(gpus=8)
    calls = [
        MeasuredCall(
            group="inside",
            axis=None,
            collective=row.collective,
            first_rank=0,
            ranks=row.gpus,
            stride=1,
            groups_at_once=1,
            gathered_bytes=int(row.gathered_bytes),
            seconds=(row.seconds,),
        )
        for row in read_tables(TABLES).collectives
        if row.profile == "dgx-h100" and row.nodes == 1 and row.gathered_bytes >= 2**20
    ]
    (fit,) = calibrate_levels(calls, guessed(start))
    assert fit is not None
    assert fit.numbers["bandwidth_fraction"].value == pytest.approx(0.833, rel=0.03)
    assert fit.numbers["multicast_fraction"].value == pytest.approx(0.672, rel=0.03)
    assert fit.residual_fraction < 0.09

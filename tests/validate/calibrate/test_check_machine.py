"""The check: what is slow is named, and only that; a healthy machine passes, noisy or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMatmul, Measurement
from fsdpplan.validate.calibrate.calibrated import calibrated
from fsdpplan.validate.calibrate.check_machine import gates, slow_parts
from fsdpplan.validate.compare.gates import Gate, noise, timed
from tests.cost.clusters import cluster
from tests.validate.artificial import SIZES, Clock, Faults, log_of
from tests.validate.links import clocks

TOLERANCE = 0.2


def check(rows: Sequence[Measurement], cluster: Cluster, *, tolerance: float) -> tuple[Gate, ...]:
    """The parts that are slow, as `calibrate` says them; empty: the machine is healthy."""
    return slow_parts(gates(rows, cluster, tolerance=tolerance))


def measured(true: Cluster, seed: int = 99) -> Cluster:
    """The profile that an earlier calibration of the healthy machine wrote."""
    return calibrated(log_of(true, clock=Clock(seed=seed)), true).cluster


@cache
def four_nodes() -> Cluster:
    """Four healthy nodes, calibrated by the first test that asks."""
    return measured(cluster(gpus=32))


def slow(faults: Faults, profile: Cluster | None = None, clock: Clock | None = None) -> set[str]:
    profile = profile or four_nodes()
    rows = log_of(profile, clock=clock or Clock(seed=3), faults=faults)
    return {gate.where for gate in check(rows, profile, tolerance=TOLERANCE)}


@settings(max_examples=20, deadline=None)
@given(clocks(), st.floats(0.0, 0.15), st.sampled_from(["dgx-h100", "dgx-a100-80g-hdr", "cpu"]))
def test_a_healthy_machine_passes_however_noisy_its_clock(
    clock: Clock, noise: float, profile: str
) -> None:
    healthy = cluster(profile, gpus=8 if profile == "cpu" else 16)
    assert slow(Faults(), healthy, replace(clock, noise=noise)) == set()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 31), st.floats(1.4, 5), clocks())
def test_a_slow_gpu_is_named_and_nothing_else(rank: int, factor: float, clock: Clock) -> None:
    found = slow(Faults(ranks={rank: factor}), clock=clock)
    assert found == {f"rank {rank} on host n{rank // 8 + 1:02}"}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 30), st.floats(1.5, 20), clocks())
def test_a_slow_link_in_a_node_is_named_and_nothing_else(
    first: int, factor: float, clock: Clock
) -> None:
    if first % 8 == 7:
        return
    found = slow(Faults(pairs={(first, first + 1): factor}), clock=clock)
    assert found == {f"link {first}-{first + 1} on host n{first // 8 + 1:02}"}


def test_a_slow_rail_between_two_nodes_is_named() -> None:
    found = slow(Faults(pairs={(9, 17): 4.0}))
    assert found == {"link n02-n03, ranks 9-17"}


def test_a_slow_adapter_is_one_fault_and_not_two() -> None:
    found = slow(Faults(pairs={(1, 9): 4.0, (9, 17): 4.0}))
    assert found == {"links of rank 9 on host n02"}


def test_a_slow_cable_between_two_hosts_is_one_fault_and_not_eight() -> None:
    found = slow(Faults(pairs={(rank, rank + 8): 4.0 for rank in range(8, 16)}))
    assert found == {"link n02-n03"}


def test_a_host_with_slow_links_is_one_fault() -> None:
    pairs = {(rank, rank + 8): 4.0 for rank in range(16)}
    assert slow(Faults(pairs=pairs)) == {"links of host n02"}


@pytest.mark.parametrize("level", ["nvlink", "infiniband"])
def test_a_slow_level_is_named_and_nothing_else(level: str) -> None:
    assert slow(Faults(levels={level: 2.0})) == {f"level {level}"}


@pytest.mark.parametrize("from_bytes", [0, 2**24])
def test_a_slow_group_is_named_where_no_link_of_it_is(from_bytes: int) -> None:
    rows = [
        replace(row, seconds=tuple(3 * one for one in row.seconds))
        if isinstance(row, MeasuredCall)
        and (row.group, row.first_rank) == ("inside", 8)
        and row.gathered_bytes >= from_bytes
        else row
        for row in log_of(four_nodes())
    ]
    found = check(rows, four_nodes(), tolerance=TOLERANCE)
    assert {gate.where for gate in found} == {"links inside host n02"}


def test_all_gpus_being_slow_is_seen_beside_the_profile() -> None:
    found = slow(Faults(ranks=dict.fromkeys(range(32), 1.5)))
    assert found == {"all ranks"}


def test_a_link_that_is_slow_inside_does_not_hide_a_slow_gpu() -> None:
    found = slow(Faults(ranks={30: 2.0}, pairs={(0, 1): 4.0}))
    assert found == {"rank 30 on host n04", "link 0-1 on host n01"}


def test_a_slow_network_does_not_hide_behind_a_slower_rail() -> None:
    """The link is named first; the level shows again when it is mended."""
    assert slow(Faults(pairs={(0, 8): 9.0}, levels={"infiniband": 3.0})) == {
        "link n01-n02, ranks 0-8"
    }


def test_a_profile_that_nobody_measured_may_be_off_by_its_errors() -> None:
    guess = cluster(gpus=16)
    rows = log_of(guess, faults=Faults(levels={"nvlink": 1.3}))
    assert check(rows, guess, tolerance=TOLERANCE) == ()
    known = replace(guess, device=replace(guess.device, evidence="measured"))
    assert {gate.where for gate in check(rows, known, tolerance=TOLERANCE)} == {"level nvlink"}


def test_more_tolerance_lets_more_pass() -> None:
    rows = log_of(four_nodes(), faults=Faults(ranks={3: 1.5}))
    assert check(rows, four_nodes(), tolerance=0.2)
    assert not check(rows, four_nodes(), tolerance=0.7)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_one_rank_and_two_can_be_checked(gpus: int) -> None:
    small = cluster(gpus=gpus)
    assert slow(Faults(), small) == set()
    found = slow(Faults(ranks={0: 3.0}), small)
    assert found == ({"all ranks"} if gpus == 1 else {"rank 0 on host n01"})


def test_every_part_has_a_gate_and_says_against_whom() -> None:
    found = gates(log_of(four_nodes()), four_nodes(), tolerance=TOLERANCE)
    assert {gate.kind for gate in found} == {"rank", "device", "pair", "group", "level"}
    beside_profile = {gate.kind for gate in found if gate.against == "profile"}
    assert beside_profile == {"device", "level"}
    assert {gate.what for gate in found if gate.kind == "device"} == {
        "bf16 matmul",
        "fp8 matmul",
        "memory",
        "attention forward",
        "attention backward",
        "kernel launches",
        "copies to device",
        "copies to host",
    }
    assert {gate.what for gate in found if gate.kind == "level"} == {"bandwidth", "latency"}


def test_small_products_and_rare_formats_are_not_held_against_the_profile() -> None:
    rows = [
        *log_of(four_nodes()),
        *(
            MeasuredMatmul(rank=rank, m=256, n=256, k=256, dtype="fp32", seconds=(1.0, 1.0))
            for rank in range(32)
        ),
    ]
    assert check(rows, four_nodes(), tolerance=TOLERANCE) == ()


def test_noise_falls_with_the_rows_and_is_there_with_one() -> None:
    clock = Clock(noise=0.1, outliers=0.0).repeat()
    rows = [timed(clock(1.0), 1.0) for _ in range(100)]
    assert 0 < noise(rows) < noise(rows[:25]) < noise(rows[:4])
    assert noise(rows[:1]) > 0.02
    assert noise([timed((2.0,), 1.0)]) == 0.0


def test_a_part_whose_repeats_were_mostly_disturbed_is_not_slow() -> None:
    assert timed((1.0, 5.0, 5.1), 1.0).log_factor == 0.0
    assert timed((2.0, 5.0, 5.1), 1.0).log_factor > 0.5


def test_few_repeats_of_which_many_are_disturbed_raise_few_false_alarms() -> None:
    clock = Clock(noise=0.05, outliers=0.1, repeats=3)
    healthy = cluster(gpus=8)
    alarms = [seed for seed in range(40) if slow(Faults(), healthy, replace(clock, seed=seed))]
    assert len(alarms) <= 2


def test_a_gate_passes_up_to_its_limit() -> None:
    gate = Gate(kind="rank", where="", what="", level=None, factor=1.2, limit=1.2, rows=1)
    assert gate.passed
    assert not replace(gate, factor=1.2001).passed


def test_a_log_without_calls_or_kernels_has_nothing_to_say() -> None:
    rows = log_of(four_nodes(), sizes=SIZES[-4:])
    assert gates(rows[:1], four_nodes(), tolerance=TOLERANCE) == ()

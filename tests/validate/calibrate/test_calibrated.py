"""A calibrated cluster: what was measured is new, all else as it was, and the band is narrower."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fsdpplan.cost.band import log_error
from fsdpplan.errors import SpecError
from fsdpplan.spec.cluster import Cluster, StepError
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMatmul, Measurement
from fsdpplan.validate.calibrate.calibrated import (
    Calibration,
    calibrated,
    machine_of,
    measured_error,
)
from tests.cost.clusters import cluster
from tests.cost.problems import case
from tests.validate.artificial import SIZES, Clock, Faults, log_of

NAMES = [field.name for field in fields(StepError)]


def guessed(true: Cluster) -> Cluster:
    """`true` as it is before anybody measures: shares of a data sheet, and its wide errors."""
    fit = replace(
        true.device.fit,
        matmul_fraction=0.7,
        memory_fraction=0.7,
        attention_forward_fraction=0.4,
        kernel_launch_seconds=5e-6,
    )
    errors = cluster("dgx-h200", gpus=8).device.error
    levels = tuple(
        replace(level, bandwidth_fraction=0.9, half_bandwidth_bytes=1e6, base_seconds=2e-5)
        for level in true.levels
    )
    device = replace(true.device, fit=fit, error=errors, evidence="datasheet")
    return replace(true, device=device, levels=levels)


def calibration(true: Cluster, start: Cluster | None = None) -> Calibration:
    return calibrated(log_of(true, clock=Clock(seed=1)), start or guessed(true))


def test_a_whole_log_makes_a_measured_device_with_the_errors_of_such() -> None:
    found = calibration(cluster(gpus=16))
    assert found.cluster.device.evidence == "measured"
    error, measured = found.cluster.device.error, measured_error()
    before = guessed(cluster(gpus=16)).device.error
    kept = {"bubble_fraction", "layout_fraction"}
    for name in NAMES:
        expected = before if name in kept else measured
        assert getattr(error, name) == getattr(expected, name), name
    assert not found.taken_over


def test_a_fit_that_explains_little_has_its_residual_as_error() -> None:
    true = cluster(gpus=16)
    rows = [
        replace(row, seconds=tuple(one * (1 + index % 5) for one in row.seconds))
        if isinstance(row, MeasuredCall) and row.group == "inside"
        else row
        for index, row in enumerate(log_of(true))
    ]
    found = calibrated(rows, guessed(true))
    assert found.levels[0] is not None
    residual = found.levels[0].residual_fraction
    assert residual > 0.3
    assert found.cluster.device.error.inside_fraction == pytest.approx(residual, rel=0.01)


def test_the_same_step_is_predicted_with_a_narrower_band() -> None:
    true = cluster(gpus=16)
    start = guessed(true)
    problem = case("llama-3-8b", dp_shard=16, micro_batch=2, num_microbatches=2, seq_len=4096)

    def step(on: Cluster) -> tuple[float, float]:
        interval = replace(problem, cluster=on).estimate.step_seconds
        return interval.expected, interval.upper / interval.expected - 1

    seconds, width = step(calibration(true).cluster)
    assert seconds == pytest.approx(step(true)[0], rel=0.02)
    # what the software is off by, no kernel tells: the spread between stacks stays in both bands
    assert width < step(start)[1]
    beyond = [
        log_error(
            replace(problem, cluster=on).estimate.time, replace(on.device.error, stack_fraction=0.0)
        )
        for on in (calibration(true).cluster, start)
    ]
    assert beyond[0] < 0.75 * beyond[1]


def test_one_node_leaves_the_network_as_it_was() -> None:
    start = guessed(cluster(gpus=16))
    found = calibration(cluster(gpus=8), start)
    assert found.cluster.levels[1] == start.levels[1]
    assert found.cluster.device.error.across_fraction == start.device.error.across_fraction
    assert found.cluster.levels[0] != start.levels[0]
    assert found.taken_over == ("infiniband",)
    assert any("infiniband" in note for note in found.notes)
    assert not any("infiniband" in field for field in found.sources)


def test_a_log_that_was_cut_short_changes_what_it_has() -> None:
    start = guessed(cluster(gpus=8))
    rows: list[Measurement] = [
        row
        for row in log_of(cluster(gpus=8))
        if not isinstance(row, MeasuredCall) and not hasattr(row, "seq_len")
    ]
    found = calibrated(rows, start)
    assert found.cluster.levels == start.levels
    error = found.cluster.device.error
    assert error.matmul_fraction == measured_error().matmul_fraction
    assert error.attention_fraction == start.device.error.attention_fraction
    assert error.base_fraction == start.device.error.base_fraction
    assert found.cluster.device.evidence == "datasheet"
    assert any("attention_forward_fraction" in note for note in found.notes)


def test_small_calls_alone_do_not_show_a_bandwidth() -> None:
    true = cluster(gpus=16)
    found = calibrated(log_of(true, sizes=SIZES[:6]), guessed(true))
    before, after = guessed(true).device.error, found.cluster.device.error
    assert (after.inside_fraction, after.across_fraction) == (
        before.inside_fraction,
        before.across_fraction,
    )
    assert [note for note in found.notes if note.startswith("nvlink was measured up to 1.0 MiB")]


def test_nothing_measured_changes_nothing_but_what_torch_says() -> None:
    start = guessed(cluster(gpus=8))
    found = calibrated([machine_of(log_of(start))], start)
    assert found.cluster == start


def test_every_measured_number_says_how() -> None:
    found = calibration(cluster(gpus=16))
    for field in (
        "cluster.device.fit.matmul_fraction",
        "cluster.device.fit.host_link_fraction",
        "cluster.levels.nvlink.bandwidth_fraction",
        "cluster.levels.infiniband.latency_seconds",
        "cluster.device.error.inside_fraction",
    ):
        source = found.sources[field]
        assert source.date == "2026-11-22"
        assert source.measured_on is not None
        assert "16 x NVIDIA H100" in source.measured_on
        assert source.how
    assert "rows" in (found.sources["cluster.levels.nvlink.base_seconds"].how or "")


def test_ranks_that_differ_are_told() -> None:
    rows = log_of(cluster(gpus=8), faults=Faults(ranks={2: 1.4}))
    found = calibrated(rows, guessed(cluster(gpus=8)))
    assert any("ranks differ" in note and "matmul_fraction" in note for note in found.notes)


def test_cpu_processes_keep_their_doubts_on_shapes_but_know_their_speed() -> None:
    start = cluster("cpu", gpus=4)
    found = calibrated(log_of(start, sizes=SIZES[:8]), start).cluster.device
    assert found.error.base_fraction == measured_error().base_fraction < 0.1
    assert found.error.matmul_fraction == start.device.error.matmul_fraction
    assert found.evidence == "measured"


def test_a_log_of_another_machine_is_refused() -> None:
    rows = log_of(cluster(gpus=8))
    with pytest.raises(SpecError, match="name another profile with --hardware"):
        calibrated(rows, cluster("cpu", gpus=8))
    with pytest.raises(SpecError, match="must agree"):
        calibrated(rows, cluster(gpus=4))
    with pytest.raises(SpecError, match="0 rows that say what it was measured on"):
        calibrated(rows[1:], cluster(gpus=8))
    with pytest.raises(SpecError, match="measure again"):
        calibrated([replace(machine_of(rows), world=7), *rows[1:]], cluster(gpus=8))


def test_calibrating_again_from_what_was_found_finds_the_same() -> None:
    true = cluster(gpus=8)
    once = calibration(true)
    again = calibration(true, once.cluster)
    for field in ("matmul_fraction", "memory_fraction"):
        assert getattr(again.cluster.device.fit, field) == pytest.approx(
            getattr(once.cluster.device.fit, field), rel=0.01
        )
    assert again.cluster.device.error == once.cluster.device.error


def test_only_matmuls_of_formats_that_are_trained_in_set_the_share() -> None:
    true = cluster(gpus=8)
    rows = [*log_of(true)]
    slow = [
        replace(row, dtype="fp16", seconds=tuple(3 * one for one in row.seconds))
        for row in rows
        if isinstance(row, MeasuredMatmul) and row.dtype == "bf16"
    ]
    found = calibrated([*rows, *slow], guessed(true))
    assert found.cluster.device.fit.matmul_fraction == pytest.approx(
        true.device.fit.matmul_fraction, rel=0.02
    )

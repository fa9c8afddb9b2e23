"""What deserves a measurement: by its error times its elasticity, kinks and all."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log, sqrt
from typing import Any

import pytest

from fsdpplan.cost.band import NORMAL_80, error_of, log_error, step_interval
from fsdpplan.cost.estimate import estimate
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice.measurement import band_fraction, measurements, unknowns
from fsdpplan.search.advice.sensitivity import sensitivities
from fsdpplan.spec.plan import Case
from fsdpplan.validate.calibrate.calibrated import measured_error
from tests.cost.problems import case

FSDP: dict[str, Any] = {
    "sharding": "fsdp",
    "reshard_after_forward": "always",
    "gradient_sync": "every",
}
SLOW = case("llama-3.1-8b", dp_shard=64, micro_batch=1, profile="dgx-a100-80g-hdr1", **FSDP)
"""Waits for its network."""


def with_errors(asked: Case, **errors: float) -> Case:
    """`asked` on a device with other errors."""
    device = asked.cluster.device
    device = replace(device, error=replace(device.error, **errors))
    return replace(asked, cluster=replace(asked.cluster, device=device))


def test_a_small_error_moves_the_step_by_its_elasticity() -> None:
    small = with_errors(SLOW, matmul_fraction=1e-4, across_fraction=1e-4, attention_fraction=1e-4)
    by_kind = {one.unknown.kind: one for one in measurements(small, measured=measured_error())}
    assert "matmul_fraction" not in by_kind  # such a move is not worth a line
    larger = with_errors(SLOW, across_fraction=2e-3, matmul_fraction=1e-3)
    found = {one.unknown.kind: one for one in measurements(larger, measured=measured_error())}
    slopes = {one.field: one.step for one in sensitivities(larger)}
    (across,) = found["across_fraction"].unknown.fields
    assert found["across_fraction"].moves_fraction == pytest.approx(
        2e-3 * abs(slopes[across]), rel=0.02
    )
    assert found["across_fraction"].gain == 0  # known better than a measured one
    assert found["stack_fraction"].moves_fraction == error_of(SLOW.cluster, "own").stack_fraction


def test_the_worthiest_is_the_first_and_narrows_the_band_most() -> None:
    found = measurements(SLOW, measured=measured_error(), told_stack=True)
    assert found[0].unknown.kind == "across_fraction"
    assert found[0].unknown.means == "calibrate between nodes"
    gains = [one.gain for one in found]
    assert gains == sorted(gains, reverse=True)
    bands = [band_fraction(SLOW, [one]) for one in found]
    assert bands[0] == min(bands)
    assert band_fraction(SLOW, found) < bands[0] < band_fraction(SLOW)
    step = estimate(SLOW).step_seconds
    assert band_fraction(SLOW) == pytest.approx(step.upper / step.expected - 1)
    time, error = estimate(SLOW).time, error_of(SLOW.cluster, "own")
    calibrated = replace(error, across_fraction=measured_error().across_fraction)
    assert bands[0] == pytest.approx(exp(NORMAL_80 * log_error(time, calibrated)) - 1)
    assert step_interval(time, calibrated).upper == pytest.approx(
        (1 + bands[0]) * time.total_seconds
    )


def test_a_run_of_ones_own_settles_the_stack() -> None:
    found = measurements(SLOW, measured=measured_error())
    stack = next(one for one in found if one.unknown.means == "run")
    error = error_of(SLOW.cluster, "own")
    assert stack.gain == error.stack_fraction**2
    before, after = band_fraction(SLOW), band_fraction(SLOW, [stack])
    assert log(1 + before) / NORMAL_80 == pytest.approx(
        hypot(log(1 + after) / NORMAL_80, error.stack_fraction)
    )
    assert not any(
        one.unknown.means == "run"
        for one in measurements(SLOW, measured=measured_error(), told_stack=True)
    )


def test_what_hides_now_may_show() -> None:
    """A network of which nothing shows moves the step where it may be far slower."""
    hidden = case("llama-3.1-8b", dp_shard=16, micro_batch=4, **FSDP)
    unsure = with_errors(hidden, across_fraction=1.0)
    (across,) = (
        one
        for one in measurements(unsure, measured=measured_error())
        if one.unknown.kind == "across_fraction"
    )
    (slope,) = sensitivities(hidden, among=set(across.unknown.fields))
    assert across.moves_fraction > 3 * abs(slope.step) * 1.0
    assert sqrt(across.gain) > 0


def test_one_node_has_no_network_to_measure() -> None:
    inside = case("gpt2-large", dp_shard=8, **FSDP)
    assert {one.kind for one in unknowns(inside)}.isdisjoint({"across_fraction"})
    assert {one.means for one in unknowns(inside)} == {"run", "calibrate"}
    rack = replace(SLOW, cluster=load_cluster("gb200-nvl72", gpus=64).cluster)
    inner = next(one for one in unknowns(rack) if one.kind == "inside_fraction")
    assert inner.means == "calibrate between nodes"

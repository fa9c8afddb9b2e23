"""Derivatives against finite differences of other steps, from both sides; kinks; Euler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import Any

import pytest

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.network import collectives
from fsdpplan.files.clusters import load_cluster
from fsdpplan.search.advice.sensitivity import (
    Sensitivity,
    counts,
    evidence_of,
    held_fraction,
    rates_and_constants,
    sensitivities,
    with_count,
    with_value,
)
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.plan import Case
from tests.cost.problems import case

FSDP: dict[str, Any] = {
    "sharding": "fsdp",
    "reshard_after_forward": "always",
    "gradient_sync": "every",
}
CASES = {
    "one GPU": case("gpt2-large", micro_batch=4),
    "DDP": case(dp_replicate=16, sharding="ddp", micro_batch=2, num_microbatches=2),
    "FSDP": case("llama-3.1-8b", dp_shard=64, micro_batch=2, **FSDP),
    "HSDP": case("llama-3.1-8b", dp_replicate=4, dp_shard=8, num_microbatches=4, **FSDP),
    "TP": case("llama-3.1-8b", dp_shard=4, tp=8, sequence_parallel=True, **FSDP),
    "A100": case("gpt2-large", profile="dgx-a100-80g-hdr1", dp_shard=16, compile=False, **FSDP),
    "PP": case(
        "llama-3.1-8b",
        pp=4,
        dp_shard=8,
        num_microbatches=8,
        schedule="1f1b",
        sharding="fsdp",
        reshard_after_forward="never",
        gradient_sync="last",
    ),
    "fp8": case("llama-3.1-8b", dp_shard=16, precision="fp8", **FSDP),
    "experts": case("mixtral-8x7b", dp_shard=32, ep=8, **FSDP),
}


def seconds(asked: Case) -> float:
    """Its expected step."""
    return estimate(asked).step_seconds.expected


def elasticity(asked: Case, field: str, fraction: float) -> float:
    """Of the step, by another step of the input."""
    value = dict(rates_and_constants(asked))[field]
    other = with_value(asked, field, value * (1 + fraction))
    return log(seconds(other) / seconds(asked)) / log(1 + fraction)


@pytest.fixture(scope="module")
def of() -> Callable[[str], tuple[Sensitivity, ...]]:
    """The sensitivities of a case by its name, each taken once."""
    seen: dict[str, tuple[Sensitivity, ...]] = {}

    def found(name: str) -> tuple[Sensitivity, ...]:
        if name not in seen:
            seen[name] = sensitivities(CASES[name])
        return seen[name]

    return found


Of = Callable[[str], tuple[Sensitivity, ...]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_both_sides_are_those_of_other_steps(name: str, of: Of) -> None:
    for one in of(name):
        if one.counted:
            continue
        assert one.less is not None
        for side, sign in ((one.more, 1), (one.less, -1)):
            if side is None:  # a share of 1
                continue
            for step in (3e-6, 1e-4) if abs(side.step) > 1e-3 else (1e-4,):
                found = elasticity(CASES[name], one.field, sign * step)
                assert side.step == pytest.approx(found, abs=3e-4, rel=3e-3), one.field


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_times_less_rates_are_the_step(name: str, of: Of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Euler: with NCCL's own times and rates, which are no inputs, they add up to 1."""
    found, fraction, before = of(name), 1e-5, seconds(CASES[name])
    for word in ("SIMPLE", "LL128", "LL"):
        one: collectives.Protocol = getattr(collectives, word)
        slower = replace(
            one,
            base_seconds=one.base_seconds and one.base_seconds * (1 + fraction),
            inner_hop_seconds=one.inner_hop_seconds * (1 + fraction),
            outer_hop_seconds=one.outer_hop_seconds * (1 + fraction),
            outer_cap_bytes_per_second=one.outer_cap_bytes_per_second / (1 + fraction),
        )
        monkeypatch.setattr(collectives, word, slower)
    own = (collectives.SIMPLE, collectives.LL, collectives.LL128)
    capable = {"none": own[:1], "ll": own[:2], "ll128": own}
    monkeypatch.setattr(collectives, "_CAPABLE", capable)
    fresh = replace(CASES[name].cluster, name="another")  # nothing of it is remembered
    held = log(seconds(replace(CASES[name], cluster=fresh)) / before) / log(1 + fraction)
    assert held_fraction(found) == pytest.approx(held, abs=1e-4)
    assert 0 <= held < 0.6
    if name == "one GPU":
        assert held == 0


def test_elasticities_are_shares_where_nothing_overlaps(of: Of) -> None:
    """On one GPU a part's share of the step is what its rate's elasticity says."""
    time = estimate(CASES["one GPU"]).time
    by_field = {one.field.rpartition(".")[2]: one for one in of("one GPU")}
    share = time.attention_seconds / time.total_seconds
    # its softmax and masks are bound by memory
    assert -by_field["attention_forward_fraction"].step == pytest.approx(share, rel=0.02)
    assert by_field["kernel_launch_seconds"].step == pytest.approx(
        time.launch_seconds / time.total_seconds, abs=1e-6
    )
    flops, memory = (
        -by_field[name].step
        for name in ("peak_bf16_flops_per_second", "memory_bandwidth_bytes_per_second")
    )
    start = by_field["matmul_start_seconds"].step
    launches = by_field["kernel_launch_seconds"].step
    assert flops + memory + start + launches == pytest.approx(1, abs=1e-3)


def kink(of_step: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is level on one side begins to grow."""
    level = of_step(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if of_step(middle) != level else (low, middle)
    return (low + high) / 2


def test_a_switch_of_protocols_is_seen_from_both_sides() -> None:
    """Simple starts at the level's own time, LL128 at NCCL's: past their meeting LL128 is taken."""
    base = case(dp_replicate=16, sharding="ddp", micro_batch=1, num_microbatches=1)
    field = "cluster.levels.infiniband.base_seconds"

    def step(value: float) -> float:
        return seconds(with_value(base, field, value))

    at = with_value(base, field, kink(step, 1e-6, 0.9))
    (found,) = sensitivities(at, among={field})
    assert found.has_kink
    assert found.more is not None
    assert found.less is not None
    assert found.more.step == pytest.approx(0, abs=1e-9)
    assert found.less.step > 1e-3
    assert found.less.step == pytest.approx(elasticity(at, field, -3e-6), rel=0.02)
    assert found.more.step == pytest.approx(elasticity(at, field, 1e-3), abs=1e-9)


def test_what_hides_costs_on_one_side() -> None:
    """Links so fast that nothing waits for them: faster ones bring nothing, slower ones cost."""
    base = case("llama-3.1-8b", dp_shard=16, micro_batch=4, **FSDP)
    field = "cluster.levels.infiniband.port_bandwidth_bytes_per_second"
    now = dict(rates_and_constants(base))[field]
    kinks = 0
    for exponent in range(-16, 9):
        at = with_value(base, field, now * 2 ** (exponent / 8))
        (found,) = sensitivities(at, among={field})
        assert found.far_less is not None
        assert found.far_more is not None
        assert found.far_less.step <= found.far_more.step + 1e-9 <= 2e-9
        kinks += found.far_less.step < 1.5 * found.far_more.step - 1e-3
    assert kinks


def test_a_share_of_1_has_no_more() -> None:
    field = "cluster.levels.nvlink.bandwidth_fraction"
    whole = with_value(CASES["TP"], field, 1.0)
    (found,) = sensitivities(whole, among={field})
    assert found.more is None
    assert found.less is not None
    assert found.less.step < 0


def test_every_number_that_prices_is_an_input() -> None:
    """Of the device, of its fitted numbers and of links: all that are not 0."""
    fields = {field for field, _ in rates_and_constants(CASES["FSDP"])}
    fit = CASES["FSDP"].cluster.device.fit
    for name in ("matmul_fraction", "overlap_slowdown_fraction", "fragmentation_fraction"):
        assert f"cluster.device.fit.{name}" in fields
        assert getattr(fit, name)
    assert "cluster.levels.infiniband.latency_seconds" in fields
    assert not any("peak_memory" in field or field.endswith("ports") for field in fields)
    assert evidence_of("by fsdpplan calibrate: 40 rows") == "calibrated"
    assert evidence_of("flag --inter-bw, per GPU and direction") == "typed"
    assert evidence_of("kernels; chosen, not fitted: a share") == "guessed"
    assert evidence_of("by fsdpplan.validate.fit.steps: least") == "fitted"
    assert evidence_of("taken over from h100: by fsdpplan.validate.fit.steps") == "relative"
    assert evidence_of("a data sheet") == evidence_of(None) == "datasheet"


def test_what_is_counted_moves_by_the_least_legal_step() -> None:
    base = case("llama-3.1-8b", dp_shard=16, num_microbatches=4, **FSDP)

    def resized(gpus: int) -> Cluster:
        return load_cluster("dgx-h100", gpus=gpus).cluster

    fields = {field for field, _ in counts(base)}
    found = sensitivities(base, resized=resized, among=fields)
    by_field = {one.field: one for one in found if one.counted}
    assert set(by_field) == fields
    batch, gpus = by_field["training.global_batch"], by_field["cluster.gpus"]
    assert batch.more is not None
    assert batch.less is not None
    assert (batch.more.factor, batch.less.factor) == (5 / 4, 1 / 2)
    assert gpus.more is not None
    assert gpus.more.factor == 2
    for one in by_field.values():
        for side in one.sides:
            other = with_count(base, one.field, round(one.value * side.factor), resized=resized)
            assert other is not None
            assert legal_layout_problem(other) is None
            assert side.step_factor == pytest.approx(seconds(other) / seconds(base))
            tokens = other.training.tokens_per_step / base.training.tokens_per_step
            assert side.token_factor == pytest.approx(side.step_factor / tokens)
            peaks = [estimate(each).memory.peak_device_bytes for each in (other, base)]
            assert side.memory_factor == pytest.approx(peaks[0] / peaks[1])

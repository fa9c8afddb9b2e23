"""Step time: what holds for every layout, model and training software that is priced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.estimate import (
    StepTime,
    executed_flops_ratio,
    host_chance,
    slower_host_seconds,
    step_time,
)
from fsdpplan.cost.model.params import mfu_fraction, useful_flops_per_token
from fsdpplan.spec.cluster import Cluster
from tests.cost.problems import Case, case
from tests.cost.wide import wide_cases

FACTORS = st.sampled_from([1.1, 2.0, 10.0])


def priced(case: Case) -> StepTime:
    """Its time."""
    return step_time(case)


def seconds(case: Case) -> float:
    """Its whole time."""
    return priced(case).time.total_seconds


def with_links(case: Case, *, level: int, factor: float) -> Case:
    """The same with `factor` times the bandwidth at one level."""
    levels = list(case.cluster.levels)
    index = min(level, len(levels) - 1)
    port = levels[index].port_bandwidth_bytes_per_second
    levels[index] = replace(levels[index], port_bandwidth_bytes_per_second=factor * port)
    return replace(case, cluster=replace(case.cluster, levels=tuple(levels)))


def with_memory(case: Case, factor: float) -> Case:
    """The same with `factor` times the memory bandwidth."""
    device = case.cluster.device
    faster = replace(
        device,
        memory_bandwidth_bytes_per_second=factor * device.memory_bandwidth_bytes_per_second,
    )
    return replace(case, cluster=replace(case.cluster, device=faster))


@given(wide_cases())
def test_no_part_of_a_step_is_negative_and_parts_of_parts_are_smaller(drawn: Case) -> None:
    time = priced(drawn).time
    assert time.compute_seconds > 0
    assert time.bubble_seconds >= 0
    assert (time.bubble_seconds > 0) <= (drawn.layout.pp > 1)
    assert time.optimizer_seconds > 0
    most = time.compute_seconds * (1 + 1e-9)
    assert min(time.matmul_seconds, time.attention_seconds, time.launch_seconds) >= 0
    assert 0 < time.matmul_seconds + time.attention_seconds + time.launch_seconds <= most
    waiting = time.exposed_inside_seconds + time.exposed_across_seconds
    assert min(time.exposed_inside_seconds, time.exposed_across_seconds) >= 0
    assert waiting == pytest.approx(time.exposed_communication_seconds)


@given(wide_cases())
def test_no_collective_is_waited_for_longer_than_it_takes(drawn: Case) -> None:
    step = priced(drawn)
    for row in step.communication:
        assert 0 <= row.exposed_seconds <= row.seconds * (1 + 1e-9)
    exposed = sum(row.exposed_seconds for row in step.communication)
    waiting = step.time.exposed_communication_seconds
    assert exposed <= waiting * (1 + 1e-9) + 1e-12
    if drawn.layout.offload == "none":  # the host link has no row
        assert exposed == pytest.approx(waiting, rel=1e-3, abs=1e-6)


@given(wide_cases())
def test_one_rank_communicates_nothing(drawn: Case) -> None:
    if drawn.layout.world == 1:
        assert priced(drawn).communication == ()
        assert priced(drawn).time.exposed_communication_seconds == 0
    for row in priced(drawn).communication:
        assert row.ranks > 1


@given(wide_cases())
def test_nothing_is_faster_than_the_roofline(drawn: Case) -> None:
    flops = drawn.training.tokens_per_step * useful_flops_per_token(
        model=drawn.model, seq_len=drawn.training.seq_len
    )
    peak = drawn.cluster.device.peak_flops_per_second(drawn.training.precision)
    assert seconds(drawn) >= flops / (peak * drawn.cluster.gpus)


@given(wide_cases())
def test_recomputation_executes_more_flops_but_never_more_than_the_peak(drawn: Case) -> None:
    ratio = executed_flops_ratio(drawn)
    assert 1 <= ratio < 1.4
    assert (ratio > 1) == (drawn.layout.activation_checkpointing != "none")
    rate = drawn.training.tokens_per_step / seconds(drawn) / drawn.cluster.gpus
    mfu = mfu_fraction(
        model=drawn.model,
        seq_len=drawn.training.seq_len,
        tokens_per_second_per_gpu=rate,
        peak_flops_per_second=drawn.cluster.device.peak_flops_per_second(drawn.training.precision),
    )
    assert 0 < mfu <= mfu * ratio <= 1


@given(wide_cases(), st.integers(0, 1), FACTORS)
def test_a_faster_link_never_makes_a_slower_step(drawn: Case, level: int, factor: float) -> None:
    assert seconds(with_links(drawn, level=level, factor=factor)) <= seconds(drawn) * (1 + 1e-6)


@given(wide_cases(), FACTORS)
def test_more_memory_bandwidth_never_makes_a_slower_step(drawn: Case, factor: float) -> None:
    assert seconds(with_memory(drawn, factor)) <= seconds(drawn) * (1 + 1e-6)


def row(step: StepTime, collective: str, axis: str) -> tuple[int, int, float, float]:
    """(count, bytes, seconds, exposed) of one collective on one axis."""
    found = [r for r in step.communication if (r.collective, r.axis) == (collective, axis)]
    return (
        sum(r.count for r in found),
        sum(r.bytes for r in found),
        sum(r.seconds for r in found),
        sum(r.exposed_seconds for r in found),
    )


def test_zero_with_overlap_hides_its_reductions_but_the_last() -> None:
    common = {"sharding": "zero1", "dp_shard": 64, "gradient_sync": "last", "seq_len": 4096}
    hidden = priced(case("llama-3.1-8b", runtime="megatron", **common))
    _, _, taken, waited = row(hidden, "reduce_scatter", "dp_shard")
    assert waited < 0.2 * taken
    after = priced(case("llama-3.1-8b", runtime="megatron_2020", **common))
    _, _, taken, waited = row(after, "all_reduce", "dp_shard")
    assert waited == pytest.approx(taken)


def test_small_buckets_pay_for_their_start_and_large_ones_lose_overlap() -> None:
    def waited(bucket_bytes: int) -> float:
        run = case(
            "llama-3.1-8b",
            sharding="ddp",
            dp_replicate=16,
            ddp_bucket_bytes=bucket_bytes,
            gradient_sync="last",
            seq_len=4096,
            micro_batch=2,
        )
        return priced(run).time.exposed_communication_seconds

    assert waited(2**28) < waited(2**36)  # all in one piece, after backward
    _, _, small, _ = row(priced(_buckets(2**16)), "all_reduce", "dp_replicate")
    _, _, usual, _ = row(priced(_buckets(25 * 2**20)), "all_reduce", "dp_replicate")
    assert small > usual


def _buckets(bucket_bytes: int) -> Case:
    return case(sharding="ddp", dp_replicate=16, ddp_bucket_bytes=bucket_bytes)


def test_a_unit_of_many_blocks_starts_less_often_and_hides_less() -> None:
    def step(blocks: int) -> StepTime:
        return priced(case("llama-3.1-8b", dp_shard=64, wrap_blocks=blocks, seq_len=4096))

    one, four, whole = step(1), step(4), step(32)
    gathers = [row(each, "all_gather", "dp_shard")[2] for each in (one, four, whole)]
    assert gathers == sorted(gathers, reverse=True)
    waits = [each.time.exposed_communication_seconds for each in (one, whole)]
    assert waits[0] < 0.5 * waits[1]


def test_broadcasting_from_hundreds_of_ranks_takes_longer_than_gathering() -> None:
    common = {"sharding": "zero1", "gradient_sync": "last", "profile": "dgx-a100-80g-hdr"}
    owners = case("llama-3.1-8b", runtime="internevo", dp_shard=512, **common)
    inside = case("llama-3.1-8b", runtime="internevo", dp_replicate=64, dp_shard=8, **common)
    # 291 tensors, each over 511 hops of about 6 microseconds; in a node the bytes decide
    assert 0.5 < row(priced(owners), "broadcast", "dp_shard")[3] < 2.0
    assert row(priced(inside), "broadcast", "dp_shard")[3] < 0.15


def test_the_messages_that_a_pipeline_waits_for_have_a_row() -> None:
    chain = case(
        "llama-3.1-8b",
        pp=4,
        sharding="ddp",
        gradient_sync="last",
        schedule="1f1b",
        num_microbatches=8,
        seq_len=4096,
    )
    count, _, taken, waited = row(priced(chain), "send_recv", "pp")
    assert count in (8, 16)
    assert 0 < waited <= taken


def test_offload_pays_for_the_optimizer_on_the_host_and_the_link() -> None:
    resident = priced(case("llama-3.1-8b", dp_shard=8, seq_len=4096)).time
    offloaded = priced(case("llama-3.1-8b", dp_shard=8, seq_len=4096, offload="cpu")).time
    assert offloaded.optimizer_seconds > 10 * resident.optimizer_seconds
    assert offloaded.compute_seconds == pytest.approx(resident.compute_seconds, rel=0.02)


def test_the_device_waits_for_a_slow_host() -> None:
    eager = case(micro_batch=1, seq_len=128, sharding="ddp", compile=False)
    assert priced(eager).time.launch_seconds <= priced(eager).time.compute_seconds
    fit = replace(eager.cluster.device.fit, kernel_launch_seconds=1e-4)
    slow = replace(eager.cluster, device=replace(eager.cluster.device, fit=fit))
    time = priced(replace(eager, cluster=slow)).time
    assert time.launch_seconds > 0.5 * time.compute_seconds
    large = case("llama-3.1-8b", dp_shard=8, seq_len=8192, micro_batch=2)
    assert priced(large).time.launch_seconds == 0
    assert 0 <= priced(large).time.launch_chance_seconds < 0.05 * priced(large).time.compute_seconds


@given(wide_cases())
def test_a_host_as_fast_as_predicted_changes_nothing_and_a_slower_one_no_step_for_the_better(
    drawn: Case,
) -> None:
    time = priced(drawn).time
    steps = [slower_host_seconds(time, factor) for factor in (0.3, 1.0, 2.0, 8.0)]
    assert steps == sorted(steps)
    assert steps[1] == pytest.approx(time.total_seconds)


@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0])
@pytest.mark.parametrize(
    "layout",
    [
        {"sharding": "ddp", "seq_len": 256},
        {"dp_shard": 8, "seq_len": 1024},
        {"tp": 8, "seq_len": 4096},
        {"tp": 2, "pp": 4, "schedule": "1f1b", "num_microbatches": 8, "seq_len": 1024},
    ],
    ids=["ddp", "fsdp", "tp", "pp"],
)
def test_a_step_with_a_slower_host_is_near_to_one_priced_with_it(
    layout: dict[str, Any], factor: float
) -> None:
    eager = case("llama-3.2-1b", micro_batch=1, compile=False, **layout)
    fit = eager.cluster.device.fit
    slow = replace(fit, kernel_launch_seconds=factor * fit.kernel_launch_seconds)
    cluster = replace(eager.cluster, device=replace(eager.cluster.device, fit=slow))
    exact = seconds(replace(eager, cluster=cluster))
    found = slower_host_seconds(priced(eager).time, factor)
    assert found == pytest.approx(exact, rel=0.05)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_the_chance_to_wait_for_the_host_is_even_where_both_take_as_long(
    host: float, device: float
) -> None:
    assert host_chance(host, host) == pytest.approx(0.5)
    assert host_chance(host, device) + host_chance(device, host) == pytest.approx(1.0)
    assert (host_chance(host, device) > 0.5) == (host > device) or host == pytest.approx(device)


def test_slow_replicas_are_charged_less_for_what_they_hide() -> None:
    """Slower links move fewer bytes a second through memory and multiprocessors."""
    hybrid = case("llama-3.1-8b", dp_replicate=8, dp_shard=8, seq_len=8192, micro_batch=2)
    step = priced(hybrid)
    _, _, taken, waited = row(step, "all_reduce", "dp_replicate")
    fraction = hybrid.cluster.device.fit.overlap_slowdown_fraction
    alone = replace(hybrid, cluster=_without_slowdown(hybrid.cluster))
    lost = step.time.compute_seconds - priced(alone).time.compute_seconds
    inside = sum(r.seconds - r.exposed_seconds for r in step.communication if r.axis == "dp_shard")
    assert lost < fraction * (inside + 0.3 * (taken - waited))


def _without_slowdown(cluster: Cluster) -> Cluster:
    fit = replace(cluster.device.fit, overlap_slowdown_fraction=0.0)
    return replace(cluster, device=replace(cluster.device, fit=fit))

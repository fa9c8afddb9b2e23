"""Memory: bytes on the fullest rank at its peak, and the ledgers behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.memory.ledger import rank_state
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.cost.memory.rank_quantities import RankSizes
from fsdpplan.cost.memory.sizes import rank_sizes
from fsdpplan.cost.model.params import matmul_parameter_count, parameter_count
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.spec.model import Experts
from fsdpplan.spec.plan import MemoryBreakdown
from tests.cost.clusters import golden
from tests.cost.problems import SMALL, Case, case, cases
from tests.strategies import divisors

LEDGER = golden("ledger")


def memory(case: Case) -> MemoryBreakdown:
    """Memory of the fullest rank."""
    return case.estimate.memory


def sizes_of(case: Case) -> RankSizes:
    """What the phases of the only pipeline rank add up."""
    return rank_sizes(case, whole_model(case.model), in_flight_blocks=case.model.layers)


@pytest.mark.parametrize("row", LEDGER["held"], ids=lambda row: row["claim"])
def test_golden_gradients_held_until_the_last_micro_batch(row: dict[str, object]) -> None:
    held = case(
        str(row["model"]),
        dp_shard=row["gpus"],
        gradient_sync="last",
        num_microbatches=2,
        activation_checkpointing="full",
    )
    sizes = sizes_of(held)
    gb = (sizes.blocks * sizes.held_block_bytes + sizes.ends.held_bytes) / 1e9
    assert gb == pytest.approx(row["gb"], rel=float(str(row["tolerance_fraction"])))
    assert memory(held).unsharded_gradients_bytes >= 1e9 * gb


def test_70b_never_fits_one_node_of_80_gb_whatever_the_replicas() -> None:
    hybrid = case("llama-3.1-70b", dp_replicate=8, dp_shard=8, activation_checkpointing="full")
    available = available_bytes(cluster=hybrid.cluster, training=hybrid.training)
    assert 4 * rank_state(hybrid, whole_model(hybrid.model)).optimizer_parameters * 3 > available


@given(cases())
def test_the_parts_add_up_and_none_is_negative(drawn: Case) -> None:
    parts = memory(drawn)
    named = [getattr(parts, name) for name in MemoryBreakdown.__dataclass_fields__]
    sizes = [value for value in named if isinstance(value, int)]
    assert min(sizes) >= 0
    assert parts.peak_allocated_bytes == sum(sizes[:8])
    assert parts.peak_allocated_bytes <= parts.peak_reserved_bytes <= parts.peak_device_bytes
    assert parts.optimizer_bytes == 2 * parts.parameters_bytes


@given(cases())
def test_shards_sum_to_at_least_the_whole(drawn: Case) -> None:
    layout = drawn.layout
    held = sum(
        4 * rank_state(drawn, stage).optimizer_parameters
        for stage in pipeline_ranks(model=drawn.model, layout=layout)
    )
    ranks = layout.tp * (layout.shard_ranks if layout.sharding == "fsdp" else 1)
    assert held * ranks >= 4 * parameter_count(drawn.model)


@given(cases(data_parallel_only=True, gpus=48), st.data())
def test_sharding_more_never_keeps_more(drawn: Case, data: st.DataObject) -> None:
    assume(drawn.layout.sharding == "fsdp")
    few = drawn.layout.dp_shard
    wider = replace(
        drawn.layout,
        dp_shard=few * data.draw(st.sampled_from(divisors(48 // few, 48))),
        reshard_after_forward="always",
    )
    stage = whole_model(drawn.model)
    less, more = (
        4 * rank_state(replace(drawn, layout=layout), stage).optimizer_parameters
        for layout in (drawn.layout, wider)
    )
    # a row of each tensor at the most is padding
    padding = 4 * 100 * drawn.model.layers * max(drawn.model.hidden, drawn.model.ffn_hidden)
    assert more <= less + padding


@given(cases(data_parallel_only=True))
def test_recomputing_everything_never_needs_more(drawn: Case) -> None:
    plain = memory(drawn.with_layout(activation_checkpointing="none", checkpoint_blocks="all"))
    full = memory(drawn.with_layout(activation_checkpointing="full", checkpoint_blocks="all"))
    assert full.peak_allocated_bytes <= plain.peak_allocated_bytes


@given(cases(data_parallel_only=True))
def test_a_larger_micro_batch_never_needs_less(drawn: Case) -> None:
    larger = drawn.with_layout(micro_batch=2 * drawn.layout.micro_batch)
    assert memory(larger).peak_allocated_bytes >= memory(drawn).peak_allocated_bytes


def test_reshard_and_sync_trade_memory_as_named() -> None:
    def peak(**changes: object) -> int:
        layout = {"dp_replicate": 2, "dp_shard": 8, "num_microbatches": 4, **changes}
        return memory(case("llama-3.1-8b", **layout)).peak_allocated_bytes

    assert peak(reshard_after_forward="always") < peak(reshard_after_forward=4)
    assert peak(reshard_after_forward=4) < peak(reshard_after_forward="never")
    assert peak(gradient_sync="reduce_scatter_only") < peak(gradient_sync="last")


def test_headroom_is_left_free() -> None:
    small = case(dp_shard=8)
    whatever = replace(small.training, fits_fraction=0.0)
    all_of_it = replace(whatever, headroom_fraction=0.0)
    whole = available_bytes(cluster=small.cluster, training=all_of_it)
    assert whole == small.cluster.device.memory_bytes
    assert available_bytes(cluster=small.cluster, training=whatever) == int(0.92 * whole)


def test_adamw_over_one_flat_tensor_has_two_more_as_large() -> None:
    # InternEvo between steps: half-precision parameters, masters and moments; in its optimizer
    # the flat fp32 gradient, the root of the second moment and what it is divided into
    alone = memory(case("llama-3.1-8b", runtime="internevo", sharding="ddp", tp=8, seq_len=8))
    assert alone.peak_phase == "optimizer"
    updated = alone.optimizer_bytes / 12
    assert alone.gradients_bytes == 4 * updated
    assert alone.temporaries_bytes == 8 * updated


def test_a_small_model_is_mostly_state() -> None:
    assert memory(case(sharding="ddp", seq_len=8)).parameters_bytes == 4 * parameter_count(SMALL)


def test_autocast_gathers_fp32_and_keeps_copies_in_the_compute_dtype() -> None:
    layout = {"dp_shard": 8, "reshard_after_forward": "never"}
    mixed, flat = (case("llama-3.1-8b", runtime=name, **layout) for name in ("fsdp2", "autocast"))
    narrow, wide = sizes_of(mixed), sizes_of(flat)
    assert wide.gathered_block_bytes == 2 * narrow.gathered_block_bytes
    assert wide.block.residual_bytes == 2 * narrow.block.residual_bytes
    assert narrow.copies_block_bytes == 0
    head = flat.model.vocab * flat.model.hidden
    copies = 32 * wide.copies_block_bytes + wide.copies_root_bytes
    assert copies == 2 * matmul_parameter_count(flat.model)
    assert wide.copies_root_bytes == 2 * head
    assert memory(flat).peak_allocated_bytes > memory(mixed).peak_allocated_bytes


def test_plain_autocast_keeps_a_wider_residual_stream_than_the_reference_decoder() -> None:
    ddp = {"sharding": "ddp", "dp_replicate": 8}
    ours, plain = (
        memory(case("gpt2-large", runtime=name, **ddp)) for name in ("fsdp2", "autocast")
    )
    assert ours.activations_bytes < plain.activations_bytes
    assert ours.unsharded_parameters_bytes == plain.unsharded_parameters_bytes


def test_every_pipeline_rank_has_its_peak_and_the_highest_is_described() -> None:
    layout = {"pp": 4, "dp_shard": 2, "schedule": "1f1b", "num_microbatches": 8}
    held = {"reshard_after_forward": "never", "gradient_sync": "last"}
    peaks = memory(case("llama-3.1-8b", **layout, **held))
    assert len(peaks.stage_peak_device_bytes) == 4
    assert max(peaks.stage_peak_device_bytes) == peaks.peak_device_bytes
    # the first rank holds the most micro-batches, the last the logits
    assert peaks.stage_peak_device_bytes[1] > peaks.stage_peak_device_bytes[2]


@pytest.mark.parametrize("runtime", ["fsdp2", "megatron", "megatron_deepspeed", "nanotron"])
def test_each_stage_of_zero_keeps_less(runtime: str) -> None:
    whole = case("llama-3.1-8b", runtime=runtime, sharding="ddp", dp_replicate=8)
    peaks = [memory(whole).peak_allocated_bytes]
    for stage in ("zero1", "zero2"):
        sharded = case("llama-3.1-8b", runtime=runtime, sharding=stage, dp_shard=8)
        peaks.append(memory(sharded).peak_allocated_bytes)
    assert peaks == sorted(peaks, reverse=True)


def test_a_compiled_model_keeps_less_than_an_eager_one() -> None:
    for mode in ("none", "op"):
        layout = {"dp_shard": 8, "micro_batch": 8, "activation_checkpointing": mode}
        eager, compiled = (
            memory(case("llama-3.1-8b", compile=on, **layout)) for on in (False, True)
        )
        assert compiled.peak_allocated_bytes < eager.peak_allocated_bytes


def test_fp8_all_gathers_fill_half_the_buffers() -> None:
    layout = {"dp_shard": 8, "reshard_after_forward": "never"}
    bf16, fp8 = (case("llama-3.1-8b", precision="fp8", **layout) for _ in range(2))
    fp8 = replace(fp8, training=replace(fp8.training, fp8_all_gather=True))
    assert 2 * sizes_of(fp8).gathered_block_bytes == sizes_of(bf16).gathered_block_bytes
    assert sizes_of(fp8).unit(0).gradient_bytes == sizes_of(bf16).unit(0).gradient_bytes
    assert memory(fp8).peak_allocated_bytes < memory(bf16).peak_allocated_bytes


def test_flat_units_need_no_buffer_beside_them() -> None:
    layout = {"dp_shard": 8, "wrap_blocks": 4}
    flat, copied = (sizes_of(case(runtime=name, **layout)) for name in ("fsdp1", "fsdp2"))
    assert flat.unit(0).buffer_bytes == 0 < copied.unit(0).buffer_bytes
    assert flat.gathers_in_place
    assert not copied.gathers_in_place


def test_what_fsdp_gathers_and_reduces_is_reserved_for_good() -> None:
    # pools of the all-gathers' and the reductions' streams, beside 11 to 15 % of fragments
    reserved = memory(case("llama-3.1-8b", dp_shard=8, activation_checkpointing="op"))
    unshared = memory(case("llama-3.1-8b", sharding="ddp", activation_checkpointing="op"))
    sharded, whole = (
        one.reserved_overhead_bytes / one.peak_allocated_bytes for one in (reserved, unshared)
    )
    assert sharded > whole


def test_async_tensor_parallelism_leaves_nccl_nothing_to_hold() -> None:
    layout = {"tp": 8, "sequence_parallel": True, "loss_parallel": True, "micro_batch": 4}
    plain, overlapped = (memory(case(async_tp=on, **layout)) for on in (False, True))
    assert plain.peak_allocated_bytes == overlapped.peak_allocated_bytes
    assert plain.peak_reserved_bytes > overlapped.peak_reserved_bytes


def test_expert_parallelism_splits_the_experts_and_not_the_rows() -> None:
    mixture = replace(SMALL, experts=Experts(experts=16, active=2, hidden=2048))
    alone, split = (
        case(mixture, runtime="megatron", sharding="zero1", dp_shard=8, ep=ep) for ep in (1, 8)
    )
    assert memory(split).parameters_bytes < memory(alone).parameters_bytes / 3
    assert memory(split).activations_bytes == memory(alone).activations_bytes

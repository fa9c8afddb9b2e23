"""Traffic: how often each collective is called, and with how many bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.network.placement import (
    ep_group,
    expert_shard_group,
    pp_group,
    replicate_group,
    shard_group,
    tp_group,
)
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.spec.model import Model
from tests.cost.clusters import golden
from tests.cost.problems import SMALL, Case, case, cases
from tests.cost.wide import LATENT, MIXTURE, wide_cases


def calls_of(case: Case) -> list[Calls]:
    """All calls of the last pipeline rank."""
    return step_calls(case, pipeline_ranks(model=case.model, layout=case.layout)[-1])


def counts(case: Case) -> Counter[str]:
    """Calls a step of each collective, those of the gradient norm apart."""
    number: Counter[str] = Counter()
    for call in calls_of(case):
        is_norm = call.collective == "all_reduce" and call.group.axis.startswith("dp_shard")
        number["norm" if is_norm else call.collective] += call.count
    return number


def volume(case: Case, collective: str, axis: str) -> int:
    """Bytes a step of one collective on one axis."""
    return sum(
        call.count * call.call_bytes
        for call in calls_of(case)
        if (call.collective, call.group.axis) == (collective, axis)
    )


@pytest.mark.parametrize("row", golden("traffic")["all_gathers"], ids=lambda row: row["claim"])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_golden_all_gathers(row: dict[str, object], num_microbatches: int) -> None:
    study = case(
        str(row["model"]),
        dp_shard=2,
        reshard_after_forward=row["reshard_after_forward"],
        num_microbatches=num_microbatches,
    )
    per_micro_batch = int(str(row["per_micro_batch"]))
    assert counts(study)["all_gather"] == num_microbatches * per_micro_batch
    assert counts(study)["reduce_scatter"] == num_microbatches * 37


@given(cases(gpus=1))
def test_one_rank_communicates_nothing(alone: Case) -> None:
    assert calls_of(alone) == []


@given(cases() | wide_cases())
def test_no_call_is_empty_or_lonely(drawn: Case) -> None:
    for call in calls_of(drawn):
        assert call.count > 0
        assert call.call_bytes > 0
        assert call.group.ranks > 1
        assert drawn.layout.world % (call.group.ranks * call.group.stride) == 0


@pytest.mark.parametrize(
    ("sync", "scatters", "reduces"),
    [("every", 4, 4), ("reduce_scatter_only", 4, 1), ("last", 1, 1)],
)
def test_the_policy_says_which_micro_batches_reduce(sync: str, scatters: int, reduces: int) -> None:
    units = SMALL.layers + 2  # embedding; final norm and head
    number = counts(case(dp_replicate=2, dp_shard=8, num_microbatches=4, gradient_sync=sync))
    assert number["reduce_scatter"] == scatters * units
    assert number["all_reduce"] == reduces * units


def test_gathers_are_in_the_compute_dtype_and_reductions_in_theirs() -> None:
    ranks = 8
    layout = {"dp_replicate": 2, "dp_shard": ranks, "reshard_after_forward": "never"}
    whole = parameter_count(SMALL)  # every width divides by 8: no padding but of the norms
    mixed = case(**layout)
    assert volume(mixed, "all_gather", "dp_shard") == 2 * whole
    assert volume(mixed, "reduce_scatter", "dp_shard") == 4 * whole
    assert volume(mixed, "all_reduce", "dp_replicate") == 4 * whole // ranks
    halved = case(**layout, reduce_dtype="bf16")
    assert volume(halved, "reduce_scatter", "dp_shard") == 2 * whole
    assert volume(halved, "all_reduce", "dp_replicate") == 2 * whole // ranks


def test_the_ends_are_units_unless_they_share_a_table_or_the_software_has_a_root() -> None:
    def calls(model: Model, **more: object) -> tuple[int, int]:
        asked = case(model, dp_shard=8, **more)
        return counts(asked)["all_gather"], volume(asked, "all_gather", "dp_shard")

    tied = replace(SMALL, tied_embeddings=True)
    blocks = 2 * SMALL.layers
    assert calls(SMALL)[0] == blocks + 2
    assert calls(tied)[0] == calls(SMALL, runtime="fsdp1")[0] == blocks + 1
    # neither end is gathered again for backward, so units of their own move no more
    assert calls(SMALL)[1] == calls(SMALL, runtime="fsdp1")[1]


def test_a_norm_behind_the_embedding_stays_in_the_root() -> None:
    """Backward needs its weight, as it needs none of a table."""
    normed = replace(SMALL, embedding_norm=True)
    assert counts(case(normed, dp_shard=8))["all_gather"] == 2 * SMALL.layers + 3


def test_autocast_gathers_and_reduces_fp32() -> None:
    flat = case(dp_shard=8, reshard_after_forward="never", runtime="autocast")
    assert volume(flat, "all_gather", "dp_shard") == 4 * parameter_count(SMALL)
    assert volume(flat, "reduce_scatter", "dp_shard") == 4 * parameter_count(SMALL)
    assert {call.dtype for call in calls_of(flat)} == {"fp32"}


def test_ddp_reduces_every_gradient_once_in_its_dtype() -> None:
    layout = {"sharding": "ddp", "dp_replicate": 8, "gradient_sync": "last", "num_microbatches": 4}
    whole = parameter_count(SMALL)
    assert volume(case(**layout), "all_reduce", "dp_replicate") == 4 * whole
    compressed = case(**layout, reduce_dtype="bf16")
    assert volume(compressed, "all_reduce", "dp_replicate") == 2 * whole
    assert counts(compressed) == counts(case(**layout))


def test_an_integer_regathers_from_fewer_ranks() -> None:
    sharded = case(dp_shard=16, reshard_after_forward=8)
    gathers = {
        call.group.ranks: call.count
        for call in calls_of(sharded)
        if call.collective == "all_gather"
    }
    assert set(gathers) == {16, 8}
    number = sum(
        call.count
        for call in calls_of(sharded)
        if call.collective == "all_gather" and call.group.ranks == 8
    )
    assert number == SMALL.layers


def test_wrapping_more_blocks_moves_the_same_bytes_in_fewer_calls() -> None:
    single, double = (case(dp_shard=8, wrap_blocks=blocks) for blocks in (1, 2))
    assert counts(double)["reduce_scatter"] == SMALL.layers // 2 + 2
    for collective in ("all_gather", "reduce_scatter"):
        assert volume(single, collective, "dp_shard") == volume(double, collective, "dp_shard")


def test_sequence_parallel_gathers_and_scatters_twice_a_block_and_direction() -> None:
    split = case(tp=8, sharding="ddp", sequence_parallel=True, loss_parallel=True, micro_batch=2)
    number = counts(split)
    assert number["all_gather"] == number["reduce_scatter"] == 4 * SMALL.layers + 2
    stream = 2 * 1024 * SMALL.hidden * 2  # micro-batch * seq_len * hidden, bf16
    # DDP's table is in fp32, and so are its rows and their gradients
    assert volume(split, "all_gather", "tp") == (4 * SMALL.layers + 1 + 2) * stream
    sharded = split.with_layout(sharding="fsdp", dp_shard=2)
    assert volume(sharded, "all_gather", "tp") == (4 * SMALL.layers + 2) * stream


def test_the_ends_of_a_pipeline_send_one_way_only() -> None:
    chain = case(pp=4, sharding="ddp", gradient_sync="last", schedule="1f1b", num_microbatches=8)
    first, inside, *_, last = pipeline_ranks(model=chain.model, layout=chain.layout)
    sends = [
        sum(call.count for call in step_calls(chain, stage) if call.collective == "send_recv")
        for stage in (first, inside, last)
    ]
    assert sends == [8, 16, 8]


@given(cases())
def test_groups_of_all_axes_fill_the_world(drawn: Case) -> None:
    groups = [group(drawn.layout) for group in (tp_group, shard_group, replicate_group, pp_group)]
    stride = 1
    for group in groups:  # innermost first: each begins where the one inside it ends
        assert group.stride == stride
        stride *= group.ranks
    assert stride == drawn.layout.world


@given(cases(data_parallel_only=True), st.integers(2, 4))
def test_a_step_reduces_the_same_however_it_accumulates_under_last(drawn: Case, times: int) -> None:
    assume(drawn.layout.gradient_sync == "last")
    longer = drawn.with_layout(num_microbatches=times * drawn.layout.num_microbatches)
    for collective in ("reduce_scatter", "all_reduce"):
        assert counts(longer)[collective] == counts(drawn)[collective]


@pytest.mark.parametrize("ranks", [3, 6, 48, 1024])
def test_padding_never_loses_a_parameter(ranks: int) -> None:
    sharded = case(dp_shard=ranks, reshard_after_forward="never")
    gathered = volume(sharded, "all_gather", "dp_shard")
    assert 2 * parameter_count(SMALL) <= gathered
    assert gathered < 2 * parameter_count(SMALL) * (1.02 if ranks < 1000 else 1.1)


def test_without_sequence_parallelism_outputs_and_input_gradients_are_all_reduced() -> None:
    split = {"tp": 8, "sharding": "ddp", "loss_parallel": True}
    joined = counts(case(runtime="megatron_2020", **split))
    # two outputs and two inputs a block, embedding and head, three numbers a token of the loss, and
    # the gradient norm
    assert joined["all_reduce"] == 4 * SMALL.layers + 2 + 3 + 1
    # torch reduces the input's gradient of each of five projections
    assert counts(case(**split))["all_reduce"] == 7 * SMALL.layers + 2 + 3 + 1


def test_recomputation_repeats_collectives_to_the_end_where_the_checkpoint_does() -> None:
    full = {"tp": 8, "sharding": "ddp", "sequence_parallel": True, "loss_parallel": True}
    stops, repeats = (
        counts(case(runtime=runtime, activation_checkpointing="full", **full))
        for runtime in ("fsdp2", "internevo")
    )
    assert stops["all_gather"] == repeats["all_gather"] == 6 * SMALL.layers + 2
    assert stops["reduce_scatter"] == 5 * SMALL.layers + 2
    assert repeats["reduce_scatter"] == 6 * SMALL.layers + 2


def test_inputs_are_gathered_again_for_a_weight_gradient_that_hides_their_reduction() -> None:
    split = {"tp": 8, "sharding": "ddp", "sequence_parallel": True, "loss_parallel": True}
    assert counts(case(runtime="megatron", **split))["all_gather"] == 6 * SMALL.layers + 2


def test_fp8_inputs_are_gathered_as_such_but_with_scales_a_row() -> None:
    split = {"tp": 8, "sharding": "ddp", "sequence_parallel": True, "precision": "fp8"}

    def gathered(recipe: str) -> int:
        run = case(**split, loss_parallel=True)
        training = replace(run.training, fp8_recipe=recipe)  # type: ignore[arg-type]
        return volume(replace(run, training=training), "all_gather", "tp")

    stream = 1024 * SMALL.hidden
    # the embedding's gradient is in fp32, of DDP's table
    assert gathered("tensorwise") == (4 * SMALL.layers + 2 + 4) * stream
    assert gathered("rowwise") == (4 * SMALL.layers + 1) * 2 * stream + 4 * stream


def test_fp8_weights_are_gathered_in_one_byte_and_the_root_in_two() -> None:
    sharded = case(dp_shard=8, reshard_after_forward="never", precision="fp8")
    cast = replace(sharded.training, fp8_all_gather=True)
    root = 2 * SMALL.vocab * SMALL.hidden + SMALL.hidden
    whole = parameter_count(SMALL)
    assert volume(sharded, "all_gather", "dp_shard") == 2 * whole
    assert volume(replace(sharded, training=cast), "all_gather", "dp_shard") == whole + root


def test_zero_reduces_every_gradient_once_and_gathers_every_parameter_once() -> None:
    whole = parameter_count(SMALL)
    zero = {"sharding": "zero1", "dp_shard": 8, "gradient_sync": "last", "num_microbatches": 4}
    scattered = case(runtime="megatron", **zero)
    assert volume(scattered, "reduce_scatter", "dp_shard") == 4 * whole
    assert volume(scattered, "all_gather", "dp_shard") == 2 * whole
    replicas = case(runtime="megatron", dp_replicate=4, **zero)
    assert volume(replicas, "reduce_scatter", "dp_shard") == 4 * whole
    assert volume(replicas, "all_reduce", "dp_replicate") == 4 * whole // 8
    reduced = case(runtime="internevo", dp_replicate=4, reduce_dtype="bf16", **zero)
    assert volume(reduced, "all_reduce", "dp_replicate*dp_shard") == 2 * whole
    assert volume(reduced, "broadcast", "dp_shard") == pytest.approx(2 * whole, rel=1e-6)


def test_torch_gathers_keys_and_values_and_a_ring_passes_them_on() -> None:
    """Keys and values of 8 heads of 64 each, bf16; their gradients in fp32 in torch."""
    cp, tokens = 4, 1024 // 4
    pieces = tokens * 2 * SMALL.kv_dim
    torch = case(cp=cp, dp_shard=2)
    assert volume(torch, "all_gather", "cp") == SMALL.layers * 2 * cp * pieces * 2
    assert volume(torch, "send_recv", "cp") == SMALL.layers * cp * pieces * 4
    ring = case(cp=cp, dp_shard=2, sharding="zero1", runtime="megatron")
    assert volume(ring, "all_gather", "cp") == 0
    forward, backward = (cp - 1) * pieces * 2, (cp - 1) * pieces * 4 + pieces * 2
    assert volume(ring, "send_recv", "cp") == SMALL.layers * (forward + backward)
    assert shard_group(torch.layout).ranks == 8


def test_latent_attention_passes_whole_heads_around() -> None:
    run = case(LATENT, cp=2, dp_shard=2)
    width = LATENT.query_dim + LATENT.value_dim
    assert volume(run, "all_gather", "cp") == LATENT.layers * 2 * 1024 * width * 2


def test_tokens_go_to_their_experts_and_back_in_both_passes() -> None:
    assert MIXTURE.experts
    spread = {"dp_shard": 8, "ep": 8}
    sparse = MIXTURE.layers - MIXTURE.experts.dense_layers
    rows = 1024 * MIXTURE.experts.active * MIXTURE.hidden * 2
    assert volume(case(MIXTURE, **spread), "all_to_all", "ep") == sparse * 4 * rows
    recomputed = case(MIXTURE, activation_checkpointing="full", **spread)
    assert volume(recomputed, "all_to_all", "ep") == sparse * 6 * rows
    assert counts(case(MIXTURE, dp_shard=8))["all_to_all"] == 0


def test_whole_experts_on_tensor_parallel_ranks_take_a_part_of_the_tokens_each() -> None:
    assert MIXTURE.experts
    layout = {"dp_shard": 4, "tp": 2, "ep": 4, "sharding": "zero1", "gradient_sync": "last"}
    layout |= {"sequence_parallel": True, "loss_parallel": True, "runtime": "megatron"}
    whole = case(MIXTURE, experts_over_tp=True, **layout)
    split = case(MIXTURE, **layout)
    assert (ep_group(whole.layout).ranks, ep_group(whole.layout).stride) == (8, 1)
    assert (ep_group(split.layout).ranks, ep_group(split.layout).stride) == (4, 2)
    assert expert_shard_group(whole.layout) == expert_shard_group(split.layout)
    assert volume(whole, "all_to_all", "ep") == volume(split, "all_to_all", "ep")
    # what came is gathered over tp to be multiplied with a part of every expert, or not at all:
    # forward, and backward the gradients of outputs and once more the inputs
    rows = 1024 * MIXTURE.experts.active * MIXTURE.hidden * 2
    sparse = MIXTURE.layers - MIXTURE.experts.dense_layers
    more = volume(split, "all_gather", "tp") - volume(whole, "all_gather", "tp")
    assert more == sparse * 3 * rows


def test_experts_are_sharded_over_fewer_ranks_and_gathered_there() -> None:
    layout = {"reshard_after_forward": "never", "dp_shard": 8}
    split, whole = case(MIXTURE, ep=2, **layout), case(MIXTURE, **layout)
    experts = volume(split, "all_gather", "dp_shard/ep")
    assert experts > 0
    assert 2 * experts + volume(split, "all_gather", "dp_shard") == pytest.approx(
        volume(whole, "all_gather", "dp_shard"), rel=1e-3
    )
    assert counts(case(MIXTURE, ep=8, **layout))["all_gather"] == MIXTURE.layers + 2


@given(wide_cases())
def test_expert_groups_are_cut_out_of_the_shard_group(drawn: Case) -> None:
    experts, copies = ep_group(drawn.layout), expert_shard_group(drawn.layout)
    assert experts.ranks * copies.ranks == drawn.layout.shard_ranks
    assert copies.stride == experts.stride * experts.ranks

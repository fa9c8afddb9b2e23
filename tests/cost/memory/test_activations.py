"""Activations: what one block keeps, and how high its backward reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.memory.activations import BlockActivations, block_activations, saved_bytes
from fsdpplan.cost.model.block_sizes import BlockShape, BlockTensors, Kernels, block_tensors_bytes
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Experts, Model
from tests.cost.problems import SMALL, some_models

MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")
EAGER, FUSED = Kernels(), Kernels(fused=True, drops_unused=True)
SCORES = Kernels(flash=False, dropout=True)
some_kernels = st.sampled_from([EAGER, FUSED, SCORES])


def shape_of(
    model: Model, *, tokens: int = 4096, tp: int = 1, kernels: Kernels = EAGER
) -> BlockShape:
    """A block in bf16 that sees one sequence."""
    return BlockShape(
        model=model,
        tokens=tokens,
        seq_len=min(tokens, 4096),
        tp=tp,
        sequence_parallel=tp > 1,
        kernels=kernels,
    )


def activations(
    model: Model,
    *,
    mode: ActivationCheckpointing = "none",
    tokens: int = 4096,
    kernels: Kernels = EAGER,
) -> BlockActivations:
    """All quantities of a block in bf16."""
    shape = shape_of(model, tokens=tokens, kernels=kernels)
    return block_activations(shape=shape, mode=mode, weight_gradients="kept")


def kept(model: Model, tensors: BlockTensors, mode: ActivationCheckpointing = "none") -> int:
    """What an eager block keeps."""
    return saved_bytes(model=model, tensors=tensors, mode=mode, kernels=EAGER)


def test_a_block_of_8b_by_hand() -> None:
    # a token, in bf16: 2 residual + 2 normed at 4096, 2 query at 4096, 2 key at 1024, 4 inner at
    # 14336; fp32 statistics of two RMSNorms and of 32 heads; cosines and sines of 128, twice
    values = 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    a_token = 2 * values + 4 * (2 + 32) + 2 * 2 * 128
    assert activations(load_model("llama-3.1-8b")).saved_bytes == 4096 * a_token


def test_a_gpt_block_of_2020_by_hand() -> None:
    # s b h (34 + 5 a s / h) bytes, of which masks of one byte; the paper counts no statistics of
    # the norms. Source: arXiv 2205.05198, equation 1.
    model = replace(load_model("gpt2-xl"), positions="learned")
    s, h, heads = 1024, model.hidden, model.heads
    kernels = Kernels(fused=True, flash=False, dropout=True)
    shape = replace(shape_of(model, tokens=s, kernels=kernels), seq_len=s)
    block = block_activations(shape=shape, mode="none", weight_gradients="added")
    statistics = s * 4 * 4
    assert block.saved_bytes - statistics == s * h * (34 + 5 * heads * s // h)


def test_full_checkpointing_keeps_the_input_alone() -> None:
    model = load_model("llama-3.1-8b")
    assert activations(model, mode="full").saved_bytes == 4096 * 4096 * 2


def test_megatrons_selective_mode_drops_the_scores_and_their_sums_and_no_more() -> None:
    model = load_model("gpt2-xl")
    without = activations(model, kernels=SCORES, mode="attention")
    flash = activations(model, kernels=replace(SCORES, flash=True))
    sums = 4096 * model.heads * 4
    assert without.saved_bytes == without.live_bytes == flash.saved_bytes - sums
    kept = activations(model).saved_bytes
    assert kept - activations(model, mode="attention").saved_bytes == sums


def test_fused_kernels_keep_one_inner_tensor_less_of_a_gated_network() -> None:
    model = load_model("llama-3.1-8b")
    assert (
        activations(model).saved_bytes - activations(model, kernels=FUSED).saved_bytes
        == 4096 * model.ffn_hidden * 2
    )
    gelu = load_model("gpt2-xl")
    assert activations(gelu).saved_bytes == activations(gelu, kernels=FUSED).saved_bytes


def test_a_compiled_block_drops_the_output_that_per_operator_checkpointing_keeps() -> None:
    model = load_model("llama-3.1-8b")
    eager = activations(model, mode="op").saved_bytes
    compiled = activations(model, mode="op", kernels=FUSED).saved_bytes
    assert eager - compiled == 4096 * model.hidden * 2


def test_composite_norms_keep_an_fp32_copy_and_the_quotient() -> None:
    model = load_model("llama-3.1-8b")
    composite = activations(model, kernels=Kernels(composite_norms=True)).saved_bytes
    assert composite - activations(model).saved_bytes == 2 * 4096 * model.hidden * 6
    compiled = Kernels(composite_norms=True, fused=True)
    assert activations(model, kernels=compiled) == activations(model, kernels=Kernels(fused=True))


def test_inputs_in_fp8_are_half_as_large_beside_what_attention_keeps() -> None:
    model = load_model("llama-3.1-8b")
    bf16 = activations(model, kernels=FUSED).saved_bytes
    fp8 = activations(model, kernels=replace(FUSED, fp8_inputs=True)).saved_bytes
    # two normed inputs and the product at half; attention's output once more
    saved = 4096 * (2 * model.hidden + model.ffn_hidden - model.value_dim)
    assert bf16 - fp8 == saved


def test_gathering_again_keeps_the_ranks_part_of_the_inputs() -> None:
    model = load_model("llama-3.1-8b")
    gathered, again = (
        block_tensors_bytes(shape_of(model, tp=8, kernels=Kernels(gathers_again=gathers)))
        for gathers in (False, True)
    )
    assert again.normed_kept_bytes * 8 == gathered.normed_kept_bytes
    assert again.gather_buffer_bytes == gathered.normed_bytes


def test_a_mixture_keeps_rows_for_each_expert_that_a_token_visits() -> None:
    def saved(active: int) -> int:
        experts = Experts(experts=8, active=active, hidden=2048)
        return activations(replace(SMALL, experts=experts)).saved_bytes

    # rows are read and returned at the hidden width, and four inner tensors
    row = 2 * (2 * SMALL.hidden + 4 * 2048)
    assert saved(4) - saved(2) == 2 * 4096 * row


@given(some_models(), st.integers(1, 2**14), some_kernels)
def test_recomputing_more_keeps_less(model: Model, tokens: int, kernels: Kernels) -> None:
    saved = [
        activations(model, tokens=tokens, mode=mode, kernels=kernels).saved_bytes for mode in MODES
    ]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] > 0


@given(some_models(), st.integers(1, 2**14), some_kernels)
def test_what_is_not_kept_is_recomputed(model: Model, tokens: int, kernels: Kernels) -> None:
    everything = activations(model, tokens=tokens, kernels=kernels).saved_bytes
    for mode in MODES:
        block = activations(model, tokens=tokens, mode=mode, kernels=kernels)
        assert block.live_bytes >= block.saved_bytes
        # attention alone is made again within the backward pass, not before it
        assert mode == "attention" or block.live_bytes >= everything
        assert block.backward_peak_bytes > 0
        assert block.forward_transient_bytes > 0


@given(some_models(), st.integers(1, 2**12), st.integers(2, 4))
def test_kept_bytes_grow_with_the_tokens(model: Model, tokens: int, times: int) -> None:
    for mode in MODES:
        few = replace(shape_of(model, tokens=tokens), seq_len=16)
        many = replace(few, tokens=times * tokens)
        rotary = block_tensors_bytes(few).rotary_bytes  # tables, whatever the tokens
        saved = [kept(model, block_tensors_bytes(shape), mode) for shape in (few, many)]
        tables = rotary if mode in ("none", "attention") else 0
        assert saved[1] - tables == times * (saved[0] - tables)


@pytest.mark.parametrize("mode", MODES)
def test_sequence_parallel_splits_all_but_the_gathered_input(mode: ActivationCheckpointing) -> None:
    whole, split = (block_tensors_bytes(shape_of(SMALL, tp=tp)) for tp in (1, 8))
    assert split.normed_bytes == whole.normed_bytes
    for name in ("residual", "query", "key", "value", "attended", "inner"):
        assert getattr(split, f"{name}_bytes") * 8 == getattr(whole, f"{name}_bytes")
    assert kept(SMALL, split, mode) < kept(SMALL, whole, mode)

"""Activations: what one block keeps, and how high its backward reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.block.operators import block_operators
from fsdpplan.cost.block.sizes import block_sizes
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.memory.activations import BlockActivations, block_activations, saved_bytes
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Experts, Model
from tests.cost.problems import SMALL, some_models
from tests.cost.works import work, works

MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")
EAGER: dict[str, object] = {"compiled": False}
FUSED: dict[str, object] = {"compiled": True}
SCORES: dict[str, object] = {**EAGER, "attention_kernel": "scores", "dropout": True}
some_kernels = st.sampled_from([EAGER, FUSED, SCORES])


def block_of(
    model: Model, *, tokens: int = 4096, tp: int = 1, kernels: dict[str, object] = EAGER
) -> BlockWork:
    """A block in bf16 that sees one sequence."""
    seq_len = min(tokens, 4096)
    return work(model, tokens=tokens, seq_len=seq_len, tp=tp, sequence_parallel=tp > 1, **kernels)


def activations(
    model: Model,
    *,
    mode: ActivationCheckpointing = "none",
    tokens: int = 4096,
    kernels: dict[str, object] = EAGER,
) -> BlockActivations:
    """All quantities of a block in bf16."""
    block = block_of(model, tokens=tokens, kernels=kernels)
    return block_activations(work=block, mode=mode, weight_gradients="kept")


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
    kernels = {
        "compiled": False,
        "fused_kernels": True,
        "attention_kernel": "scores",
        "dropout": True,
    }
    fused = block_of(model, tokens=s, kernels=kernels)
    block = block_activations(work=fused, mode="none", weight_gradients="added")
    statistics = s * 4 * 4
    assert block.saved_bytes - statistics == s * h * (34 + 5 * heads * s // h)


def test_full_checkpointing_keeps_the_input_alone() -> None:
    model = load_model("llama-3.1-8b")
    assert activations(model, mode="full").saved_bytes == 4096 * 4096 * 2


def test_megatrons_selective_mode_drops_the_scores_and_their_sums_and_no_more() -> None:
    model = load_model("gpt2-xl")
    without = activations(model, kernels=SCORES, mode="attention")
    flash = activations(model, kernels={**SCORES, "attention_kernel": "flash"})
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
    composite = activations(model, kernels={**EAGER, "composite_norms": True}).saved_bytes
    assert composite - activations(model).saved_bytes == 2 * 4096 * model.hidden * 6
    compiled = {**FUSED, "composite_norms": True}
    assert activations(model, kernels=compiled) == activations(model, kernels=FUSED)


def test_inputs_in_fp8_are_half_as_large_beside_what_attention_keeps() -> None:
    model = load_model("llama-3.1-8b")
    bf16 = activations(model, kernels=FUSED).saved_bytes
    fp8 = activations(model, kernels={**FUSED, "fp8_inputs": True}).saved_bytes
    # two normed inputs and the product at half; attention's output once more
    saved = 4096 * (2 * model.hidden + model.ffn_hidden - model.value_dim)
    assert bf16 - fp8 == saved


def test_gathering_again_keeps_the_ranks_part_of_the_inputs() -> None:
    model = load_model("llama-3.1-8b")
    gathered, again = (
        block_sizes(block_of(model, tp=8, kernels={**EAGER, "gathers_again": gathers}))
        for gathers in (False, True)
    )
    assert again.normed_kept * 8 == gathered.normed_kept
    assert again.gather_buffer == gathered.normed


def test_a_mixture_keeps_rows_for_each_expert_that_a_token_visits() -> None:
    def saved(active: int) -> int:
        experts = Experts(experts=8, active=active, hidden=2048)
        return activations(replace(SMALL, experts=experts)).saved_bytes

    # rows are read and returned at the hidden width, and four inner tensors
    row = 2 * (2 * SMALL.hidden + 4 * 2048)
    assert saved(4) - saved(2) == 2 * 4096 * row


@given(some_models(), st.integers(1, 2**14), some_kernels)
def test_recomputing_more_keeps_less(model: Model, tokens: int, kernels: dict[str, object]) -> None:
    saved = [
        activations(model, tokens=tokens, mode=mode, kernels=kernels).saved_bytes for mode in MODES
    ]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] > 0


@given(some_models(), st.integers(1, 2**14), some_kernels)
def test_what_is_not_kept_is_recomputed(
    model: Model, tokens: int, kernels: dict[str, object]
) -> None:
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
    few = replace(block_of(model, tokens=tokens), seq_len=16)
    many = replace(few, tokens=times * tokens)
    # tables, whatever the tokens
    rotary = sum(each.saved_bytes for each in block_operators(few) if each.name == "rotation")
    for mode in MODES:
        saved = [saved_bytes(block, mode) for block in (few, many)]
        tables = rotary if mode in ("none", "attention") else 0
        assert saved[1] - tables == times * (saved[0] - tables)


@pytest.mark.parametrize("mode", MODES)
def test_sequence_parallel_splits_all_but_the_gathered_input(mode: ActivationCheckpointing) -> None:
    whole, split = (block_of(SMALL, tp=tp) for tp in (1, 8))
    sizes, parts = block_sizes(whole), block_sizes(split)
    assert parts.normed == sizes.normed
    assert parts.residual * 8 == sizes.residual
    assert parts.inner * 8 == sizes.inner
    for name in ("query", "key", "value", "attended"):
        assert getattr(parts.heads, name) * 8 == getattr(sizes.heads, name)
    assert saved_bytes(split, mode) < saved_bytes(whole, mode)


@given(works())
def test_a_block_keeps_what_its_operators_save(block: BlockWork) -> None:
    operators = block_operators(block)
    assert saved_bytes(block, "none") == sum(o.saved_bytes for o in operators)
    for each in operators:
        parts = (each.statistics_bytes, each.remade_bytes, each.unkept_bytes)
        assert all(0 <= part <= each.saved_bytes for part in parts), each

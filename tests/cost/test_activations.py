"""Activations: what one block keeps, and how high its backward reaches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.activations import (
    BlockActivations,
    BlockTensors,
    all_saved_bytes,
    block_activations,
    block_tensors_bytes,
    saved_bytes,
    weight_gradient_bytes,
)
from fsdpplan.cost.params import block_tensors
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model
from tests.cost.problems import SMALL, some_models

MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")


def tensors(model: Model, *, tokens: int = 4096, tp: int = 1) -> BlockTensors:
    """Tensors of a block in bf16."""
    return block_tensors_bytes(
        model=model,
        tokens=tokens,
        seq_len=tokens,
        tp=tp,
        sequence_parallel=tp > 1,
        element_bytes=2,
        residual_element_bytes=2,
    )


def activations(
    model: Model, *, tokens: int = 4096, mode: ActivationCheckpointing = "none", tp: int = 1
) -> BlockActivations:
    """All quantities of a block in bf16."""
    return block_activations(
        model=model,
        tokens=tokens,
        seq_len=tokens,
        tp=tp,
        sequence_parallel=tp > 1,
        element_bytes=2,
        residual_element_bytes=2,
        mode=mode,
        weight_gradients="kept",
    )


def test_a_block_of_8b_by_hand() -> None:
    # a token, in bf16: 2 residual + 2 normed at 4096, 2 query at 4096, 2 key at 1024, 4 inner at
    # 14336; fp32 statistics of two RMSNorms and of 32 heads; cosines and sines of 128, twice
    values = 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    a_token = 2 * values + 4 * (2 + 32) + 2 * 2 * 128
    assert activations(load_model("llama-3.1-8b")).saved_bytes == 4096 * a_token


def test_full_checkpointing_keeps_the_input_alone() -> None:
    model = load_model("llama-3.1-8b")
    assert activations(model, mode="full").saved_bytes == 4096 * 4096 * 2


@given(some_models(), st.integers(1, 2**14))
def test_recomputing_more_keeps_less(model: Model, tokens: int) -> None:
    kept = [activations(model, tokens=tokens, mode=mode).saved_bytes for mode in MODES]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] > 0


@given(some_models(), st.integers(1, 2**14))
def test_what_is_not_kept_is_recomputed(model: Model, tokens: int) -> None:
    for mode in MODES:
        block = activations(model, tokens=tokens, mode=mode)
        assert block.live_bytes >= block.saved_bytes
        assert block.live_bytes >= activations(model, tokens=tokens).saved_bytes


@given(some_models(), st.integers(1, 2**12), st.integers(2, 4))
def test_kept_bytes_grow_with_the_tokens(model: Model, tokens: int, times: int) -> None:
    for mode in MODES:
        few = activations(model, tokens=tokens, mode=mode).saved_bytes
        many = activations(model, tokens=times * tokens, mode=mode).saved_bytes
        assert many == times * few


@pytest.mark.parametrize("mode", MODES)
def test_sequence_parallel_splits_all_but_the_gathered_input(mode: ActivationCheckpointing) -> None:
    whole, split = tensors(SMALL), tensors(SMALL, tp=8)
    assert split.normed == whole.normed
    for name in ("residual", "query", "key", "inner"):
        assert getattr(split, name) * 8 == getattr(whole, name)
    kept = saved_bytes(model=SMALL, tensors=split, mode=mode)
    assert kept < saved_bytes(model=SMALL, tensors=whole, mode=mode)


@given(some_models())
def test_weight_gradients_cover_every_matrix(model: Model) -> None:
    matrices = sum(t.elements for t in block_tensors(model) if len(t.shape) == 2)
    assert weight_gradient_bytes(model=model, tp=1, element_bytes=2).total == 2 * matrices


@given(some_models(), st.integers(1, 2**14))
def test_all_saved_is_the_mode_without_recomputation(model: Model, tokens: int) -> None:
    sizes = tensors(model, tokens=tokens)
    everything = all_saved_bytes(model=model, tensors=sizes)
    assert saved_bytes(model=model, tensors=sizes, mode="none") == everything

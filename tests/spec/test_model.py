"""Model: what a shape may say, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import VOCAB_MULTIPLE, Experts, LatentAttention, padded_vocab


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"active": 9}, "cannot visit 9 of 8 experts"),
        ({"active": 0}, "active must be a whole number of at least 1"),
        ({"experts": 0}, "experts must be a whole number of at least 1"),
        ({"hidden": -1}, "hidden must be a whole number of at least 1"),
        ({"shared_hidden": -1}, "must be at least 0"),
        ({"dense_layers": -1}, "must be at least 0"),
        ({"experts": 10**9}, "no model has more than"),
    ],
)
def test_experts_that_cannot_be_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Experts(**({"experts": 8, "active": 2, "hidden": 64} | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": Experts(experts=8, active=2, hidden=64, dense_layers=33)}, "33 dense layers"),
        (
            {"latent": LatentAttention(kv_rank=64, rope_head_dim=256, value_head_dim=64)},
            "wider than the head, 128",
        ),
        ({"sliding_window": -1}, "sliding_window must be at least 0"),
        ({"full_attention_every": 0}, "full_attention_every must be a whole number"),
        ({"qk_norm_width": "both"}, "qk_norm_width must be one of"),
    ],
)
def test_a_model_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(load_model("llama-3.1-8b"), **change)


def test_dense_and_windowed_blocks_are_counted() -> None:
    assert load_model("llama-3.1-8b").dense_blocks == 32
    assert load_model("mixtral-8x7b").dense_blocks == 0
    assert load_model("deepseek-v3").dense_blocks == 3
    windowed = {"llama-3.1-8b": 0, "mistral-7b-v0.1": 32, "gemma-2-9b": 21, "gemma-3-27b": 52}
    for name, blocks in windowed.items():
        assert load_model(name).windowed_blocks == blocks


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_a_vocabulary_is_padded_where_tp_does_not_divide_it_and_as_little_as_stays_aligned(
    vocab: int, tp: int
) -> None:
    rows = padded_vocab(vocab, tp)
    assert rows % tp == 0
    assert (rows == vocab) == (vocab % tp == 0)
    if rows != vocab:
        assert rows // tp % VOCAB_MULTIPLE == 0
        assert vocab < rows < vocab + tp * VOCAB_MULTIPLE


@given(st.integers(1, 300_000), st.integers(1, 64), st.sampled_from([2, 64, 128]))
def test_a_multiple_is_of_each_ranks_rows(vocab: int, tp: int, multiple: int) -> None:
    rows = padded_vocab(vocab, tp, multiple)
    assert rows % (tp * multiple) == 0
    assert vocab <= rows < vocab + tp * multiple


def test_megatrons_default_makes_its_tables() -> None:
    megatron = replace(load_model("gpt2"), vocab_multiple=128)
    assert {tp: megatron.vocab_rows(tp) for tp in (1, 8)} == {1: 50304, 8: 51200}


def test_gpt2_is_padded_as_everybody_pads_it() -> None:
    rows = {tp: load_model("gpt2").vocab_rows(tp) for tp in (1, 2, 4, 8)}
    assert rows == {1: 50257, 2: 50272, 4: 50304, 8: 50304}


def test_values_of_latent_attention_have_a_width_of_their_own() -> None:
    lite = load_model("deepseek-v2-lite")
    assert (lite.query_dim, lite.value_dim) == (16 * 192, 16 * 128)
    dense = load_model("llama-3.1-8b")
    assert dense.value_dim == dense.query_dim == 4096

"""FLOPs: six a weight and token, and causal attention."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import (
    attention_forward_flops_per_token,
    attention_span_tokens,
    matmul_parameter_count,
    mean_attention_span_tokens,
    mfu_fraction,
    parameter_count,
    useful_flops_per_token,
)
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.strategies import any_models, models


def test_8b_at_8192_by_hand() -> None:
    model = load_model("llama-3.1-8b")
    weights = parameter_count(model) - model.vocab * model.hidden - (2 * 32 + 1) * model.hidden
    assert matmul_parameter_count(model) == weights
    attention = 6 * 32 * 8192 * 4096  # 3 passes of 2 s h, a block and token
    assert useful_flops_per_token(model=model, seq_len=8192) == 6 * weights + attention


@given(models(), st.integers(1, 10_000))
def test_attention_grows_with_the_sequence_and_the_rest_does_not(
    model: Model, seq_len: int
) -> None:
    def attention(length: int) -> float:
        return useful_flops_per_token(model=model, seq_len=length) - 6 * matmul_parameter_count(
            model
        )

    assert attention(2 * seq_len) == pytest.approx(2 * attention(seq_len))
    per_block = attention_forward_flops_per_token(model=model, seq_len=seq_len)
    assert attention(seq_len) == pytest.approx(3 * model.layers * per_block)


@given(st.integers(1, 10_000), st.integers(0, 20_000))
def test_a_window_saves_what_lies_outside_its_band(seq_len: int, window: int) -> None:
    exact = sum(min(query + 0.5, window or seq_len) for query in range(min(seq_len, 300)))
    span = attention_span_tokens(seq_len=min(seq_len, 300), window=window)
    assert span == pytest.approx(exact / min(seq_len, 300), rel=0.02, abs=0.6)
    full = attention_span_tokens(seq_len=seq_len)
    assert 0 < attention_span_tokens(seq_len=seq_len, window=window) <= full
    if window >= seq_len:
        assert attention_span_tokens(seq_len=seq_len, window=window) == full


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("mean", [20, 700, 10_000])
def test_a_query_meets_what_its_document_has_before_it(mean: int, window: int) -> None:
    """Tokens that begin a document are drawn one by one, as the trainer's made-up text has them."""
    dice, seq_len, met = Random(mean), 4096, []
    for _ in range(100):
        begun = 0
        for token in range(seq_len):
            begun = token if dice.random() < 1 / mean else begun
            met.append(min(token - begun, window or seq_len) + 0.5)
    span = attention_span_tokens(seq_len=seq_len, window=window, document_tokens=mean)
    assert span == pytest.approx(fmean(met), rel=0.05)


def test_exponential_documents_take_twice_the_attention_of_equal_ones() -> None:
    span = attention_span_tokens(seq_len=2**20, document_tokens=1000)
    assert span == pytest.approx(2 * attention_span_tokens(seq_len=1000), rel=0.01)


@given(any_models(), st.integers(1, 100_000))
def test_long_documents_are_sequences(model: Model, seq_len: int) -> None:
    whole = mean_attention_span_tokens(model=model, seq_len=seq_len)
    long = mean_attention_span_tokens(model=model, seq_len=seq_len, document_tokens=1e9)
    assert long == pytest.approx(whole, rel=1e-3)


@given(any_models(), st.integers(1, 100_000))
def test_blocks_meet_between_a_window_and_the_whole(model: Model, seq_len: int) -> None:
    span = mean_attention_span_tokens(model=model, seq_len=seq_len)
    least = attention_span_tokens(seq_len=seq_len, window=model.sliding_window)
    assert least * (1 - 1e-9) <= span <= seq_len / 2 * (1 + 1e-9)
    if model.windowed_blocks == 0:
        assert span == seq_len / 2


def test_gemma_3_at_32k_by_hand() -> None:
    model = load_model("gemma-3-27b")  # 62 blocks, 10 of them full, window 1024
    band = 1024 - 1024**2 / (2 * 32768)
    span = (10 * 16384 + 52 * band) / 62
    assert mean_attention_span_tokens(model=model, seq_len=32768) == pytest.approx(span)
    flops = attention_forward_flops_per_token(model=model, seq_len=32768)
    assert flops == pytest.approx(4 * span * 32 * 128)


def test_deepseek_v3_at_4096_by_hand() -> None:
    model = load_model("deepseek-v3")  # keys of 192 and values of 128 on each of 128 heads
    flops = attention_forward_flops_per_token(model=model, seq_len=4096)
    assert flops == 4096 * 128 * (192 + 128)
    per_token = useful_flops_per_token(model=model, seq_len=4096)
    assert per_token == pytest.approx(6 * matmul_parameter_count(model) + 3 * 61 * flops)
    # 37.55e9 active less the embedding look-up
    assert matmul_parameter_count(model) / 1e9 == pytest.approx(36.6, abs=0.1)


@given(models())
def test_key_heads_save_work_in_their_projections_only(model: Model) -> None:
    one = replace(model, kv_heads=1, qk_norm=False)
    saved = useful_flops_per_token(model=model, seq_len=64) - useful_flops_per_token(
        model=one, seq_len=64
    )
    key_rows = (model.kv_heads - 1) * model.head_dim
    assert saved == 6 * model.layers * 2 * key_rows * model.hidden


def test_the_peak_rate_is_full_utilisation() -> None:
    model = load_model("gpt2")
    peak = 989.4e12
    rate = peak / useful_flops_per_token(model=model, seq_len=1024)
    for share in (0.25, 1.0):
        assert mfu_fraction(
            model=model,
            seq_len=1024,
            tokens_per_second_per_gpu=share * rate,
            peak_flops_per_second=peak,
        ) == pytest.approx(share)

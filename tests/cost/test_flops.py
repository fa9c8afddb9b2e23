"""FLOPs: six a weight and token, and causal attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.flops import (
    attention_forward_flops_per_token,
    mfu_fraction,
    useful_flops_per_token,
)
from fsdpplan.cost.params import matmul_parameter_count, parameter_count
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.strategies import models


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

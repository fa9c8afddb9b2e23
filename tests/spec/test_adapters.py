"""Adapters: their scale, their limits, and what a base of 4 bits takes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.spec.adapters import (
    TARGET_GROUPS,
    TARGETS,
    Adapters,
    nf4_bytes,
    parsed_targets,
)
from fsdpplan.spec.training import Training

SIXTEEN = Adapters(rank=16, alpha=32.0)
TRAINING = Training(seq_len=128, global_batch=8, adapters=SIXTEEN)


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    assert SIXTEEN.scale == 2
    assert replace(SIXTEEN, rslora=True).scale == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 0}, "rank must be"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"alpha": math.inf}, "alpha must be"),
        ({"targets": ()}, "not none"),
        ({"targets": ("v", "q")}, "in this order"),
        ({"targets": ("q", "w9")}, "target of adapters must be one of"),
        ({"dropout": 1.0}, "below 1"),
        ({"dtype": "fp16"}, "dtype of adapters"),
        ({"base": "int8"}, "base must be one of"),
    ],
)
def test_what_is_no_adapter_is_said(change: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        replace(SIXTEEN, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"runtime": "megatron"}, "leave --lora out"),
        ({"program": "hf"}, "leave --lora out"),
        ({"precision": "fp16"}, "--precision bf16"),
        ({"precision_switch": "fp8@0.8"}, "--precision-switch out"),
        ({"param_dtype": "bf16"}, "--lora-dtype bf16"),
        ({"optimizer": "muon"}, "adamw_8bit"),
        ({"gradient_compression": "powersgd:1:1000"}, "--gradient-compression out"),
    ],
)
def test_what_a_training_of_adapters_is_not_is_said(change: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        replace(TRAINING, **change)


def test_targets_are_parsed_as_plans_have_them() -> None:
    assert parsed_targets("v, q") == ("q", "v")
    assert parsed_targets("mlp,o_proj") == ("o", "gate", "up", "down")
    assert parsed_targets("all") == TARGETS == TARGET_GROUPS["all"]
    with pytest.raises(SpecError, match="such as q,v"):
        parsed_targets("q,everything")


@given(st.integers(1, 10**12))
def test_four_bits_take_a_little_more_than_half_a_byte(elements: int) -> None:
    """0.5 + 1/64 + 4/16384, and what is not filled of the last byte, block and group."""
    exact = elements * (0.5 + 1 / 64 + 4 / 16384)
    assert exact <= nf4_bytes(elements) <= exact + 0.5 + 1 + 4 + 4 + 1

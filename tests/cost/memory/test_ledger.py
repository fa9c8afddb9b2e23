"""Ledger: bytes a parameter that a rank keeps, by software and sharding."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given

from fsdpplan.cost.memory.ledger import StateBytes, makes_gradients, rank_state, sums_fp32_gradients
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.model.shards import whole_model
from fsdpplan.spec.model import Experts
from tests.cost.clusters import golden
from tests.cost.problems import SMALL, Case, case, cases

LEDGER = golden("ledger")
RANKS = 8
WHOLE = {"sharding": "ddp", "dp_replicate": RANKS}
ZERO_1 = {"sharding": "zero1", "dp_shard": RANKS}
ZERO_2 = {"sharding": "zero2", "dp_shard": RANKS}
SHARDED = {"dp_shard": RANKS}


def state_of(drawn: Case) -> StateBytes:
    """The ledger of the only pipeline rank."""
    return rank_state(drawn, whole_model(drawn.model))


@pytest.mark.parametrize(
    ("runtime", "precision", "layout", "parameters", "gradients", "optimizer"),
    [
        ("fsdp2", "bf16", WHOLE, 4, 4, 8),
        ("fsdp2", "bf16", ZERO_1, 4, 4, 8 / RANKS),
        ("fsdp2", "bf16", ZERO_2, 4, 4 / RANKS, 8 / RANKS),
        ("fsdp2", "bf16", SHARDED, 4 / RANKS, 0, 8 / RANKS),
        ("megatron", "bf16", WHOLE, 2, 4, 12),
        ("megatron", "bf16", ZERO_1, 2, 4, 12 / RANKS),
        ("megatron_2020", "fp16", WHOLE, 2, 2, 12),
        ("megatron_2020", "bf16", WHOLE, 2, 4, 12),
        ("megatron_deepspeed", "fp16", ZERO_1, 2, 2, 12 / RANKS),
        ("megatron_deepspeed", "bf16", ZERO_1, 2, 6, 12 / RANKS),
        ("internevo", "bf16", ZERO_1, 2, 2, 12 / RANKS),
        ("nanotron", "bf16", WHOLE, 2, 6, 12),
        ("nanotron_zero1", "bf16", ZERO_1, 2, 4, 12 / RANKS),
    ],
)
def test_bytes_a_parameter(
    runtime: str,
    precision: str,
    layout: dict[str, object],
    parameters: float,
    gradients: float,
    optimizer: float,
) -> None:
    drawn = case(runtime=runtime, precision=precision, **layout)
    state, count = state_of(drawn), parameter_count(SMALL)
    assert state.parameters == pytest.approx(parameters * count, rel=1e-6)
    assert state.gradients == pytest.approx(gradients * count, rel=1e-6)
    assert state.optimizer == pytest.approx(optimizer * count, rel=1e-6)


def each_parameter(**drawn: object) -> tuple[int, int, int]:
    """Bytes a parameter: (parameters, gradients, optimizer)."""
    state, count = state_of(case(**drawn)), parameter_count(SMALL)
    return (
        round(state.parameters / count),
        round(state.gradients / count),
        round(state.optimizer / count),
    )


@pytest.mark.parametrize("row", LEDGER["classic"], ids=lambda row: row["claim"])
def test_golden_classic_mixed_precision(row: dict[str, int]) -> None:
    precision = {2: "fp16", 4: "bf16"}[row["gradient_bytes"]]
    each = each_parameter(runtime="megatron_2020", precision=precision, **WHOLE)
    parts = [row["parameters"] * part / 1e9 for part in each]
    assert parts == [row["weights_gb"], row["gradients_gb"], row["optimizer_gb"]]
    assert sum(parts) == row["total_gb"]
    assert ceil(sum(parts) / row["gpu_gb"]) == row["least_gpus"]


@pytest.mark.parametrize("row", LEDGER["sharded"], ids=lambda row: row["claim"])
def test_golden_sharded_ledger(row: dict[str, int]) -> None:
    """FSDP2: 16 bytes, never 18, since the copy in 16 bits is gathered and freed unit by unit."""
    each = sum(each_parameter(**WHOLE))
    assert each == 16
    assert each * row["parameters"] / row["gpus"] / 1e9 == row["gb_a_gpu"]


def test_parameters_kept_in_bf16_are_8_bytes_each_in_place_of_16() -> None:
    whole = {**WHOLE, "dp_replicate": 2, "dp_shard": 1, "sharding": "ddp"}
    assert sum(each_parameter(**whole)) == 16
    assert each_parameter(param_dtype="bf16", **whole) == (2, 2, 4)


def test_megatrons_buffer_has_the_dtype_of_the_reduction() -> None:
    assert sums_fp32_gradients(case(runtime="megatron").training)
    assert not sums_fp32_gradients(case(runtime="megatron", reduce_dtype="bf16").training)


def test_expert_parallel_ranks_update_their_own_experts() -> None:
    model = replace(SMALL, experts=Experts(experts=8, active=2, hidden=2048))
    alone, split = (
        state_of(case(model, runtime="megatron", sharding="zero1", dp_shard=8, ep=ep))
        for ep in (1, 8)
    )
    # every rank holds an eighth of the experts whole, or all of them; in all they update the same
    assert split.parameters < alone.parameters
    assert split.optimizer == pytest.approx(alone.optimizer, rel=1e-3)


@given(cases())
def test_the_optimizer_updates_what_fsdp_or_ddp_holds(drawn: Case) -> None:
    state = state_of(drawn)
    assert state.optimizer_parameters == state.held_parameters > 0
    made = makes_gradients(training=drawn.training, layout=drawn.layout)
    assert (state.gradients == 0) == (drawn.layout.sharding == "fsdp" or made)

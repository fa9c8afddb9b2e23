"""Backward steps: what is allocated is freed, and what gradients add to the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.block.branch import weight_gradient_bytes
from fsdpplan.cost.block.operator import BackwardStep
from fsdpplan.cost.block.operators import block_operators
from fsdpplan.cost.memory.activations import (
    backward_peaks_bytes,
    backward_steps,
    inputs_half_peak_bytes,
)
from fsdpplan.cost.memory.weight_gradients import output_gradient_bytes
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Experts, LatentAttention, Model
from tests.cost.problems import BLOCKS, SMALL
from tests.cost.works import work

GELU = replace(SMALL, mlp="gelu")
MIXTURE = replace(SMALL, experts=Experts(experts=8, active=2, hidden=2048, shared_hidden=512))
LATENT = replace(
    SMALL,
    name="latent",
    latent=LatentAttention(kv_rank=128, rope_head_dim=32, value_head_dim=48, query_rank=256),
)
LATENT_MIXTURE = replace(MIXTURE, name="latent mixture", latent=LATENT.latent)
KERNELS: tuple[dict[str, object], ...] = (
    {},
    {"fused_kernels": True},
    {"attention_kernel": "scores"},
    {"fused_kernels": True, "attention_kernel": "scores", "dropout": True},
    {"reference_decoder": True, "dropout": True},
    {"joined_projections": True},
)


def steps_of(model: Model, **changes: object) -> list[BackwardStep]:
    """Of an eager block in bf16."""
    block = work(model, tokens=1024, seq_len=1024, compiled=False, **changes)
    return backward_steps(block_operators(block))


@pytest.mark.parametrize("kernels", KERNELS, ids=repr)
@pytest.mark.parametrize(
    "model",
    [SMALL, GELU, MIXTURE, LATENT, LATENT_MIXTURE, *BLOCKS],
    ids=lambda model: model.name + model.mixer,
)
def test_every_weight_gradient_is_made_and_more_is_freed_than_allocated(
    model: Model, kernels: dict[str, object]
) -> None:
    steps = steps_of(model, **kernels)
    gradients = weight_gradient_bytes(model=model, tp=1, element_bytes=2)
    assert sum(step.weight_gradient for step in steps) == sum(gradients.values())
    # what the block saved is gone in the end
    assert sum(step.allocated for step in steps) < sum(step.freed for step in steps)


FUSED_ATTENTION = [kernels for kernels in KERNELS if kernels.get("attention_kernel") != "scores"]
PAIRS = [(model, kernels) for model in (SMALL, GELU) for kernels in KERNELS]
PAIRS += [(model, kernels) for model in BLOCKS for kernels in FUSED_ATTENTION]


@pytest.mark.parametrize(("model", "kernels"), PAIRS, ids=lambda of: getattr(of, "name", str(of)))
def test_what_is_allocated_and_what_was_saved_is_freed(
    model: Model, kernels: dict[str, object]
) -> None:
    """But for statistics, and what a gate of shared experts reads."""
    block = work(model, tokens=1024, seq_len=1024, compiled=False, **kernels)
    operators = block_operators(block)
    left = sum(s.allocated - s.freed for s in backward_steps(operators))
    saved = sum(each.saved_bytes for each in operators)
    assert abs(saved + left) <= 0.06 * saved


def test_kept_gradients_raise_the_peak_and_casts_more() -> None:
    steps = steps_of(SMALL)
    added, kept = (backward_peaks_bytes(steps, weight_gradients=g) for g in ("added", "kept"))
    assert added <= kept
    assert kept <= backward_peaks_bytes(steps, weight_gradients="cast")


def test_a_single_step_peaks_at_what_it_allocates() -> None:
    step = BackwardStep(weight_gradient=3, allocated=5, freed=7)
    assert backward_peaks_bytes([step, step], weight_gradients="kept") == (9, 0)
    assert backward_peaks_bytes([step], weight_gradients="added") == (8, 0)


def test_experts_that_are_reduced_by_themselves_part_the_peak() -> None:
    work = BackwardStep(weight_gradient=3, allocated=5, freed=7)
    reduction = BackwardStep(allocated=6, freed=3, reduces_experts=True)
    assert backward_peaks_bytes([work, reduction, work], weight_gradients="kept") == (8, 12)


FAMILIES = (
    "llama-3.1-8b",
    "gpt2",
    "megatron-76b",
    "qwen3-8b",
    "olmo-2-7b",
    "gemma-2-2b",
    "falcon-40b",
    "deepseek-v2",
    "mixtral-8x7b",
    "qwen1.5-moe-a2.7b",
)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_inputs_half_leaves_the_gradients_of_all_outputs(name: str, tp: int) -> None:
    """But for the router's, which are small: the residual stream's comes in and goes out."""
    model, tokens = load_model(name), 1024
    split = {"tp": tp, "sequence_parallel": tp > 1, "compiled": False}
    block = work(model, tokens=tokens, seq_len=tokens, **split)
    steps = backward_steps(block_operators(block))
    left = sum(step.allocated + step.beside - step.let_go for step in steps)
    router = (model.experts.experts + 1) * tokens if model.experts else 0
    assert 0 <= output_gradient_bytes(block) - left <= 2 * router
    assert inputs_half_peak_bytes(steps) > left

"""fp16 with loss scaling, on real gloo ranks and alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.precision import compute_dtype
from fsdpplan.trainer.scaler import FIRST_SCALE, LossScaler, scaled, scaler_state
from tests.trainer import jobs, plans
from tests.trainer.precision_layouts import HALF, LAYOUTS, SPOILED_STEP, SPOILS, spoil_one_gradient

CPU = torch.device("cpu")

FP16_TOLERANCE = 1e-3
"""fp16 has 11 bits; losses near 4 differ by 2e-4 in the third step."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]) -> Results:
    """The layouts that are asked for in fp16 and bf16, in one set of processes."""
    out = tmp_path_factory.mktemp("scaling") / "results.json"
    function = "tests.trainer.precision_layouts:measure_scaling"
    return jobs.measured(4, function, out, asked=asked("name"))


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp16_begins_as_fp32_does(results: Results, name: str) -> None:
    measured, expected = results[name], results["fp32"]
    assert measured["losses"] == pytest.approx(expected["losses"], abs=FP16_TOLERANCE)
    assert measured["norms"] == pytest.approx(expected["norms"], rel=0.01)
    assert set(measured["scales"]) == {FIRST_SCALE}


HALF_TOLERANCE = 0.01
"""bf16 has 8 bits; sums in another order differ by 0.004 in losses near 4, in three steps."""


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", HALF)
def test_parameters_kept_in_bf16_lose_as_one_process(results: Results, name: str) -> None:
    expected = results["bf16"]
    for rank in results[name]["ranks"]:
        assert rank["dtypes"] == ["torch.bfloat16"]
        assert rank["losses"] == pytest.approx(expected["losses"], abs=HALF_TOLERANCE)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=0.03)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", SPOILS)
def test_all_ranks_skip_a_step_that_overflowed_and_go_on(results: Results, name: str) -> None:
    ranks = results[f"{name}_spoiled"]["ranks"]
    for rank in ranks:
        before, spoiled, after = rank["weights"]
        assert spoiled == before
        assert not math.isfinite(rank["norms"][SPOILED_STEP])
        assert rank["scales"] == ranks[0]["scales"]
        if SPOILS[name] is spoil_one_gradient:  # once, and only the last rank's
            assert rank["scales"] == [FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
            assert math.isfinite(rank["norms"][SPOILED_STEP + 1])
            assert after != spoiled


@pytest.mark.gloo
def test_a_checkpoint_keeps_the_loss_scale(tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "kept"), "--lr-schedule", "constant")
    training = {"precision": "fp16"}
    for steps in ("1", "2"):
        jobs.train(tmp_path, 1, "--steps", steps, *checkpoints, training=training)
        saved = next((tmp_path / "kept").glob(f"step-*{steps}/trainer.json"))
        state = json.loads(saved.read_text(encoding="utf-8"))["scaler_state"]
        assert state == {"scale": FIRST_SCALE, "good_steps": float(steps)}
    assert [line["loss_scale"] for line in jobs.lines(tmp_path, "step")] == [FIRST_SCALE] * 2


def scaler(*, growth_interval: int = 2) -> LossScaler:
    return LossScaler(CPU, growth_interval=growth_interval)


def recipe(*, adamw: str = "fused") -> Recipe:
    return Recipe(
        steps=1, learning_rate=1e-3, warmup_steps=0, weight_decay=0.1, clip_norm=1.0, adamw=adamw
    )


@pytest.mark.parametrize("adamw", ["fused", "foreach", "loop"])
def test_the_scale_falls_with_an_overflow_and_rises_after_good_steps(adamw: str) -> None:
    model, loss_scaler = nn.Linear(3, 3), scaler()
    optimizer = make_optimizer(model, recipe(adamw=adamw))
    scales, moved = [], []
    for norm in (1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0):
        before = model.weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, norm)
        loss_scaler.step(optimizer, torch.tensor(norm))
        scales.append(float(loss_scaler.scale) / FIRST_SCALE)
        moved.append(not torch.equal(model.weight, before))
    assert scales == [1, 0.5, 0.5, 1, 0.5, 0.5]
    assert moved == [True, False, True, True, False, True]


def test_a_skipped_step_is_not_counted() -> None:
    model, loss_scaler = nn.Linear(3, 3), scaler()
    optimizer = make_optimizer(model, recipe())
    for norm in (1.0, float("inf"), 1.0):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss_scaler.step(optimizer, torch.tensor(norm))
    assert float(optimizer.state[model.weight]["step"]) == 2


def test_gradients_are_scaled_and_the_loss_is_not() -> None:
    loss_scaler, weight = scaler(), nn.Parameter(torch.tensor(3.0))
    loss = scaled(weight * 2, loss_scaler)
    loss.backward()
    assert loss.item() == 6
    assert weight.grad is not None
    assert weight.grad.item() == 2 * FIRST_SCALE
    holder = nn.Module()
    holder.weight = weight
    loss_scaler.unscale(holder)
    assert weight.grad.item() == 2


def test_a_scaler_goes_on_where_another_stopped() -> None:
    first, second = scaler(), scaler()
    first.scale.mul_(0.25)
    first.good_steps.fill_(1)
    second.load(scaler_state(first))
    assert scaler_state(second) == scaler_state(first) == {"scale": 2.0**14, "good_steps": 1.0}
    assert scaler_state(None) == {}


@pytest.mark.parametrize(
    ("precision", "dtype", "peak"),
    [
        ("fp32", torch.float32, 1e11),
        ("bf16", torch.bfloat16, 2e11),
        ("fp16", torch.float16, 3e11),
        ("fp8", torch.bfloat16, 4e11),
    ],
)
def test_a_precision_has_its_compute_dtype_and_its_peak(
    precision: str, dtype: torch.dtype, peak: float
) -> None:
    document = plans.plan_document(training={"precision": precision})
    names = ("fp32", "bf16", "fp16", "fp8")
    document["cluster"]["device"] |= {
        f"peak_{name}_flops_per_second": (1 + index) * 1e11 for index, name in enumerate(names)
    }
    plan = parse_plan(json.dumps(document))
    assert compute_dtype(plan.training) is dtype
    assert plan.peak_flops_per_second == peak

"""Muon: every layout updates as one process does, and updates are orthogonal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.groups import parse_group
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.muon import orthogonal
from fsdpplan.trainer.optimizer import Recipe, ShardOptimizer, block_matrices, make_optimizer
from tests.trainer import jobs, plans
from tests.trainer.precision_layouts import EXPERTS, LAYOUTS

TOLERANCE = 1e-5
"""Sums in another order, which orthogonalising carries on; 2e-6 was the largest seen."""

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, asked: Callable[[str], set[Any]]) -> Results:
    """All optimizers and the layouts that are asked for, in one set of processes."""
    out = tmp_path_factory.mktemp("optimizers") / "results.json"
    function = "tests.trainer.precision_layouts:measure_optimizers"
    return jobs.measured(4, function, out, asked=asked("name"))


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_learns_by_muon_as_one_process(results: Results, name: str) -> None:
    measured, expected = results[f"muon_{name}"], results["muon"]
    assert measured["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert expected["losses"][2] != pytest.approx(results["adamw"]["losses"][2], abs=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name", EXPERTS)
def test_stacked_experts_learn_by_muon_as_in_one_process(results: Results, name: str) -> None:
    expected = results["muon_experts"]["losses"]
    assert results[f"muon_{name}"]["losses"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["fused", "foreach", "loop"])
def test_adamw_is_the_same_however_it_is_computed(results: Results, kind: str) -> None:
    expected = results["adamw"]["losses"]
    assert results[f"adamw_{kind}"]["losses"] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (3, 6, 20)])
def test_an_update_is_nearly_orthogonal_whatever_its_scale(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    update = orthogonal(1e-3 * torch.randn(shape))
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_each_matrix_of_a_stack_is_orthogonalised_alone() -> None:
    torch.manual_seed(0)
    stack = torch.randn(4, 6, 10)
    alone = torch.stack([orthogonal(matrix) for matrix in stack])
    torch.testing.assert_close(orthogonal(stack), alone)


def test_nothing_moves_without_a_gradient() -> None:
    assert torch.equal(orthogonal(torch.zeros(4, 6)), torch.zeros(4, 6))


def mixture_decoder() -> Decoder:
    experts = {"experts": 4, "active": 2, "hidden": 32, "bias": True}
    plan = parse_plan(plans.plan_text(model={"experts": experts, "attention_bias": True}))
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    return decoder


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    decoder = mixture_decoder()
    chosen = {id(parameter) for parameter in block_matrices(decoder)}
    for name, parameter in decoder.named_parameters():
        is_matrix = name.startswith("layers.") and name.endswith("weight") and "norm" not in name
        assert (id(parameter) in chosen) == is_matrix, name


def test_a_stage_without_blocks_has_nothing_for_muon() -> None:
    config = parse_plan(plans.plan_text()).model
    assert not list(block_matrices(Decoder(config, blocks=(), has_head=False)))


def test_muon_keeps_one_momentum_and_adamw_two_moments() -> None:
    decoder = mixture_decoder()
    recipe = Recipe(
        steps=1,
        learning_rate=1e-3,
        warmup_steps=0,
        weight_decay=0.1,
        clip_norm=1.0,
        optimizer="muon",
    )
    optimizer = make_optimizer(decoder, recipe)
    for parameter in decoder.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, parameter in decoder.named_parameters():
        state = optimizer.state[parameter]
        if name.startswith("layers.0.attention.w") and name.endswith("weight"):
            assert state.keys() == {"momentum_buffer"}
        elif "norm" in name or "embeddings" in name or name.startswith("output"):
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("momentum", "steps"), [(0.95, 5), (0.8, 3)])
def test_its_settings_are_torchs(nesterov: bool, momentum: float, steps: int) -> None:
    """torch orthogonalises in bf16, here it is fp32 on a CPU."""
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("torch.optim.Muon came with torch 2.9")
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Linear(24, 40, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    reference = muon(
        theirs.parameters(),
        lr=0.02,
        weight_decay=0.1,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=steps,
        adjust_lr_fn="match_rms_adamw",
    )
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([ours])
    recipe = Recipe(
        steps=3,
        learning_rate=1e-3,
        warmup_steps=0,
        weight_decay=0.0,
        clip_norm=1.0,
        optimizer="muon",
        muon_learning_rate=0.02,
        muon_weight_decay=0.1,
        muon_momentum=momentum,
        muon_nesterov=nesterov,
        muon_ns_steps=steps,
    )
    optimizer = make_optimizer(model, recipe)
    for _ in range(3):
        gradient = torch.randn(40, 24)
        ours.weight.grad, theirs.weight.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    moved, expected = ours.weight - before, theirs.weight - before
    assert (moved - expected).norm() < 0.02 * expected.norm()
    again = optimizer.state[ours.weight]["momentum_buffer"]
    torch.testing.assert_close(again, reference.state[theirs.weight]["momentum_buffer"])


def test_groups_are_dealt_out_together() -> None:
    """Settings are by parameter, the exchange is of all."""
    decoder = mixture_decoder()
    groups = (parse_group("layers.0.*:lr=0.5"), parse_group("layers.1.*:weight_decay=0"))
    recipe = Recipe(
        steps=1,
        learning_rate=1e-3,
        warmup_steps=0,
        weight_decay=0.1,
        clip_norm=1.0,
        optimizer="muon",
        groups=groups,
    )
    optimizer = make_optimizer(decoder, recipe)
    assert sum("muon" in group for group in optimizer.param_groups) > 1
    for parameter in decoder.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert isinstance(optimizer, ShardOptimizer)
    assert len(optimizer._deals) == 1

"""Optimizers: what they update, how they are computed, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.optimizer import Recipe, make_optimizer, set_learning_rate
from fsdpplan.trainer.options import parse_options
from fsdpplan.trainer.parallel.support import require_runnable
from tests.trainer.plans import config_of, plan_text

RECIPE = Recipe(
    steps=3, learning_rate=1e-2, warmup_steps=0, weight_decay=0.1, clip_norm=1.0, adamw="loop"
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))


def weights_after(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[Tensor]:
    """The weights after some steps on random numbers."""
    torch.manual_seed(1)
    for _ in range(RECIPE.steps):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    groups = make_optimizer(model, RECIPE).param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert [decays[id(parameter)] for parameter in model.parameters()] == [0.1, 0, 0, 0]


def test_biases_of_experts_do_not_decay_though_they_are_stacked() -> None:
    experts = {"experts": 4, "active": 2, "hidden": 24, "bias": True, "router_bias": True}
    model = Decoder(config_of(experts=experts))
    for group in make_optimizer(model, RECIPE).param_groups:
        decaying = {id(parameter) for parameter in group["params"] if group["weight_decay"]}
        for name, parameter in model.named_parameters():
            assert not (name.endswith("bias") and id(parameter) in decaying), name


@pytest.mark.parametrize("adamw", ["fused", "foreach", "loop"])
def test_adamw_is_torchs(adamw: str) -> None:
    ours, theirs = network(), network()
    groups = make_optimizer(theirs, RECIPE).param_groups
    reference = torch.optim.AdamW(
        [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups],
        lr=RECIPE.learning_rate,
        betas=(0.9, 0.95),
        foreach=False,
    )
    expected = weights_after(reference, theirs)
    measured = weights_after(make_optimizer(ours, replace(RECIPE, adamw=adamw)), ours)
    torch.testing.assert_close(measured, expected, rtol=1e-5, atol=1e-6)


def test_the_command_line_says_how_adamw_is_computed() -> None:
    assert parse_options([]).adamw == "fused"
    chosen = parse_options(["--adamw", "foreach"]).adamw
    group = make_optimizer(network(), replace(RECIPE, adamw=chosen)).param_groups[0]
    assert (group["foreach"], group["fused"]) == (True, False)


def test_adamw_of_8_bits_needs_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(TrainerError, match=r"adamw_8bit needs torchao.*pip install torchao"):
        make_optimizer(network(), replace(RECIPE, optimizer="adamw_8bit"))


@pytest.mark.filterwarnings("ignore")  # torchao's and the compiler's own
def test_adamw_of_8_bits_learns_as_adamw() -> None:
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    ours, theirs = network(), network()
    before = [parameter.detach().clone() for parameter in theirs.parameters()]
    expected = weights_after(make_optimizer(theirs, RECIPE), theirs)
    optimizer = make_optimizer(ours, replace(RECIPE, optimizer="adamw_8bit"))
    set_learning_rate(optimizer, RECIPE.learning_rate)
    torch.compiler.set_stance("force_eager")
    try:
        measured = weights_after(optimizer, ours)
    finally:
        torch.compiler.set_stance("default")
    for old, exact, rounded in zip(before, expected, measured, strict=True):
        moved = (exact - old).norm()
        assert 0 < (rounded - exact).norm() < 0.2 * moved or torch.allclose(rounded, exact)
    large = optimizer.state[ours[0].weight]["exp_avg"]
    assert large.codes.dtype is torch.uint8
    assert large.scale.numel() * 256 == large.numel()


@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
def test_only_adamw_runs_on_the_host(optimizer: str) -> None:
    text = plan_text(training={"optimizer": optimizer}, offload="cpu")
    with pytest.raises(TrainerError, match=f"optimizer {optimizer} with offload cpu"):
        require_runnable(parse_plan(text))

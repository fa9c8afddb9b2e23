"""The mixture of experts on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdpplan.spec.trainer_options import BALANCE_SPEED
from fsdpplan.trainer.config import ExpertsConfig, RouterConfig
from fsdpplan.trainer.model import moe
from fsdpplan.trainer.model.balance import Balance, MeanSoFar, balance_experts
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.feed_forward import activate
from fsdpplan.trainer.model.moe import GroupedExperts, MixtureOfExperts, balanced, padded_places
from fsdpplan.trainer.model.weights import initialise
from tests.trainer import plans

HIDDEN = 16


def mixture(mlp: str = "swiglu", hidden: int = 24, **fields: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    config = ExpertsConfig(**{"experts": 5, "active": 2, "hidden": hidden, **fields})
    built = MixtureOfExperts(HIDDEN, config, mlp=mlp)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.5)
    return built


def one_by_one(built: MixtureOfExperts, x_ND: Tensor) -> Tensor:
    """The definition: for each token the weighted sum of what its experts give."""
    weights, chosen = built.route(x_ND)
    experts = built.experts
    rows = []
    for token, x in enumerate(x_ND):
        total = torch.zeros_like(x)
        for weight, number in zip(weights[token], chosen[token].tolist(), strict=True):
            inner = activate(experts.w1.weight[number] @ x + experts.w1.bias[number], experts.mlp)
            if experts.mlp != "gelu":
                inner = inner * (experts.w3.weight[number] @ x + experts.w3.bias[number])
            total = total + weight * (experts.w2.weight[number] @ inner + experts.w2.bias[number])
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("mlp", ["swiglu", "geglu", "gelu"])
@pytest.mark.parametrize("hidden", [24, 23], ids=["one kernel", "a loop"])
def test_each_token_gets_the_weighted_sum_of_its_experts(mlp: str, hidden: int) -> None:
    built = mixture(mlp, hidden, bias=True, router_bias=True)
    x = torch.randn(2, 7, HIDDEN, requires_grad=True)
    out = built(x)
    expected = one_by_one(built, x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    parameters = [x, *built.parameters()]
    found = torch.autograd.grad(out.square().sum(), parameters)
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_weights_of_the_chosen_sum_to_one_and_the_best_are_chosen() -> None:
    built = mixture()
    x = torch.randn(9, HIDDEN)
    weights, chosen = built.route(x)
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))
    best = built.router(x).topk(2, dim=-1).indices
    assert torch.equal(chosen.sort().values, best.sort().values)


ROUTERS = {
    "v2": ({"normalised": False, "scaling": 16.0, "groups": 4, "groups_chosen": 2}, {}),
    "v2 lite": ({"normalised": False}, {"topk_method": "greedy", "routed_scaling_factor": 1.0}),
    "v3": (
        {"scores": "sigmoid", "scaling": 2.5, "groups": 4, "groups_chosen": 2, "group_best": 2},
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "k2": (
        {"scores": "sigmoid", "scaling": 2.827},
        {"norm_topk_prob": True, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1},
    ),
    "not normalised": (
        {"scores": "sigmoid", "normalised": False},
        {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    ),
}
"""Our router, and the config of the one in transformers that it is."""


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_are_those_of_transformers(name: str) -> None:
    # here, since they take longer to import than all tests of this file take
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    ours, theirs = ROUTERS[name]
    built = mixture(experts=12, active=3, router=RouterConfig(**ours))
    config = SimpleNamespace(
        num_experts_per_tok=3,
        num_experts=12,
        num_local_experts=12,
        hidden_size=HIDDEN,
        **{
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "n_group": 4,
            "topk_group": 2,
        }
        | theirs,
    )
    if name.startswith("v2"):
        router: Any = modeling_deepseek_v2.DeepseekV2TopkRouter(config)
    else:
        router = modeling_deepseek_v3.DeepseekV3TopkRouter(config)
        router.e_score_correction_bias.normal_(std=0.3)
        built.expert_bias.copy_(router.e_score_correction_bias)
    router.weight.data.copy_(built.router.weight)
    x = torch.randn(33, HIDDEN)
    _, weights, chosen = router(x)
    found, numbers = built.route(x)
    expected = torch.zeros(33, 12).scatter(1, chosen, weights)
    torch.testing.assert_close(torch.zeros(33, 12).scatter(1, numbers, found), expected)


def test_an_expert_that_nobody_visits_has_a_gradient_of_zero() -> None:
    built = mixture()
    with torch.no_grad():
        built.expert_bias[3] = -9.0
    built(torch.randn(1, 6, HIDDEN)).sum().backward()
    for linear in (built.experts.w1, built.experts.w2, built.experts.w3):
        assert linear.weight.grad is not None
        assert not linear.weight.grad[3].any()


def test_rows_in_padded_groups_are_computed_as_without_padding() -> None:
    """On CUDA each group of rows begins at 16 bytes."""
    built = mixture(bias=True).experts
    counts = torch.tensor([3, 0, 9, 8, 1])
    rows = torch.randn(21, HIDDEN)
    padded_counts = torch.tensor([8, 0, 16, 8, 8])
    at = padded_places(counts, padded_counts, rows=21)
    assert at.tolist() == [0, 1, 2, *range(8, 17), *range(24, 32), 32]
    padded = torch.full((56, HIDDEN), 7.0).index_copy(0, at, rows)
    groups = moe.Groups(padded_counts, padded, inner=24)
    torch.testing.assert_close(built._run(padded, groups)[at], built(rows, counts))


def test_rows_behind_the_last_group_say_nothing_of_any_bias() -> None:
    """Kernels leave there what was in memory."""
    groups = moe.Groups(torch.tensor([8, 8]), torch.zeros(24, HIDDEN), inner=24)
    bias = torch.zeros(2, 24, requires_grad=True)
    out = groups.multiply(torch.ones(24, HIDDEN), torch.ones(2, 24, HIDDEN), bias)
    gradient = torch.ones(24, 24)
    gradient[16:] = torch.nan
    out.backward(gradient)
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((2, 24), 8.0))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_an_even_split_keeps_all_and_differs_by_one(total: int, parts: int) -> None:
    sizes = balanced(total, parts)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1


def tiny() -> Decoder:
    experts = {"experts": 6, "active": 2, "hidden": 24, "dense_layers": 1}
    decoder = Decoder(plans.config_of(layers=3, experts=experts))
    initialise(decoder, seed=0, layers=3)
    return decoder


def test_busy_experts_are_chosen_less_and_idle_ones_more() -> None:
    decoder = tiny()
    decoder(torch.randint(61, (2, 20)))
    (first, second) = (m for m in decoder.modules() if isinstance(m, MixtureOfExperts))
    counts = first.counts.clone()
    assert counts.sum() == second.counts.sum() == 2 * 2 * 20
    busiest = max(first.counts.max(), second.counts.max())
    moved = Balance(bias_rate=BALANCE_SPEED)
    found = balance_experts(decoder, None, decoder.config, moved)
    assert found.imbalance == busiest / (80 / 6)
    assert found.auxiliary_loss is None
    expected = BALANCE_SPEED * torch.sign(80 / 6 - counts)
    torch.testing.assert_close(first.expert_bias, expected)
    assert not first.counts.any()


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("hidden", [24, 23], ids=["one kernel", "a loop"])
def test_real_tokens_are_as_if_nothing_filled_up_their_rows(mlp: str, hidden: int) -> None:
    """Outputs, gradients, loads, and what presses the router."""
    built = mixture(mlp, hidden, bias=True, router_bias=True, shared_hidden=8)
    built.is_pressed = True
    built.pressure.copy_(torch.randn(5))
    x = torch.randn(2, 9, HIDDEN)
    real = torch.arange(9).expand(2, 9) < torch.tensor([[9], [2]])
    found = []
    for rows, mask in ((x[real][None], None), (x, real)):
        leaf = rows.clone().requires_grad_()
        out = built(leaf, mask)
        kept = out[0] if mask is None else out[mask]
        gradients = torch.autograd.grad(kept.square().sum(), [leaf, *built.parameters()])
        of_x = gradients[0][0] if mask is None else gradients[0][mask]
        if mask is not None:
            assert not gradients[0][~mask].any()
        found.append(
            [kept, of_x, *gradients[1:], built.counts.clone(), built.probabilities.clone()]
        )
        built.counts.zero_()
        built.probabilities.zero_()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_what_micro_batches_are_told_is_in_the_mean_what_the_step_has_chosen(
    chosen: list[list[int]],
) -> None:
    """Over choices, whoever chose how many; a step whose rows are all filler presses nothing."""
    counts = torch.tensor(chosen)
    mean = MeanSoFar(counts.sum())
    told = torch.stack([mean.after(each) for each in counts])
    assert told.isfinite().all()
    torch.testing.assert_close((counts.sum(1)[:, None] * told).sum(0), counts.sum(0).double())
    if len(chosen) == 1 and counts.any():
        torch.testing.assert_close(told[0], counts[0].double() / counts.sum())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch in torch
@pytest.mark.parametrize("backend", ["eager", "aot_eager_decomp_partition"])
def test_a_compiled_router_reads_its_pressure_in_backward(backend: str) -> None:
    """It is known only then: what a graph of forward has read of it is nothing."""
    built = mixture()
    built.is_pressed = True
    x = torch.randn(9, HIDDEN)
    found = []
    for route in (built.route, torch.compile(built.route, backend=backend)):
        for pressure in (1.0, 2.0):
            built.pressure.fill_(torch.nan)
            (weights, _) = route(x)
            built.pressure.data.copy_(pressure * torch.arange(5))
            built.zero_grad()
            weights.square().sum().backward()
            assert built.router.weight.grad is not None
            found.append(built.router.weight.grad.clone())
    torch.testing.assert_close(found[2:], found[:2])
    assert not torch.allclose(found[0], found[1])


def test_biases_are_saved_and_counts_are_not() -> None:
    names = tiny().state_dict()
    assert "layers.1.feed_forward.expert_bias" in names
    assert not any(name.endswith("counts") for name in names)


def test_a_router_that_prefers_one_expert_is_balanced_in_time() -> None:
    built = mixture(active=1)
    with torch.no_grad():
        built.router.weight.mul_(0.02)
        built.router.weight[0] += 0.02
    x = torch.randn(1, 200, HIDDEN) + 1.0
    spread = []
    for _ in range(60):
        built(x)
        found = balance_experts(built, None, tiny().config, Balance(bias_rate=BALANCE_SPEED))
        assert found.imbalance is not None
        spread.append(float(found.imbalance))
    assert spread[0] > 2
    assert min(spread[-20:]) < 1.5


def test_a_dense_model_has_nothing_to_balance() -> None:
    dense = Decoder(plans.config_of())
    assert balance_experts(dense, None, dense.config, Balance()).imbalance is None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_any_counts_are_computed_row_by_row(sizes: list[int]) -> None:
    experts: GroupedExperts = mixture().experts
    rows = torch.randn(sum(sizes), HIDDEN)
    out = experts(rows, torch.tensor(sizes))
    numbers = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))
    for row, number, found in zip(rows, numbers, out, strict=True):
        inner = activate(experts.w1.weight[number] @ row, "swiglu")
        inner = inner * (experts.w3.weight[number] @ row)
        torch.testing.assert_close(found, experts.w2.weight[number] @ inner, rtol=1e-3, atol=1e-4)

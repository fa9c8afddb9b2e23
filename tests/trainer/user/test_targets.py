"""What a loss of a user's model is divided by: one count of the step, or a refusal. In one process,
over micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fsdpplan.trainer import (
    TrainerError,
    forward_backward,
    gradient_sync,
    load_plan,
    parallelize,
    targets_per_micro_batch,
    token_loss,
)
from fsdpplan.trainer.config import PlanConfig
from tests.trainer import plans
from tests.trainer.own_models import LENGTH, VOCAB, Own
from tests.trainer.user_layouts import MODELS, WIDTHS

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # torch's, of heads with a bias
]

ROWS = 4
KNOWN = (12, 0, 7, 2)
REFUSED = (
    "targets, over all ranks, .* the gradient depends on the layout: .*targets_per_micro_batch"
)


def plan_of(*, precision: str = "fp32", **layout: Any) -> PlanConfig:
    training = {"seq_len": LENGTH, "precision": precision}
    chosen = {"micro_batch": 1, "num_microbatches": ROWS, **layout}
    return load_plan(plans.plan_text(model={"vocab": VOCAB}, training=training, **chosen))


def rows(known: tuple[int, ...] = KNOWN) -> tuple[Tensor, Tensor]:
    """Tokens, and targets of which each row has so many."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    targets = tokens.roll(-1, 1)
    for row, number in zip(targets, known, strict=True):
        row[number:] = -100
    return tokens, targets


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole ones, which are freed."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient: Any = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        parameter.grad = None
    return found


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    whole = torch.stack([each.norm() for each in expected.values()]).norm()
    for name, gradient in found.items():
        norm = torch.maximum(expected[name].norm(), 1e-3 * whole)
        assert (gradient - expected[name]).norm() < 1e-5 * norm, name


def stepped(model: nn.Module, plan: PlanConfig, *given: Any, **named: Any) -> None:
    """`forward_backward` and an optimizer's step."""
    forward_backward(model, plan, *given, **named)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.zero_grad()


def test_a_count_is_the_mean_of_a_micro_batch_and_0_targets_are_a_loss_of_0(alone: None) -> None:
    plan, (_, targets) = plan_of(), rows()
    parallelize(Own(), plan)
    assert float(targets_per_micro_batch(plan, targets)) == sum(KNOWN) / ROWS
    assert float(targets_per_micro_batch(plan, list(targets[:2]))) == sum(KNOWN[:2]) / 2
    none = targets_per_micro_batch(plan, torch.full_like(targets, -100))
    logits = torch.randn(ROWS, LENGTH, VOCAB)
    assert float(token_loss(logits, torch.full_like(targets, -100), none)) == 0
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(token_loss(logits, targets, 4.0)) == pytest.approx(float(total) / 4)


@pytest.mark.parametrize("chunks", [1, 5])
def test_what_is_only_looked_at_is_not_held_against_a_step(alone: None, chunks: int) -> None:
    plan, (tokens, targets) = plan_of(loss_chunks=chunks), rows()
    model = parallelize(Own(), plan)
    token_loss(model(tokens[:1]), targets[:1])
    with torch.no_grad():
        token_loss(model(tokens[:2]), targets[:2])
    stepped(model, plan, tokens, targets)


class OwnLoss(Own):
    """A model that computes its loss by itself."""

    def forward(self, tokens: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:  # type: ignore[override]
        loss = token_loss(super().forward(tokens), labels, num_items_in_batch)
        return SimpleNamespace(loss=loss)


class MeanLoss(Own):
    """A model whose loss is a mean of its own."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=F.cross_entropy(super().forward(tokens).mT, labels))


def expected_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    F.cross_entropy(Own.forward(model, tokens).flatten(0, 1), targets.flatten()).backward()  # type: ignore[arg-type]
    return gradients(model)


@pytest.mark.parametrize("make", [OwnLoss, MeanLoss])
def test_the_loss_of_a_model_of_ones_own_is_divided_by_one_count_or_refused(
    alone: None, make: type[Own]
) -> None:
    torch.manual_seed(0)
    model, plan, (tokens, targets) = make(), plan_of(), rows()
    expected = expected_of(model, tokens, targets)
    model = parallelize(model, plan)
    given = {"tokens": tokens, "labels": targets}
    stepped(model, plan, {"tokens": tokens, "labels": tokens})
    with pytest.raises(TrainerError, match=REFUSED):
        forward_backward(model, plan, given)
    model.zero_grad()
    if make is OwnLoss:
        count = targets_per_micro_batch(plan, targets)
        forward_backward(model, plan, given | {"num_items_in_batch": count})
        require_same(gradients(model), expected)


def sum_over_count(output: Tensor, targets: Tensor, *, num_items_in_batch: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, targets, reduction="sum") / num_items_in_batch


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.mT, targets)


def test_a_loss_of_ones_own_gets_the_count_or_is_refused(alone: None) -> None:
    torch.manual_seed(0)
    model, plan, (tokens, targets) = Own(), plan_of(), rows()
    expected = expected_of(model, tokens, targets)
    model = parallelize(model, plan)
    forward_backward(model, plan, tokens, targets, loss=sum_over_count)
    require_same(gradients(model), expected)
    count = targets_per_micro_batch(plan, targets)
    stepped(model, plan, tokens, targets, loss=lambda out, to: token_loss(out, to, count))
    stepped(model, plan, tokens, tokens, loss=mean)
    with pytest.raises(TrainerError, match="0 to 12 " + REFUSED):
        forward_backward(model, plan, tokens, targets, loss=mean)


def hugging_face(config: str, kind: str, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    widths = {**WIDTHS, **fields}
    made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**widths))
    return made.train()


def test_labels_that_a_model_does_not_move_are_all_counted(alone: None) -> None:
    """The first label is a target of a masked language model, and of a causal one it is not."""
    plan, (tokens, targets) = plan_of(), rows((12, 1, 7, 2))
    special = {f"{kind}_token_id": 0 for kind in ("pad", "eos", "bos", "cls", "sep")}
    model = hugging_face("ModernBertConfig", "ModernBertForMaskedLM", **special)
    given = {"input_ids": tokens, "labels": targets}
    model(**given).loss.backward()
    expected = gradients(model)
    model = parallelize(model, plan)
    forward_backward(model, plan, given)
    require_same(gradients(model), expected)


def test_a_model_of_hugging_face_that_leaves_the_count_aside_is_refused(alone: None) -> None:
    plan, (tokens, targets) = plan_of(), rows((12, 1, 7, 2))
    model = parallelize(hugging_face("BertConfig", "BertForMaskedLM"), plan)
    forward_backward(model, plan, {"input_ids": tokens, "labels": tokens})
    with pytest.raises(TrainerError, match="1 to 12 " + REFUSED):
        forward_backward(model, plan, {"input_ids": tokens, "labels": targets})


def test_the_balance_of_experts_is_the_mean_over_micro_batches(alone: None) -> None:
    plan, (tokens, _) = plan_of(), rows()
    labels = rows((12, 1, 7, 2))[1].roll(1, 1)
    config, fields = MODELS["mixtral"]
    balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = hugging_face(config, "MixtralForCausalLM", **fields, **balance)
    targets = labels[:, 1:]
    for row in range(ROWS):
        output = model(input_ids=tokens[row : row + 1])
        logits = output.logits[:, :-1].mT
        total = F.cross_entropy(logits, targets[row : row + 1], reduction="sum")
        (total / (targets != -100).sum() + 0.5 * output.aux_loss / ROWS).backward()
    expected = gradients(model)
    model = parallelize(model, plan)
    forward_backward(model, plan, {"input_ids": tokens, "labels": labels})
    require_same(gradients(model), expected)


def test_a_count_comes_through_mixed_precision_as_it_is(alone: None) -> None:
    """FSDP casts what a model is given: in bf16 257.25 would be 258."""
    plan = plan_of(precision="bf16", num_microbatches=1)
    model, seen = hugging_face("LlamaConfig", "LlamaForCausalLM"), []

    def loss(*_: Any, num_items_in_batch: Any = None, **__: Any) -> Tensor:
        seen.append(num_items_in_batch)
        return torch.zeros((), requires_grad=True)

    model.loss_function = loss  # type: ignore[assignment]
    model = parallelize(model, plan)
    tokens, _ = rows()
    with gradient_sync(model, plan.layout, is_last=True):
        count = torch.tensor(257.25)
        model(input_ids=tokens[:1], labels=tokens[:1], num_items_in_batch=count)
    assert seen == [torch.tensor(257.25)]

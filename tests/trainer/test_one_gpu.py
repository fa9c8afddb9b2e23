"""One process alone: bare, and under FSDP over one rank, it trains as plain torch does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from fsdpplan.trainer import load_plan, parallelize
from fsdpplan.trainer.checkpoint.progress import Progress
from fsdpplan.trainer.checkpoint.runs import Checkpoints
from fsdpplan.trainer.config import PlanConfig, parse_plan
from fsdpplan.trainer.model.decoder import Decoder
from fsdpplan.trainer.model.loss import next_token_loss
from fsdpplan.trainer.model.weights import initialise
from fsdpplan.trainer.optimizer import Recipe, make_optimizer
from fsdpplan.trainer.parallel.assemble import Assembled, assemble
from fsdpplan.trainer.step import train_step
from fsdpplan.trainer.text.data import micro_batches, open_sequences
from tests.trainer import plans

STEPS = 3
RECIPE = Recipe(steps=STEPS, learning_rate=3e-3, warmup_steps=0, weight_decay=0.1, clip_norm=0.5)
CPU = torch.device("cpu")

BARE = {"sharding": "ddp"}
ALONE = {"sharding": "fsdp"}
TWICE = {"num_microbatches": 2}
FP32 = {"precision": "fp32"}
BF16 = {"precision": "bf16"}
HALF = {"precision": "bf16", "param_dtype": "bf16"}

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bare": (BARE, FP32),
    "bare, twice": (BARE | TWICE, FP32),
    "bare, twice, at last": (BARE | TWICE | {"gradient_sync": "last"}, FP32),
    "bare, recomputed": (BARE | {"activation_checkpointing": "full"}, FP32),
    "bare, autocast": (BARE, BF16),
    "bare, autocast, twice": (BARE | TWICE, BF16),
    "bare, bf16 parameters": (BARE, HALF),
    "over one rank": (ALONE, FP32),
    "over one rank, twice": (ALONE | TWICE, FP32),
    "over one rank, kept": (ALONE | {"reshard_after_forward": "never"}, FP32),
    "over one rank, offloaded": (ALONE | {"offload": "cpu"}, FP32),
    "over one rank, offloaded, twice": (ALONE | TWICE | {"offload": "cpu"}, FP32),
    "over one rank, in fp32 throughout": (ALONE | {"wrap_blocks": 2}, FP32),
}


def planned(layout: dict[str, Any], training: dict[str, Any]) -> PlanConfig:
    """A plan for one rank, of 8 sequences a step."""
    return parse_plan(plans.plan_text(training=training, **layout))


def clip_norm(plan: PlanConfig) -> float:
    """Of gradients in fp32 one that clips; in bf16 none, as the order of its sum is then seen."""
    return RECIPE.clip_norm if plan.training.precision == "fp32" else 1e6


def plain(plan: PlanConfig) -> tuple[list[float], nn.Module]:
    """Losses of the same steps by torch alone, and what was trained."""
    decoder = Decoder(plan.model)
    initialise(decoder, seed=0, layers=plan.model.layers)
    if plan.training.param_dtype == "bf16":
        for parameter in decoder.parameters():
            parameter.data = parameter.data.bfloat16()
    optimizer = make_optimizer(decoder, RECIPE)
    sequences = open_sequences(plan, None, seed=0)
    autocasts = plan.training.precision == "bf16" and plan.training.param_dtype == "fp32"
    number = plan.layout.num_microbatches
    losses = []
    for step in range(STEPS):
        rows = torch.stack([sequences(step * 8 + row) for row in range(8)])
        optimizer.zero_grad()
        total = 0.0
        for part in rows.chunk(number):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
                logits = decoder(part[:, :-1])
            loss = next_token_loss(logits, part[:, 1:]) / number
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), clip_norm(plan))
        optimizer.step()
        losses.append(total)
    return losses, decoder


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("layout", "training"), SAME.values(), ids=SAME.keys())
def test_it_trains_as_plain_torch_does(layout: dict[str, Any], training: dict[str, Any]) -> None:
    plan = planned(layout, training)
    assembled = assemble(plan, CPU, seed=0)
    optimizer = make_optimizer(assembled.model, RECIPE)
    losses = [step_loss(plan, assembled, optimizer, step) for step in range(STEPS)]
    expected, trained = plain(plan)
    assert losses == pytest.approx(expected, abs=1e-6)
    assert losses[-1] < losses[0]
    found = dict(assembled.model.named_parameters())
    for name, parameter in trained.named_parameters():
        here: Any = found[name]
        whole = here.full_tensor() if hasattr(here, "full_tensor") else here
        torch.testing.assert_close(whole.detach(), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("alone")
def test_nothing_is_wrapped_around_one_replica() -> None:
    assembled = assemble(planned(BARE, FP32), CPU, seed=0)
    assert assembled.parts == (assembled.model,)
    assert not isinstance(assembled.model, DistributedDataParallel | FSDPModule)


def test_a_checkpoint_of_before_resumes(tmp_path: Path, alone: None) -> None:
    """The wrapper's run had the same names and shapes, and so has FSDP's over one rank."""
    plan = planned(BARE, FP32)
    wrapped = assemble(plan, CPU, seed=0)
    called = DistributedDataParallel(wrapped.model, gradient_as_bucket_view=True)
    wrapped = replace(wrapped, parts=(called,))
    optimizer = make_optimizer(wrapped.model, RECIPE)
    losses = [step_loss(plan, wrapped, optimizer, 0)]
    before = Checkpoints(tmp_path, plan, keep=1, background=False)
    before.begin(wrapped.model, optimizer, seed=0, resume="never")
    done = Progress(
        step=1, sequences=8, seed=0, seq_len=24, steps=STEPS, learning_rate=3e-3, warmup_steps=0
    )
    before.save(wrapped.model, optimizer, done)
    before.wait()
    losses += [step_loss(plan, wrapped, optimizer, step) for step in (1, 2)]
    for layout in (BARE, ALONE, ALONE | {"offload": "cpu"}):
        other = planned(layout, FP32)
        resumed = assemble(other, CPU, seed=1)
        its = make_optimizer(resumed.model, RECIPE)
        checkpoints = Checkpoints(tmp_path, other, keep=1, background=False)
        progress, _ = checkpoints.begin(resumed.model, its, seed=0, resume="required")
        assert progress is not None
        assert progress.step == 1
        found = [step_loss(other, resumed, its, step) for step in (1, 2)]
        assert found == pytest.approx(losses[1:], abs=1e-6), layout


def step_loss(
    plan: PlanConfig, assembled: Assembled, optimizer: torch.optim.Optimizer, step: int
) -> float:
    """Of one step behind `step` others."""
    sequences = open_sequences(plan, None, seed=0)
    batches = micro_batches(sequences, plan, first=step * 8, rank=0, device=CPU)
    return train_step(assembled, optimizer, batches, plan, clip_norm=clip_norm(plan)).loss.item()


class Stack(nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


@pytest.mark.usefixtures("alone")
def test_a_model_of_ones_own_is_returned_as_it_is() -> None:
    model = Stack()
    called = parallelize(model, load_plan(plans.plan_text(training=FP32, **BARE)))
    assert called is model
    assert set(dict(called.named_parameters())) == {
        f"blocks.{number}.{name}" for number in range(3) for name in ("weight", "bias")
    }


@pytest.mark.usefixtures("alone")
def test_a_model_on_the_meta_device_gets_its_values_afterwards() -> None:
    with torch.device("meta"):
        model = Stack()
    called = parallelize(model, load_plan(plans.plan_text(training=FP32, **BARE)))
    assert all(parameter.is_meta for parameter in called.parameters())

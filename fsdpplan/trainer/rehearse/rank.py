"""A rehearsal: this program, as one rank of its whole world, without the others and without memory.

The process group is fake (messages arrive at once), tensors hold nothing, everything else is the
program that trains: meshes, parts, data, steps, the state of a checkpoint. So shapes, divisibility,
collectives, gradients and the peak of memory are those of the cluster, in seconds on one CPU.

What differs from CUDA: tensors are CPU tensors, with the norms' saved tensors as CUDA's kernels
keep them; blocks are not compiled; DDP's C++ reducer is stood in for (fake_ddp); attention under
context parallelism takes the CPU's all-to-all; steps in fp8 are taken in bf16, and the compiled
update of 8-bit AdamW leaves everything as it is. What a plan's rehearsal does not see for that is
in its report (rehearsal.not_seen).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..checkpoint.state import fill_optimizer, named_tensors, tree
from ..config import PlanConfig
from ..optimizer import Recipe, make_optimizer
from ..parallel.assemble import build_parts, finish
from ..parallel.mesh import build_meshes
from ..parallel.tied_tables import copied_parameters
from ..precision import precisions
from ..private_torch import fake_tensors, stated_pipeline_shapes
from ..spikes import SpikeGuard
from ..step import train_step
from ..text.data import Sequences, micro_batches
from ..text.packing import MicroBatch
from ..torch_versions import fused_attention
from .counting import Axis, Call, CollectiveCounter, CollectiveRow, RowKey, layout_axes
from .fake_world import (
    cuda_like_dropout,
    cuda_like_norms,
    fake_replicas,
    fake_world,
    nothing_to_draw,
    updates_in_place,
)
from .live_bytes import LiveBytes

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRehearsal:
    """What one rank did in a step, when all optimizer state exists."""

    rank: int
    rows: dict[RowKey, CollectiveRow]
    calls: dict[tuple[str, tuple[int, ...]], list[Call]]
    """Of each group, by (axis, ranks), its calls in order."""
    peak_bytes_of: dict[str, int]
    """Highest level in `start` (until the first step), `step` (forward, backward and clipping),
    `optimizer` and `checkpoint` (its state is collected)."""
    state_bytes: int
    """Parameters, optimizer state and input tokens: the level between steps."""
    parameters: int
    """Elements that this rank holds."""
    without_gradient: tuple[str, ...]
    """Parameters that the step gave none."""

    @property
    def peak_bytes(self) -> int:
        """Highest level in the step."""
        return max(self.peak_bytes_of[phase] for phase in ("step", "optimizer"))


@dataclass(slots=True, kw_only=True)
class Stage:
    """How far a rehearsal came, for whoever explains an error."""

    name: str = "starting"


class Program(Protocol):
    """What is rehearsed. Making it builds the model, outside of the fake mode."""

    axes: list[Axis]
    mode: FakeTensorMode
    """In which it begins, steps and saves."""
    model: nn.Module
    """Holds the parameters of this rank."""
    first_step_differs: bool
    """From later ones, in more than that it makes the optimizer's state."""

    def begin(self) -> torch.optim.Optimizer:
        """Give the parameters memory and values, and make the optimizer."""
        ...

    def held(self) -> list[Tensor]:
        """Tensors that may be older than the count of bytes, what the steps are given among them;
        fake from `begin` on."""
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One whole step."""
        ...

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the inputs go, and collect the state of a checkpoint."""
        ...


def rehearse_rank(
    plan: PlanConfig,
    rank: int,
    *,
    sequences: Sequences,
    recipe: Recipe,
    packs: bool = False,
    on_spike: str = "none",
    stage: Stage | None = None,
) -> RankRehearsal:
    """Run a step of the plan, not its first, as `rank` of its world."""
    stage = stage or Stage()
    on_cuda = plan.cluster.device.kind == "cuda"
    plan = on_cpu(plan)
    with fake_cluster(plan, rank, cuda_like=on_cuda):
        stage.name = "reading the data"
        batches = micro_batches(sequences, plan, first=0, rank=rank, device=CPU, packs=packs)
        program = DecoderProgram(plan, batches, recipe, stage, on_spike=on_spike)
        return measured(program, rank, stage=stage)


def on_cpu(plan: PlanConfig) -> PlanConfig:
    """The plan for CPU devices: fake CUDA tensors need a build of torch that has CUDA, and products
    in fp8 a device that has them, so steps in fp8 are taken in bf16."""
    device = replace(plan.cluster.device, kind="cpu")
    training = plan.training
    if "fp8" in precisions(training):
        training = replace(
            training, precision="bf16", precision_switch="none", fp8_all_gather=False
        )
    return replace(plan, cluster=replace(plan.cluster, device=device), training=training)


@contextmanager
def fake_cluster(plan: PlanConfig, rank: int, *, cuda_like: bool) -> Iterator[None]:
    """The plan's world, and CUDA's kernels as far as they keep other tensors than the CPU's."""
    with ExitStack() as stack:
        stack.enter_context(fake_world(plan.layout.world, rank=rank))
        stack.enter_context(fake_replicas())
        stack.enter_context(nothing_to_draw())
        stack.enter_context(fused_attention())
        if plan.training.optimizer == "adamw_8bit":
            stack.enter_context(updates_in_place())
        if plan.layout.pp > 1:
            stack.enter_context(stated_pipeline_shapes())
        if cuda_like:
            stack.enter_context(cuda_like_norms())
            stack.enter_context(cuda_like_dropout())
        yield


class DecoderProgram:
    """The reference decoder, as `train.set_up` and `train.one_step` have it."""

    def __init__(
        self,
        plan: PlanConfig,
        batches: list[MicroBatch],
        recipe: Recipe,
        stage: Stage,
        *,
        on_spike: str,
    ) -> None:
        self.on_spike, self.mode = on_spike, fake_tensors()
        self.guard: SpikeGuard | None = None
        self.plan, self.batches, self.recipe = plan, batches, recipe
        self.first_step_differs = plan.layout.sharding == "ddp" and plan.layout.dp_replicate > 1
        stage.name = "making the process groups"
        self.meshes = build_meshes(plan.layout, CPU.type)
        self.axes = layout_axes(self.meshes, plan.layout)
        stage.name = "building the model"
        self.model, self.parts = build_parts(plan, self.meshes, CPU)

    def begin(self) -> torch.optim.Optimizer:
        self.assembled = finish(self.plan, CPU, self.meshes, self.model, self.parts, seed=0)
        optimizer = make_optimizer(self.model, self.recipe, copied_parameters(self.plan))
        self.batches = [as_fake(batch, self.mode) for batch in self.batches]
        if self.on_spike != "none":
            scales_loss = self.assembled.scaler is not None
            self.guard = SpikeGuard(CPU, stages=self.plan.layout.pp, scales_loss=scales_loss)
        return optimizer

    def held(self) -> list[Tensor]:
        return [part for batch in self.batches for part in batch if part is not None]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        recipe = self.recipe
        train_step(
            self.assembled,
            optimizer,
            self.batches,
            self.plan,
            clip_norm=recipe.clip_norm,
            balance=recipe.balance,
            guard=self.guard,
            skips_spikes=self.on_spike == "skip",
        )

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        self.batches = []
        adapters, copies = self.plan.training.adapters, copied_parameters(self.plan)
        tree(named_tensors(self.model, optimizer, copies, leaves_frozen=adapters is not None))


def measured(program: Program, rank: int, *, stage: Stage) -> RankRehearsal:
    """Begin, step and collect the state of a checkpoint, all in fake tensors.

    What the first step leaves is there before the one that is measured: the optimizer's state, and
    DDP's buckets. Where it is the state alone, the optimizer makes that by a step of its own.
    """
    live, counter = LiveBytes(), CollectiveCounter(program.axes)
    without_gradient: tuple[str, ...] = ()

    def before_update(*_: object) -> None:
        nonlocal without_gradient
        without_gradient = names_without_gradient(program.model)
        live.start_phase("optimizer")

    with program.mode, live, counter:
        stage.name = "giving the parameters values"
        optimizer = program.begin()
        live.add(*program.held())
        live.start_phase("first")
        stage.name = "the first step"
        if program.first_step_differs:
            program.step(optimizer)
        else:
            fill_optimizer(optimizer)
        counter.forget()
        stage.name = "a step"
        live.start_phase("step")
        optimizer.register_step_pre_hook(before_update)
        program.step(optimizer)
        state_bytes, parameters = live.total, held_elements(program.model)
        rows, calls = counter.rows, counter.calls
        counter.forget()
        stage.name = "collecting the state of a checkpoint"
        live.start_phase("checkpoint")
        program.save(optimizer)
    return RankRehearsal(
        rank=rank,
        rows=dict(rows),
        calls=dict(calls),
        peak_bytes_of=dict(live.peak_in_phase),
        state_bytes=state_bytes,
        parameters=parameters,
        without_gradient=without_gradient,
    )


def as_fake(batch: MicroBatch, mode: FakeTensorMode) -> MicroBatch:
    """Tensors of the same shapes without values."""
    return MicroBatch._make(None if part is None else mode.from_tensor(part) for part in batch)


def names_without_gradient(model: nn.Module) -> tuple[str, ...]:
    """Parameters that backward has not reached."""
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    )


def held_elements(model: nn.Module) -> int:
    """Elements of the parameters that this rank has memory for."""
    return sum(
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel()
        for parameter in model.parameters()
    )

"""What a layout does to a model, step by step in one order: the reference decoder, or any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import nn

from ..config import PlanConfig
from .data_parallel import Ends, apply_fsdp
from .float8 import apply_float8
from .mesh import Meshes
from .recompute import apply_checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A model, or one pipeline stage of it, and what is to become of it."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    """Its repeated layers."""
    plan: PlanConfig
    meshes: Meshes
    device: torch.device
    """Where it will compute; its parameters may be on the meta device still."""
    ends: Ends = field(default_factory=Ends)
    """What FSDP gathers by itself before and behind its blocks."""


Step = Callable[[Part], None]


def skip(_: Part) -> None:
    """Nothing: this kind of model has no use for the step."""


def put_in_float8(part: Part) -> None:
    """Products of 8 bits, where the plan has them."""
    if part.plan.training.precision == "fp8":
        apply_float8(part.blocks, part.plan, part.device)


def recompute(part: Part) -> None:
    """Recomputation in backward."""
    apply_checkpointing(part.blocks, part.plan.layout)


def compile_blocks(part: Part) -> None:
    """Compile each block's forward. Off on CPU."""
    if part.plan.layout.compile and part.device.type == "cuda":
        for block in part.blocks:
            block.forward = torch.compile(block.forward)


def shard(part: Part) -> None:
    """FSDP2, where the plan has it."""
    if part.plan.layout.sharding == "fsdp":
        apply_fsdp(part.model, part.blocks, part.plan, part.meshes, ends=part.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How each step is done to one kind of model. The order of the fields is that of the steps.

    What is the same for every model is the default.
    """

    float8: Step = put_in_float8
    """Other linear layers, which is what tensor parallelism has to split: put in the place of a
    layer that is split already, they would multiply a tensor by a DTensor."""
    tensors: Step
    """Matrices over tp, the sequence between them."""
    experts: Step = skip
    """Routed experts over ep and tp, of mixtures that the step before has left out."""
    adapters: Step = skip
    """All frozen but low-rank matrices beside layers, which are split as these are by now."""
    sequences: Step
    """Attention over the ranks of cp, of the heads that tp has left on this one."""
    recomputation: Step = recompute
    """It wraps what a block computes, so all that changes that comes before."""
    compilation: Step = compile_blocks
    """It traces all of the above, and nothing of FSDP's and DDP's hooks."""
    head: Step = skip
    """The head's product put off into the loss, or what it has of padding masked."""
    shards: Step = shard
    """What is left on a rank, over the data axes: parameters have the names and the shapes that
    training keeps."""
    sequence_end: Step = skip
    """What must run behind FSDP's hooks on the last block."""
    replicas: Callable[[Part], nn.Module]
    """Copies of the model made equal and kept so: this needs values. Returns what to call."""


LAST = "replicas"
"""The step that needs values; a model may get them before it only."""

ORDER = tuple(field.name for field in fields(Steps) if field.name != LAST)
"""Steps that a model on the meta device can take."""


def lay_out(part: Part, steps: Steps) -> None:
    """Take all steps in their order, but the last."""
    for name in ORDER:
        getattr(steps, name)(part)

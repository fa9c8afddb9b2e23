"""The tiny step on this rank, by the code of training.

Two steps in fp32: the first is not clipped, so that gradients are seen as they are; the second sees
whether what the first one wrote is what is gathered, and how it is clipped. Then one step in the
plan's own number formats, of which only what is blurred little is asked.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import PlanConfig
from ..model.weights import (
    VOCABULARIES,
    fill_quantised,
    is_quantised,
    named_parameters,
    part_of,
    quantised_layers,
)
from ..optimizer import make_optimizer
from ..parallel.assemble import Assembled, assemble
from ..parallel.mesh import Meshes
from ..parallel.shards import local
from ..rng import generator_states, restore_generators
from ..step import train_step
from ..text.data import micro_batches
from ..text.packing import MicroBatch
from .look import Kept, Look, one_process_name
from .reference import Reference, as_built, drawn, recipe_of

SMALL_SCALE = 2.0**7
"""Of fp16 losses: the tiny model's gradients are large, and no step may be skipped."""


class KindSequences:
    """The sequences of a tiny step, as training reads its data."""

    def __init__(self, sequences: Tensor) -> None:
        self._sequences = sequences
        self.identity: dict[str, int | str] = {"kind": "tiny"}

    def __call__(self, number: int) -> Tensor:
        return self._sequences[number % len(self._sequences)]

    def starts(self, number: int) -> Tensor:
        """One document each."""
        starts = torch.zeros_like(self(number), dtype=torch.bool)
        starts[0] = True
        return starts


def batches_of(plan: PlanConfig, reference: Reference, device: torch.device) -> list[MicroBatch]:
    """This rank's micro-batches of the step."""
    sequences = KindSequences(reference.sequences)
    return micro_batches(sequences, plan, first=0, rank=dist.get_rank(), device=device)


@contextmanager
def nothing_left(device: torch.device) -> Iterator[None]:
    """Leave generators, memory and settings as they were; products in fp32 are exact meanwhile
    (some images turn TF32 on)."""
    states, precision = generator_states(), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        restore_generators(states)
        gc.collect()  # modules and their hooks hold each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


def assemble_tiny(plan: PlanConfig, meshes: Meshes, device: torch.device, seed: int) -> Assembled:
    """The tiny model in the plan's layout, with the values of one process's."""
    assembled = assemble(plan, device, seed=0, meshes=meshes)
    with torch.no_grad():
        for name, parameter in named_parameters(assembled.model):
            if is_quantised(name):
                continue
            named, shape = one_process_name(plan, name), parameter.shape
            if named in VOCABULARIES:
                shape = torch.Size([plan.model.vocab, *shape[1:]])
            built = as_built(plan, {named: drawn(named, shape, seed=seed)})
            local(parameter).copy_(part_of(built[named], parameter))
        for name, layer in quantised_layers(assembled.model):
            fill_quantised(layer, drawn(name, layer.whole_shape, seed=seed).to(device))
    if assembled.scaler is not None:
        assembled.scaler.load({"scale": SMALL_SCALE, "good_steps": 0.0})
    return assembled


def step_exactly(
    plan: PlanConfig,
    meshes: Meshes,
    device: torch.device,
    reference: Reference,
    *,
    seed: int,
    adamw: str,
) -> Kept:
    """Two steps in fp32, compared in everything; all ranks call this."""
    assembled = assemble_tiny(plan, meshes, device, seed)
    optimizer = make_optimizer(assembled.model, recipe_of(plan, adamw=adamw))
    look = Look(plan, assembled, reference)
    batches = batches_of(plan, reference, device)
    optimizer.register_step_pre_hook(look.at_gradients)
    with look.at_forward():
        first = train_step(assembled, optimizer, batches, plan, clip_norm=inf)
    look.after_first(float(first.loss), float(first.grad_norm))
    clip_norm = reference.later_norm / 2
    second = train_step(assembled, optimizer, batches, plan, clip_norm=clip_norm)
    look.after_second(float(second.loss), float(second.grad_norm))
    return look.kept()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rough:
    """What a rank saw of a step in the plan's own number formats. Gradients are compared with fp32
    ones over all ranks together: formats of 16 bits blur each by itself."""

    losses: tuple[float, float] | None
    """(found, one process's) on ranks that have a loss."""
    norm: float
    found_squares: float
    """Of this rank's part of the gradients."""
    products: float
    """With one process's."""
    expected_squares: float


def step_roughly(
    plan: PlanConfig,
    meshes: Meshes,
    device: torch.device,
    reference: Reference,
    *,
    seed: int,
    adamw: str,
) -> Rough:
    """A step in the plan's own number formats; all ranks call this."""
    assembled = assemble_tiny(plan, meshes, device, seed)
    optimizer = make_optimizer(assembled.model, recipe_of(plan, adamw=adamw))
    look = Look(plan, assembled, reference)
    batches = batches_of(plan, reference, device)
    optimizer.register_step_pre_hook(look.keep_gradients)
    output = train_step(assembled, optimizer, batches, plan, clip_norm=inf)
    expected = look.expected_loss(reference.losses)
    found, products, squares = look.sums()
    return Rough(
        losses=None if expected is None else (float(output.loss), expected),
        norm=float(output.grad_norm),
        found_squares=found,
        products=products,
        expected_squares=squares,
    )

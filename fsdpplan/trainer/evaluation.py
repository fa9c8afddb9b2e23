"""Evaluation: the loss on data that the run does not train on, without a trace in the training.

The same sequences are taken in every evaluation and under every layout, seed and schedule: all of
the data, or as many as `--eval-tokens` allows, drawn once. The loss is the mean over all their
targets that count, so it does not depend on how ranks share them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .config import PlanConfig
from .model.loss import loss_function
from .model.moe import mixtures
from .options import Options
from .parallel.assemble import Assembled
from .parallel.tensor_parallel import loss_context
from .private_torch import forget_forward_passes
from .rng import generator_states, restore_generators
from .text.chats import open_chats
from .text.data import Masked, Sequences, are_texts, micro_batches, open_sequences
from .text.packing import IGNORED, MicroBatch, model_inputs

SEED = 0
"""Of which sequences are taken where not all are: the same in runs of any seed."""


class Held(Sequences, Protocol):
    """Sequences of data that ends."""

    @property
    def windows(self) -> int:
        """How many there are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a run is judged by."""

    sequences: Held
    most: int
    """Sequences to take, if there are so many."""

    def words(self, plan: PlanConfig) -> str:
        """What is taken, and how much it is beside a step."""
        steps = self.windows / plan.training.global_batch
        of = "" if self.windows == self.sequences.windows else f" of {self.sequences.windows:,}"
        return (
            f"held-out data: {self.windows:,} sequences{of}, as many as {steps:,.1f} steps train on"
        )

    @property
    def windows(self) -> int:
        """How many are taken."""
        return min(self.sequences.windows, self.most)

    @property
    def identity(self) -> dict[str, int | str]:
        """That of the data."""
        return self.sequences.identity

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`; behind the end the last one again, of which nothing counts."""
        return self.sequences(min(number, self.windows - 1))

    def starts(self, number: int) -> Tensor:
        """Which of its tokens begin a document."""
        return self.sequences.starts(min(number, self.windows - 1))

    def counted(self, number: int) -> Tensor:
        """Which of its tokens count as targets."""
        if number < self.windows and isinstance(self.sequences, Masked):
            return self.sequences.counted(number)
        return torch.full_like(self(number), number < self.windows, dtype=torch.bool)

    def real(self, number: int) -> Tensor:
        """Which of its tokens do more than fill it up."""
        number = min(number, self.windows - 1)
        if isinstance(self.sequences, Masked):
            return self.sequences.real(number)
        return torch.ones_like(self(number), dtype=torch.bool)


def held_out(plan: PlanConfig, options: Options) -> HeldOut | None:
    """What the command line says to judge by; None: nothing."""
    if options.eval_data is None:
        return None
    path = options.eval_data
    sequences: Held
    (is_text,) = are_texts([path])
    if options.sft and is_text:
        sequences = open_chats(plan, options, path, seed=SEED)
    else:
        tokenizer = options.tokenizer if is_text else None
        opened = open_sequences(plan, path, seed=SEED, tokenizer=tokenizer, is_text=is_text)
        sequences = cast(Held, opened)
    tokens = options.eval_tokens
    most = None if tokens is None else max(1, tokens // plan.training.seq_len)
    return HeldOut(sequences=sequences, most=most or sequences.windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What an evaluation found."""

    loss: float
    """Mean over all targets that count."""
    targets: int
    sequences: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def evaluate(
    assembled: Assembled,
    plan: PlanConfig,
    held_out: HeldOut,
    *,
    device: torch.device,
    packs: bool,
    beat: Callable[[], None] = lambda: None,
) -> Evaluated:
    """The loss on `held_out`; all ranks call this, and it waits for the device once, in the end.
    `beat` is called before each of its parts, as large as a step's forward passes."""
    began = time.perf_counter()
    layout, windows, totals = plan.layout, held_out.windows, torch.zeros(2, dtype=torch.float64)
    totals = totals.to(device)
    at_once = layout.data_parallel * layout.micro_batch
    with undisturbed(assembled):
        for first in range(0, windows, plan.training.global_batch):
            beat()
            batches = micro_batches(
                held_out, plan, first=first, rank=dist.get_rank(), device=device, packs=packs
            )
            # of the last ones, only those in which some rank has something left
            batches = batches[: math.ceil((windows - first) / at_once)]
            for loss, batch in zip(losses_of(assembled, batches, plan), batches, strict=False):
                totals[0] += loss.double() * batch.targets.numel()
                totals[1] += (batch.targets != IGNORED).sum()
    dist.all_reduce(totals)
    # ranks that share targets have told of them as often
    total, targets = totals.tolist()
    return Evaluated(
        loss=total / targets,
        targets=round(targets / layout.tp),
        sequences=windows,
        seconds=time.perf_counter() - began,
    )


def losses_of(
    assembled: Assembled, batches: Sequence[MicroBatch], plan: PlanConfig
) -> Iterator[Tensor]:
    """The mean of each micro-batch over all its targets, ignored ones counting 0; nothing on the
    pipeline ranks that do not have it."""
    if assembled.pipeline is not None:
        yield from assembled.pipeline.losses(batches)
        return
    (part,) = assembled.parts
    # DDP's wrapper would prepare for a backward pass
    model = getattr(part, "module", part)
    loss_of = loss_function(plan, batches[0].tokens.device, part)
    for batch in batches:
        with loss_context(plan.layout):
            loss = loss_of(model(batch.tokens, **model_inputs(batch)), batch.targets)
        yield loss


@contextmanager
def undisturbed(assembled: Assembled) -> Iterator[None]:
    """Forward passes after which training goes on as if they had not been.

    What they would change: random numbers drawn, tokens that experts count for their balance,
    FSDP's gathered parameters and its order of units, and modes (dropout is off meanwhile). Scales
    of fp8 follow from weights and inputs alone.
    """
    generators = generator_states()
    counted = [
        (buffer, buffer.clone())
        for mixture in mixtures(assembled.model)
        for name, buffer in mixture.named_buffers(recurse=False)
        if name in ("counts", "probabilities")
    ]
    modules = (assembled.model, *assembled.parts)  # DDP's wrapper may not show what it calls
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in modules:
            module.train()
            forget_forward_passes(module)
        for buffer, before in counted:
            buffer.copy_(before)
        restore_generators(generators)


def said(step: int, found: Evaluated) -> tuple[dict[str, Any], str]:
    """An evaluation after `step`: the fields of its event, and a line for people."""
    event = {
        "step": step,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "targets": found.targets,
        "sequences": found.sequences,
        "seconds": found.seconds,
    }
    return event, (
        f"held-out loss {found.loss:.4f} (perplexity {found.perplexity:,.2f}) after step {step}, "
        f"of {found.targets:,} targets in {found.seconds:.2f} s"
    )

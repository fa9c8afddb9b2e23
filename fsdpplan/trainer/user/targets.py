"""The targets of a step of a user's model: counted once, for every micro-batch and rank.

A mean over this micro-batch's targets on this rank, averaged over micro-batches and ranks, is the
mean over all targets only where each has as many. With ignored labels (-100) of unequal number the
gradient would depend on the layout. So the sum of a micro-batch is divided by one number in the
whole step, the mean number of targets of a micro-batch: what is averaged then is what one process
computes over all rows, and losses that are no sum over targets (the load balance of experts) keep
their weight.

Losses that were divided by their own number of targets are remembered, and refused where those
numbers differ. The host learns that once a step: of the first step before it goes on, and later of
the step before, so that it never waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..config import PlanConfig
from ..errors import TrainerError
from ..parallel.distributed import local_device
from ..private_torch import ambient_fake_mode
from ..text.packing import IGNORED, count_targets

NUM_ITEMS = "num_items_in_batch"
"""Argument by which models of Hugging Face, and losses, take what their sum is divided by."""


def targets_per_micro_batch(plan: PlanConfig, targets: Tensor | Sequence[Tensor]) -> Tensor:
    """Mean number of targets (other than -100) of a micro-batch, over all micro-batches and ranks
    of a step; all ranks call this, once a step.

    `targets` are this rank's: one tensor with the rows of all micro-batches of the plan, or a list
    with a tensor for each micro-batch. `token_loss(output, targets, count)` takes what is returned,
    and so does a Hugging Face model, as `num_items_in_batch=count`; divide by the number of
    micro-batches as ever. The targets of a causal model of Hugging Face are `labels[:, 1:]`, since
    it moves labels by one.
    """
    parts = [targets] if isinstance(targets, Tensor) else list(targets)
    number = plan.layout.num_microbatches if isinstance(targets, Tensor) else len(parts)
    counted, _ = count_targets(parts, device=local_device(plan.cluster.device.kind))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    # ranks that share targets count them alike, so the mean stays; without any the loss is 0
    return counted.clamp(min=1) / (ranks * number)


class UncountedTargets:
    """Numbers of targets of the losses since the last step that were divided by their own."""

    def __init__(self) -> None:
        self.num_counted = 0
        """Losses of models that were given the count of the step."""
        self._extremes: Tensor | None = None
        self._before: _Answer | None = None

    def watch(self, loss: Tensor, targets: Tensor) -> None:
        """Remember the number of `targets` when backward comes to their `loss`: what is only
        looked at trains nothing."""
        if torch.compiler.is_compiling() or not loss.requires_grad:
            return
        count = (targets != IGNORED).sum()
        loss.register_hook(lambda _: self.add(count))  # type: ignore[no-untyped-call]

    def add(self, count: Tensor) -> None:
        """Remember the number of targets of one loss."""
        if ambient_fake_mode() is not None:
            return
        extremes = torch.stack([count, -count])
        known = self._extremes
        self._extremes = extremes if known is None else torch.maximum(known, extremes)

    @property
    def has_any(self) -> bool:
        """Whether there was such a loss."""
        return self._extremes is not None

    def require_equal(self, device: torch.device) -> None:
        """Raise where the numbers of targets differed; all ranks call this, also without any."""
        found, self._extremes = self._extremes, None
        if ambient_fake_mode() is not None:
            return
        none = torch.full((2,), torch.iinfo(torch.int64).min, device=device)
        extremes = none if found is None else found.to(device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        here = _Answer(extremes)
        known, self._before = self._before, here
        highest, lowest = (known if known is not None and extremes.is_cuda else here).numbers()
        if highest > -lowest:
            raise TrainerError(
                f"the micro-batches of a step have {-lowest} to {highest} targets, over all ranks, "
                "and the loss of each was divided by its own number, so the gradient depends on "
                "the layout: use count = targets_per_micro_batch(plan, targets) once a step, and "
                "give that to token_loss(output, targets, count), to a Hugging Face "
                "model or a loss= of yours as num_items_in_batch (a loss that is a mean over rows "
                "takes it and leaves it)"
            )


class _Answer:
    """Numbers on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            there.copy_(numbers, non_blocking=True)
            self._numbers, self._event = there, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def numbers(self) -> list[int]:
        """The numbers; waits until they are here."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._numbers.tolist()
        return found


_OF = "fsdpplan_targets"


def own_count(targets: Tensor, *, share: int) -> Tensor:
    """The number of `targets` over `share`, marked as one that nobody has counted over a step."""
    count = (targets != IGNORED).sum().clamp(min=1) / share
    setattr(count, _OF, targets)
    return count


def uncounted_of(num_items_in_batch: Any) -> Tensor | None:
    """The targets whose own number that is; None: it is the count of a step."""
    found: Tensor | None = getattr(num_items_in_batch, _OF, None)
    return found


uncounted = UncountedTargets()
"""Of this process: an optimizer's step is where a step ends, whatever models took part."""


def watch_targets(model: nn.Module, device: torch.device) -> None:
    """From now on no optimizer of `model` steps on losses whose numbers of targets differ."""
    known = weakref.ref(model)

    def before_step(optimizer: Any, *_: Any) -> None:
        if not uncounted.has_any or (model := known()) is None:
            return
        first = next(each for group in optimizer.param_groups for each in group["params"])
        if any(first is parameter for parameter in model.parameters()):
            uncounted.require_equal(device)

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(model, handle.remove)


class ExactCount:
    """`num_items_in_batch` on its way into a model, past FSDP: that casts all numbers that a model
    is given to the dtype of its parameters, and bf16 would round the count."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def leave_out(self, _: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        """Before FSDP's hook."""
        self._kept = {NUM_ITEMS: given[NUM_ITEMS]} if NUM_ITEMS in given else {}
        return (args, {n: v for n, v in given.items() if n != NUM_ITEMS}) if self._kept else None

    def put_back(self, _: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        """After it."""
        kept, self._kept = self._kept, {}
        return (args, given | kept) if kept else None

"""The loss of a user's model, whole or in pieces: `token_loss(output, targets)`, right for both.

In pieces, the head is put off: it returns what it is given, and the loss makes its logits a piece
of the tokens at a time (trainer/model/loss.py). What comes out of such a head is marked, so that a
program which takes it for logits is told so instead of training something else.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..config import PlanConfig
from ..errors import TrainerError
from ..model.loss import chunked_loss
from ..text.packing import IGNORED
from .targets import NUM_ITEMS, uncounted, uncounted_of

_MARK = "fsdpplan_head_put_off"


@dataclass(slots=True)
class PutOff:
    """A head whose product is left to the loss, for one call of the model."""

    head: nn.Module
    chunks: int
    compiles: bool
    version: int
    """Of the tensor that it gave, which what is written in its place changes."""
    is_taken: bool = False
    """Whether the loss has come."""

    def require_taken(self, _: Tensor) -> None:
        """Raise where backward comes from something else."""
        if not self.is_taken:
            raise TrainerError(_NOT_TAKEN)


def is_put_off(output: Tensor) -> bool:
    """Whether `output` is what a head was given that leaves its logits to the loss."""
    return getattr(output, _MARK, None) is not None


def token_loss(
    output: Tensor, targets: Tensor, num_items_in_batch: Tensor | float | None = None
) -> Tensor:
    """Sum of the cross-entropies of `targets` (-100: ignored) from what the model returned for
    them, divided by `num_items_in_batch`, or by the number of them where that is None.

    `output` is the model's, as it is: logits (..., vocabulary), whole or split over it by tensor
    parallelism; or, where the plan has the loss in pieces, what the head was given. Without
    `num_items_in_batch` it is equal to `F.cross_entropy(logits.flatten(0, -2), targets.flatten())`,
    and the optimizer's step is refused where micro-batches or ranks had unequal numbers of
    targets: `targets_per_micro_batch` counts them.
    """
    given = num_items_in_batch
    own = targets if given is None else uncounted_of(given)
    count = (targets != IGNORED).sum().clamp(min=1) if given is None else given
    loss = _token_loss(output, targets, count)
    if own is None:
        uncounted.num_counted += 1
    else:
        uncounted.watch(loss, own)
    return loss


def _token_loss(output: Tensor, targets: Tensor, count: Tensor | float) -> Tensor:
    put_off: PutOff | None = getattr(output, _MARK, None)
    if put_off is None:
        logits = output.flatten(0, -2).float()
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return (total.to_local() if isinstance(total, DTensor) else total) / count
    if output._version != put_off.version:
        raise TrainerError(_NOT_TAKEN)
    put_off.is_taken = True
    # read now: FSDP puts the gathered weight in the place of its shard
    weight, bias = _rows(put_off.head.weight), _rows(put_off.head.bias)
    if isinstance(weight, DTensor):
        output = DTensor.from_local(output, weight.device_mesh, (Replicate(),), run_check=False)
    with torch.autocast(targets.device.type, enabled=False):
        mean = chunked_loss(
            output,
            weight,  # type: ignore[arg-type]
            targets,
            chunks=put_off.chunks,
            compiles=put_off.compiles,
            bias_V=bias,
        )
    return mean * (targets.numel() / count)


def _rows(parameter: Any) -> Tensor | None:
    """A parameter of the head; of one that all ranks of tp have whole, as a tied one, its rows."""
    if isinstance(parameter, DTensor) and not parameter.placements[0].is_shard():
        return parameter.redistribute(placements=(Shard(0),))
    found: Tensor | None = parameter
    return found


def put_head_off(model: nn.Module, head: nn.Module, plan: PlanConfig, device: torch.device) -> None:
    """Let `head`, of `model`, leave its product to `token_loss`; a Hugging Face model's own loss
    becomes that."""
    chunks = plan.layout.loss_chunks
    compiles = plan.layout.compile and device.type == "cuda"

    def as_given(hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):  # as the product would
            hidden = hidden.to(torch.get_autocast_dtype(kind))
        put_off = PutOff(head, chunks, compiles, hidden._version)
        if hidden.requires_grad:
            hidden.register_hook(put_off.require_taken)  # type: ignore[no-untyped-call]
        setattr(hidden, _MARK, put_off)
        return hidden

    head.forward = as_given
    if hasattr(model, "loss_function"):
        model.loss_function = causal_loss  # type: ignore[assignment]
    # what it returns may be a view, in whose place nothing may be written: `token_loss` sees to it
    name = re.escape(f"FSDP2-wrapped module (FSDP{type(model).__name__}) returned a view")
    warnings.filterwarnings("ignore", name)


_NOT_TAKEN = (
    "the plan has the loss in pieces, so the model's head leaves its logits to the loss, and "
    "another loss was computed: give fsdpplan.trainer.token_loss(output, targets) what the model "
    "returned, as it is; a model that changes its logits behind the head needs --loss-chunks 1"
)


def causal_loss(
    logits: Tensor,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """In the place of a Hugging Face model's loss of the next token (transformers 5.23,
    loss/loss_utils.py, `ForCausalLMLoss`), of hidden states instead of logits."""
    if getattr(logits, _MARK, None) is None:
        raise TrainerError(_NOT_TAKEN)
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    if ignore_index != IGNORED:
        shift_labels = shift_labels.masked_fill(shift_labels == ignore_index, IGNORED)
    return token_loss(logits, shift_labels, num_items_in_batch)


class OwnLoss:
    """The loss function of a Hugging Face model, which remembers targets that nobody counted."""

    def __init__(self, function: Callable[..., Tensor], *, shifts: bool) -> None:
        self.function, self.shifts = function, shifts

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return self.function(*args, **given)
        named = {**given, **inspect.signature(self.function).bind(*args, **given).arguments}
        loss: Tensor = self.function(*args, **given)
        count = given.get(NUM_ITEMS)
        if count is not None and uncounted_of(count) is None:
            uncounted.num_counted += 1
            return loss
        own = uncounted_of(count)
        if own is None:
            own = OwnTargets(shifts=self.shifts).of(named)
        if own is not None:
            uncounted.watch(loss, own)
        return loss


def watch_own_loss(model: nn.Module) -> None:
    """Let the loss functions of a Hugging Face model, which may be inside of another, remember
    targets that nobody counted."""
    for each in _with_own_loss(model):
        function = each.loss_function
        encodes = getattr(getattr(each, "config", None), "is_encoder_decoder", False)
        # transformers 5.23, trainer.py: labels of a decoder behind an encoder are not moved
        shifts = getattr(function, "__name__", "") == "ForCausalLMLoss" and not encodes
        if not isinstance(function, OwnLoss):
            each.loss_function = OwnLoss(function, shifts=shifts)


def _with_own_loss(model: nn.Module) -> list[Any]:
    # of a model without a head, which has no such type, Transformers would warn
    return [
        each
        for each in model.modules()
        if getattr(each, "loss_type", None) is not None and hasattr(each, "loss_function")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTargets:
    """How a model that computes its own loss counts targets."""

    shifts: bool = False
    """Whether its labels are those of the tokens themselves, so that the first has no target."""
    takes_count: bool = False
    """Whether it may be given `num_items_in_batch`: it is of Hugging Face."""
    names_count: bool = False
    """Whether its forward has an argument of that name, beside others."""

    def of(self, named: Mapping[str, Any]) -> Tensor | None:
        """The targets of a step in what the model is called with; None: none are known."""
        found = named.get("shift_labels")
        if isinstance(found, Tensor):
            return found
        labels = named.get("labels")
        if not isinstance(labels, Tensor):
            return None
        return labels[..., 1:] if self.shifts else labels


def own_targets(model: nn.Module) -> OwnTargets:
    """How `model` counts targets, after `watch_own_loss`."""
    losses = [each.loss_function for each in _with_own_loss(model)]
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return OwnTargets(
        shifts=any(each is causal_loss or getattr(each, "shifts", False) for each in losses),
        takes_count=bool(losses) and (takes_any or NUM_ITEMS in parameters),
        names_count=NUM_ITEMS in parameters,
    )


def named_head(model: nn.Module, head: nn.Module | None) -> nn.Linear:
    """The head that the user has named, or `lm_head`; raises where its product cannot be put
    off."""
    found = head if head is not None else getattr(model, "lm_head", None)
    kind = type(model).__name__
    if found is None:
        raise TrainerError(
            f"the plan has the loss in pieces, for which {kind} names no head (lm_head): give "
            "parallelize(..., head=...), or plan again with --loss-chunks 1"
        )
    if not isinstance(found, nn.Linear) or not any(found is each for each in model.modules()):
        raise TrainerError(
            f"the head of {kind}, a {type(found).__name__}, must be an nn.Linear inside of the "
            "model for a loss in pieces: plan again with --loss-chunks 1"
        )
    return found


Loss = Callable[..., Tensor]
"""A number of what the model returned and the targets that go with it; it may take
`num_items_in_batch`, too."""


def takes_count(loss: Loss) -> bool:
    """Whether `loss` has an argument `num_items_in_batch`."""
    try:
        return NUM_ITEMS in inspect.signature(loss).parameters
    except ValueError:  # of a function that is not Python's
        return False


def loss_of(output: Any, targets: Any, loss: Loss | None, count: Tensor | None = None) -> Tensor:
    """The loss of one micro-batch: the user's, or `token_loss`, or the model's own; `count` is
    what the sum over its targets is divided by."""
    found: Any
    if loss is not None and takes_count(loss):
        found = loss(output, targets, num_items_in_batch=count)
    elif loss is not None:
        before = uncounted.num_counted
        found = loss(output, targets)
        if isinstance(targets, Tensor) and uncounted.num_counted == before:
            uncounted.watch(found, targets)
    elif targets is not None:
        found = token_loss(getattr(output, "logits", output), targets, count)
    else:
        found = getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise TrainerError(
                f"the model returns {type(output).__name__}, of which no loss is known: give "
                "forward_backward targets, or loss=FUNCTION"
            )
    made: Tensor = found.to_local() if isinstance(found, DTensor) else found
    return made

"""The loss of a user's model, whole or in pieces: `token_loss(output, targets)`, right for both.

In pieces, the head is put off: it returns what it is given, and the loss makes its logits a piece
of the tokens at a time (trainer/model/loss.py). What comes out of such a head is marked, so that a
program which takes it for logits is told so instead of training something else.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
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


def token_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of `targets` (-100: ignored) from what the model returned for them.

    `output` is the model's, as it is: logits (..., vocabulary), whole or split over it by tensor
    parallelism; or, where the plan has the loss in pieces, what the head was given. Equal to
    `F.cross_entropy(logits.flatten(0, -2), targets.flatten())`.
    """
    put_off: PutOff | None = getattr(output, _MARK, None)
    count = (targets != IGNORED).sum().clamp(min=1)
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
    loss = token_loss(logits, shift_labels)
    if num_items_in_batch is None:
        return loss
    return loss * ((shift_labels != IGNORED).sum() / num_items_in_batch)


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


Loss = Callable[[Any, Any], Tensor]
"""A number of what the model returned and the targets that go with it."""


def loss_of(output: Any, targets: Any, loss: Loss | None) -> Tensor:
    """The loss of one micro-batch: the user's, or `token_loss`, or the model's own."""
    found: Any
    if loss is not None:
        found = loss(output, targets)
    elif targets is not None:
        found = token_loss(getattr(output, "logits", output), targets)
    else:
        found = getattr(output, "loss", None)
        if not isinstance(found, Tensor):
            raise TrainerError(
                f"the model returns {type(output).__name__}, of which no loss is known: give "
                "forward_backward targets, or loss=FUNCTION"
            )
    made: Tensor = found.to_local() if isinstance(found, DTensor) else found
    return made

"""The loss: cross-entropy of the next token.

Cross-entropy without all logits at once: head and loss, a piece of the tokens at a time.

Each piece's gradients are made beside its loss, as soon as its logits exist, so that nothing is
computed again in backward: what stays is a gradient as large as the hidden states and one as large
as the head's weight. For a token with logits z and target y

    loss = log(sum(exp(z))) - z[y]        d loss / d z = softmax(z) - one_hot(y)

Under tensor parallelism each rank has the logits of its rows of the vocabulary; the highest logit,
the sum of the exponentials and the target's logit of each token are all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..config import PlanConfig
from ..parallel.local_parameters import current_parameter
from ..text.packing import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """The rows of the head's weight that this rank has."""

    group: dist.ProcessGroup | None
    """The ranks that have the others; None: there are none."""
    first: int
    """The first of them."""
    tokens: int
    """How many of them are tokens': the others, behind them, are padding."""


def defer_head(part: nn.Module) -> None:
    """Let `part`, a decoder or its last stage, return what its head would be given.

    The head's `forward` is replaced, not the head: its weight keeps its name and its place among
    the sharded parameters, and is gathered with them.
    """
    head = getattr(part, "output", None)
    if isinstance(head, nn.Module):
        head.forward = _as_it_is


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def chunked_loss_function(
    part: nn.Module, *, chunks: int, compiles: bool, vocab: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of what `part` returns, a decoder or last stage whose head was deferred."""
    owner = getattr(part, "module", part)  # of DDP's wrapper

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        # read anew each time: FSDP puts the gathered weight in the place of its shard
        weight = current_parameter(owner, "output.weight")
        return chunked_loss(hidden, weight, targets, chunks=chunks, compiles=compiles, vocab=vocab)

    return loss_of


def chunked_loss(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    *,
    chunks: int,
    compiles: bool,
    vocab: int | None = None,
    bias_V: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy over all targets, ignored ones counting 0, from `chunks` pieces. The
    weight's rows beyond `vocab` are padding, whose logits count as -inf."""
    vocab = vocab or weight_VD.shape[0]
    part = VocabularyPart(group=None, first=0, tokens=vocab)
    if isinstance(weight_VD, DTensor):
        hidden_BTD = _whole_hidden(hidden_BTD, weight_VD)
        mesh, weight_VD = weight_VD.device_mesh, weight_VD.to_local()
        rows = weight_VD.shape[0]
        first = mesh.get_local_rank() * rows
        part = VocabularyPart(
            group=mesh.get_group(), first=first, tokens=min(rows, max(0, vocab - first))
        )
    bias_V = bias_V.to_local() if isinstance(bias_V, DTensor) else bias_V
    hidden_ND, targets_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
    if not torch.is_grad_enabled():
        total = _loss_alone(
            hidden_ND, weight_VD, targets_N, chunks, part, compiles=compiles, bias_V=bias_V
        )
        return total / targets_N.numel()
    made = _loss_and_gradients(
        hidden_ND.detach(),
        weight_VD.detach(),
        targets_N,
        chunks,
        part,
        compiles=compiles,
        bias_V=None if bias_V is None else bias_V.detach(),
        trains_weight=weight_VD.requires_grad,
        trains_bias=bias_V is not None and bias_V.requires_grad,
    )
    of_hidden: Tensor = _Made.apply(hidden_ND, made.loss, made.hidden_gradient)  # type: ignore[no-untyped-call]
    total = of_hidden
    if made.weight_gradient is not None:
        total = total + _Made.apply(weight_VD, torch.zeros_like(made.loss), made.weight_gradient)  # type: ignore[no-untyped-call]
    if made.bias_gradient is not None:
        total = total + _Made.apply(bias_V, torch.zeros_like(made.loss), made.bias_gradient)  # type: ignore[no-untyped-call]
    return total / targets_N.numel()


def _whole_hidden(hidden: Tensor, weight: DTensor) -> Tensor:
    """All tokens of the hidden states, which tensor-parallel ranks may have split; each rank makes
    the part of their gradient that comes from its rows of the vocabulary."""
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, weight.device_mesh, [Shard(1)], run_check=False)
    return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class _Made(torch.autograd.Function):
    """A number whose gradient with respect to `source` has been made already, but for the scale
    that backward brings (fp16 would round away what the loss scale, in it, is there to keep).

    One for each source: a schedule that splits backward asks for one gradient at a time. The
    gradient is let go of, so that it becomes the parameter's own without a copy.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, source.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scales[0]).to(ctx.dtype), None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _LossAndGradients:
    """Of the sum over all targets."""

    loss: Tensor
    hidden_gradient: Tensor
    weight_gradient: Tensor | None
    """None of a weight that is frozen, as of a bias."""
    bias_gradient: Tensor | None = None


@torch.no_grad()
def _loss_and_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunks: int,
    part: VocabularyPart,
    *,
    compiles: bool,
    bias_V: Tensor | None = None,
    trains_weight: bool = True,
    trains_bias: bool = True,
) -> _LossAndGradients:
    computed = weight_VD.to(hidden_ND.dtype)
    piece_loss = _chosen_piece_loss(part, compiles=compiles)
    weight_gradient = _WeightGradient(weight_VD.dtype, computed.dtype)
    hidden_gradient = torch.empty_like(hidden_ND)
    bias_gradient = None if bias_V is None or not trains_bias else torch.zeros_like(bias_V)
    losses = []
    pieces = (tensor.tensor_split(chunks) for tensor in (hidden_ND, targets_N, hidden_gradient))
    for hidden, targets, made in zip(*pieces, strict=True):
        logits = _logits(hidden, computed, bias_V)
        loss, logits_gradient = piece_loss(logits, targets, part)
        del logits
        torch.mm(logits_gradient, computed, out=made)
        if trains_weight:
            weight_gradient.add(logits_gradient, hidden)
        if bias_gradient is not None:
            bias_gradient.add_(logits_gradient.sum(0))
        losses.append(loss)
        del logits_gradient
    return _LossAndGradients(
        loss=torch.stack(losses).sum(),
        hidden_gradient=hidden_gradient,
        weight_gradient=weight_gradient.total if trains_weight else None,
        bias_gradient=bias_gradient,
    )


def _loss_alone(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunks: int,
    part: VocabularyPart,
    *,
    compiles: bool,
    bias_V: Tensor | None = None,
) -> Tensor:
    """The sum over all targets, where nobody asks for gradients: a third of the products."""
    computed = weight_VD.to(hidden_ND.dtype)
    piece_loss = _chosen_piece_loss(part, compiles=compiles)
    pieces = zip(hidden_ND.tensor_split(chunks), targets_N.tensor_split(chunks), strict=True)
    losses = [
        piece_loss(_logits(hidden, computed, bias_V), targets, part)[0]
        for hidden, targets in pieces
    ]
    return torch.stack(losses).sum()


def _logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    logits = hidden_ND @ weight_VD.T
    return logits if bias_V is None else logits.add_(bias_V)


class _WeightGradient:
    """The sum of the pieces' gradients of the head's weight: in the weight's own dtype, as FSDP
    reduces it; in fp32 where that is fp16, which a sum over many tokens can leave."""

    def __init__(self, dtype: torch.dtype, computed: torch.dtype) -> None:
        self.dtype = torch.float32 if dtype == torch.float16 else dtype
        self.adds_in_place = self.dtype == computed
        self.total = torch.empty(0)

    def add(self, logits_gradient_NV: Tensor, hidden_ND: Tensor) -> None:
        """Add one piece's."""
        if not self.total.numel():
            self.total = (logits_gradient_NV.T @ hidden_ND).to(self.dtype)
        elif self.adds_in_place:
            self.total.addmm_(logits_gradient_NV.T, hidden_ND)
        else:
            self.total.add_(logits_gradient_NV.T @ hidden_ND)


def _piece_loss(
    logits_NV: Tensor, targets_N: Tensor, part: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """(sum of the losses, gradient of the logits); the gradient takes the place of the logits."""
    values = logits_NV.float()
    if part.tokens < values.shape[1]:
        values[:, part.tokens :] = -torch.inf
    highest = values.amax(1)
    _reduce(highest, part, dist.ReduceOp.MAX)
    values.sub_(highest[:, None])
    rows = targets_N - part.first
    is_here = (rows >= 0) & (rows < values.shape[1])
    rows = torch.where(is_here, rows, 0)[:, None]
    of_target = torch.where(is_here, values.gather(1, rows)[:, 0], 0.0)
    sums = values.exp_().sum(1)
    _reduce(of_target, part, dist.ReduceOp.SUM)
    _reduce(sums, part, dist.ReduceOp.SUM)
    counts = targets_N != IGNORED
    losses = (sums.log() - of_target) * counts
    values.scatter_add_(1, rows, -(sums * is_here)[:, None])
    gradient = torch.mul(values, (counts / sums)[:, None], out=logits_NV)
    return losses.sum(), gradient


def _reduce(values: Tensor, part: VocabularyPart, operation: Any) -> None:
    if part.group is not None:
        dist.all_reduce(values, op=operation, group=part.group)


def _chosen_piece_loss(
    part: VocabularyPart, *, compiles: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    return _compiled_piece_loss() if compiles and part.group is None else _piece_loss


@cache
def _compiled_piece_loss() -> Callable[..., tuple[Tensor, Tensor]]:
    """One for all steps, so that it is compiled once."""
    return torch.compile(_piece_loss)


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 over all targets; an ignored one counts as 0.

    So every micro-batch weighs the same; `packing.counted_fraction` is what makes it a mean over
    the targets that count.
    """
    logits, targets = logits_BTV.flatten(0, 1).float(), targets_BT.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    # split over the vocabulary, logits make a loss that is the same on all ranks
    total = total.to_local() if isinstance(total, DTensor) else total
    return total / targets.numel()


def loss_function(
    plan: PlanConfig, device: torch.device, part: nn.Module | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of what `part` returns: the model, its wrapper, or the last stage (None: this rank
    has it not).

    Compiled where the blocks are: eager, it reads and writes the logits in fp32 several times over.
    """
    layout = plan.layout
    compiles = layout.compile and device.type == "cuda"
    if layout.loss_chunks > 1 and part is not None:
        return chunked_loss_function(
            part, chunks=layout.loss_chunks, compiles=compiles, vocab=plan.model.vocab
        )
    return _compiled_loss() if compiles else next_token_loss


@cache
def _compiled_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """One for all steps, so that it is compiled once."""
    return torch.compile(next_token_loss)

"""Expert parallelism: each rank holds some of the routed experts, tokens travel to them and back.

The ranks of `ep` have different tokens. Each sorts copies of its tokens by expert and sends every
rank those for the experts there; what they give comes back the same way. None is dropped, so how
many travel is known when the router has chosen only, and the host waits for it.

Under tensor parallelism each rank gathers the sequence and routes all of it alike; experts are
split over their inner width, and the parts that the ranks give are summed.

Source: GShard (arXiv 2006.16668), section 3.2, without its capacity; torchtitan
torchtitan/models/moe and torchtitan/distributed/expert_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from ..config import PlanConfig
from ..model.moe import (
    GroupedExperts,
    MixtureOfExperts,
    StackedLinear,
    balanced,
    local,
    mixtures,
)
from ..private_torch import is_fake
from ..torch_versions import divide_by
from .autograd_collectives import exchange_rows
from .mesh import Meshes

ROWS, COLUMNS = 1, 2
"""Dimensions of stacked weights: what a projection gives, and what it is given."""

Experts = Callable[[Tensor, Tensor], Tensor]


def apply_expert_parallel(part: nn.Module, meshes: Meshes) -> None:
    """Split the routed experts of `part` over `meshes.experts`, and over tp.

    Under tp the whole of a mixture is split here, shared experts included.
    """
    for mixture in mixtures(part):
        _split_experts(mixture.experts, meshes)
        if meshes.experts is not None:
            experts: Any = mixture.experts
            experts.forward = _dispatching(experts.forward, meshes.experts["ep"])
        if meshes.tp is not None:
            _split_beside_experts(mixture, meshes.tp)
            called: Any = mixture
            called.forward = _gathering(mixture.forward, meshes.tp)


def _split_experts(experts: GroupedExperts, meshes: Meshes) -> None:
    """Whole experts over ep, their inner width over tp."""
    axes = [name for name, there in (("ep", meshes.experts), ("tp", meshes.tp)) if there]
    root = meshes.experts if meshes.experts is not None else meshes.parameters
    mesh = root[tuple(axes)]
    for name, linear in experts.named_children():
        assert isinstance(linear, StackedLinear)
        inner = COLUMNS if name == "w2" else ROWS
        _distribute(linear, "weight", mesh, _placements(axes, Shard(inner)))
        if linear.bias is not None:
            over_tp = Replicate() if name == "w2" else Shard(ROWS)
            _distribute(linear, "bias", mesh, _placements(axes, over_tp))
        if name == "w2":
            linear.inputs_over = meshes.tp


def _placements(axes: Sequence[str], over_tp: Placement) -> list[Placement]:
    return [Shard(0) if axis == "ep" else over_tp for axis in axes]


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Keep this rank's part of a parameter, which is on the meta device or equal on all ranks."""
    whole = module.get_parameter(name)
    part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))


def _split_beside_experts(mixture: MixtureOfExperts, tp: DeviceMesh) -> None:
    """The shared experts by their inner width. Router and gate are whole on each rank, and meet
    there a part of what the outputs' gradients say."""
    for scores in (mixture.router, mixture.shared_gate):
        if scores is not None:
            for name, _ in list(scores.named_parameters()):
                _distribute(scores, name, tp, (Replicate(),))
            scores.parts_over = tp
    if mixture.shared_experts is not None:
        for name, linear in mixture.shared_experts.named_children():
            assert isinstance(linear, nn.Linear)
            _distribute(linear, "weight", tp, (Shard(1 if name == "w2" else 0),))
            linear.forward = _local_linear(linear)  # type: ignore[method-assign, assignment]


# Functions that are made, not `partial`: torch.compile takes each partial for another program, and
# gives up compiling after eight blocks.


def _local_linear(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, local(linear.weight))


def _gathering(run: Callable[..., Tensor], tp: DeviceMesh) -> Callable[..., Tensor]:
    # what is said of tokens is said of the whole sequence
    return lambda x_BTD, *of_all: over_sequence(lambda whole: run(whole, *of_all), tp, x_BTD)


def _dispatching(run: Experts, ep: DeviceMesh) -> Experts:
    return lambda rows_RD, counts: dispatched(run, ep, rows_RD, counts)


def over_sequence(run: Callable[[Tensor], Tensor], tp: DeviceMesh, x_BTD: Tensor) -> Tensor:
    """`run`, which gives a part of a sum over the ranks of `tp`, of the whole sequence, of which
    each has a piece before and after."""
    if not isinstance(x_BTD, DTensor):
        x_BTD = DTensor.from_local(x_BTD, tp, (Shard(1),), run_check=False)
    gathered = x_BTD.redistribute(placements=(Replicate(),))
    out = run(gathered.to_local(grad_placements=(Partial(),)))
    summed = DTensor.from_local(out, tp, (Partial(),), run_check=False)
    return summed.redistribute(placements=(Shard(1),)).to_local()


def dispatched(run: Experts, ep: DeviceMesh, rows_RD: Tensor, counts: Tensor) -> Tensor:
    """`run` the experts of all ranks of `ep` on the rows of all; `rows_RD` are sorted by expert,
    `counts` rows of each, and those behind them are nobody's."""
    here = torch.empty_like(counts)
    dist.all_to_all_single(here, counts, group=ep.get_group())
    from_each = here.view(ep.size(), -1)
    sent, received = _sizes(counts, from_each, ep, total=len(rows_RD))
    # They come by sender, and of each by expert. No name holds rows longer than they are needed.
    numbers = torch.arange(sum(received), device=counts.device)
    expert = torch.searchsorted(here.cumsum(0), numbers, right=True) % from_each.shape[1]
    order = expert.argsort(stable=True)
    nobodys = len(rows_RD) - sum(sent)
    mine = rows_RD[: len(rows_RD) - nobodys] if nobodys else rows_RD
    out = run(exchange_rows(mine, sent, received, ep)[order], from_each.sum(0))[order.argsort()]
    out = exchange_rows(out, received, sent, ep)
    return F.pad(out, (0, 0, 0, nobodys)) if nobodys else out


def _sizes(
    counts: Tensor, from_each: Tensor, ep: DeviceMesh, *, total: int
) -> tuple[list[int], list[int]]:
    """(rows to each rank, rows from each); where tensors have no values, as if all experts were
    chosen alike."""
    if is_fake(counts):
        to_each = balanced(total, ep.size())
        return to_each, [to_each[ep.get_local_rank()]] * ep.size()
    to_each_rank = counts.view_as(from_each).sum(1)
    sent, received = torch.stack([to_each_rank, from_each.sum(1)]).tolist()
    return sent, received


def shard_experts(
    blocks: Sequence[nn.Module], plan: PlanConfig, meshes: Meshes, **options: Any
) -> None:
    """`fully_shard` the routed experts of each block over the ranks that have the same ones, with
    the `options` of the blocks.

    Their gradients are sums over the tokens of all `ep` ranks already, so they are divided by the
    number of all data-parallel ranks, more than the group in which they are reduced has.
    """
    if meshes.expert_fsdp is None:
        return
    layout = plan.layout
    shard_ranks = layout.shard_ranks // layout.ep
    placement = expert_placement(blocks, shard_ranks)
    for block in blocks:
        for mixture in mixtures(block):
            experts: Any = mixture.experts
            fully_shard(experts, mesh=meshes.expert_fsdp, shard_placement_fn=placement, **options)
            data_ranks = layout.dp_replicate * layout.shard_ranks
            divide_by(experts, float(data_ranks), shard_ranks=shard_ranks)


def expert_placement(
    blocks: Sequence[nn.Module], ranks: int
) -> Callable[[nn.Parameter], Shard | None]:
    """Which dimension of a parameter FSDP splits over `ranks`: of routed experts that are fewer
    each one's own rows, where they can be split evenly, or ranks would hold padding only."""
    routed = {
        id(parameter)
        for block in blocks
        for mixture in mixtures(block)
        for parameter in mixture.experts.parameters()
    }

    def placement(parameter: nn.Parameter) -> Shard | None:
        if id(parameter) not in routed:
            return None
        experts, rows = local(parameter).shape[:2]
        return Shard(ROWS) if experts < ranks and rows % ranks == 0 else None

    return placement

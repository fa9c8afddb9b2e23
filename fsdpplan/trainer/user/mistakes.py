"""Mistakes that are often made with a model of one's own, each told in a sentence."""

from __future__ import annotations

import os
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..config import PlanConfig
from ..errors import RankError, TrainerError

LEAST_BLOCK_FRACTION = 0.1
"""Share of a model's parameters that its blocks hold at least: less, and one unit, the root, would
gather nearly all of the model at once."""


def require_bare(model: nn.Module) -> None:
    """Raise where `model` was wrapped, sharded or distributed before `parallelize`."""
    modules = list(model.modules())
    first = any(isinstance(module, FullyShardedDataParallel) for module in modules)
    second = [module for module in modules if isinstance(module, FSDPModule)]
    if first and second:
        raise TrainerError(
            "FSDP1 and FSDP2 are mixed in this model: give parallelize the model without "
            "FullyShardedDataParallel and without fully_shard"
        )
    if first:
        raise TrainerError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which parallelize's FSDP2 "
            "cannot be mixed with: give it the model without the wrapper"
        )
    if second == [model]:
        raise TrainerError(
            "only the root of this model is wrapped by fully_shard, so each step would gather all "
            "of it at once: leave fully_shard out, parallelize wraps each block and then the root"
        )
    if second:
        raise TrainerError(
            "fully_shard was called on this model already: leave it out, parallelize calls it"
        )
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            raise TrainerError(_wrapped_in_ddp(module))
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise TrainerError(
            "the model's parameters are DTensors already: build it without tp_plan or a device "
            "mesh of its own, parallelize distributes it as planned"
        )


def _wrapped_in_ddp(wrapper: DistributedDataParallel) -> str:
    bare = "give parallelize the model inside (`model.module`), it wraps it itself"
    if not wrapper.find_unused_parameters:
        return f"the model is wrapped in DistributedDataParallel already: {bare}"
    unused = [name for name, p in wrapper.module.named_parameters() if not p.requires_grad]
    why = (
        f"its unused parameters are frozen (such as {unused[0]}), which needs no search"
        if unused
        else "where none is unused that is a walk through the graph in each step for nothing"
    )
    return f"find_unused_parameters=True searches for unused parameters, and {why}: {bare}"


def require_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise unless `blocks` are parts of `model` that hold much of it."""
    inside = {id(module) for module in model.modules()}
    if any(block is model or id(block) not in inside for block in blocks):
        raise TrainerError(
            "blocks=[...] must name modules inside the model: each becomes one FSDP unit, and the "
            "root is the last"
        )
    held = {id(p): p.numel() for block in blocks for p in block.parameters()}
    whole = sum(parameter.numel() for parameter in model.parameters())
    share = sum(held.values()) / max(1, whole)
    if share < LEAST_BLOCK_FRACTION:
        raise TrainerError(
            f"the {len(blocks)} blocks found hold {share:.1%} of the parameters, so the root unit "
            "would gather nearly the whole model at once: give parallelize(..., blocks=[...]) the "
            "repeated layers"
        )


def require_same_model(model: nn.Module, device: torch.device) -> None:
    """Raise where ranks built other parameters; all ranks call this.

    Collectives of other sizes would hang, or mix up parameters.
    """
    shapes = [f"{name}{tuple(each.shape)}{each.dtype}" for name, each in model.named_parameters()]
    sign = zlib.crc32(";".join(shapes).encode())
    extremes = torch.tensor([sign, -sign], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.tolist()
    if highest != -lowest:
        raise TrainerError(
            "the ranks built different models (names, shapes or dtypes of parameters differ): "
            "build the same on each, in the same order"
        )


def require_islands(plan: PlanConfig) -> None:
    """Raise where a group that shards parameters, beside replicas, was started across two islands:
    nodes, that is. Where it is planned so, the plan has counted what that costs, and its rules say
    so.
    """
    layout, island = plan.layout, plan.cluster.gpus_per_node
    group = layout.shard_ranks * layout.tp
    if layout.dp_replicate == 1 or group > island:
        return
    if island % group:
        return
    started = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world))
    if started >= layout.world:
        return
    if started % group:
        raise TrainerError(
            f"{started} processes were started on a node, so that groups of {group} ranks that "
            f"shard parameters lie across two islands: start {island} a node, as planned"
        )
    local_rank, rank = os.environ.get("LOCAL_RANK"), os.environ.get("RANK")
    if local_rank is not None and rank is not None and (int(rank) % started != int(local_rank)):
        raise RankError(
            f"rank {rank} is local rank {local_rank} of {started}: ranks that shard parameters lie "
            "across islands unless a node has consecutive ranks; start by torchrun, or srun with "
            "--distribution block"
        )


def warn_of_rules(plan: PlanConfig) -> None:
    """Warn of each rule of the field that the plan says it breaks."""
    for rule in plan.rules:
        _warn(f"the plan breaks {rule.rule}: {rule.says}; {rule.advice}")


def _warn(message: str) -> None:
    """Once, not on each rank; from the line that called `parallelize`."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=4)


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise where `optimizer` trains parameters that `model` has no longer: one that was made
    before `parallelize`."""
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for parameter in _parameters_of(optimizer)):
        raise TrainerError(_BEFORE_SHARDING)


def watch_optimizers(model: nn.Module) -> Callable[[nn.Module], None]:
    """What to call with the model after its parameters are replaced: from then on no optimizer may
    step that holds one of those that it has now."""
    earlier = [weakref.ref(parameter) for parameter in model.parameters()]

    def replaced(model: nn.Module) -> None:
        kept = {id(parameter) for parameter in model.parameters()}
        stale = [ref for ref in earlier if (held := ref()) is not None and id(held) not in kept]
        if stale:
            register_optimizer_step_pre_hook(lambda optimizer, *_: _refuse(optimizer, stale))

    return replaced


def _refuse(optimizer: Any, stale: Sequence[weakref.ref[nn.Parameter]]) -> None:
    gone = {id(parameter) for ref in stale if (parameter := ref()) is not None}
    if any(id(parameter) in gone for parameter in _parameters_of(optimizer)):
        raise TrainerError(_BEFORE_SHARDING)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


_BEFORE_SHARDING = (
    "the optimizer was made before the model was sharded and would train parameters that the model "
    "has no longer: make it after parallelize"
)

"""Data parallelism: parameters sharded by FSDP2 or copied by DDP; when gradients are reduced."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..config import LayoutConfig, PlanConfig
from ..errors import TrainerError
from ..precision import TORCH_DTYPES, apply_autocast, fsdp_precision
from ..private_torch import parts_kept_on
from ..torch_versions import take_means
from .ddp_hooks import Reduction, power_sgd_state, reduce_in_dtype, reduce_low_rank
from .expert_parallel import expert_placement, shard_experts
from .gradient_sums import gradient_sums
from .local_parameters import LocalParameters, has_distributed_parameters
from .mesh import Meshes

DDP_DEFAULT_BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel takes when it is not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What is before and behind the blocks of a model and a unit of its own; empty: in the root."""

    tables: Sequence[nn.Module] = ()
    """Embeddings alone, of which backward needs no weight."""
    head: Sequence[nn.Module] = ()
    """The final norm and the head, in the order in which they are called."""


def apply_fsdp(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: PlanConfig,
    meshes: Meshes,
    *,
    ends: Ends | None = None,
) -> None:
    """`fully_shard` each unit of `wrap_blocks` blocks, the ends of the model, then the rest of it.

    The head is not gathered again for backward, which needs it first, nor is the root, by torch's
    default. Tables are freed behind forward and not gathered again at all; in a pipeline they stay
    for the next micro-batch, as blocks do.
    """
    ends = ends or Ends()
    training, layout, mesh = plan.training, plan.layout, meshes.fsdp
    if layout.pp == 1 and layout.wrap_blocks > len(blocks):
        raise TrainerError(
            f"the plan wraps {layout.wrap_blocks} blocks in one FSDP unit, the model has "
            f"{len(blocks)}: plan again with --wrap-blocks {len(blocks)} or less"
        )
    policy = fsdp_precision(training)
    reshard = {"always": True, "never": False}.get(
        str(layout.reshard_after_forward), layout.reshard_after_forward
    )
    offload = offload_policy(layout, mesh.device_type)
    shard_experts(
        blocks,
        plan,
        meshes,
        reshard_after_forward=reshard,
        mp_policy=policy,
        offload_policy=offload,
    )
    with parts_kept_on(meshes.kept):
        for first in range(0, len(blocks), layout.wrap_blocks):
            unit = list(blocks[first : first + layout.wrap_blocks])
            fully_shard(
                unit if len(unit) > 1 else unit[0],  # type: ignore[arg-type]
                mesh=mesh,
                reshard_after_forward=reshard,  # type: ignore[arg-type]
                mp_policy=policy,
                offload_policy=offload,
                shard_placement_fn=expert_placement(blocks, layout.shard_ranks),
            )
            take_means(unit[0])
    for end, frees in ((ends.tables, layout.pp == 1), (ends.head, False)):
        if not end:
            continue
        fully_shard(
            list(end) if len(end) > 1 else end[0],
            mesh=mesh,
            reshard_after_forward=frees,
            mp_policy=policy,
            offload_policy=offload,
        )
        take_means(end[0])
        _allow_views_of(end)
    if ends.tables:
        table: Any = ends.tables[0]
        table.set_unshard_in_backward(False)
        # by default it would gather what came before it: the head, of the micro-batch before
        table.set_modules_to_backward_prefetch([table])
    take_means(fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload))


def _allow_views_of(unit: Sequence[nn.Module]) -> None:
    """Do not warn that changing a unit's output in place may skip its gather in backward: one that
    is not gathered there has none to skip."""
    names = ", ".join(type(module).__name__ for module in unit)
    warnings.filterwarnings("ignore", re.escape(f"FSDP2-wrapped module ({names}) returned a view"))


def offload_policy(layout: LayoutConfig, device_type: str) -> OffloadPolicy:
    """Where shards live. Memory can only be pinned where there is a device to copy it to."""
    if layout.offload == "cpu":
        return CPUOffloadPolicy(pin_memory=device_type == "cuda")
    return OffloadPolicy()


@torch.no_grad()
def equalise_replicas(model: nn.Module, meshes: Meshes) -> None:
    """Copy the first replica's parameters to the others; FSDP2 takes them to be equal.

    DDP does the same when it wraps a model. Parameters on the meta device have no values yet.
    """
    replicas = meshes.axis("dp_replicate")
    if replicas is None:
        return
    group = replicas.get_group()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        if not local.is_meta:
            dist.broadcast(local, src=dist.get_global_rank(group, 0), group=group)


def require_values(model: nn.Module) -> None:
    """Raise where a model is on the meta device."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise TrainerError("DDP needs a model with values: call materialise(model, device) first")


def move_to(model: nn.Module, device: torch.device) -> None:
    """Move a model whose values are elsewhere; what has none stays on the meta device."""
    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.device != device and not tensor.is_meta for tensor in tensors):
        model.to(device)


def apply_ddp(
    model: nn.Module, plan: PlanConfig, device: torch.device, meshes: Meshes
) -> nn.Module:
    """DistributedDataParallel over whole parameters; matmuls of fp32 ones in the plan's precision
    by autocast.

    The replicas are those of `dp_replicate`: where there is one, on one GPU or beside tensor
    parallelism, there is nothing to reduce, and no DDP, whose buckets would hold all gradients. On
    one GPU a model may be on the meta device still.
    """
    replicas = meshes.axis("dp_replicate")
    if plan.layout.world > 1:
        require_values(model)
    move_to(model, device)
    apply_autocast(model, plan, device)
    if has_distributed_parameters(model):
        model = LocalParameters(model)
    if replicas is None:
        return model
    group = replicas.get_group()
    bucket_bytes = plan.layout.ddp_bucket_bytes
    # Told its own default, DDP would no longer make the first bucket small.
    default = bucket_bytes == DDP_DEFAULT_BUCKET_BYTES
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=None if default else bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        **_no_buffer_broadcast(),
    )
    training = plan.training
    if training.gradient_compression.startswith("powersgd"):
        state = power_sgd_state(training.gradient_compression, group)
        wrapped.register_comm_hook(state, reduce_low_rank)
    elif training.reduce_dtype != training.param_dtype:
        reduction = Reduction(group=group, dtype=TORCH_DTYPES[training.reduce_dtype])
        wrapped.register_comm_hook(reduction, reduce_in_dtype)
    return wrapped


def _no_buffer_broadcast() -> dict[str, Any]:
    """DDP's switch against sending buffers with each forward, which FSDP does not do either.

    torch 2.13 renamed it and warns of the old name.
    """
    names = inspect.signature(DistributedDataParallel).parameters
    return {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
    }


@contextmanager
def gradient_sync(model: nn.Module, layout: LayoutConfig, *, is_last: bool) -> Iterator[None]:
    """Run one micro-batch, forward and backward, with the layout's synchronisation of gradients.

    `is_last` says whether it is the last one before the optimizer's step. Without reduction FSDP
    still reshards after each backward, so parameters are gathered anew in every micro-batch, also
    under reshard never (torch 2.13: 4 micro-batches of a model of 33 units make 132 all-gathers).

    Gradients of parameters in bf16 that add up over micro-batches do so in fp32. FSDP that reduces
    the last micro-batch alone holds gradients in the reduce dtype until then.
    """
    is_reduced_once = isinstance(model, FSDPModule) and layout.gradient_sync != "every"
    if layout.num_microbatches == 1 or is_reduced_once:
        with _reductions(model, layout, is_last=is_last):
            yield
        return
    # DDP's buckets are reduced behind its parameters' hooks, and offloaded shards are copied beside
    by_ddp = isinstance(model, DistributedDataParallel) and layout.gradient_sync != "last"
    sums = gradient_sums(model, after_backward=by_ddp or layout.offload == "cpu")
    with sums.micro_batch(is_last=is_last), _reductions(model, layout, is_last=is_last):
        yield


@contextmanager
def _reductions(model: nn.Module, layout: LayoutConfig, *, is_last: bool) -> Iterator[None]:
    """Let the backward pass inside reduce what the layout reduces in it."""
    if isinstance(model, DistributedDataParallel):
        if layout.gradient_sync == "last" and not is_last:
            with model.no_sync():
                yield
            return
    elif isinstance(model, FSDPModule):
        model.set_is_last_backward(is_last)
        # In this order: the first sets what the second does, too.
        model.set_requires_gradient_sync(is_last or layout.gradient_sync != "last")
        model.set_requires_all_reduce(is_last or layout.gradient_sync == "every")
    yield

"""Tensor parallelism: each matrix split over ranks, the sequence split between the matmuls.

Projections into a block's two networks are split by columns (their outputs), those out of them by
rows (their inputs); all between the networks is split over the sequence. So each network gathers
its input over the sequence and reduce-scatters its output. The embedding and the head are split
over the vocabulary, and the loss is computed of the pieces.

Source: arXiv 1909.08053 and 2205.05198; torch's "Large Scale Transformer model training with Tensor
Parallel" tutorial.

How single modules are split over tensor-parallel ranks, beside what torch has styles for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from ..config import LayoutConfig, ModelConfig, PlanConfig
from ..errors import TrainerError
from ..model.attention import Attention
from ..model.latent_attention import LatentAttention
from ..model.norms import AllHeadsNorm, RMSNorm
from ..private_torch import overlap_tensor_parallel
from ..torch_versions import tell_masks_apart


class GatherSequence(ParallelStyle):
    """A network's first input, split over the sequence, is gathered once for all its projections,
    and their gradients of it are summed before they are scattered."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x, *others = inputs
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, (Shard(1),), run_check=False)
            return (x.redistribute(placements=(Replicate(),)), *others)

        module.register_forward_pre_hook(gather)
        return module


class SplitWeight(ParallelStyle):
    """A head that is not called: the loss gathers the sequence and takes the weight's rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split_parameter(module, "weight", device_mesh)
        return module


def mask_padding(head: nn.Module, *, vocab: int) -> None:
    """Let logits of a head's rows beyond `vocab`, which are padding, be -inf: they never win, and
    their gradient is exactly zero."""
    weight, first = head.get_parameter("weight"), 0
    if weight.shape[0] == vocab:
        return
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        first = weight.shape[0] // mesh.size() * mesh.get_local_rank()

    @torch.no_grad()  # they have no gradient by which to undo it
    def mask(_: nn.Module, __: object, logits: Tensor) -> None:
        if isinstance(logits, DTensor):
            logits.to_local()[..., max(0, vocab - first) :] = -torch.inf
        else:  # whole
            logits.data[..., vocab:] = -torch.inf

    head.register_forward_hook(mask)


class SplitPositions(ParallelStyle):
    """A position table that every rank has, of which each looks up its own part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own_part(_: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            positions = DTensor.from_local(*inputs, mesh, (Replicate(),), run_check=False)
            return positions.redistribute(placements=(Shard(positions.ndim - 1),))

        def as_tensor(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(
            module,
            device_mesh,
            input_fn=own_part,  # type: ignore[arg-type]
            output_fn=as_tensor,  # type: ignore[arg-type]
        )


class SplitAllHeadsNorm(ParallelStyle):
    """A norm over all heads together, of which each rank has its own; nothing for other modules."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, AllHeadsNorm)
        split_parameter(module, "weight", device_mesh)
        module.mesh = device_mesh
        return module


class NarrowProjection(ParallelStyle):
    """A projection that all ranks compute in whole, for heads that are split: what it gives is
    local, and each rank has its heads' part of its gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_tensor(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local(grad_placements=(Partial(),))

        return distribute_module(
            module,
            device_mesh,
            output_fn=as_tensor,  # type: ignore[arg-type]
        )


class NarrowNorm(ParallelStyle):
    """The norm behind a `NarrowProjection`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        distribute_module(module, device_mesh)

        def forward(x: Tensor) -> Tensor:
            weight = module.weight
            assert isinstance(weight, DTensor)
            local = weight.to_local(grad_placements=(Partial(),))
            return F.rms_norm(x, module.normalized_shape, local.to(x.dtype), module.eps)

        module.forward = forward  # type: ignore[method-assign]
        return module


class WideProjection(ColwiseParallel):
    """The projection by columns of what a `NarrowProjection` has given: the ranks' gradients of its
    input stay apart."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def as_distributed(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            whole: Tensor = AsWhole.apply(*inputs, device_mesh)  # type: ignore[no-untyped-call]
            return (whole,)

        module.register_forward_pre_hook(as_distributed)
        return super()._apply(module, device_mesh)


class AsWhole(Function):
    """A tensor that all ranks have, as a DTensor; its gradient is each rank's own part of a sum.

    `DTensor.from_local` would sum the parts over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(local, mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        assert gradient.placements[0].is_partial()
        return gradient.to_local(), None


def split_parameter(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Split a parameter of `module` itself by rows."""
    parameter = module.get_parameter(name)
    module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, (Shard(0),))))


def require_peer_access(mesh: DeviceMesh) -> None:
    """Raise TrainerError where the driver lets this GPU map no memory of another one of `mesh` on
    this host, which symmetric memory needs: torch would say so at the first step, and not why."""
    own, visible = torch.cuda.current_device(), torch.cuda.device_count()
    first = dist.get_rank() - own  # a process takes the GPU of its local rank
    for device in (rank - first for rank in mesh.mesh.flatten().tolist()):
        is_peer = 0 <= device < visible and device != own
        if is_peer and not torch.cuda.can_device_access_peer(own, device):
            raise TrainerError(
                f"async_tp (tp {mesh.size()}): it needs symmetric memory, and GPUs {own} and "
                f"{device} cannot map each other's; plan again with --no-async-tp"
            )


def overlap(mesh: DeviceMesh) -> None:
    """Let collectives over `mesh` run beside their matmuls: async TP."""
    require_peer_access(mesh)
    overlap_tensor_parallel(mesh.get_group())


def apply_tensor_parallel(part: nn.Module, plan: PlanConfig, mesh: DeviceMesh) -> None:
    """Split the matrices of `part`, a decoder or a pipeline stage's share of one, over `mesh`.

    The routed experts of a block, and what is beside them, are left to `apply_expert_parallel`.
    """
    if plan.layout.async_tp and mesh.device_type == "cuda":
        overlap(mesh)
    tell_masks_apart()
    part.whole_length = plan.training.seq_len  # type: ignore[assignment]
    split(part, mesh, _end_styles(plan.layout))
    if plan.model.tied_embeddings and _has(part, "tok_embeddings") and _has(part, "output"):
        # both are split over the vocabulary, but each was made a parameter of its own
        part.output.weight = part.tok_embeddings.weight  # type: ignore[union-attr]
    for number, block in part.layers.named_children():  # type: ignore[union-attr]
        split(block, mesh, _block_styles(plan.model))
        _split_heads(block.get_submodule("attention"), plan.model, mesh)
        if not plan.model.has_experts(int(number)):
            split(block, mesh, feed_forward_styles())


def _split_heads(attention: nn.Module, model: ModelConfig, mesh: DeviceMesh) -> None:
    """What attention keeps by head, beside its projections."""
    assert isinstance(attention, Attention | LatentAttention)
    attention.first_head = model.heads // mesh.size() * mesh.get_local_rank()
    if attention.sinks is not None:
        split_parameter(attention, "sinks", mesh)


def loss_context(layout: LayoutConfig) -> AbstractContextManager[None]:
    """In which the loss of logits that are split over the vocabulary, and its backward, run."""
    return loss_parallel() if layout.loss_parallel else nullcontext()


def split(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """`parallelize_module` for those of the named children that `module` has."""
    present = {name: style for name, style in styles.items() if _has(module, name)}
    parallelize_module(module, mesh, present)


def _has(module: nn.Module, path: str) -> bool:
    found: nn.Module | None = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is not None


def _end_styles(layout: LayoutConfig) -> dict[str, ParallelStyle]:
    head = ColwiseParallel(
        input_layouts=Shard(1),
        output_layouts=Shard(-1) if layout.loss_parallel else Replicate(),
        use_local_output=not layout.loss_parallel,
    )
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "pos_embeddings": SplitPositions(),
        "embedding_norm": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(),
        "output": SplitWeight() if layout.loss_chunks > 1 else head,
    }


def _block_styles(model: ModelConfig) -> dict[str, ParallelStyle]:
    """Of all in a block but its feed-forward network."""
    inside: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": GatherSequence(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_norm": SequenceParallel(use_local_output=True),
        "ffn_norm": SequenceParallel(),
        "post_ffn_norm": SequenceParallel(use_local_output=True),
    }
    return inside | {f"attention.{name}": style for name, style in _heads_styles(model).items()}


def _heads_styles(model: ModelConfig) -> dict[str, ParallelStyle]:
    """Of what makes queries, keys and values of the heads, which are split."""
    if model.latent is not None:
        return {
            "wq": ColwiseParallel(),
            "wq_a": NarrowProjection(),
            "q_norm": NarrowNorm(),
            "wq_b": WideProjection(),
            "wkv_a": NarrowProjection(),
            "kv_norm": NarrowNorm(),
            "wkv_b": WideProjection(),
        }
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("wq", "wk", "wv")}
    for name in ("q_norm", "k_norm"):
        styles[name] = (
            SplitAllHeadsNorm()
            if model.qk_norm_width == "all_heads"
            else SequenceParallel(sequence_dim=2, use_local_output=True)
        )
    return styles


def feed_forward_styles() -> dict[str, ParallelStyle]:
    """Of a block's dense network."""
    return {
        "feed_forward": GatherSequence(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }

"""Tensor parallelism: each matrix split over ranks, the sequence split between the matmuls.

Projections into a block's two networks are split by columns (their outputs), those out of them by
rows (their inputs); all between the networks is split over the sequence. So each network gathers
its input over the sequence and reduce-scatters its output. The embedding and the head are split
over the vocabulary, and the loss is computed of the pieces.

Source: arXiv 1909.08053 and 2205.05198; torch's "Large Scale Transformer model training with Tensor
Parallel" tutorial.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Replicate,
    Shard,
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
from ..model.attention import Attention
from ..model.latent_attention import LatentAttention
from ..private_torch import overlap_tensor_parallel
from .tensor_styles import (
    GatherSequence,
    NarrowNorm,
    NarrowProjection,
    SplitAllHeadsNorm,
    SplitPositions,
    SplitWeight,
    WideProjection,
    split_parameter,
)


def apply_tensor_parallel(part: nn.Module, plan: PlanConfig, mesh: DeviceMesh) -> None:
    """Split the matrices of `part`, a decoder or a pipeline stage's share of one, over `mesh`.

    The routed experts of a block, and what is beside them, are left to `apply_expert_parallel`.
    """
    if plan.layout.async_tp and mesh.device_type == "cuda":
        overlap_tensor_parallel(mesh.get_group())
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

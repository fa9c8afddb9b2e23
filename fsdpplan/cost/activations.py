"""Activations: what one block keeps for backward, and the peaks inside its backward.

Everything is counted for one micro-batch on one rank, operator by operator. An eager block saves
the inputs of each matmul, of fused attention, of the norms and of the element-wise functions; one
with fused kernels, compiled or written by hand, recomputes element-wise results, so a SwiGLU keeps
gate and up but not their product's first factor. Norms, rotations and GELU keep the same.

Sources: real FSDP2 under fake tensors, and the partitioner of torch 2.13's compiler on the
reference block (tests/ground_truth); Megatron-LM megatron/core/fusions/fused_bias_swiglu.py;
scores and dropout as in arXiv 2205.05198, equation 1. Rows of routed experts are the average over
ranks: a router out of balance needs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.backward_steps import (
    WeightGradientsOf,
    backward_peak_bytes,
    backward_steps,
)
from fsdpplan.cost.block_sizes import (
    BlockShape,
    BlockTensors,
    Kernels,
    block_tensors_bytes,
)
from fsdpplan.cost.weight_gradients import weight_gradient_bytes
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """Activation bytes of one block, one micro-batch, one rank."""

    saved_bytes: int
    """Kept from forward to backward."""
    live_bytes: int
    """Kept or recomputed when the block's backward starts."""
    residual_bytes: int
    """The block's input, and the gradient of its output."""
    forward_transient_bytes: int
    """Most that forward needs beyond what it has saved by then."""
    backward_peak_bytes: int
    """Most that backward reaches above the level at its start, weight gradients included."""
    weight_gradient_bytes: int
    """Unsharded weight gradients that the block's backward leaves."""
    last_weight_gradient_bytes: int
    """The one registered last: FSDP2 still refers to it while it reduces."""


def saved_bytes(
    *, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing, kernels: Kernels
) -> int:
    """Bytes of one block kept from forward to backward.

        none       2 residual + 2 normed + query + key + value + attended + 4 inner (fused: 3,
                   GELU: 2) + statistics (autocast: 5 normed, GELU: 4)
        attention  as none without the scores: beside fused attention, which keeps none, Megatron's
                   selective mode frees next to nothing
        op         residual + every second matmul from the first + attention output
        full       residual

    Source: saved tensors of the operators, counted under fake tensors (tests/ground_truth).
    """
    match mode:
        case "none":
            return all_saved_bytes(model=model, tensors=tensors, kernels=kernels)
        case "attention":
            everything = all_saved_bytes(model=model, tensors=tensors, kernels=kernels)
            return everything - tensors.scores_kept
        case "op":
            kept = _matmul_outputs(model, tensors)[::2]
            if kernels.drops_unused and len(_matmul_outputs(model, tensors)) % 2:
                kept = kept[:-1]
            return tensors.residual + tensors.attended + tensors.statistics + sum(kept)
        case "full":
            return tensors.residual


def all_saved_bytes(*, model: Model, tensors: BlockTensors, kernels: Kernels) -> int:
    """Bytes that one block saves without checkpointing."""
    t = tensors
    activated = (2 if kernels.fused else 3) if model.is_gated else 1
    inputs = 2 if t.shares_inputs else 4 + int(model.is_gated)
    attention = t.query + t.key + t.value + t.attended + t.attended_copy + t.latents
    experts = t.routed.rows + t.routed.returned_kept + (activated + 1) * t.routed.inner
    return (
        2 * t.residual
        + inputs * t.normed_kept
        + attention
        + activated * t.inner
        + t.product_kept
        + t.statistics
        + t.norm_copies
        + t.rotary
        + t.qk_normed
        + t.post_normed
        + t.scores_kept
        + t.masks
        + t.routed.router
        + experts
    )


def _matmul_outputs(model: Model, t: BlockTensors) -> list[int]:
    """Outputs of a block's plain matmuls in the order of forward; grouped ones of routed experts
    are not among those that per-operator checkpointing counts.

    Source: torchtitan torchtitan/parallelisms/parallelize_llama.py, `_get_custom_policy`.
    """
    attention = [t.query, t.key, t.value, t.normed]
    if model.latent:
        # into the latents and out of them; a latent is half of what its norm reads and returns
        into = [t.latents // 2] if model.latent.query_rank else []
        attention = [*into, t.query, t.latents // 2, t.key + t.value, t.normed]
    if model.experts and not model.experts.shared_hidden:
        return [*attention, t.routed.router // 2]
    router = [t.routed.router // 2] if model.experts else []
    projections = [t.inner, t.inner] if model.is_gated else [t.inner]
    return [*attention, *router, *projections, t.normed]


def _unread_bytes(
    *, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing, kernels: Kernels
) -> int:
    """What per-operator checkpointing keeps though backward does not read it: the last output."""
    is_kept = mode == "op" and len(_matmul_outputs(model, tensors)) % 2 and not kernels.drops_unused
    return tensors.normed if is_kept else 0


@lru_cache(maxsize=8192)
def block_activations(
    *,
    shape: BlockShape,
    mode: ActivationCheckpointing,
    weight_gradients: WeightGradientsOf,
) -> BlockActivations:
    """All activation quantities of one block for one micro-batch on one rank."""
    model, kernels = shape.model, shape.kernels
    tensors = block_tensors_bytes(shape)
    gradients = weight_gradient_bytes(
        model=model, tp=shape.tp, element_bytes=shape.element_bytes, ep=shape.ep
    )
    everything = all_saved_bytes(model=model, tensors=tensors, kernels=kernels)
    unread = _unread_bytes(model=model, tensors=tensors, mode=mode, kernels=kernels)
    steps = backward_steps(model=model, tensors=tensors, gradients=gradients, kernels=kernels)
    leaves_gradients = weight_gradients in ("kept", "cast")
    return BlockActivations(
        saved_bytes=saved_bytes(model=model, tensors=tensors, mode=mode, kernels=kernels),
        live_bytes=everything + unread,
        residual_bytes=tensors.residual,
        forward_transient_bytes=_forward_transient_bytes(
            model=model, tensors=tensors, mode=mode, kernels=kernels
        )
        - unread,
        backward_peak_bytes=backward_peak_bytes(steps, weight_gradients=weight_gradients)
        + tensors.gather_buffer,
        weight_gradient_bytes=gradients.total if leaves_gradients else 0,
        last_weight_gradient_bytes=0 if model.mlp_bias else gradients.up or gradients.down,
    )


def _forward_transient_bytes(
    *, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing, kernels: Kernels
) -> int:
    """The larger of what attention and the feed-forward network need besides what they save.

    Under checkpointing nothing of them is saved, so inner tensors count too.
    """
    t = tensors
    in_attention = t.exchanged + t.scores
    if mode in ("none", "attention"):
        recomputes_scores = t.scores_kept if mode == "attention" else 0
        in_network = t.residual + t.normed + t.scatter_copy + t.gather_buffer
        return max(in_network, in_attention + recomputes_scores)
    inner_tensors = (2 if kernels.fused else 3) if model.is_gated else 2
    in_network = (
        inner_tensors * (t.inner + t.routed.inner)
        + 2 * t.routed.rows
        + t.residual
        + t.normed_gradient
        + t.gather_buffer
    )
    heads = t.query + t.key + t.value + t.attended
    if t.scores or t.exchanged:
        return max(in_network, in_attention + t.scores_kept + heads + t.normed)
    return in_network

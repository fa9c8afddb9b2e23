"""Activations: what one block keeps for backward, and the peaks inside its backward.

Everything is counted for one micro-batch on one rank, operator by operator. An eager block saves
the inputs of each matmul, of fused attention, of the norms and of the element-wise functions; one
with fused kernels, compiled or written by hand, recomputes element-wise results, so a SwiGLU keeps
gate and up but not their product's first factor. Norms, rotations and GELU keep the same.

Sources: real FSDP2 under fake tensors, and the partitioner of torch 2.13's compiler on the
reference block (tests/ground_truth); Megatron-LM megatron/core/fusions/fused_bias_swiglu.py;
scores and dropout as in arXiv 2205.05198, equation 1. Rows of routed experts are the average over
ranks: a router out of balance needs more.

Windows: which blocks' attention is given a mask of all scores, and what masks take.

PyTorch's kernel for windows looks at a window's tiles only. Where there is none, the trainer adds a
mask to the scores, one for all blocks of a model part and all micro-batches; kernels that take a
mask read keys and values of every query head.

Source: fsdpplan/trainer/model/attention.py; its steps' peaks
(tests/ground_truth/test_block_kinds.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

from fsdpplan.cost.block.operators import reads_last_output
from fsdpplan.cost.memory.backward_steps import (
    ExpertsUnit,
    WeightGradientsOf,
    backward_peaks_bytes,
    backward_steps,
    inputs_half_peak_bytes,
)
from fsdpplan.cost.memory.weight_gradients import weight_gradient_bytes
from fsdpplan.cost.model.attention_kernel import masked_share
from fsdpplan.cost.model.block_sizes import (
    BlockShape,
    BlockTensors,
    Kernels,
    block_tensors_bytes,
)
from fsdpplan.cost.model.formats import formats
from fsdpplan.cost.model.shards import Stage
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """Activation bytes of one block, one micro-batch, one rank."""

    saved_bytes: int
    """Kept from forward to backward."""
    live_bytes: int
    """Kept or recomputed when the block's backward starts; attention recomputed alone is later."""
    residual_bytes: int
    """The block's input, and the gradient of its output."""
    forward_transient_bytes: int
    """Most that forward needs beyond what it has saved by then."""
    before_experts_bytes: int
    """What the block has made, saved or not, when its routed experts begin."""
    backward_peak_bytes: int
    """Most that backward reaches above the level at its start, weight gradients included; where
    routed experts are a unit of their own, before they are reduced."""
    reduced_peak_bytes: int
    """The same from their reduction on, what they were gathered into not counted; 0 where they are
    no unit of their own."""
    remade_peak_bytes: int
    """Part of the first: most that recomputation needs beyond all that it makes, while routed
    experts are at work; 0 where it makes none of theirs."""
    inputs_half_peak_bytes: int
    """The same in the half by inputs of a split backward pass, above the level at its start."""
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
        op         residual + every second matmul from the first + attention output (dropout:
                   + masks + 2 residual)
        full       residual

    Source: saved tensors of the operators, counted under fake tensors (tests/ground_truth).
    """
    match mode:
        case "none" | "attention":
            given = {"model": model, "tensors": tensors, "kernels": kernels}
            everything = all_saved_bytes(**given) - remade_bytes(**given)  # type: ignore[arg-type]
            return everything - (recomputed_attention_bytes(tensors) if mode == "attention" else 0)
        case "op":
            kept = _matmul_outputs(model, tensors)[::2]
            if kernels.drops_unused and len(_matmul_outputs(model, tensors)) % 2:
                kept = kept[:-1]
            attended = tensors.attended_read_bytes or tensors.attended_bytes
            # what is drawn at random stays: masks, and what they left of both branches
            left = 0 if kernels.drops_unused else tensors.halves * tensors.residual_bytes
            dropped = tensors.masks_bytes + left if kernels.drops_branches else 0
            kept_bytes = sum(kept) + dropped
            return tensors.residual_bytes + attended + tensors.statistics_bytes + kept_bytes
        case "full":
            return tensors.residual_bytes


def saved_bytes_by_mode(shape: BlockShape) -> dict[ActivationCheckpointing, int]:
    """`saved_bytes` of a block in every mode."""
    tensors = block_tensors_bytes(shape)
    return {
        mode: saved_bytes(mode=mode, model=shape.model, tensors=tensors, kernels=shape.kernels)
        for mode in get_args(ActivationCheckpointing)
    }


def all_saved_bytes(*, model: Model, tensors: BlockTensors, kernels: Kernels) -> int:
    """Bytes that one block saves without checkpointing."""
    t, activated = tensors, _activated(model, kernels)
    inputs = t.halves if t.shares_inputs else t.inputs + model.has_network * (1 + model.is_gated)
    attention = (
        t.query_read_bytes
        + t.key_read_bytes
        + t.value_read_bytes
        + t.attended_bytes
        + t.attended_read_bytes
    )
    attention += t.attended_copy_bytes + t.latents_bytes + t.beside_bytes
    experts = (
        t.routed.rows_bytes + t.routed.returned_kept_bytes + (activated + 1) * t.routed.inner_bytes
    )
    if model.experts and model.experts.shared_gate:
        experts += t.normed_bytes
    if t.routed.router_input_bytes:  # nobody but shared experts reads what it is copied from
        experts += t.routed.router_input_bytes - (0 if t.inner_bytes else t.normed_kept_bytes)
    return (
        t.halves * t.residual_bytes
        + inputs * t.normed_kept_bytes
        + attention
        + activated * t.inner_bytes
        + t.product_kept_bytes
        + t.statistics_bytes
        + t.norm_copies_bytes
        + t.rotary_bytes
        + t.qk_normed_bytes
        + t.post_normed_bytes
        + t.scores_kept_bytes
        + t.masks_bytes
        + t.routed.router_bytes
        + experts
    )


def remade_bytes(*, model: Model, tensors: BlockTensors, kernels: Kernels) -> int:
    """Of these, what a software makes again in backward from what it keeps, or keeps at half the
    width: it is back, at most all of it at once, when the block's backward runs."""
    t, activated = tensors, _activated(model, kernels)
    bytes_ = 0
    if kernels.remakes_latents and model.latent:
        latents = t.query_latent_bytes + t.key_value_latent_bytes  # what their norms read is kept
        bytes_ += 2 * t.normed_kept_bytes + t.latents_bytes - latents
        bytes_ += t.query_read_bytes + t.key_read_bytes + t.value_read_bytes
    if kernels.remakes_product:
        bytes_ += t.product_kept_bytes + t.routed.inner_bytes
    if kernels.fp8_rows:
        bytes_ += (t.routed.rows_bytes + activated * (t.inner_bytes + t.routed.inner_bytes)) // 2
        bytes_ += t.attended_copy_bytes + t.attended_bytes // 4
    return bytes_


def _activated(model: Model, kernels: Kernels) -> int:
    """Inner tensors that a gated or plain activation keeps."""
    return (2 if kernels.fused else 3) if model.is_gated else 1


def recomputed_attention_bytes(t: BlockTensors) -> int:
    """What mode `attention` does not keep: all that is made between the projections. Values that
    were made with the keys stay in one tensor with them."""
    value = t.keys_and_values_bytes or t.value_bytes
    wider = (
        t.query_read_bytes
        + t.key_read_bytes
        + t.value_read_bytes
        - t.query_bytes
        - t.key_bytes
        - value
    )
    return t.scores_kept_bytes + t.log_sum_exp_bytes + t.attended_read_bytes + wider


def _matmul_outputs(model: Model, t: BlockTensors) -> list[int]:
    """Outputs of a block's plain matmuls in the order of forward; grouped ones of routed experts
    are not among those that per-operator checkpointing counts.

    Source: torchtitan torchtitan/parallelisms/parallelize_llama.py, `_get_custom_policy`.
    """
    attention = [t.query_bytes, t.key_bytes, t.value_bytes, t.normed_bytes]
    if model.latent:
        into = [t.query_latent_bytes] if t.query_latent_bytes else []
        attention = [
            *into,
            t.query_bytes,
            t.key_value_latent_bytes,
            t.keys_and_values_bytes,
            t.normed_bytes,
        ]
    if model.attention_gate:
        attention.insert(1, t.query_bytes)
    if model.mixer == "-":
        attention = []
    elif model.mixer != "A":
        attention = [t.query_bytes + t.key_bytes + 2 * t.value_bytes, t.normed_bytes]
    if not model.has_network:
        return attention
    if model.experts and not model.experts.shared_hidden:
        return [*attention, t.routed.router_bytes // 2]
    router = [t.routed.router_bytes // 2] if model.experts else []
    projections = [t.inner_bytes, t.inner_bytes] if model.is_gated else [t.inner_bytes]
    return [*attention, *router, *projections, t.normed_bytes]


def _unread_bytes(
    *, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing, kernels: Kernels
) -> int:
    """What per-operator checkpointing keeps though backward does not read it: the output of the
    last projection down, where nothing reads it, and no dropout behind it is made again."""
    is_kept = mode == "op" and len(_matmul_outputs(model, tensors)) % 2 and not kernels.drops_unused
    is_read = reads_last_output(model) or kernels.drops_branches
    return tensors.normed_bytes if is_kept and not is_read else 0


@lru_cache(maxsize=8192)
def block_activations(
    *,
    shape: BlockShape,
    mode: ActivationCheckpointing,
    weight_gradients: WeightGradientsOf,
    experts: ExpertsUnit | None = None,
) -> BlockActivations:
    """All activation quantities of one block for one micro-batch on one rank; `experts`: those that
    are a unit of their own."""
    model, kernels = shape.model, shape.kernels
    tensors = block_tensors_bytes(shape)
    gradients = weight_gradient_bytes(
        model=model, tp=shape.tp, element_bytes=shape.element_bytes, ep=shape.ep
    )
    everything = all_saved_bytes(model=model, tensors=tensors, kernels=kernels)
    unread = _unread_bytes(model=model, tensors=tensors, mode=mode, kernels=kernels)
    recomputes = mode in ("op", "full")
    leaves_gradients = weight_gradients in ("kept", "cast")
    recomputed = recomputed_attention_bytes(tensors) if mode == "attention" else 0
    remade = 0 if recomputes else remade_bytes(model=model, tensors=tensors, kernels=kernels)
    steps = backward_steps(
        model=model,
        tensors=tensors,
        gradients=gradients,
        kernels=kernels,
        recomputed=recomputed,
        experts=experts if leaves_gradients else None,
    )
    left = gradients
    if experts and leaves_gradients:
        left = weight_gradient_bytes(
            model=model,
            tp=shape.tp,
            element_bytes=shape.element_bytes,
            ep=shape.ep,
            has_experts=False,
        )
    peak, reduced_peak = backward_peaks_bytes(steps, weight_gradients=weight_gradients)
    again = tensors.gather_buffer_bytes + remade
    beyond = _routed_beyond_bytes(model, tensors, mode=mode, kernels=kernels) if recomputes else 0
    return BlockActivations(
        saved_bytes=saved_bytes(model=model, tensors=tensors, mode=mode, kernels=kernels),
        live_bytes=everything + unread - recomputed - remade,
        residual_bytes=tensors.residual_bytes,
        forward_transient_bytes=_forward_transient_bytes(
            model=model, tensors=tensors, mode=mode, kernels=kernels
        )
        - unread,
        before_experts_bytes=_before_experts_bytes(
            model=model, tensors=tensors, mode=mode, kernels=kernels
        ),
        backward_peak_bytes=max(peak, beyond) + again,
        reduced_peak_bytes=reduced_peak + again if reduced_peak else 0,
        remade_peak_bytes=beyond + again if beyond else 0,
        inputs_half_peak_bytes=inputs_half_peak_bytes(steps),
        weight_gradient_bytes=left.total if leaves_gradients else 0,
        last_weight_gradient_bytes=0 if model.mlp_bias else left.up or left.down or left.other,
    )


def _routed_transient_bytes(t: BlockTensors) -> int:
    """What routed experts need beyond what they keep: what they return in their order, beside the
    same in the order of tokens. Between ranks, the rows that were sent are there, too; and, while
    the block's forward runs, what attention returned and what the router read."""
    if not t.routed.rows_bytes:
        return 0
    read = 0 if t.inner_bytes else t.normed_bytes
    return t.routed.rows_bytes + t.routed.exchanged_bytes + t.normed_bytes + read


def _routed_beyond_bytes(
    model: Model, t: BlockTensors, *, mode: ActivationCheckpointing, kernels: Kernels
) -> int:
    """The same beyond what the whole block keeps or recomputes: of shared experts, whose turn is
    later, nothing is there yet, under mode `op` what was kept of them."""
    activated = (2 if kernels.fused else 3) if model.is_gated else 1
    later = activated + 1 - int(mode == "op")
    return max(0, _routed_transient_bytes(t) - later * t.inner_bytes)


def _forward_transient_bytes(
    *, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing, kernels: Kernels
) -> int:
    """The larger of what attention and the feed-forward network need besides what they save.

    Under checkpointing nothing of them is saved, so inner tensors count too.
    """
    t = tensors
    in_attention = t.exchanged_bytes + t.scores_bytes + t.states_bytes
    if mode in ("none", "attention"):
        recomputes_scores = t.scores_kept_bytes if mode == "attention" else 0
        in_network = (
            t.residual_bytes + t.normed_bytes + t.scatter_copy_bytes + t.gather_buffer_bytes
        )
        if t.scatter_copy_bytes:  # callers hold what attention added and what the norm returned
            in_network += 2 * t.residual_bytes
        of_routed = _routed_beyond_bytes(model, t, mode=mode, kernels=kernels)
        in_network = max(in_network, of_routed)
        return max(in_network, in_attention + recomputes_scores)
    inner_tensors = (2 if kernels.fused else 3) if model.is_gated else 2
    inside = inner_tensors * t.inner_bytes
    if t.routed.rows_bytes:
        products = max(
            inner_tensors * t.routed.inner_bytes, t.routed.inner_bytes + t.routed.rows_bytes
        )
        inside = max(inside + t.normed_bytes, _routed_transient_bytes(t) + products)
    in_network = inside + t.residual_bytes + t.normed_gradient_bytes + t.gather_buffer_bytes
    heads = (
        t.query_read_bytes
        + t.key_read_bytes
        + t.value_read_bytes
        + t.attended_bytes
        + t.attended_read_bytes
    )
    if t.scores_bytes or t.exchanged_bytes or t.states_bytes:
        return max(in_network, in_attention + t.scores_kept_bytes + heads + t.normed_bytes)
    return in_network


def _before_experts_bytes(
    *, model: Model, tensors: BlockTensors, mode: ActivationCheckpointing, kernels: Kernels
) -> int:
    """What is there of a block whose routed experts begin: what it saves but for theirs and for
    those that every token visits, whose turn is later; and the rows, sent and received."""
    t, activated = tensors, _activated(model, kernels)
    if not t.routed.rows_bytes:
        return 0
    saved = saved_bytes(model=model, tensors=t, mode=mode, kernels=kernels)
    if mode in ("none", "attention"):
        later = activated * t.inner_bytes + t.product_kept_bytes
        own = t.routed.returned_kept_bytes + (activated + 1) * t.routed.inner_bytes
        return saved - later - own + t.routed.exchanged_bytes
    later = t.inner_bytes * int(mode == "op") * int(model.is_gated)
    return saved - later + _routed_transient_bytes(t) + t.residual_bytes


def mask_bytes(case: Case, stage: Stage) -> int:
    """What a pipeline rank holds of masks, from its first forward pass on: one a virtual stage.

    A sink is a token more that all see. Under context parallelism a rank has the mask of all ranks'
    tokens. Of packed documents it is of as many queries as the window, and twice as many keys.
    """
    model, training = case.model, case.training
    if not masked_share(model=model, training=training, device=case.cluster.device):
        return 0
    width = training.seq_len + int(model.attention_sinks)
    parts = sum(piece.blocks > 0 for piece in stage.pieces)
    elements = 2 * model.sliding_window**2 if training.packed else width * width
    return parts * elements * formats(training=training, layout=case.layout).computed


def mean_activations(
    shape: BlockShape,
    *,
    masked: float,
    mode: ActivationCheckpointing,
    weight_gradients: WeightGradientsOf,
    experts: ExpertsUnit | None = None,
) -> BlockActivations:
    """Activations of a block of a model of whose blocks the share `masked` has masks: what it keeps
    in the mean, what it needs beside that as the larger of both kinds."""
    kinds = [
        (
            block_activations(
                shape=one,
                mode=mode,
                weight_gradients=weight_gradients,
                experts=experts,
            ),
            share,
        )
        for one, share in ((shape, 1 - masked), (replace(shape, masked=True), masked))
        if share
    ]
    if len(kinds) == 1:
        return kinds[0][0]
    (plain, _), (wide, _) = kinds
    saved = round(sum(share * kind.saved_bytes for kind, share in kinds))
    return replace(
        plain,
        saved_bytes=saved,
        live_bytes=saved + max(kind.live_bytes - kind.saved_bytes for kind, _ in kinds),
        forward_transient_bytes=max(plain.forward_transient_bytes, wide.forward_transient_bytes),
        before_experts_bytes=max(plain.before_experts_bytes, wide.before_experts_bytes),
        backward_peak_bytes=max(plain.backward_peak_bytes, wide.backward_peak_bytes),
        reduced_peak_bytes=max(plain.reduced_peak_bytes, wide.reduced_peak_bytes),
        remade_peak_bytes=max(plain.remade_peak_bytes, wide.remade_peak_bytes),
        inputs_half_peak_bytes=max(plain.inputs_half_peak_bytes, wide.inputs_half_peak_bytes),
    )


def mean_saved_bytes(shape: BlockShape, *, masked: float) -> dict[ActivationCheckpointing, int]:
    """What `mean_activations` says that a block keeps in each mode, and no more."""
    plain = saved_bytes_by_mode(shape) if masked < 1 else {}
    if not masked:
        return plain
    wide = saved_bytes_by_mode(replace(shape, masked=True))
    if not plain:
        return wide
    return {mode: round((1 - masked) * plain[mode] + masked * wide[mode]) for mode in wide}

"""Activations: what one block keeps for backward, and the peaks inside its backward.

Both are read off the block's operators (`cost/block/operator.py`), for one micro-batch on one rank:
what is kept is a sum of what they save, by the mode of recomputation, and backward is a walk along
their steps from the last to the first.

Windows: which blocks' attention is given a mask of all scores, and what masks take.

PyTorch's kernel for windows looks at a window's tiles only. Where there is none, the trainer adds a
mask to the scores, one for all blocks of a model part and all micro-batches; kernels that take a
mask read keys and values of every query head.

Source: fsdpplan/trainer/model/attention.py; its steps' peaks
(tests/ground_truth/test_block_kinds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from fsdpplan.cost.block.adapters import added_bytes
from fsdpplan.cost.block.branch import weight_gradient_bytes
from fsdpplan.cost.block.operator import BackwardStep, Operator
from fsdpplan.cost.block.operators import block_operators, on_device, reads_last_output
from fsdpplan.cost.block.sizes import BlockSizes, block_sizes
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.attention_kernel import masked_share
from fsdpplan.cost.model.formats import formats
from fsdpplan.cost.model.shards import Stage
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.plan import Case
from fsdpplan.spec.values import replace

WeightGradientsOf = Literal["kept", "added", "cast", "cast_and_added"]
"""What becomes of a weight's gradient in backward: it stays until its unit is reduced, or is added
at once to what there is. Under autocast it is cast to fp32 first, and the compute-dtype copy of the
weight is freed with the matmul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsUnit:
    """Routed experts of a block that FSDP reduces by themselves, as soon as their gradients are
    there."""

    reduce_bytes: int
    """Their reduce-scatter input."""
    gradient_bytes: int
    """Their unsharded gradients, which it is made of, or which are added to what it is made of."""
    output_bytes: int
    """What their reduction returns."""
    shard_bytes: int
    """What it adds to the gradient shards for good."""
    held_bytes: int = 0
    """The sum of theirs and of those of earlier micro-batches, where that is reduced."""


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


def saved_bytes(work: BlockWork, mode: ActivationCheckpointing) -> int:
    """Bytes of one block kept from forward to backward.

        none       all that its operators save, but what a software makes again in any mode
        attention  as none, without what is made between the projections and attention's output
        op         residual + every second matmul's output from the first + attention output
                   + statistics (dropout: + masks + 2 residual)
        full       residual

    Source: saved tensors of the operators, counted under fake tensors (tests/ground_truth).
    """
    operators = block_operators(work)
    match mode:
        case "none":
            return sum([each.saved_bytes - each.remade_bytes for each in operators])
        case "attention":
            return sum(
                [each.saved_bytes - each.remade_bytes - each.unkept_bytes for each in operators]
            )
        case "op":
            sizes, kept = block_sizes(work), _outputs(operators)[::2]
            if work.compiled and len(_outputs(operators)) % 2:
                kept = kept[:-1]
            statistics = sum([each.statistics_bytes for each in operators])
            dropped = 0
            if work.drops_branches:  # what is drawn at random stays, and what it left of branches
                dropped = work.model.halves * work.residual_tokens * work.model.hidden
                dropped += 0 if work.compiled else work.model.halves * sizes.residual
            return sizes.residual + sizes.heads.returned + statistics + sum(kept) + dropped
        case "full":
            return block_sizes(work).residual


def _outputs(operators: Sequence[Operator]) -> list[int]:
    return [output for each in operators for output in each.outputs]


def _unread_bytes(work: BlockWork, mode: ActivationCheckpointing) -> int:
    """What per-operator checkpointing keeps though backward does not read it: the output of the
    last projection down, where nothing reads it, and no dropout behind it is made again."""
    if mode != "op" or work.compiled or work.drops_branches or reads_last_output(work.model):
        return 0
    return block_sizes(work).normed if len(_outputs(block_operators(work))) % 2 else 0


@lru_cache(maxsize=8192)
def block_activations(
    *,
    work: BlockWork,
    mode: ActivationCheckpointing,
    weight_gradients: WeightGradientsOf,
    experts: ExpertsUnit | None = None,
) -> BlockActivations:
    """All activation quantities of one block for one micro-batch on one rank; `experts`: those that
    are a unit of their own."""
    model, sizes, operators = work.model, block_sizes(work), block_operators(work)
    recomputes = mode in ("op", "full")
    leaves_gradients = weight_gradients in ("kept", "cast")
    unread = _unread_bytes(work, mode)
    everything = sum([each.saved_bytes for each in operators])
    remade = 0 if recomputes else sum([each.remade_bytes for each in operators])
    recomputed = sum([each.unkept_bytes for each in operators]) if mode == "attention" else 0
    steps = backward_steps(
        operators, recomputed=recomputed, experts=experts if leaves_gradients else None
    )
    left = weight_gradient_bytes(
        model=model,
        tp=work.tp,
        element_bytes=work.element_bytes,
        ep=work.ep,
        has_experts=not (experts and leaves_gradients),
    )
    last = left.get("up") or left.get("down")
    last = last or sum(left.get(role, 0) for role in ("router", "latent", "indexer"))
    peak, reduced_peak = backward_peaks_bytes(steps, weight_gradients=weight_gradients)
    again = sizes.gather_buffer + remade
    beyond = _routed_beyond_bytes(work, sizes, mode) if recomputes else 0
    return BlockActivations(
        saved_bytes=saved_bytes(work, mode),
        live_bytes=everything + unread - recomputed - remade,
        residual_bytes=sizes.residual,
        forward_transient_bytes=_forward_transient_bytes(work, sizes, mode) - unread,
        before_experts_bytes=_before_experts_bytes(work, sizes, mode),
        backward_peak_bytes=max(peak, beyond) + again,
        reduced_peak_bytes=reduced_peak + again if reduced_peak else 0,
        remade_peak_bytes=beyond + again if beyond else 0,
        inputs_half_peak_bytes=inputs_half_peak_bytes(steps),
        weight_gradient_bytes=sum(left.values()) if leaves_gradients else 0,
        last_weight_gradient_bytes=0 if model.mlp_bias else last,
    )


def backward_steps(
    operators: Sequence[Operator], *, recomputed: int = 0, experts: ExpertsUnit | None = None
) -> list[BackwardStep]:
    """The steps of a block's backward, last operator of forward first; `recomputed` bytes of
    attention are made again when its turn comes; `experts`: those that are a unit of their own."""
    steps: list[BackwardStep] = []
    for operator in reversed(operators):
        if recomputed and operator.place == "attention":
            steps.append(BackwardStep(allocated=recomputed))
            recomputed = 0
        if experts and operator.name == "dispatch":
            steps += _reduction_steps(experts)
        steps += operator.steps
    return steps


def _reduction_steps(experts: ExpertsUnit) -> list[BackwardStep]:
    """Of routed experts whose gradients are all there."""
    step, output = BackwardStep, experts.output_bytes
    made, freed = experts.reduce_bytes, experts.gradient_bytes
    returned = step(allocated=output, freed=output - experts.shard_bytes)
    if not experts.held_bytes:
        return [step(allocated=made, freed=freed, reduces_experts=True), returned]
    return [
        step(freed=freed, reduces_experts=True),
        step(allocated=made, freed=experts.held_bytes),
        returned,
    ]


def backward_peaks_bytes(
    steps: Sequence[BackwardStep], *, weight_gradients: WeightGradientsOf
) -> tuple[int, int]:
    """Highest levels in the backward of one block above the level at its start: before routed
    experts are reduced, and from then on; 0 where they are no unit of their own."""
    level = peak = before = 0
    for step in steps:
        if step.reduces_experts:
            before, peak = peak, 0
        peak = max(peak, level + step.weight_gradient + step.allocated)
        level += step.allocated - step.freed
        match weight_gradients:
            case "kept":
                level += step.weight_gradient
            case "added":
                pass
            case "cast" | "cast_and_added":
                peak = max(peak, level + 2 * step.weight_gradient)
                level += step.weight_gradient * (1 if weight_gradients == "cast" else -1)
    are_apart = any(step.reduces_experts for step in steps)
    return (before, peak) if are_apart else (peak, 0)


def inputs_half_peak_bytes(steps: Sequence[BackwardStep]) -> int:
    """The same of the half by inputs of a split backward pass: it makes no weight's gradient, and
    of what is freed else it lets go of gradients alone that are no layer's output.

    Source: torch 2.13 torch/distributed/pipelining/_backward.py, `stage_backward_input`, whose
    graph and hooks keep what `stage_backward_weight` needs.
    """
    level = peak = 0
    for step in steps:
        peak = max(peak, level + step.allocated + step.beside)
        level += step.allocated + step.beside - step.let_go
    return peak


def _activated(work: BlockWork) -> int:
    """Inner tensors that a gated or plain activation keeps."""
    return (3 if work.kernels == "eager" else 2) if work.model.is_gated else 1


def _routed_transient_bytes(sizes: BlockSizes) -> int:
    """What routed experts need beyond what they keep: what they return in their order, beside the
    same in the order of tokens. Between ranks, the rows that were sent are there, too; and, while
    the block's forward runs, what attention returned and what the router read."""
    routed = sizes.routed
    if not routed.rows:
        return 0
    read = 0 if sizes.inner else sizes.normed
    return routed.rows + routed.exchanged + sizes.normed + read


def _routed_beyond_bytes(work: BlockWork, sizes: BlockSizes, mode: ActivationCheckpointing) -> int:
    """The same beyond what the whole block keeps or recomputes: of shared experts, whose turn is
    later, nothing is there yet, under mode `op` what was kept of them."""
    later = _activated(work) + 1 - int(mode == "op")
    return max(0, _routed_transient_bytes(sizes) - later * sizes.inner)


def _forward_transient_bytes(
    work: BlockWork, sizes: BlockSizes, mode: ActivationCheckpointing
) -> int:
    """The larger of what attention and the feed-forward network need besides what they save.

    Under checkpointing nothing of them is saved, so inner tensors count too.
    """
    heads, routed, residual = sizes.heads, sizes.routed, sizes.residual
    added = added_bytes(work)
    in_attention = heads.exchanged + heads.scores + heads.states
    if mode in ("none", "attention"):
        recomputes_scores = heads.scores_kept if mode == "attention" else 0
        in_network = residual + sizes.normed + sizes.scatter_copy + sizes.gather_buffer
        if sizes.scatter_copy:  # callers hold what attention added and what the norm returned
            in_network += 2 * residual
        of_routed = _routed_beyond_bytes(work, sizes, mode)
        return max(in_network, of_routed, in_attention + recomputes_scores) + added
    tensors = (3 if work.kernels == "eager" else 2) if work.model.is_gated else 2
    inside = tensors * sizes.inner
    if routed.rows:
        products = max(tensors * routed.inner, routed.inner + routed.rows)
        inside = max(inside + sizes.normed, _routed_transient_bytes(sizes) + products)
    in_network = inside + residual + sizes.normed_gradient + sizes.gather_buffer + added
    if not in_attention:
        return in_network
    of_heads = heads.read + heads.attended + heads.attended_read
    return max(in_network, in_attention + heads.scores_kept + of_heads + sizes.normed)


def _before_experts_bytes(work: BlockWork, sizes: BlockSizes, mode: ActivationCheckpointing) -> int:
    """What is there of a block whose routed experts begin: what it saves but for theirs and for
    those that every token visits, whose turn is later; and the rows, sent and received."""
    routed = sizes.routed
    if not routed.rows:
        return 0
    saved, activated = saved_bytes(work, mode), _activated(work)
    if mode in ("none", "attention"):
        product = sizes.inner // work.element_bytes if work.fp8_inputs else sizes.inner
        later = activated * sizes.inner + product
        own = routed.returned_kept + (activated + 1) * routed.inner
        return saved - later - own + routed.exchanged
    later = sizes.inner * int(mode == "op") * int(work.model.is_gated)
    return saved - later + _routed_transient_bytes(sizes) + sizes.residual


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
    work: BlockWork,
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
                work=one, mode=mode, weight_gradients=weight_gradients, experts=experts
            ),
            share,
        )
        for one, share in _kinds(work, masked)
    ]
    if len(kinds) == 1:
        return kinds[0][0]
    (plain, _), (wide, _) = kinds
    saved = round(sum(share * kind.saved_bytes for kind, share in kinds))
    return replace(
        plain,
        saved_bytes=saved,
        live_bytes=saved + max(kind.live_bytes - kind.saved_bytes for kind, _ in kinds),
        **{name: max(getattr(plain, name), getattr(wide, name)) for name in BESIDE_SAVED},
    )


BESIDE_SAVED = (
    "forward_transient_bytes",
    "before_experts_bytes",
    "backward_peak_bytes",
    "reduced_peak_bytes",
    "remade_peak_bytes",
    "inputs_half_peak_bytes",
)
"""What a block needs beside what it keeps."""


def _kinds(work: BlockWork, masked: float) -> list[tuple[BlockWork, float]]:
    """(block, share) of those without and with masks that there are."""
    plain = on_device(work)
    if not masked:
        return [(plain, 1.0)]
    wide = replace(plain, masked=True)
    return [(plain, 1 - masked), (wide, masked)] if masked < 1 else [(wide, 1.0)]


def mean_saved_bytes(work: BlockWork, *, masked: float) -> dict[ActivationCheckpointing, int]:
    """What `mean_activations` says that a block keeps in each mode, and no more."""
    kinds = _kinds(work, masked)
    return {
        mode: round(sum(share * saved_bytes(one, mode) for one, share in kinds))
        for mode in get_args(ActivationCheckpointing)
    }

"""Backward steps: what the operators of one block's backward pass allocate and free.

Source: the reference block traced under fake tensors (tests/ground_truth). Left out: what the CUDA
kernel of attention allocates for itself (fp32 sums of the query gradient; under grouped queries,
key and value gradients of every query head).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fsdpplan.cost.memory.weight_gradients import WeightGradients
from fsdpplan.cost.model.block_sizes import BlockTensors, Kernels
from fsdpplan.spec.model import Model

WeightGradientsOf = Literal["kept", "added", "cast", "cast_and_added"]
"""What becomes of a weight's gradient in backward: it stays until its unit is reduced, or is added
at once to what there is. Under autocast it is cast to fp32 first, and the compute-dtype copy of the
weight is freed with the matmul."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardStep:
    """One operator of a block's backward: it allocates, then frees its inputs."""

    weight_gradient: int = 0
    """Allocated; stays until the block's gradients are reduced."""
    allocated: int = 0
    freed: int = 0
    let_go: int = 0
    """Part of `freed` that the half by inputs of a split backward pass frees, too: gradients that
    are no layer's output. It keeps all else for the half by weights (`pipeline_weights`)."""
    reduces_experts: bool = False
    """It is the reduction of routed experts that are a unit of their own: their gathered parameters
    and what was reduced before are gone by then."""
    beside: int = 0
    """Gradients of norms' outputs that it keeps beside those of their inputs, which are no larger:
    a whole backward pass has one of the two."""


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
class Network:
    """The tensors of one feed-forward network: the dense one, or the routed experts together."""

    gradient: int
    """Gradient of what the network reads or returns."""
    kept_input: int
    inner: int
    kept_product: int
    own_output: int = 0
    """Gradient of the output, where nothing else needs it."""
    output_cast: int
    """A copy of the output's gradient in another form; 0 where it serves as it is."""


def backward_steps(
    *,
    model: Model,
    tensors: BlockTensors,
    gradients: WeightGradients,
    kernels: Kernels,
    recomputed: int = 0,
    experts: ExpertsUnit | None = None,
) -> list[BackwardStep]:
    """The operators of one block's backward, last operator of forward first; `recomputed` bytes of
    attention are made again when its turn comes; `experts`: those that are a unit of their own."""
    feed_forward = (
        _mixture_steps(model, tensors, gradients, kernels, experts)
        if model.experts
        else _network_steps(model, tensors, gradients, kernels)
    )
    sums_experts = model.experts is not None and not tensors.inner_bytes
    behind_network = _norm_steps(tensors, returns_own=not sums_experts)
    behind_attention = _norm_steps(tensors, returns_own=True)
    attention = _attention_steps(model, tensors, gradients, kernels, recomputed)
    if tensors.gather_copy_bytes:  # before the gradient of a branch is where the steps expect it
        laid_out = tensors.gather_copy_bytes + tensors.residual_cast_bytes
        gather = BackwardStep(allocated=laid_out, freed=laid_out, let_go=laid_out)
        feed_forward, attention = [gather, *feed_forward], [gather, *attention]
    if (
        tensors.post_normed_bytes
    ):  # what such a norm gives back is the branch's own, and goes with it
        of_branch = tensors.residual_bytes
        behind = BackwardStep(allocated=of_branch, freed=tensors.post_normed_bytes // 2)
        feed_forward, attention = (
            [behind, replace(branch[0], freed=branch[0].freed + of_branch), *branch[1:]]
            for branch in (feed_forward, attention)
        )
    if kernels.drops_branches:  # what dropout gives back is the branch's own, and goes with it
        of_branch = tensors.residual_bytes
        behind = BackwardStep(allocated=of_branch, freed=tensors.masks_bytes // 2)
        feed_forward, attention = (
            [behind, replace(branch[0], freed=branch[0].freed + of_branch), *branch[1:]]
            for branch in (feed_forward, attention)
        )
    if not model.has_network:
        return [*attention, *behind_attention]
    if model.mixer == "-":
        return [*feed_forward, *behind_network]
    return [*feed_forward, *behind_network, *attention, *behind_attention]


def _network_steps(
    model: Model, t: BlockTensors, w: WeightGradients, kernels: Kernels
) -> list[BackwardStep]:
    """The network that every token visits."""
    network = Network(
        gradient=t.normed_gradient_bytes,
        kept_input=t.normed_kept_bytes,
        inner=t.inner_bytes,
        kept_product=t.product_kept_bytes,
        output_cast=t.residual_cast_bytes,
    )
    own_input = 0 if t.shares_inputs else t.normed_bytes
    return _feed_forward_steps(network, w, gated=model.is_gated, fused=kernels.fused, own=own_input)


def _feed_forward_steps(
    n: Network, w: WeightGradients, *, gated: bool, fused: bool, own: int
) -> list[BackwardStep]:
    """Down projection, activation, gate and up projections. A fused activation keeps what it reads
    alone and makes both gradients in one kernel."""
    step, cast = BackwardStep, n.output_cast
    down = step(
        weight_gradient=w.down,
        allocated=n.inner + cast,
        freed=n.kept_product + n.own_output + cast,
    )
    gate = step(weight_gradient=w.gate, allocated=n.gradient, freed=n.inner + n.kept_input)
    if not gated:
        return [down, step(allocated=n.inner, freed=2 * n.inner, let_go=n.inner), gate]
    up = step(weight_gradient=w.up, allocated=n.gradient, freed=n.inner + own)
    sum_of_two = _sum_of_two(n.gradient)
    if fused:
        both = step(allocated=2 * n.inner, freed=3 * n.inner, let_go=n.inner)
        return [down, both, up, gate, sum_of_two]
    product = step(allocated=2 * n.inner, freed=3 * n.inner, let_go=n.inner)
    activation = step(allocated=n.inner, freed=2 * n.inner, let_go=n.inner)
    return [down, product, up, activation, gate, sum_of_two]


def _mixture_steps(
    model: Model, t: BlockTensors, w: WeightGradients, kernels: Kernels, experts: ExpertsUnit | None
) -> list[BackwardStep]:
    """The experts that every token visits, then the routed ones between combine and dispatch, then
    the router, whose gradient is fp32 where it reads a copy."""
    step, rows, normed = BackwardStep, t.routed.rows_bytes, t.normed_gradient_bytes
    routed = Network(
        gradient=rows,
        kept_input=rows,
        inner=t.routed.inner_bytes,
        kept_product=t.routed.inner_bytes,
        own_output=rows,
        output_cast=0,
    )
    sum_of_two = _sum_of_two(normed)
    router = step(allocated=t.routed.router_input_bytes, freed=t.routed.router_input_bytes)
    cast = step(
        allocated=normed, freed=t.routed.router_input_bytes, let_go=t.routed.router_input_bytes
    )
    returned = t.routed.returned_kept_bytes
    reduction = []
    if experts and experts.held_bytes:
        reduction = [
            step(freed=experts.gradient_bytes, reduces_experts=True),
            step(allocated=experts.reduce_bytes, freed=experts.held_bytes),
        ]
    elif experts:
        made, freed = experts.reduce_bytes, experts.gradient_bytes
        reduction = [step(allocated=made, freed=freed, reduces_experts=True)]
    if experts:
        output = experts.output_bytes
        reduction.append(step(allocated=output, freed=output - experts.shard_bytes))
    return [
        *(_network_steps(model, t, WeightGradients(), kernels) if t.inner_bytes else []),
        step(allocated=rows + returned, freed=2 * returned, let_go=returned),
        step(allocated=rows, freed=rows, let_go=rows),
        *_feed_forward_steps(routed, w, gated=model.is_gated, fused=kernels.fused, own=0),
        *reduction,
        step(
            weight_gradient=w.other,
            allocated=normed,
            freed=rows + t.routed.router_bytes,
            let_go=rows,
        ),
        *([sum_of_two] if t.inner_bytes else []),
        *([router, cast, sum_of_two] if t.routed.router_input_bytes else []),
    ]


def _sum_of_two(gradient: int) -> BackwardStep:
    """The gradients of an input that two layers read."""
    return BackwardStep(allocated=gradient, freed=2 * gradient, let_go=2 * gradient)


def _normed_heads(model: Model, t: BlockTensors) -> int:
    """What the norms between attention's products return, and the two halves of latent ones."""
    if model.latent:
        rank = model.latent.kv_rank
        kept = t.key_value_latent_bytes * rank // (rank + model.latent.rope_head_dim)
        return 2 * t.query_latent_bytes + kept + t.key_value_latent_bytes
    return t.query_bytes + t.key_bytes if model.qk_norm else 0


def _norm_steps(t: BlockTensors, *, returns_own: bool) -> list[BackwardStep]:
    """The norm before a branch, and the sum of the branch with the residual stream; `returns_own`:
    what the branch adds is a layer's output."""
    step = BackwardStep
    local_normed = t.residual_bytes if t.scatter_copy_bytes else t.normed_gradient_bytes
    laid_out = t.scatter_copy_bytes + t.normed_gradient_bytes
    scatter = step(
        allocated=t.scatter_copy_bytes + t.residual_bytes, freed=laid_out, let_go=laid_out
    )
    # the stream's gradient is that of the branch's output where it serves as it is
    stays = t.residual_bytes if returns_own and not t.residual_cast_bytes else 0
    return [
        *([scatter] if t.scatter_copy_bytes else []),
        step(
            allocated=t.residual_bytes,
            freed=local_normed + t.residual_bytes + t.norm_copies_bytes // 2,
        ),
        step(
            allocated=t.residual_bytes,
            freed=2 * t.residual_bytes,
            let_go=2 * t.residual_bytes - stays,
        ),
    ]


def _attention_steps(
    model: Model, t: BlockTensors, w: WeightGradients, kernels: Kernels, recomputed: int
) -> list[BackwardStep]:
    """Output projection, attention, then the projections of values, keys and queries."""
    step, normed = BackwardStep, t.normed_gradient_bytes
    cast = t.residual_cast_bytes
    own_input = 0 if t.shares_inputs else t.normed_bytes
    sum_of_two = _sum_of_two(normed)
    read = (
        t.query_read_bytes
        + t.key_read_bytes
        + t.value_read_bytes
        + (t.attended_read_bytes or t.attended_bytes)
    )
    returned = t.attended_read_bytes or t.attended_bytes
    core = [
        step(
            allocated=t.query_read_bytes
            + t.key_read_bytes
            + t.value_read_bytes
            + t.exchanged_bytes
            + 2 * t.states_bytes,
            freed=returned + read + t.exchanged_bytes + 2 * t.states_bytes,
            let_go=returned + t.exchanged_bytes,
        )
    ]
    if t.beside_bytes:  # gradients of a gate, and of a result before its norm
        core = [step(allocated=2 * t.attended_bytes, freed=t.attended_bytes), *core]
        core.append(step(freed=t.beside_bytes + t.attended_bytes))
    if t.attended_read_bytes:
        core = [
            step(allocated=returned, freed=2 * t.attended_bytes, let_go=t.attended_bytes),
            *core,
        ]
    for wide, own in (
        (t.value_read_bytes, t.value_bytes),
        (t.key_read_bytes, t.key_bytes),
        (t.query_read_bytes, t.query_bytes),
    ):
        if wide > own:
            core.append(step(allocated=own, freed=wide, let_go=wide))
    if not kernels.flash:
        made = t.scores_bytes + t.value_bytes
        core = [
            step(
                allocated=made,
                freed=t.scores_kept_bytes - t.scores_bytes + t.attended_bytes,
                let_go=t.attended_bytes,
            ),
            step(freed=t.scores_bytes),  # the softmax makes its gradient in place
            step(
                allocated=t.query_bytes + t.key_bytes,
                freed=t.scores_bytes
                + t.attended_bytes
                + t.query_bytes
                + t.key_bytes
                + t.value_bytes,
                let_go=t.scores_bytes,
            ),
        ]
    return [
        step(
            weight_gradient=w.output,
            allocated=t.attended_bytes + cast,
            freed=t.attended_copy_bytes + cast,
        ),
        step(allocated=recomputed),
        *core,
        step(
            freed=t.rotary_bytes + t.qk_normed_bytes + t.latents_bytes,
            let_go=t.key_bytes + t.value_bytes - t.keys_and_values_bytes
            if t.keys_and_values_bytes
            else 0,
            beside=_normed_heads(model, t),
        ),
        step(weight_gradient=w.value, allocated=normed, freed=t.value_bytes + own_input),
        step(weight_gradient=w.key, allocated=normed, freed=t.key_bytes + own_input),
        sum_of_two,
        step(weight_gradient=w.query, allocated=normed, freed=t.query_bytes + t.normed_kept_bytes),
        sum_of_two,
    ]


def backward_peaks_bytes(
    steps: list[BackwardStep], *, weight_gradients: WeightGradientsOf
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


def inputs_half_peak_bytes(steps: list[BackwardStep]) -> int:
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

"""Network: the operators of a block's feed-forward network, or of its router, routed experts and
those that every token visits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fsdpplan.cost.block.adapters import is_kept
from fsdpplan.cost.block.branch import first_of_backward
from fsdpplan.cost.block.operator import (
    GATE,
    GELU,
    BackwardStep,
    Operator,
    Steps,
    streamed,
    sum_of_two,
    with_memory,
)
from fsdpplan.cost.block.sizes import BlockSizes
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.formats import FP32_BYTES
from fsdpplan.spec.model import Experts

ROUTER_PASSES = 6
"""fp32 passes over the router's scores in each direction: softmax or sigmoid reads and writes, the
choice of the best reads, the histogram of the choice reads and writes what little there is."""


class Network(NamedTuple):
    """The tensors of one feed-forward network: the dense one, or the routed experts together."""

    name: str
    """Before those of its matrices."""
    width: int
    """Inner width of what a token visits."""
    gradient: int
    """Gradient of what the network reads or returns."""
    kept_input: int
    inner: int
    kept_product: int
    gradients: dict[str, int]
    """Of its weights, by role."""
    own_input: int = 0
    """The input of the second way up, where that is a copy."""
    own_output: int = 0
    """Gradient of the output, where nothing else needs it."""
    output_cast: int = 0
    """A copy of the output's gradient in another form; 0 where it serves as it is."""
    outputs: tuple[int, int] | None = None
    """What a way up and the way down return, of plain products."""


def network_operators(
    work: BlockWork, sizes: BlockSizes, gradients: dict[str, int], products: list[Operator]
) -> Iterator[Operator]:
    """The network that every token visits; or the router, what it sends tokens to, and that."""
    model = work.model
    of_network = [one for one in products if one.place in ("ffn_in", "ffn_out")]
    casts = work.residual_bytes > work.element_bytes
    copies = 1 + model.is_gated if casts else 1
    kept_input = sizes.normed_kept if is_kept(work, "gate", "up") else 0
    kept_product = sizes.inner // work.element_bytes if work.fp8_inputs else sizes.inner
    visited = Network(
        name="shared_experts." if model.experts else "",
        width=model.experts.shared_hidden if model.experts else model.ffn_hidden,
        gradient=sizes.normed_gradient,
        kept_input=kept_input,
        inner=sizes.inner,
        kept_product=kept_product if is_kept(work, "down") else 0,
        gradients={} if model.experts else gradients,
        own_input=sizes.normed if casts else 0,
        output_cast=sizes.residual_cast,
        outputs=(sizes.inner, sizes.normed),
    )
    saved = copies * kept_input
    if model.experts is None:
        yield from _feed_forward(work, sizes, visited, of_network, saved=saved)
        return
    yield from _mixture(work, sizes, gradients, of_network, saved=saved)
    shared = [one for one in of_network if one.name.startswith("shared_experts.")]
    if shared:
        yield from _feed_forward(work, sizes, visited, shared)
    for one in of_network:
        if one.name == "shared_gate":
            yield with_memory(one, saved=sizes.normed)


def _mixture(
    work: BlockWork,
    sizes: BlockSizes,
    gradients: dict[str, int],
    products: list[Operator],
    *,
    saved: int,
) -> Iterator[Operator]:
    """The router, whose gradient is fp32 where it reads a copy; dispatch, routed experts, combine.

    Nobody but shared experts reads what the router's copy is made of.
    """
    experts, routed, normed = work.model.experts, sizes.routed, sizes.normed_gradient
    assert experts is not None
    copy, rows = routed.router_input, routed.rows
    steps: Steps = (sum_of_two(normed),) if sizes.inner else ()
    if copy:
        saved += copy - (0 if sizes.inner else sizes.normed_kept)
        cast = BackwardStep(allocated=normed, freed=copy, let_go=copy)
        steps += (BackwardStep(allocated=copy, freed=copy), cast, sum_of_two(normed))
    for one in products:
        if one.name == "router":
            yield with_memory(
                one, saved=saved + routed.router, outputs=(routed.router // 2,), steps=steps
            )
    dispatch, combine = _permutations(work, experts)
    yield with_memory(
        dispatch,
        saved=rows,
        remade=rows // 2 if work.fp8_rows else 0,
        steps=(
            BackwardStep(
                weight_gradient=gradients.get("router", 0),
                allocated=normed,
                freed=rows + routed.router,
                let_go=rows,
            ),
        ),
    )
    network = Network(
        name="experts.",
        width=experts.active * experts.hidden,
        gradient=rows,
        kept_input=rows,
        inner=routed.inner,
        kept_product=routed.inner,
        gradients=gradients,
        own_output=rows,
    )
    yield from _feed_forward(
        work, sizes, network, [one for one in products if one.name.startswith("experts.")]
    )
    kept = routed.returned_kept
    weighted = BackwardStep(allocated=rows + kept, freed=2 * kept, let_go=kept)
    first = (weighted,) if sizes.inner else first_of_backward(weighted, work, sizes)
    yield with_memory(
        combine, saved=kept, steps=(*first, BackwardStep(allocated=rows, freed=rows, let_go=rows))
    )


INDEXED_PASSES = (6.0, 18.0)
"""What they lose by that in (forward, backward), in passes over the copies: 4 ms a block of 8,192
tokens with 8 of 128 experts, where 11 passes are 1 ms, in a profile of torch 2.11 on an H100."""


def _permutations(work: BlockWork, experts: Experts) -> tuple[Operator, Operator]:
    """Choice and dispatch of the tokens' copies, and what combines those that come back.

    Passes over the copies, `active` for each token: gathered (2), weighted (2) and summed (1, and
    one over the tokens); split among ranks, sorted by expert after the exchange and back before it
    (4). Hand-written kernels weight while they sum. Backward mirrors forward, and reads the outputs
    once more for the gradient of the weights. PyTorch's kernels reach less than a copy's rate: rows
    are weighted in fp32, sums of rows and gradients of gathered rows are added by index
    (`INDEXED_PASSES`).

    All experts are taken as equally popular: load imbalance, and the tokens that a capacity limit
    drops, are not modelled. The exchange between ranks is communication.
    """
    routed = work.routed_tokens
    tokens = routed * work.model.hidden * work.element_bytes
    copies = tokens * experts.active
    sorts = 2 if work.exchanges_rows else 0
    into = (2 + sorts) * copies + ROUTER_PASSES * FP32_BYTES * routed * experts.experts
    out = ((1 if work.kernels == "fused" else 3) + sorts) * copies + tokens
    more = (0.0, 0.0) if work.kernels == "fused" else INDEXED_PASSES
    behind = out + (1 + more[1] / 2) * copies
    return (
        Operator("dispatch", "ffn_in", "elementwise", None, into, into + more[1] / 2 * copies),
        Operator("combine", "ffn_out", "elementwise", None, out + more[0] * copies, behind),
    )


SILU, PRODUCT = (2, 3), (3, 6)
"""Passes of a gate in two kernels: the activation, and its product with the other way up."""


def _feed_forward(
    work: BlockWork,
    sizes: BlockSizes,
    n: Network,
    products: list[Operator],
    *,
    saved: int = 0,
) -> Iterator[Operator]:
    """Ways up, activation, and the way down. A fused activation keeps what it reads alone and makes
    both gradients in one kernel. The first product keeps `saved` bytes of the block's input."""
    step, gated, is_eager = BackwardStep, work.model.is_gated, work.kernels == "eager"
    size = work.tokens * n.width / work.tp * work.element_bytes
    own, cast = n.gradients, n.output_cast
    down = step(
        weight_gradient=own.get("down", 0),
        allocated=n.inner + cast,
        freed=n.kept_product + n.own_output + cast,
    )
    gate = step(
        weight_gradient=own.get("gate", 0), allocated=n.gradient, freed=n.inner + n.kept_input
    )
    up = step(weight_gradient=own.get("up", 0), allocated=n.gradient, freed=n.inner + n.own_input)
    both = step(allocated=2 * n.inner, freed=3 * n.inner, let_go=n.inner)
    alone = step(allocated=n.inner, freed=2 * n.inner, let_go=n.inner)
    activations: list[Operator] = []

    def activation(name: str, passes: tuple[int, int], tensors: int, *steps: BackwardStep) -> None:
        kept = tensors * n.inner
        activations.append(
            streamed(
                f"{n.name}{name}",
                "ffn_out",
                passes,
                size,
                saved=kept,
                remade=kept // 2 if work.fp8_rows else 0,
                steps=steps,
            )
        )

    has_up = any(one.product and one.product.weight.role == "up" for one in products)
    if not gated:
        activation("activation", GELU[work.kernels], 1, alone)
    elif is_eager:
        activation("activation", SILU, 1, alone)
        activation("product", PRODUCT, 2, *([both] if has_up else [both, up]))
    else:
        activation("activation", GATE[work.kernels], 2, *([both] if has_up else [both, up]))
    up_output = (n.outputs[0],) if n.outputs else ()
    for one in products:
        assert one.product
        match one.product.weight.role:
            case "gate":
                yield with_memory(
                    one,
                    saved=saved,
                    outputs=up_output * (1 if has_up or not gated else 2),
                    steps=(gate, sum_of_two(n.gradient)) if gated else (gate,),
                )
                if len(activations) > 1:
                    yield activations.pop(0)
            case "up":
                yield with_memory(one, outputs=up_output, steps=(up,))
            case _:
                yield from activations
                yield with_memory(
                    one,
                    saved=n.kept_product,
                    remade=n.kept_product if work.remakes_product else 0,
                    outputs=(n.outputs[1],) if n.outputs else (),
                    steps=first_of_backward(down, work, sizes) if n.outputs else (down,),
                )

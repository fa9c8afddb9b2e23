"""Branch: what stands around each branch of a block, and its products: the norm before it, the norm
and dropout behind it, casts and sums beside its matmuls.

fp8: memory traffic of casting and laying out the operands of 8-bit matmuls. A product of backward
reads its operands along the other dimension, and the kernels take one layout only, so input, weight
and gradient are each needed twice. Bytes an element, forward / backward:

                 input      weight     gradient of the output
    tensorwise   5 / 7      5 / 7      - / 7      eager: greatest value (2), cast (3), laid out (2)
                 3 / 3      5 / 3      - / 4      compiled: greatest value with the chain before it
    rowwise      3 / 5      3 / 5      - / 8      row in one kernel (3), column in two (2 and 3)
                 1 / 5      3 / 5      - / 6      compiled: rows with the chain before them
    delayed      4 / 0      4 / 0      - / 4      cast and laid out in one kernel, last steps' scale

Compiled and fused projections of one input share its cast. Weights that FSDP gathers in fp8 are
only laid out again (0 / 2). The head, attention and the norms stay in 16 bits.

Source: torchao torchao/float8/float8_linear.py (operands saved in 16 bits and cast again in
backward) and float8_ops.py (layouts); TransformerEngine transformer_engine/pytorch/module/linear.py
and common/transpose/cast_transpose.cu.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from fsdpplan.cost.block.operator import (
    CHAIN,
    NORM,
    BackwardStep,
    Operator,
    Steps,
    as_operators,
    is_composite,
    streamed,
)
from fsdpplan.cost.block.products import Product, block_products
from fsdpplan.cost.block.sizes import BlockSizes
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.formats import FP32_BYTES
from fsdpplan.cost.model.params import ParameterTensor, Place, block_tensors
from fsdpplan.spec.model import Model

Branch = Literal["attention", "ffn"]


def statistics_bytes(work: BlockWork) -> int:
    """fp32 row statistics of a norm over the residual stream."""
    numbers = 2 if work.model.norm == "layernorm" else 1
    return work.residual_tokens * numbers * FP32_BYTES


def norm_before(
    branch: Branch, work: BlockWork, sizes: BlockSizes, *, returns_own: bool
) -> Operator:
    """The norm before a branch, and the addition of the branch before it; under autocast with an
    fp32 residual stream backward casts the gradient of the branch. `returns_own`: what the branch
    adds is a layer's output."""
    elements = work.residual_elements
    place: Place = "attention_in" if branch == "attention" else "ffn_in"
    # several kernels keep an fp32 copy of the input, and the quotient before it is scaled:
    # torch 2.5 aten/src/ATen/native/layer_norm.cpp, `rms_norm`; counted under fake tensors
    copies = 0
    if is_composite(work):
        copies = work.residual_tokens * work.model.hidden * (FP32_BYTES + work.element_bytes)
    residual, scatter = sizes.residual, sizes.scatter_copy
    laid_out = scatter + sizes.normed_gradient
    # the stream's gradient is that of the branch's output where it serves as it is
    stays = residual if returns_own and not sizes.residual_cast else 0
    normed = residual if scatter else sizes.normed_gradient
    steps: Steps = (
        BackwardStep(allocated=residual, freed=normed + residual + copies),
        BackwardStep(allocated=residual, freed=2 * residual, let_go=2 * residual - stays),
    )
    if scatter:
        before = BackwardStep(allocated=scatter + residual, freed=laid_out, let_go=laid_out)
        steps = (before, *steps)
    norm = streamed(f"{branch}_norm", place, CHAIN[work.kernels], elements * work.residual_bytes)
    norm = as_operators(norm, elements, work)
    casts = elements * (work.element_bytes + work.residual_bytes) if work.casts_stream else 0.0
    own = statistics_bytes(work)
    return Operator(
        *norm[:5],
        norm.backward_bytes + casts,
        saved_bytes=residual + own + copies,
        statistics_bytes=own,
        steps=steps,
    )


def end_of_branch(branch: Branch, work: BlockWork, sizes: BlockSizes) -> Iterator[Operator]:
    """The norm behind a branch, and dropout.

    Dropout: eager, read, write and a mask of bytes in forward, the same in backward; fused with the
    addition, its mask, and a pass of its own in backward. A compiler draws the same numbers again.
    """
    elements = work.residual_elements
    place: Place = "attention_out" if branch == "attention" else "ffn_out"
    rows = work.residual_tokens * work.model.hidden
    of_branch = sizes.residual
    if work.model.post_norms:
        norm = streamed(
            f"post_{branch}_norm", place, NORM[work.kernels], elements * work.residual_bytes
        )
        kept, own = rows * work.element_bytes, statistics_bytes(work)
        # what it gives back is the branch's own, and goes with it, as does what it is given
        freed = kept + (of_branch if work.drops_branches else 0)
        yield as_operators(norm, elements, work)._replace(
            saved_bytes=kept + own,
            statistics_bytes=own,
            steps=(BackwardStep(allocated=of_branch, freed=freed),),
        )
    if work.dropout:
        passes = (2 * work.element_bytes + 1, 2 * work.element_bytes + 1)
        if work.kernels != "eager":
            passes = (1, passes[1]) if work.kernels == "fused" else (0, 0)
        step = BackwardStep(allocated=of_branch, freed=rows)
        yield streamed(
            f"{branch} dropout",
            place,
            passes,
            elements,
            saved=rows,
            steps=(step,) if work.drops_branches else (),
        )


def first_of_backward(first: BackwardStep, work: BlockWork, sizes: BlockSizes) -> Steps:
    """`first` of a branch's backward, behind what gathers its output's gradient over the sequence;
    what dropout or a norm behind the branch gave back is freed with it."""
    behind = sizes.residual if work.model.post_norms or work.drops_branches else 0
    if not sizes.gather_copy:
        return (first._replace(freed=first.freed + behind),)
    laid_out = sizes.gather_copy + sizes.residual_cast
    return BackwardStep(allocated=laid_out, freed=laid_out + behind, let_go=laid_out), first


def matmuls(work: BlockWork) -> list[Operator]:
    """The products of a block, each with its casts, and sums of gradients.

    Under autocast with an fp32 residual stream each projection casts its input, and backward casts
    its gradient back. Autocast copies each fp32 weight to the compute dtype in forward, and its
    gradient back. Gradients of an input that several projections read are added up, three passes
    for each but the first, unless they are joined; those of biases are summed over tokens.
    """
    model, each = work.model, work.element_bytes
    inputs, biases, is_fp8 = work.tokens * model.hidden, _biases(model), work.precision == "fp8"
    cast = inputs * (each + work.residual_bytes) if work.casts_stream else 0.0
    summed = 3.0 * inputs * work.residual_bytes if work.kernels == "eager" else 0.0
    copied = 4 + each if work.autocast and work.precision != "fp32" else 0
    found = []
    for product in block_products(work):
        weight = product.weight
        is_copied = copied and product.is_trained
        forward = backward = copied * product.weight_elements if is_copied else 0.0
        if product.k == model.hidden and product.groups == 1:
            forward, backward = forward + cast, backward + cast
            if weight.stacks_on:
                backward += summed
        if biases:
            backward += each * work.tokens * _bias_width(product, biases, work)
        if is_fp8:
            casts = fp8_cast_bytes(product, work)
            forward, backward = forward + casts[0], backward + casts[1]
        found.append(Operator(product.name, weight.place, "matmul", product, forward, backward))
    return found


def _bias_width(product: Product, biases: dict[str, ParameterTensor], work: BlockWork) -> int:
    """Numbers a token that are summed for the gradients of a product's biases."""
    experts, width = work.model.experts, 0
    for tensor in (product.weight, *product.stacked):
        if bias := biases.get(tensor.name.removesuffix(".weight")):
            visits = experts.active if bias.is_expert and experts else 1
            width += visits * bias.local_shape(work.tp)[-1]
    return width


@lru_cache(maxsize=256)
def _biases(model: Model) -> dict[str, ParameterTensor]:
    """Biases of a block's matrices, by the names of these."""
    biases = (
        t for t in block_tensors(model) if t.role and t.name.endswith(".bias") and t.is_trained
    )
    return {bias.name.removesuffix(".bias"): bias for bias in biases}


class CastBytes(NamedTuple):
    """Bytes an element of each operand, (forward, backward)."""

    input: tuple[float, float]
    weight: tuple[float, float]
    gradient: float


def cast_bytes(work: BlockWork) -> CastBytes:
    """What the recipe moves for each element."""
    match work.fp8_recipe, work.compiled:
        case "tensorwise", False:
            found = CastBytes(input=(5, 7), weight=(5, 7), gradient=7)
        case "tensorwise", True:
            found = CastBytes(input=(3, 3), weight=(5, 3), gradient=4)
        case "rowwise", False:
            found = CastBytes(input=(3, 5), weight=(3, 5), gradient=8)
        case "rowwise", True:
            found = CastBytes(input=(1, 5), weight=(3, 5), gradient=6)
        case _:
            found = CastBytes(input=(4, 0), weight=(4 * work.weight_casts, 0), gradient=4)
    return found._replace(weight=(0, 2)) if work.fp8_all_gather else found


def fp8_cast_bytes(product: Product, work: BlockWork) -> tuple[float, float]:
    """Traffic of the casts of one product in (forward, backward), in bytes."""
    if product.dtype(work) != "fp8":
        return 0.0, 0.0
    each, weights = cast_bytes(work), product.weight_elements
    is_cast_already = product.shares_input and work.kernels != "eager"
    inputs = 0.0 if is_cast_already else product.rows * product.k
    return (
        each.input[0] * inputs + each.weight[0] * weights,
        each.input[1] * inputs
        + each.weight[1] * weights
        + each.gradient * product.rows * product.n,
    )


@lru_cache(maxsize=1024)
def weight_gradient_bytes(
    *, model: Model, tp: int, element_bytes: int, ep: int = 1, has_experts: bool = True
) -> dict[str, int]:
    """Unsharded gradients of the matrices of one block on one rank, in the compute dtype, by role;
    routed experts together with others, or without them."""
    found: dict[str, int] = {}
    for tensor in block_tensors(model):
        if not tensor.is_trained:
            continue
        if tensor.is_matrix and (has_experts or not tensor.is_expert):
            own = prod(tensor.local_shape(tp, ep)) * element_bytes
            found[tensor.role] = found.get(tensor.role, 0) + own
    return found

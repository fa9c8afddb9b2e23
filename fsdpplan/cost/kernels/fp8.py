"""fp8: memory traffic of casting and laying out the operands of 8-bit matmuls.

A product of backward reads its operands along the other dimension, and the kernels take one layout
only, so input, weight and gradient are each needed twice. Bytes an element, forward / backward:

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

from dataclasses import dataclass

from fsdpplan.cost.kernels.products import Product, block_products
from fsdpplan.cost.kernels.work import BlockWork


@dataclass(frozen=True, slots=True, kw_only=True)
class CastBytes:
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
    if work.fp8_all_gather:
        return CastBytes(input=found.input, weight=(0, 2), gradient=found.gradient)
    return found


def fp8_cast_bytes(work: BlockWork) -> tuple[float, float]:
    """Traffic of the casts of one block in (forward, backward), in bytes."""
    if work.precision != "fp8":
        return 0.0, 0.0
    each = cast_bytes(work)
    forward = backward = 0.0
    for product in block_products(work):
        if product.dtype(work) != "fp8":
            continue
        inputs = 0.0 if _is_cast_already(product, work) else product.rows * product.k
        weights = product.weight_elements
        forward += each.input[0] * inputs + each.weight[0] * weights
        backward += each.input[1] * inputs + each.weight[1] * weights
        backward += each.gradient * product.rows * product.n
    return forward, backward


def _is_cast_already(product: Product, work: BlockWork) -> bool:
    return product.shares_input and work.kernels != "eager"

"""Adapters: what low-rank matrices beside a frozen one add to a block, and what 4 bits cost.

    y = W x + scale * B (A x)

A keeps the input, with the others that read it, B what A returns; W keeps nothing. Backward makes
two gradients of the input, through A and through W, and adds them. A matrix in 4 bits is made in
the compute dtype for its product, in forward and again in backward, and let go of behind it; a
piece of it is in fp32 at a time.

Source: fsdpplan/trainer/model/adapters.py and nf4.py, under fake tensors (tests/ground_truth).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fsdpplan.cost.block.operator import BackwardStep, Operator, sum_of_two
from fsdpplan.cost.block.products import Product, adapter_products
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.params import ParameterTensor, Role, block_tensors
from fsdpplan.spec.adapters import NF4_BLOCK, AdaptedModel

DEQUANTISING_BYTES = 23.0
"""Traffic of a weight: a byte of two is read (0.5), widened (2 + 2), looked up (4 + 4 with what is
read of it), multiplied with its scale (4 + 4) and written in 16 bits (2); a block's scale beside
(0.5). Counted in fsdpplan/trainer/model/nf4.py; a kernel that reads 4 bits and writes 16 needs 2.5.
torchtune's on a 4090 takes the time of 18 (0.37 s for three passes over 7 billion weights)."""

PIECE_WEIGHTS = NF4_BLOCK * 2**16
"""Weights that are in fp32 at a time."""

PIECE_BYTES = 10
"""Of one of these: the values of the piece before (4), codes (2) and values (4)."""


def is_kept(work: BlockWork, *roles: Role) -> bool:
    """Whether backward needs the input that the matrices of these roles share: for the gradient of
    one of them, or of an adapter beside it, unless that reads what dropout has left of it."""
    if not isinstance(work.model, AdaptedModel):
        return True
    return not work.model.adapters.dropout and any(
        each.role in roles and each.is_trained and each.is_matrix
        for each in block_tensors(work.model)
    )


def dequantised_bytes(product: Product, work: BlockWork) -> int:
    """What a matrix in 4 bits needs beside itself while it is multiplied; 0 of another."""
    if product.weight.stored != "nf4":
        return 0
    weights = product.weight_elements
    return weights * work.element_bytes + PIECE_BYTES * min(weights, PIECE_WEIGHTS)


def with_adapters(operators: Iterator[Operator], work: BlockWork) -> Iterator[Operator]:
    """`operators` of a block, with those of adapters behind their matrices, and what it costs that
    these are in 4 bits."""
    if not isinstance(work.model, AdaptedModel):
        yield from operators
        return
    pairs = adapter_products(work)
    for operator in operators:
        product = operator.product
        if product is None:
            yield operator
            continue
        base = _from_four_bits(operator, product, work)
        pair = pairs.get(product.weight.name)
        if pair is None:
            yield base
            continue
        summed = sum_of_two(product.k * work.tokens * work.element_bytes)
        made = base.steps[:-1] if base.steps[-1] == summed else base.steps
        yield base._replace(steps=(*made, summed))
        yield from _pair(operator, pair, work)


def _from_four_bits(operator: Operator, product: Product, work: BlockWork) -> Operator:
    made = dequantised_bytes(product, work)
    if not made:
        return operator
    moved = DEQUANTISING_BYTES * product.weight_elements
    weights = product.weight_elements * work.element_bytes
    before = BackwardStep(allocated=made, freed=made - weights)
    first, *rest = operator.steps or (BackwardStep(),)
    around = first._replace(freed=first.freed + weights)
    return operator._replace(
        forward_bytes=operator.forward_bytes + moved,
        backward_bytes=operator.backward_bytes + moved,
        steps=(before, around, *rest),
    )


def _pair(base: Operator, pair: tuple[Product, Product], work: BlockWork) -> Iterator[Operator]:
    """A and B: dropout of the input, both products, the scale, and the sum with what W returns."""
    down, up = pair
    assert isinstance(work.model, AdaptedModel)
    each, tokens = work.element_bytes, work.tokens
    between, inputs, outputs = (tokens * width * each for width in (down.n, down.k, up.n))
    dropped = tokens * down.k * (each + 1) if work.model.adapters.dropout else 0
    summed = sum_of_two(inputs)
    adds = (summed,) if base.steps[-1] == summed else ()
    yield Operator(
        down.name,
        base.place,
        "matmul",
        down,
        2.0 * dropped,
        2.0 * dropped + 3.0 * inputs,
        saved_bytes=dropped,
        steps=(BackwardStep(allocated=inputs + dropped, freed=between + 2 * dropped), *adds),
    )
    yield Operator(
        up.name,
        base.place,
        "matmul",
        up,
        5.0 * outputs,
        2.0 * outputs,
        saved_bytes=between,
        steps=(BackwardStep(allocated=outputs + between, freed=outputs + between),),
    )


def added_bytes(work: BlockWork) -> int:
    """Most that one product needs in forward for its adapter, or since its matrix is in 4 bits."""
    if not isinstance(work.model, AdaptedModel):
        return 0
    return max((_added(tensor, work) for tensor in block_tensors(work.model)), default=0)


def _added(tensor: ParameterTensor, work: BlockWork) -> int:
    rows, columns = tensor.local_shape(work.tp)[-2:] if tensor.is_matrix else (0, 0)
    if tensor.adapts:
        # what W and what B returned, beside their sum
        return 2 * work.tokens * rows * work.element_bytes if tensor.name.endswith("B") else 0
    if tensor.stored != "nf4":
        return 0
    weights = rows * columns
    return weights * work.element_bytes + PIECE_BYTES * min(weights, PIECE_WEIGHTS)


PAIR_OPERATORS = 4
"""Of an adapter in forward: two products, the scale, the sum."""

DEQUANTISING_OPERATORS = 14
"""Of a piece of a matrix in 4 bits."""


def adapter_operators(work: BlockWork) -> float:
    """Operators of adapters, and of making matrices from 4 bits, in a block's forward."""
    if not isinstance(work.model, AdaptedModel):
        return 0.0
    found = 0.0
    for tensor in block_tensors(work.model):
        if tensor.stored == "nf4":
            weights = prod(tensor.local_shape(work.tp))
            found += DEQUANTISING_OPERATORS * -(-weights // PIECE_WEIGHTS)
    dropped = int(work.model.adapters.dropout > 0)
    return found + (PAIR_OPERATORS + dropped) * len(adapter_products(work))

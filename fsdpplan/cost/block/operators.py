"""Operators: what one block does for one micro-batch on one rank, one after another.

A block is one list, in the order of forward, made from its work: products with their matrices,
attention or states in its place, norms, rotations, activations, and the permutations of tokens
around experts. FLOPs, seconds, recomputation, activations, the peak of backward and the pieces of a
timeline are read off it.

Recomputed: which operators of a block's forward backward does again, by mode.

Source: torch.utils.checkpoint, which stops once backward has all that it reads; the trainer's
`recompute.py`, as torchtitan `apply_ac`, per-op selective; Megatron-LM `recompute_granularity`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fsdpplan.cost.block.adapters import with_adapters
from fsdpplan.cost.block.branch import (
    end_of_branch,
    matmuls,
    norm_before,
    weight_gradient_bytes,
)
from fsdpplan.cost.block.mixer import mixer_operators
from fsdpplan.cost.block.network import network_operators
from fsdpplan.cost.block.operator import Operator
from fsdpplan.cost.block.sizes import block_sizes
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.spec.model import Model
from fsdpplan.spec.values import replace


def block_operators(work: BlockWork) -> tuple[Operator, ...]:
    """The operators of one block in the order of forward."""
    return _block_operators(on_device(work))


@lru_cache(maxsize=8192)
def on_device(work: BlockWork) -> BlockWork:
    """`work` without what only the host has to do with, and what backward recomputes: all blocks
    that differ in these alone do the same."""
    return replace(work, mode="none", wrapper_operators=0.0)


@lru_cache(maxsize=8192)
def _block_operators(work: BlockWork) -> tuple[Operator, ...]:
    return tuple(with_adapters(_made(work), work))


def _made(work: BlockWork) -> Iterator[Operator]:
    model, sizes, products = work.model, block_sizes(work), matmuls(work)
    gradients = weight_gradient_bytes(
        model=model, tp=work.tp, element_bytes=work.element_bytes, ep=work.ep
    )
    if model.mixer != "-":
        yield norm_before("attention", work, sizes, returns_own=True)
        yield from mixer_operators(work, sizes, gradients, products)
        yield from end_of_branch("attention", work, sizes)
    if model.has_network:
        # experts return nothing of their own where no shared ones do: their sum is what is added
        is_own = model.experts is None or model.experts.shared_hidden > 0
        yield norm_before("ffn", work, sizes, returns_own=is_own)
        yield from network_operators(work, sizes, gradients, products)
        yield from end_of_branch("ffn", work, sizes)


def element_wise_bytes(work: BlockWork) -> tuple[float, float]:
    """Memory traffic of a block beside its matmuls and attention in (forward, backward)."""
    operators = block_operators(work)
    return (
        sum([each.forward_bytes for each in operators]),
        sum([each.backward_bytes for each in operators]),
    )


def reads_last_output(model: Model) -> bool:
    """Whether backward reads what the block's last projection down returns: a norm behind it, a
    gate, or the weights of routed experts do; a sum does not."""
    experts = model.experts
    return model.post_norms or (
        experts is not None and (experts.shared_gate or not experts.shared_hidden)
    )


def repeated_operators(work: BlockWork) -> tuple[Operator, ...]:
    """What backward does again of forward, by the mode of recomputation.

    none: nothing, but what a software makes again of latents whatever the mode; attention: the
    scores, their softmax and the values' sums; full: all but the last product, where nothing reads
    what it returns, unless the runtime's own checkpoint function repeats forward to its end; op: of
    the plain products of these every second one from the second, all of routed experts, whose
    outputs are as many as the experts of each token, and what is element-wise.
    """
    operators = block_operators(work)
    if work.mode in ("none", "attention"):
        return tuple(
            operator
            for operator in operators
            if (work.mode == "attention" and operator.kind == "attention")
            or (work.remakes_latents and operator.product and operator.product.weight.reads_latents)
        )
    if work.mode == "full" and work.repeats_whole_block:
        return operators
    products = [operator.product for operator in operators if operator.product]
    if not (work.repeats_whole_block or reads_last_output(work.model)):
        products = products[:-1]
    if work.mode == "op":
        plain = [product for product in products if not product.is_routed]
        products = plain[1::2] + [product for product in products if product.is_routed]
    again = {product.name for product in products}
    return tuple(
        operator if operator.kind != "matmul" or operator.name in again else operator.beside
        for operator in operators
        if operator.kind != "attention" or work.mode == "full"
    )

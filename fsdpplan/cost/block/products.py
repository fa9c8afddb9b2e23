"""Products: the matmuls of one block's forward on one rank, by shape, in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.params import PLACES, ParameterTensor, block_tensors
from fsdpplan.spec.model import Model
from fsdpplan.spec.values import replace

FP8_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this for an fp8 matmul; others stay in bf16.
Source: torch.ops.aten._scaled_mm; torchao skips such layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`groups` products (rows x k) @ (k x n) of different weights in one kernel; mostly one."""

    weight: ParameterTensor
    """The matrix, whole; of stacked ones the first."""
    rows: float
    """Rows of all groups together."""
    n: int
    k: int
    groups: int = 1
    stacked: tuple[ParameterTensor, ...] = ()
    """The matrices that stand below it in one product."""

    @property
    def name(self) -> str:
        """That of its matrix within the block."""
        return self.weight.name.removesuffix(".weight")

    @property
    def shares_input(self) -> bool:
        """An earlier product has the same input."""
        return bool(self.weight.stacks_on)

    @property
    def is_trained(self) -> bool:
        """Its weights have gradients."""
        return self.weight.is_trained

    @property
    def is_routed(self) -> bool:
        """Of routed experts."""
        return self.weight.is_expert

    @property
    def weight_elements(self) -> int:
        """Elements of all its weights."""
        return self.groups * self.n * self.k

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each product of elements."""
        return 2.0 * self.rows * self.n * self.k

    @property
    def by_input(self) -> Product:
        """The product of backward that makes the gradient of the input."""
        return replace(self, n=self.k, k=self.n)

    def dtype(self, work: BlockWork) -> str:
        """Number format of its operands."""
        if work.precision == "fp8" and (self.n % FP8_MULTIPLE or self.k % FP8_MULTIPLE):
            return work.activation_dtype
        return work.precision


def block_products(work: BlockWork) -> tuple[Product, ...]:
    """The products of one block's forward on one rank, in order: each matrix of the block once,
    adapters apart (`adapter_products`).

    Routed experts: in the mean over ranks each one gets `tokens * active` rows for its
    `experts / ep` experts, all alike; that some experts are more popular than others is left out.
    """
    return _block_products(
        work.model,
        work.tokens,
        work.tp,
        work.ep,
        work.joined_projections,
        work.routed_tokens if work.experts_over_tp else None,
    )


@lru_cache(maxsize=8192)
def _block_products(
    model: Model, tokens: int, tp: int, ep: int, are_joined: bool, routed_tokens: float | None
) -> tuple[Product, ...]:
    """`routed_tokens`: what a rank routes where tensor-parallel ranks have whole experts."""
    products = []
    for tensor in _in_order(model):
        shape, own = tensor.local_shape(tp, ep), float(tokens)
        if tensor.is_expert and routed_tokens is not None:
            shape, own = tensor.local_shape(1, ep * tp), routed_tokens
        products.append(_product(tensor, shape, model, own))
    return tuple(_stacked(products) if are_joined else products)


@lru_cache(maxsize=8192)
def _adapter_products(
    model: Model, tokens: int, tp: int
) -> tuple[tuple[str, tuple[Product, Product]], ...]:
    tensors = [tensor for tensor in block_tensors(model) if tensor.adapts]
    return tuple(
        (
            down.adapts,
            (
                _product(down, down.local_shape(tp), model, float(tokens)),
                _product(up, up.local_shape(tp), model, float(tokens)),
            ),
        )
        for down, up in zip(tensors[::2], tensors[1::2], strict=True)
    )


def adapter_products(work: BlockWork) -> dict[str, tuple[Product, Product]]:
    """Name of a matrix -> the products of its adapter, down and up."""
    return dict(_adapter_products(work.model, work.tokens, work.tp))


@lru_cache(maxsize=256)
def _in_order(model: Model) -> tuple[ParameterTensor, ...]:
    """The matrices of a block in the order of forward: they are registered network by network, and
    within one the way down before the second way up."""
    matrices = (t for t in block_tensors(model) if t.is_matrix and not t.adapts)
    networks = groupby(matrices, key=lambda tensor: tensor.name.split(".")[:-2])
    return tuple(
        tensor
        for _, network in networks
        for tensor in sorted(network, key=lambda tensor: PLACES.index(tensor.place))
    )


def _product(
    tensor: ParameterTensor, shape: tuple[int, ...], model: Model, tokens: float
) -> Product:
    if not tensor.is_expert:
        return Product(weight=tensor, rows=tokens, n=shape[0], k=shape[1])
    assert model.experts is not None
    rows = max(1, round(tokens * model.experts.active))
    groups = max(1, min(shape[0], rows))
    return Product(weight=tensor, rows=float(rows), n=shape[1], k=shape[2], groups=groups)


def _stacked(products: list[Product]) -> list[Product]:
    """Projections of one input as one product: query, key and value; gate and up.

    Source: Megatron-LM `linear_qkv` and `linear_fc1`, nanotron `qkv_proj` and `gate_up_proj`.
    """
    stacked: dict[str, Product] = {}
    for product in products:
        onto = product.weight.stacks_on
        if onto:
            first, below = stacked[onto], (*stacked[onto].stacked, product.weight)
            stacked[onto] = replace(first, n=first.n + product.n, stacked=below)
        else:
            stacked[product.name] = product
    return list(stacked.values())

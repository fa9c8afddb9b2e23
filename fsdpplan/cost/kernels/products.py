"""Products: the matmuls of one block, by shape, forward and backward.

Recomputed: which products of a block's forward backward computes again, by mode.

Source: torch.utils.checkpoint, which stops once backward has all that it reads; the trainer's
`recompute.py`, as torchtitan `apply_ac`, per-op selective; Megatron-LM `recompute_granularity`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.kernels.matmul import has_tiles, matmul_seconds
from fsdpplan.cost.kernels.work import BlockWork, memory_bytes_per_second
from fsdpplan.cost.model.params import ParameterTensor, block_tensors
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES

FP8_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this for an fp8 matmul; others stay in bf16.
Source: torch.ops.aten._scaled_mm; torchao skips such layers."""

GROUP_ROWS = 128
"""Rows of a tile: a grouped matmul computes each expert's rows in whole tiles."""

FUSED_INPUTS = {"wk": "wq", "wv": "wq", "w3": "w1"}
"""Projections that software with joined projections stacks onto another one of the same input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`groups` products (rows x k) @ (k x n) of different weights in one kernel; mostly one."""

    name: str
    rows: float
    """Rows of all groups together."""
    n: int
    k: int
    groups: int = 1
    shares_input: bool = False
    """An earlier product has the same input."""
    is_routed: bool = False
    """Of routed experts."""

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
    """The products of one block's forward on one rank, in order: each matrix of the block once.

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
    weights = {_name(tensor): tensor for tensor in block_tensors(model) if tensor.is_matrix}
    ordered = sorted(weights, key=_order)  # stable: down comes last, before a gate of its output
    products = []
    for name in ordered:
        tensor, own = weights[name], float(tokens)
        shape = tensor.local_shape(tp, ep)
        if tensor.is_expert and routed_tokens is not None:
            shape, own = tensor.local_shape(1, ep * tp), routed_tokens
        products.append(_product(name, tensor, shape, model, own, named=weights))
    return tuple(_stacked(products) if are_joined else products)


def _order(name: str) -> int:
    return 2 if name == "shared_gate" else int(name.endswith("w2"))


def _name(tensor: ParameterTensor) -> str:
    return tensor.name.removesuffix(".weight")


def _stem(name: str) -> tuple[str, str]:
    prefix, _, last = name.rpartition(".")
    return prefix, last


def _product(
    name: str,
    tensor: ParameterTensor,
    shape: tuple[int, ...],
    model: Model,
    tokens: float,
    *,
    named: dict[str, ParameterTensor],
) -> Product:
    prefix, last = _stem(name)
    first = FUSED_INPUTS.get(last)
    shares = first is not None and (f"{prefix}.{first}" if prefix else first) in named
    if not tensor.is_expert:
        return Product(name=name, rows=tokens, n=shape[0], k=shape[1], shares_input=shares)
    assert model.experts is not None
    rows = max(1, round(tokens * model.experts.active))
    return Product(
        name=name,
        rows=float(rows),
        n=shape[1],
        k=shape[2],
        groups=max(1, min(shape[0], rows)),
        shares_input=shares,
        is_routed=True,
    )


def _stacked(products: list[Product]) -> list[Product]:
    """Projections of one input as one product: query, key and value; gate and up.

    Source: Megatron-LM `linear_qkv` and `linear_fc1`, nanotron `qkv_proj` and `gate_up_proj`.
    """
    stacked: dict[str, Product] = {}
    for product in products:
        prefix, last = _stem(product.name)
        first = FUSED_INPUTS.get(last, last)
        onto = f"{prefix}.{first}" if prefix else first
        if product.shares_input and onto in stacked:
            stacked[onto] = replace(stacked[onto], n=stacked[onto].n + product.n)
        else:
            stacked[product.name] = product
    return list(stacked.values())


def product_seconds(product: Product, *, dtype: str, device: Device) -> float:
    """Time of one product on its own.

    A grouped one computes whole tiles of rows for each group, and reads each group's weights.
    """
    if product.groups == 1:
        return matmul_seconds(
            m=max(1, round(product.rows)), n=product.n, k=product.k, dtype=dtype, device=device
        )
    tiles = -(-product.rows / product.groups // GROUP_ROWS)
    rows = round(
        max(tiles, 1.0) * GROUP_ROWS * product.groups if has_tiles(device) else product.rows
    )
    tiled = matmul_seconds(m=rows, n=product.n, k=product.k, dtype=dtype, device=device)
    operand = DTYPE_BYTES[dtype]
    traffic = product.weight_elements * operand + product.rows * (
        product.k * operand + product.n * 2
    )
    return max(tiled, traffic / memory_bytes_per_second(device) + device.fit.matmul_start_seconds)


@lru_cache(maxsize=8192)
def forward_product_seconds(work: BlockWork, device: Device) -> dict[str, float]:
    """Seconds of each product of a block's forward on its own, by name."""
    return {
        product.name: product_seconds(product, dtype=product.dtype(work), device=device)
        for product in block_products(work)
    }


def backward_products_seconds(work: BlockWork, device: Device) -> float:
    """Seconds of a block's products in backward, at the sustained rate: two behind each forward
    one, by input and by weight, whose depth is the rows."""
    seconds = 0.0
    for product in block_products(work):
        dtype = product.dtype(work)
        seconds += product_seconds(product.by_input, dtype=dtype, device=device)
        seconds += _by_weight_seconds(product, dtype=dtype, device=device)
    return seconds / device.fit.sustained(work.family)


def _by_weight_seconds(product: Product, *, dtype: str, device: Device) -> float:
    """The gradient of the weights: (n x rows) @ (rows x k); grouped ones stand side by side."""
    rows = max(1, round(product.rows / product.groups))
    return matmul_seconds(
        m=product.n * product.groups, n=product.k, k=rows, dtype=dtype, device=device
    )


def forward_matmul_seconds(
    shapes: tuple[tuple[int, int, int], ...], *, dtype: str, device: Device
) -> float:
    """Seconds of the products in `shapes`, at the sustained rate."""
    seconds = sum(matmul_seconds(m=m, n=n, k=k, dtype=dtype, device=device) for m, n, k in shapes)
    return seconds / device.fit.sustained_fraction


def backward_matmul_seconds(
    shapes: tuple[tuple[int, int, int], ...], *, dtype: str, device: Device
) -> float:
    """Seconds of the two products behind each forward one: by input and by weight."""
    by_input = tuple((m, k, n) for m, n, k in shapes)
    by_weight = tuple((k, n, m) for m, n, k in shapes)
    return forward_matmul_seconds(by_input + by_weight, dtype=dtype, device=device)


def reads_last_output(model: Model) -> bool:
    """Whether backward reads what the block's last projection down returns: a norm behind it, a
    gate, or the weights of routed experts do; a sum does not."""
    experts = model.experts
    return model.post_norms or (
        experts is not None and (experts.shared_gate or not experts.shared_hidden)
    )


def repeated_products(work: BlockWork) -> tuple[Product, ...]:
    """The products that backward computes again.

    full: all but the last one, where nothing reads what it returns, unless the runtime's own
    checkpoint function repeats forward to its end; op: of these every second one from the second,
    and all of routed experts, whose outputs are as many as the experts of each token.
    """
    products = block_products(work)
    if work.mode in ("none", "attention"):
        return ()
    if not (work.repeats_whole_block or reads_last_output(work.model)):
        products = products[:-1]
    if work.mode == "full":
        return products
    plain = [product for product in products if not product.is_routed]
    routed = [product for product in products if product.is_routed]
    return (*plain[1::2], *routed)

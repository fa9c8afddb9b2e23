"""Operators: the matmuls of one block by shape, and its element-wise work.

Products: the matmuls of one block, by shape, forward and backward.

Recomputed: which products of a block's forward backward computes again, by mode.

Source: torch.utils.checkpoint, which stops once backward has all that it reads; the trainer's
`recompute.py`, as torchtitan `apply_ac`, per-op selective; Megatron-LM `recompute_granularity`.

Element-wise work: memory traffic of norms, additions, rotations, activations and casts.

Counted from operators, in passes over a tensor (one reading or one writing each), forward /
backward:

                              eager       compiled    fused by hand
    norm and addition         5 / 8       4 / 6       5 / 8
    norm alone                2 / 5       1 / 2       2 / 5
    rotation                  9 / 9       2 / 2       2 / 2
    gate (SwiGLU, GeGLU)      5 / 9       3 / 5       3 / 5
    GELU                      2 / 3       2 / 3       2 / 3

Backward of a norm reads gradient and input twice: once for the input's gradient, once for the
weight's; a compiler joins addition and norm into one chain and reads again only what a row does not
keep on the chip. Eager backward also adds up the gradients of an input that several projections
share, unless it is one joined projection.

Source: operators of the reference decoder under fake tensors (tests/ground_truth), the kernels
`native_layer_norm`, `_fused_rms_norm` and their backward in torch 2.13, and Megatron-LM's
bias-dropout-add, bias-GELU, SwiGLU and rotary kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.kernels.rates import (
    BlockWork,
    Kernels,
    has_tiles,
    matmul_seconds,
    memory_bytes_per_second,
)
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.cost.model.params import PLACES, ParameterTensor, block_tensors
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES

FP8_MULTIPLE = 16
"""Both dimensions of a weight must be multiples of this for an fp8 matmul; others stay in bf16.
Source: torch.ops.aten._scaled_mm; torchao skips such layers."""

GROUP_ROWS = 128
"""Rows of a tile: a grouped matmul computes each expert's rows in whole tiles."""


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

    @property
    def name(self) -> str:
        """That of its matrix within the block."""
        return self.weight.name.removesuffix(".weight")

    @property
    def shares_input(self) -> bool:
        """An earlier product has the same input."""
        return bool(self.weight.stacks_on)

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
    weights = [tensor for tensor in block_tensors(model) if tensor.is_matrix]
    products = []
    for tensor in sorted(weights, key=lambda one: PLACES.index(one.place)):
        shape, own = tensor.local_shape(tp, ep), float(tokens)
        if tensor.is_expert and routed_tokens is not None:
            shape, own = tensor.local_shape(1, ep * tp), routed_tokens
        products.append(_product(tensor, shape, model, own))
    return tuple(_stacked(products) if are_joined else products)


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
        seconds += by_weight_seconds(product, dtype=dtype, device=device)
    return seconds / device.fit.sustained(work.family)


def by_weight_seconds(product: Product, *, dtype: str, device: Device) -> float:
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


ROUTER_PASSES = 6
"""fp32 passes over the router's scores in each direction: softmax or sigmoid reads and writes, the
choice of the best reads, the histogram of the choice reads and writes what little there is."""


def expert_bytes(work: BlockWork) -> tuple[float, float]:
    """Traffic of routing in (forward, backward), in bytes.

    Passes over the copies of the tokens, `active` for each token: gathered (2), weighted (2) and
    summed (1, and one over the tokens); split among ranks, sorted by expert after the exchange and
    back before it (4). Hand-written kernels weight while they sum. Backward mirrors forward, and
    reads the outputs once more for the gradient of the weights.

    All experts are taken as equally popular: load imbalance, and the tokens that a capacity limit
    drops, are not modelled. The matmuls are in `products`, the exchange between ranks is
    communication.
    """
    experts = work.model.experts
    if experts is None:
        return 0.0, 0.0
    routed = work.routed_tokens
    copies = routed * experts.active * work.model.hidden * work.element_bytes
    tokens = routed * work.model.hidden * work.element_bytes
    passes = 3 if work.kernels == "fused" else 5
    if work.ep > 1 or work.experts_over_tp:
        passes += 4
    router = ROUTER_PASSES * FP32_BYTES * routed * experts.experts
    forward = passes * copies + tokens + router
    return forward, forward + copies


CHAIN: dict[Kernels, tuple[int, int]] = {"eager": (5, 8), "compiled": (4, 6), "fused": (5, 8)}
NORM: dict[Kernels, tuple[int, int]] = {"eager": (2, 5), "compiled": (1, 2), "fused": (2, 5)}
ROTATION: dict[Kernels, tuple[int, int]] = {"eager": (9, 9), "compiled": (2, 2), "fused": (2, 2)}
GATE: dict[Kernels, tuple[int, int]] = {"eager": (5, 9), "compiled": (3, 5), "fused": (3, 5)}
GELU: dict[Kernels, tuple[int, int]] = {"eager": (2, 3), "compiled": (2, 3), "fused": (2, 3)}

COMPOSITE_NORM_BYTES = (32.0, 70.0)
"""What an eager RMSNorm of operators moves beyond a fused one, in bytes an element of 16 bits.

Forward: cast to fp32 (6), square (8), mean (4), product with the root (8), cast back (6), product
with the weight (4), less the 4 of one kernel. Backward: the weight's product (8) and sum (2), cast
(6), product (8) and its sum (12), square (24: gradient laid out, times input, times two), sum of
both branches (12), cast (6), less one reading that they share (8).
Source: torch 2.5 aten rms_norm; torchtitan of 2024 torchtitan/models/norms.py.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Traffic of one part of a block."""

    name: str
    forward: float
    """Bytes."""
    backward: float


def element_wise_bytes(work: BlockWork) -> tuple[float, float]:
    """Memory traffic of a block's element-wise work in (forward, backward), in bytes."""
    parts = tuple(element_wise_parts(work))
    return sum(p.forward for p in parts), sum(p.backward for p in parts)


def element_wise_parts(work: BlockWork) -> Iterator[Part]:
    """The parts whose sum `element_wise_bytes` is."""
    model, kernels = work.model, work.kernels
    residual = work.residual_elements * work.residual_bytes
    yield _part("norms and additions", CHAIN[kernels], model.halves * residual)
    if model.post_norms:
        yield _part("norms behind branches", NORM[kernels], model.halves * residual)
    if kernels == "eager":
        yield Part(name="sums of gradients", forward=0.0, backward=_summed_bytes(work))
    yield _part("rotation", ROTATION[kernels], _rotated_elements(work) * work.element_bytes)
    inner = _inner_elements(work) * work.element_bytes
    yield _part("activation", (GATE if model.is_gated else GELU)[kernels], inner)
    yield _part("norms of heads", NORM[kernels], _head_norm_elements(work) * work.element_bytes)
    yield Part(name="biases", forward=0.0, backward=_biased_elements(work) * work.element_bytes)
    if work.composite_norms and kernels == "eager" and model.norm == "rmsnorm":
        normed = model.halves * work.residual_elements * (2 if model.post_norms else 1)
        yield _part("norms as operators", COMPOSITE_NORM_BYTES, normed + _head_norm_elements(work))
    yield _residual_casts(work)
    yield _dropout(work)
    if model.attention_gate:
        gated = work.tokens * model.query_dim / work.tp * work.element_bytes
        yield _part("gate of attention", GATE[kernels], gated)
    if model.mixer in "DM":
        yield from _around_states(work)
    if model.latent:
        yield _part("heads put together", (4, 4), _joined_elements(work) * work.element_bytes)
    forward, backward = expert_bytes(work)
    yield Part(name="routing", forward=forward, backward=backward)


CONVOLUTION = (2, 5)
"""Passes over what a convolution of a few tokens reads: read and written; in backward gradient and
input read, the activation made again, the gradient written."""


def _around_states(work: BlockWork) -> Iterator[Part]:
    """The convolution before a state, and the norm and the gate behind it."""
    from fsdpplan.cost.kernels.states import state_of_work  # of few models

    state, each = state_of_work(work), work.tokens / work.tp * work.element_bytes
    yield _part("convolution", CONVOLUTION, state.mixed_dim * each)
    yield _part("norm of states", NORM[work.kernels], state.value_dim * each)
    yield _part("gate of states", GATE[work.kernels], state.value_dim * each)


def _part(name: str, passes: tuple[float, float], size: float) -> Part:
    return Part(name=name, forward=passes[0] * size, backward=passes[1] * size)


def _shared_inputs(work: BlockWork) -> tuple[int, int]:
    """Projections that read a norm's output, and how many of them share it with another one."""
    products = [p for p in block_products(work) if p.k == work.model.hidden and p.groups == 1]
    return len(products), sum(p.shares_input for p in products)


def _summed_bytes(work: BlockWork) -> float:
    """Gradients of a norm's output added up, three passes for each projection but the first; none
    where they are joined."""
    _, sharing = _shared_inputs(work)
    return 3.0 * sharing * work.tokens * work.model.hidden * work.residual_bytes


def _rotated_elements(work: BlockWork) -> float:
    """Elements of queries and keys that are rotated."""
    model = work.model
    if model.positions != "rope" or model.mixer != "A":
        return 0.0
    if model.latent:
        return work.tokens * model.latent.rope_head_dim * (model.heads / work.tp + 1)
    return work.tokens * (model.query_dim + model.kv_dim) / work.tp


def _joined_elements(work: BlockWork) -> float:
    """Elements of query heads under latent attention: rotated and plain parts are put together,
    those of keys likewise, and keys get their shared part once a head."""
    return work.tokens * work.model.query_dim / work.tp


def _inner_elements(work: BlockWork) -> float:
    """Elements of the feed-forward network's inner activations."""
    model = work.model
    if not model.has_network:
        return 0.0
    if model.experts is None:
        return work.tokens * model.ffn_hidden / work.tp
    routed = model.experts.active * model.experts.hidden
    return work.tokens * (routed + model.experts.shared_hidden) / work.tp


def _head_norm_elements(work: BlockWork) -> float:
    """Elements that norms of queries, keys or latents normalise."""
    model = work.model
    if model.latent:
        return float(work.tokens * (model.latent.query_rank + model.latent.kv_rank))
    if not model.qk_norm:
        return 0.0
    return work.tokens * (model.query_dim + model.kv_dim) / work.tp


def _biased_elements(work: BlockWork) -> float:
    """Elements of the gradients that are summed over tokens for the biases' gradients."""
    widths = 0
    for tensor in block_tensors(work.model):
        if not tensor.name.endswith(".bias") or "norm" in tensor.name:
            continue
        visits = work.model.experts.active if tensor.is_expert and work.model.experts else 1
        widths += visits * tensor.local_shape(work.tp)[-1]
    return float(work.tokens * widths)


def _residual_casts(work: BlockWork) -> Part:
    """Under autocast with an fp32 residual stream each projection casts its input, and backward
    casts the gradients of the branches down and of the inputs up."""
    width = work.element_bytes + work.residual_bytes
    if work.residual_bytes == work.element_bytes or work.compiled:
        return Part(name="casts of the stream", forward=0.0, backward=0.0)
    casts = _shared_inputs(work)[0] * work.tokens * work.model.hidden * width
    branches = work.model.halves * work.residual_elements * width
    return Part(name="casts of the stream", forward=casts, backward=casts + branches)


def _dropout(work: BlockWork) -> Part:
    """Two residual branches: eager, read, write and a mask of bytes in forward, the same in
    backward; fused with the addition, its mask, and a pass of its own in backward. A compiler
    draws the same numbers again."""
    if not work.dropout or work.compiled:
        return Part(name="dropout", forward=0.0, backward=0.0)
    own = 2 * work.element_bytes + 1
    forward = own if work.kernels == "eager" else 1
    size = work.model.halves * work.residual_elements
    return Part(name="dropout", forward=forward * size, backward=own * size)

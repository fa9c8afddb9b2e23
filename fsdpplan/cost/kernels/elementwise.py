"""Element-wise work: memory traffic of norms, additions, rotations, activations and casts.

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
from dataclasses import dataclass

from fsdpplan.cost.kernels.products import block_products
from fsdpplan.cost.kernels.work import BlockWork, Kernels
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.cost.model.params import block_tensors

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
    yield _part("norms and additions", CHAIN[kernels], 2 * residual)
    if model.post_norms:
        yield _part("norms behind branches", NORM[kernels], 2 * residual)
    if kernels == "eager":
        yield Part(name="sums of gradients", forward=0.0, backward=_summed_bytes(work))
    yield _part("rotation", ROTATION[kernels], _rotated_elements(work) * work.element_bytes)
    inner = _inner_elements(work) * work.element_bytes
    yield _part("activation", (GATE if model.is_gated else GELU)[kernels], inner)
    yield _part("norms of heads", NORM[kernels], _head_norm_elements(work) * work.element_bytes)
    yield Part(name="biases", forward=0.0, backward=_biased_elements(work) * work.element_bytes)
    if work.composite_norms and kernels == "eager" and model.norm == "rmsnorm":
        normed = 2 * work.residual_elements * (2 if model.post_norms else 1)
        yield _part("norms as operators", COMPOSITE_NORM_BYTES, normed + _head_norm_elements(work))
    yield _residual_casts(work)
    yield _dropout(work)
    if model.latent:
        yield _part("heads put together", (4, 4), _joined_elements(work) * work.element_bytes)
    forward, backward = expert_bytes(work)
    yield Part(name="routing", forward=forward, backward=backward)


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
    if model.positions != "rope":
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
    branches = 2 * work.residual_elements * width
    return Part(name="casts of the stream", forward=casts, backward=casts + branches)


def _dropout(work: BlockWork) -> Part:
    """Two residual branches: eager, read, write and a mask of bytes in forward, the same in
    backward; fused with the addition, its mask, and a pass of its own in backward. A compiler
    draws the same numbers again."""
    if not work.dropout or work.compiled:
        return Part(name="dropout", forward=0.0, backward=0.0)
    own = 2 * work.element_bytes + 1
    forward = own if work.kernels == "eager" else 1
    size = 2 * work.residual_elements
    return Part(name="dropout", forward=forward * size, backward=own * size)

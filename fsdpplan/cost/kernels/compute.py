"""Compute: seconds of one block on one rank, communication apart.

    block = max(matmuls + attention + element-wise traffic + kernel starts, what the host needs)

Matmuls by shape (`products`), attention by its tiles at its own efficiency (`attention`),
element-wise work by bytes over the memory bandwidth (`elementwise`, `experts`, `fp8`), and a floor
for small shapes: an eager program cannot start operators faster than the host dispatches them
(`dispatch`). Head, loss and embedding are in `head`, the optimizer in `optimizer`.

Dispatch: what the host does for a block, in operators of an eager program.

Host and device are two queues: a stretch of a step takes what the slower of them needs. The unit is
one dispatched operator (`kernel_launch_seconds`); what Python adds around operators is measured in
it. Ratios measured on one core with torch 2.13 and a fake process group, an operator that records
for autograd taking 1.5 us: a call of a module 2.5 us, of an autograd function written in Python
2.8 us beyond what it calls, forward or backward; a collective 7 us.

fp8: memory traffic of casting and laying out the operands of 8-bit matmuls.

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
from functools import lru_cache

from fsdpplan.cost.kernels.attention import attention_backward_seconds, attention_forward_seconds
from fsdpplan.cost.kernels.operators import (
    Product,
    backward_products_seconds,
    block_products,
    element_wise_bytes,
    forward_product_seconds,
    repeated_products,
)
from fsdpplan.cost.kernels.rates import BlockSeconds, BlockWork, memory_bytes_per_second
from fsdpplan.cost.model.params import block_tensors
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.values import replace

COMPILED_OPERATOR_FRACTION = 12 / 32
"""Share of an eager block's operators that remain when the block is compiled: seven matmuls and
attention stay, the element-wise work fuses to about four chains. Reasoned, not measured on CUDA."""

MODULE_OPERATORS = 1.7
"""One call of a module in eager mode."""

FUNCTION_OPERATORS = 2.0
"""One autograd function written in Python, in each direction."""

COLLECTIVE_OPERATORS = 8.0
"""One collective: five for torch's call and its checks, measured, and three for NCCL's own events,
waits and launch, which a fake group does not make: reasoned."""

CHECKPOINT_OPERATORS = 12.0
"""Recomputation of a block: random state and autocast state saved and restored, hooks."""


def operators(work: BlockWork) -> tuple[float, float]:
    """Operators that a block dispatches in (forward, backward).

    The reference block in eager mode: two norms, two additions, the projections, attention, nine
    for each rotation and two (SwiGLU) or one for the activation. Backward runs about twice as
    many. Autocast adds a cast for each weight. Kernels fused by hand: one for each of these.
    """
    forward = _own_operators(work) * (COMPILED_OPERATOR_FRACTION if work.compiled else 1.0)
    return forward + work.wrapper_operators, 2 * forward + work.wrapper_operators


def _own_operators(work: BlockWork) -> float:
    model = work.model
    fused = work.kernels == "fused"
    projections = len(block_products(work))
    if model.is_patterned:
        return _kind_operators(work)
    forward = 5.0 + projections + (2 if model.is_gated and not fused else 1)
    if not work.flash_attention:
        forward += 2 if fused else 5  # two matmuls and a softmax for one; scaled, masked, cast
    if model.positions == "rope":
        forward += 2 if fused else 18
    if model.qk_norm or model.latent:
        forward += 2
    if model.latent:
        forward += 4  # heads split, keys widened, both put together
    if model.post_norms:
        forward += 2
    if work.autocast:
        forward += projections
    if work.residual_bytes > work.element_bytes:
        forward += projections
    if work.dropout and not fused:
        forward += 2
    if work.composite_norms and work.kernels == "eager" and model.norm == "rmsnorm":
        forward += 7 * (2 + 2 * model.post_norms + 2 * model.qk_norm)
    forward += _routing_operators(work)
    if work.precision == "fp8":
        forward += projections * (2 if fused else 6)
    return forward


def _routing_operators(work: BlockWork) -> int:
    """Router, choice, histogram, sort, gather, weight, sum; and the exchange."""
    if work.model.experts is None:
        return 0
    exchange = 6 if work.ep > 1 or work.experts_over_tp else 0
    return (8 if work.kernels == "fused" else 20) + exchange


STATE_OPERATORS = 14
"""Of a state: convolution, gates and decays, the kernels of its chunks, norm and gate. Counted in
flash-linear-attention and mamba-ssm, not measured."""


def _kind_operators(work: BlockWork) -> float:
    """Of a block without attention, or without a network: a norm and an addition for each half."""
    model, projections = work.model, len(block_products(work))
    forward = 2.0 * model.halves + projections + _routing_operators(work)
    if model.mixer in "DM":
        forward += STATE_OPERATORS
    elif model.mixer == "A":
        forward += 19.0 if model.positions == "rope" else 1.0
    if model.has_network:
        forward += 2 if model.is_gated else 1
    if work.autocast:
        forward += projections
    if work.precision == "fp8":
        forward += projections * 6
    return forward


def python_operators(work: BlockWork) -> tuple[float, float]:
    """What Python adds around a block's operators in (forward, backward), in operators.

    Modules: the block, its norms, its two halves and its projections. Tensor parallelism wraps two
    entries into and two exits from the split part in autograd functions with a collective each;
    with sequence parallelism the entries' backward gathers its input again. Gradients that
    accumulate outside of autograd have a hook each. Compiled code has none but the collectives.
    """
    collectives_forward, collectives_backward = _tensor_parallel_collectives(work)
    forward = COLLECTIVE_OPERATORS * collectives_forward
    backward = COLLECTIVE_OPERATORS * collectives_backward
    if work.compiled:
        return forward, backward
    modules = 5 + len(block_products(work)) + 2 * work.model.post_norms
    functions = 4 if work.tp > 1 else 0
    functions += 4 if work.fused_kernels else 0  # norms, activation, rotation
    functions += 1 if work.flash_attention else 0
    forward += MODULE_OPERATORS * modules + FUNCTION_OPERATORS * functions
    backward += FUNCTION_OPERATORS * functions
    if work.fused_kernels:
        backward += len(block_tensors(work.model))
    return forward, backward


def _tensor_parallel_collectives(work: BlockWork) -> tuple[int, int]:
    if work.tp == 1:
        return 0, 0
    if work.model.halves == 1:
        return (2, 3) if work.sequence_parallel else (1, 1)
    return (4, 6) if work.sequence_parallel else (2, 2)


def host_seconds(work: BlockWork, *, kernel_launch_seconds: float) -> tuple[float, float]:
    """Seconds that the host needs for a block in (forward, backward)."""
    own, python = operators(work), python_operators(work)
    return (
        (own[0] + python[0]) * kernel_launch_seconds,
        (own[1] + python[1]) * kernel_launch_seconds,
    )


def element_wise_kernels(work: BlockWork) -> tuple[float, float]:
    """Kernels that the device starts for a block beside its matmuls in (forward, backward)."""
    forward, backward = operators(work)
    matmuls = len(block_products(work))
    wrapper = work.wrapper_operators
    return max(0.0, forward - wrapper - matmuls), max(0.0, backward - wrapper - 2 * matmuls)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """Seconds of the device for one direction of a block, by part."""

    matmuls: float
    attention: float
    element_wise: float
    """Traffic of norms, additions, rotations, activations, casts and routing, and the time that
    its kernels take to start."""

    @property
    def total(self) -> float:
        """All parts, one behind the other on one stream."""
        return self.matmuls + self.attention + self.element_wise


def device_parts(work: BlockWork, device: Device) -> tuple[DeviceParts, DeviceParts]:
    """What the device does in a block's (forward, backward), recomputation apart."""
    return _device_parts(_on_device(work), device)


def _on_device(work: BlockWork) -> BlockWork:
    """`work` without what only the host has to do with, and what backward recomputes: all blocks
    that differ in these alone do the same."""
    return replace(work, mode="none", wrapper_operators=0.0)


@lru_cache(maxsize=8192)
def _device_parts(work: BlockWork, device: Device) -> tuple[DeviceParts, DeviceParts]:
    memory = memory_bytes_per_second(device)
    streamed = element_wise_bytes(work)
    cast = fp8_cast_bytes(work)
    weight_cast = autocast_bytes(work)
    kernels = element_wise_kernels(work)
    start = device.fit.matmul_start_seconds
    forward, backward = (
        (s + c + weight_cast) / memory + k * start
        for s, c, k in zip(streamed, cast, kernels, strict=True)
    )
    return (
        DeviceParts(
            matmuls=sum(forward_product_seconds(work, device).values())
            / device.fit.sustained(work.family),
            attention=attention_forward_seconds(work, device),
            element_wise=forward,
        ),
        DeviceParts(
            matmuls=backward_products_seconds(work, device),
            attention=attention_backward_seconds(work, device),
            element_wise=backward,
        ),
    )


@lru_cache(maxsize=8192)
def block_seconds(work: BlockWork, device: Device) -> BlockSeconds:
    """Seconds of one block for one micro-batch on one rank, communication apart."""
    on_device = _on_device(work)
    parts = _device_parts(on_device, device)
    forward, backward = parts[0].total, parts[1].total
    recompute = _recompute_seconds(work, parts[0], on_device, device)
    launch = device.fit.kernel_launch_seconds
    forward_host, backward_host = host_seconds(work, kernel_launch_seconds=launch)
    again_host = forward_host * _repeated_share(work)
    if work.mode in ("op", "full") and not work.compiled:
        again_host += CHECKPOINT_OPERATORS * launch
    slower_forward = max(forward, forward_host)
    # the host dispatches recomputation and backward as one stretch
    slower_backward = max(recompute + backward, again_host + backward_host)
    plain_backward = max(backward, backward_host)
    return BlockSeconds(
        forward_seconds=slower_forward,
        recompute_seconds=max(0.0, slower_backward - plain_backward),
        backward_seconds=plain_backward,
        forward_host_seconds=forward_host,
        recompute_host_seconds=again_host,
        backward_host_seconds=backward_host,
        forward_device_seconds=forward,
        recompute_device_seconds=recompute,
        backward_device_seconds=backward,
    )


def autocast_bytes(work: BlockWork) -> float:
    """Autocast copies each fp32 weight to the compute dtype in forward, and its gradient back."""
    if not work.autocast or work.precision == "fp32":
        return 0.0
    weights = sum(product.weight_elements for product in block_products(work))
    return float(weights * (4 + work.element_bytes))


def _recompute_seconds(
    work: BlockWork, forward: DeviceParts, on_device: BlockWork, device: Device
) -> float:
    """Forward work that the device repeats in backward, by mode.

    none: nothing, but what a software makes again of latents whatever the mode; full: all but the
    products that are not repeated (`recomputed`); op: the products that are, and
    what is element-wise; attention: the scores, their softmax and the values' sums.
    """
    if work.mode in ("none", "attention"):
        made_again = _latents_seconds(work, on_device, device) if work.remakes_latents else 0.0
        return made_again + (forward.attention if work.mode == "attention" else 0.0)
    if work.mode == "full" and work.repeats_whole_block:
        return forward.total
    each = forward_product_seconds(on_device, device)
    again = sum(each[product.name] for product in repeated_products(work))
    again /= device.fit.sustained(work.family)
    if work.mode == "op":
        return again + forward.element_wise
    return max(0.0, forward.total - (forward.matmuls - again))


def _latents_seconds(work: BlockWork, on_device: BlockWork, device: Device) -> float:
    """The products that make queries, keys and values of latents; their norms are left out."""
    each = forward_product_seconds(on_device, device)
    again = sum(each[one.name] for one in block_products(work) if one.weight.reads_latents)
    return again / device.fit.sustained(work.family)


def _repeated_share(work: BlockWork) -> float:
    """Share of forward's operators that recomputation dispatches again."""
    match work.mode:
        case "none":
            return 0.0
        case "attention":
            return 0.1
        case "op":
            return 0.8
        case "full":
            return 1.0

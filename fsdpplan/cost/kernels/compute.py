"""Compute: seconds of one block on one rank, communication apart.

    block = max(matmuls + attention + element-wise traffic + kernel starts, what the host needs)

The operators of a block (`cost/block/operators.py`) are priced one by one: matmuls by shape
(`products`), attention by its tiles at its own efficiency (`attention`), all else by bytes over the
memory bandwidth. Small shapes have a floor: an eager program cannot start operators faster than the
host dispatches them. Head, loss and embedding are in `head`, the optimizer in `optimizer`.

Dispatch: what the host does for a block, in operators of an eager program.

Host and device are two queues: a stretch of a step takes what the slower of them needs. The unit is
one dispatched operator (`kernel_launch_seconds`); what Python adds around operators is measured in
it. Ratios measured on one core with torch 2.13 and a fake process group, an operator that records
for autograd taking 1.5 us: a call of a module 2.5 us, of an autograd function written in Python
2.8 us beyond what it calls, forward or backward; a collective 7 us.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fsdpplan.cost.block.adapters import adapter_operators
from fsdpplan.cost.block.operator import Operator, OperatorKind
from fsdpplan.cost.block.operators import (
    block_operators,
    element_wise_bytes,
    on_device,
    repeated_operators,
)
from fsdpplan.cost.block.products import block_products
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.attention import attention_backward_seconds, attention_forward_seconds
from fsdpplan.cost.kernels.products import by_weight_seconds, product_seconds
from fsdpplan.cost.kernels.rates import BlockSeconds, memory_bytes_per_second
from fsdpplan.cost.model.params import block_tensors, trained_tensors
from fsdpplan.spec.cluster import Device

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

OPERATOR_STARTS = 2.2
"""Host's time for an operator of a training step, with what autograd records of it and Python
around it, as a multiple of that for a bare kernel in a loop (`kernel_launch_seconds`). From GPT-2
Large at 1 x 1024 tokens in eager mode on an H100, which takes 100 ms, all of them the host's,
beside 10 us a bare kernel there."""

COMPILED_CALL_OPERATORS = 15.0
"""One call of a compiled block in each direction: guards, the graph's own Python, its buffers. From
the same machine."""

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
        forward += projections + _biases(work)
    if work.residual_bytes > work.element_bytes:
        forward += projections
    if work.dropout and not fused:
        forward += 2
    if work.composite_norms and work.kernels == "eager" and model.norm == "rmsnorm":
        forward += 7 * (2 + 2 * model.post_norms + 2 * model.qk_norm)
    forward += _routing_operators(work)
    if work.precision == "fp8":
        forward += projections * (2 if fused else 6)
    return forward + adapter_operators(work)


def _biases(work: BlockWork) -> int:
    """Of projections."""
    return sum(
        one.name.endswith(".bias") and "norm" not in one.name for one in block_tensors(work.model)
    )


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
    with sequence parallelism the entries' backward gathers its input again. Each gradient is put
    where it belongs. Compiled code is one call, and has no other but the collectives.
    """
    collectives_forward, collectives_backward = _tensor_parallel_collectives(work)
    forward = COLLECTIVE_OPERATORS * collectives_forward
    backward = COLLECTIVE_OPERATORS * collectives_backward
    backward += trained_tensors(work.model)
    if work.compiled:
        return forward + COMPILED_CALL_OPERATORS, backward + COMPILED_CALL_OPERATORS
    modules = 5 + len(block_products(work)) + 2 * work.model.post_norms
    functions = 4 if work.tp > 1 else 0
    functions += 4 if work.fused_kernels else 0  # norms, activation, rotation
    functions += 1 if work.flash_attention else 0
    forward += MODULE_OPERATORS * modules + FUNCTION_OPERATORS * functions
    backward += FUNCTION_OPERATORS * functions
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
    each = OPERATOR_STARTS * kernel_launch_seconds
    return (own[0] + python[0]) * each, (own[1] + python[1]) * each


def element_wise_kernels(work: BlockWork) -> tuple[float, float]:
    """Kernels that the device starts for a block beside its matmuls in (forward, backward)."""
    forward, backward = operators(work)
    matmuls = len(block_products(work))
    wrapper = work.wrapper_operators
    return max(0.0, forward - wrapper - matmuls), max(0.0, backward - wrapper - 2 * matmuls)


class Kernel(NamedTuple):
    """An operator and seconds of its product, or of attention, on the device alone."""

    operator: Operator
    forward: float = 0.0
    by_input: float = 0.0
    """Backward: the gradients of its inputs."""
    by_weight: float = 0.0


def block_kernels(work: BlockWork, device: Device) -> tuple[Kernel, ...]:
    """The operators of a block in the order of forward, each with its seconds at the sustained
    rate; recomputation apart."""
    return _block_kernels(on_device(work), device)


@lru_cache(maxsize=8192)
def _block_kernels(work: BlockWork, device: Device) -> tuple[Kernel, ...]:
    return tuple(_kernel(operator, work, device) for operator in block_operators(work))


def _kernel(operator: Operator, work: BlockWork, device: Device) -> Kernel:
    if operator.kind == "attention":
        ahead, behind = attention_forward_seconds, attention_backward_seconds
        return Kernel(operator, ahead(work, device), behind(work, device))
    product = operator.product
    if product is None:
        return Kernel(operator)
    dtype, sustained = product.dtype(work), device.fit.sustained(work.family)
    return Kernel(
        operator,
        product_seconds(product, dtype=dtype, device=device) / sustained,
        product_seconds(product.by_input, dtype=dtype, device=device) / sustained,
        by_weight_seconds(product, dtype=dtype, device=device) / sustained
        if product.is_trained
        else 0.0,
    )


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
    return _device_parts(on_device(work), device)


@lru_cache(maxsize=8192)
def _device_parts(work: BlockWork, device: Device) -> tuple[DeviceParts, DeviceParts]:
    memory, start = memory_bytes_per_second(device), device.fit.matmul_start_seconds
    kernels = _block_kernels(work, device)
    matmuls, attention = (_of_kind(kernels, kind) for kind in ("matmul", "attention"))
    moved, started = element_wise_bytes(work), element_wise_kernels(work)
    forward, backward = (
        DeviceParts(
            matmuls=matmuls[way],
            attention=attention[way],
            element_wise=moved[way] / memory + started[way] * start,
        )
        for way in (0, 1)
    )
    return forward, backward


def _of_kind(kernels: Iterable[Kernel], kind: OperatorKind) -> tuple[float, float]:
    """(forward, backward) seconds of the operators of one kind."""
    forward = backward = 0.0
    for operator, ahead, by_input, by_weight in kernels:
        if operator.kind == kind:
            forward, backward = forward + ahead, backward + by_input + by_weight
    return forward, backward


@lru_cache(maxsize=8192)
def block_seconds(work: BlockWork, device: Device) -> BlockSeconds:
    """Seconds of one block for one micro-batch on one rank, communication apart."""
    parts = device_parts(work, device)
    forward, backward = parts[0].total, parts[1].total
    recompute = _recompute_seconds(work, parts[0], device)
    launch = device.fit.kernel_launch_seconds
    forward_host, backward_host = host_seconds(work, kernel_launch_seconds=launch)
    again_host = forward_host * _repeated_share(work)
    if work.mode in ("op", "full") and not work.compiled:
        again_host += CHECKPOINT_OPERATORS * OPERATOR_STARTS * launch
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


def _recompute_seconds(work: BlockWork, forward: DeviceParts, device: Device) -> float:
    """Forward work that the device repeats in backward, by mode; element-wise work is repeated
    whole, or not at all."""
    again = repeated_operators(work)
    if not again:
        return 0.0
    names = {each.name for each in again if each.product or each.kind == "attention"}
    kernels = [each for each in block_kernels(work, device) if each.operator.name in names]
    seconds = _of_kind(kernels, "matmul")[0] + _of_kind(kernels, "attention")[0]
    return seconds + (forward.element_wise if work.mode in ("op", "full") else 0.0)


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

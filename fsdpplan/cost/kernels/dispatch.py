"""Dispatch: what the host does for a block, in operators of an eager program.

Host and device are two queues: a stretch of a step takes what the slower of them needs. The unit is
one dispatched operator (`kernel_launch_seconds`); what Python adds around operators is measured in
it. Ratios measured on one core with torch 2.13 and a fake process group, an operator that records
for autograd taking 1.5 us: a call of a module 2.5 us, of an autograd function written in Python
2.8 us beyond what it calls, forward or backward; a collective 7 us.
"""

from __future__ import annotations

from fsdpplan.cost.kernels.products import block_products
from fsdpplan.cost.kernels.work import BlockWork
from fsdpplan.cost.model.params import block_tensors

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
    if model.experts is not None:
        forward += 8 if fused else 20  # router, choice, histogram, sort, gather, weight, sum
        forward += 6 if work.ep > 1 or work.experts_over_tp else 0
    if work.precision == "fp8":
        forward += projections * (2 if fused else 6)
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

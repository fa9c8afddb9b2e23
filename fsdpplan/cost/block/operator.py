"""Operator: what one of a block's list is, and what is moved by those that are element-wise.

Element-wise work is counted in passes over a tensor (one reading or one writing each), forward /
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

Memory: an eager block saves the inputs of each matmul, of attention, of the norms and of the
element-wise functions; one with fused kernels, compiled or written by hand, recomputes element-wise
results, so a SwiGLU keeps gate and up but not their product's first factor.

Source: real FSDP2 under fake tensors, and the partitioner of torch 2.13's compiler on the reference
block (tests/ground_truth); Megatron-LM megatron/core/fusions/fused_bias_swiglu.py; scores and
dropout as in arXiv 2205.05198, equation 1. Left out: what the CUDA kernel of attention allocates
for itself (fp32 sums of the query gradient; under grouped queries, key and value gradients of every
query head).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fsdpplan.cost.block.products import Product
from fsdpplan.cost.block.work import BlockWork, Kernels
from fsdpplan.cost.model.params import Place

OperatorKind = Literal["matmul", "attention", "elementwise"]
"""`attention`: what mixes tokens, states in its place too."""


class BackwardStep(NamedTuple):
    """One of the kernels of an operator's backward: it allocates, then frees its inputs."""

    weight_gradient: int = 0
    """Allocated; stays until the block's gradients are reduced."""
    allocated: int = 0
    freed: int = 0
    let_go: int = 0
    """Part of `freed` that the half by inputs of a split backward pass frees, too: gradients that
    are no layer's output. It keeps all else for the half by weights."""
    reduces_experts: bool = False
    """It is the reduction of routed experts that are a unit of their own: their gathered parameters
    and what was reduced before are gone by then."""
    beside: int = 0
    """Gradients of norms' outputs that it keeps beside those of their inputs, which are no larger:
    a whole backward pass has one of the two."""


def sum_of_two(gradient: int) -> BackwardStep:
    """The gradients of an input that two layers read."""
    return BackwardStep(allocated=gradient, freed=2 * gradient, let_go=2 * gradient)


Steps = tuple[BackwardStep, ...]


class Operator(NamedTuple):
    """One operator of a block, forward and backward."""

    name: str
    """That of its matrix or norm within the block, or of what it does."""
    place: Place
    """The stretch of the block that it stands in."""
    kind: OperatorKind
    product: Product | None = None
    """Of a matmul."""
    forward_bytes: float = 0.0
    """Memory traffic: of an element-wise operator its own; of a matmul what stands beside it, casts
    and sums."""
    backward_bytes: float = 0.0
    saved_bytes: int = 0
    """Kept from forward to backward, without checkpointing."""
    statistics_bytes: int = 0
    """Part of `saved`: fp32 row statistics of norms, and the log-sum-exp of attention."""
    remade_bytes: int = 0
    """Part of `saved` that a software makes again in backward from what it keeps, or keeps at half
    the width, whatever the mode: it is back, at most all of it at once, when the block's backward
    runs."""
    unkept_bytes: int = 0
    """Part of `saved` that mode `attention` does not keep."""
    outputs: tuple[int, ...] = ()
    """Bytes of what plain matmuls return, one for each of stacked ones: of these per-operator
    checkpointing keeps every second. Grouped ones of routed experts are not among them.
    Source: torchtitan torchtitan/parallelisms/parallelize_llama.py, `_get_custom_policy`."""
    steps: Steps = ()
    """What its backward allocates and frees, in the order of backward."""

    @property
    def beside(self) -> Operator:
        """What is made again where its output is kept: all but its product."""
        return Operator(
            self.name, self.place, self.kind, None, self.forward_bytes, self.backward_bytes
        )


def with_memory(
    operator: Operator,
    *,
    saved: int = 0,
    remade: int = 0,
    outputs: tuple[int, ...] = (),
    steps: Steps = (),
) -> Operator:
    """`operator` with what it keeps, and what its backward allocates and frees."""
    return Operator(
        *operator[:6], saved_bytes=saved, remade_bytes=remade, outputs=outputs, steps=steps
    )


CHAIN: dict[Kernels, tuple[int, int]] = {"eager": (5, 8), "compiled": (4, 6), "fused": (5, 8)}
NORM: dict[Kernels, tuple[int, int]] = {"eager": (2, 5), "compiled": (1, 2), "fused": (2, 5)}
ROTATION: dict[Kernels, tuple[int, int]] = {"eager": (9, 9), "compiled": (2, 2), "fused": (2, 2)}
GATE: dict[Kernels, tuple[int, int]] = {"eager": (5, 9), "compiled": (3, 5), "fused": (3, 5)}
GELU: dict[Kernels, tuple[int, int]] = {"eager": (2, 3), "compiled": (2, 3), "fused": (2, 3)}
JOINED = (4, 4)
"""Heads whose parts are put together."""

CONVOLUTION = (2, 5)
"""Passes over what a convolution of a few tokens reads: read and written; in backward gradient and
input read, the activation made again, the gradient written."""

COMPOSITE_NORM_BYTES = (32.0, 70.0)
"""What an eager RMSNorm of operators moves beyond a fused one, in bytes an element of 16 bits.

Forward: cast to fp32 (6), square (8), mean (4), product with the root (8), cast back (6), product
with the weight (4), less the 4 of one kernel. Backward: the weight's product (8) and sum (2), cast
(6), product (8) and its sum (12), square (24: gradient laid out, times input, times two), sum of
both branches (12), cast (6), less one reading that they share (8).
Source: torch 2.5 aten rms_norm; torchtitan of 2024 torchtitan/models/norms.py.
"""


def streamed(
    name: str,
    place: Place,
    passes: tuple[float, float],
    size: float,
    *,
    saved: int = 0,
    remade: int = 0,
    steps: Steps = (),
) -> Operator:
    """An element-wise operator of so many passes (forward, backward) over `size` bytes."""
    return Operator(
        name,
        place,
        "elementwise",
        None,
        passes[0] * size,
        passes[1] * size,
        saved_bytes=saved,
        remade_bytes=remade,
        steps=steps,
    )


def is_composite(work: BlockWork) -> bool:
    """Whether RMSNorms are several kernels."""
    is_eager = work.composite_norms and work.kernels == "eager"
    return is_eager and work.model.norm == "rmsnorm"


def as_operators(norm: Operator, elements: float, work: BlockWork) -> Operator:
    """A norm with what it moves beyond one kernel, where it is several."""
    if not is_composite(work):
        return norm
    forward, backward = COMPOSITE_NORM_BYTES
    return norm._replace(
        forward_bytes=norm.forward_bytes + forward * elements,
        backward_bytes=norm.backward_bytes + backward * elements,
    )

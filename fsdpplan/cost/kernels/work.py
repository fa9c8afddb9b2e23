"""Work: what the compute time of one block depends on, and what becomes of it.

`BlockWork` is the key under which a block's time is remembered; the modules that price its parts
(`products`, `attention`, `elementwise`, `experts`, `fp8`, `dispatch`) read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.spec.cluster import Device
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model
from fsdpplan.spec.runtime import StackFamily
from fsdpplan.spec.training import DTYPE_BYTES, Fp8Recipe, Precision

Kernels = Literal["eager", "compiled", "fused"]
"""Who writes the element-wise kernels: PyTorch, one an operator; its compiler, one a chain; or a
library by hand, one a norm, rotation, activation or addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block for one micro-batch on one rank.

    `forward`, `recompute` and `backward` are what the slower of device and host needs; the host's
    share stands beside them for whoever adds up stretches in which it runs ahead.
    """

    forward_seconds: float
    recompute_seconds: float
    """Forward work done again in backward by activation checkpointing."""
    backward_seconds: float
    """Without the recomputation."""
    forward_host_seconds: float = 0.0
    """What the host needs to dispatch the forward."""
    recompute_host_seconds: float = 0.0
    backward_host_seconds: float = 0.0
    forward_device_seconds: float = 0.0
    """What the device needs for the forward if nothing keeps it waiting."""
    recompute_device_seconds: float = 0.0
    backward_device_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What a block's shape comes down to; the key under which its time is remembered."""

    model: Model
    """With experts: the block has them. A block without is one of `dense_view(model)`."""
    tokens: int
    """Tokens of a micro-batch on a rank, before sequence parallelism."""
    seq_len: int
    """Length that attention sees."""
    tp: int
    sequence_parallel: bool
    precision: Precision
    """Number format of the matmuls."""
    mode: ActivationCheckpointing
    compiled: bool
    autocast: bool
    """Weights are cast in each forward."""
    residual_bytes: int
    """One element of the residual stream: 4 where plain autocast leaves it in fp32."""
    wrapper_operators: float
    """What the data-parallel wrapper dispatches on the host for this block, in operators."""
    cp: int = 1
    """Ranks over which a sequence is split; `tokens` are one rank's."""
    ep: int = 1
    """Ranks over which the routed experts are split, tensor-parallel ones apart."""
    experts_over_tp: bool = False
    """Tensor-parallel ranks have whole experts, and a part of the tokens for them."""
    family: StackFamily = "pytorch"
    """Whose kernels they are."""
    fused_kernels: bool = False
    """The block is not compiled, but its element-wise kernels are fused by hand."""
    joined_projections: bool = False
    """Projections of one input are one matrix: query, key and value; gate and up."""
    flash_attention: bool = True
    """Scores are not written to memory."""
    native_attention: bool = False
    """Fused attention uses the asynchronous tensor cores of devices that have them."""
    dropout: bool = False
    """Attention and both residual branches drop elements at random."""
    composite_norms: bool = False
    """Eager RMSNorms are PyTorch operators in fp32, one by one."""
    repeats_whole_block: bool = False
    """Full checkpointing repeats the last matmul too."""
    remakes_latents: bool = False
    """Queries, keys and values of latents are made again in backward, whatever the mode."""
    fp8_recipe: Fp8Recipe = "tensorwise"
    fp8_all_gather: bool = False
    """Weights arrive in fp8: nothing is left to cast."""
    weight_casts: float = 1.0
    """fp8 casts of a weight a micro-batch: less than 1 where one cast serves several."""

    @property
    def kernels(self) -> Kernels:
        """Who writes the element-wise kernels."""
        if self.compiled:
            return "compiled"
        return "fused" if self.fused_kernels else "eager"

    @property
    def activation_dtype(self) -> Precision:
        """Number format of activations: fp8 is only that of matmuls' operands."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def element_bytes(self) -> int:
        """One element of an activation inside the block."""
        return DTYPE_BYTES[self.activation_dtype]

    @property
    def routed_tokens(self) -> float:
        """Tokens that this rank scores, and whose copies it sends to experts."""
        return self.tokens / self.tp if self.experts_over_tp else self.tokens

    @property
    def residual_elements(self) -> float:
        """Elements of the residual stream on this rank."""
        tokens = self.tokens / self.tp if self.sequence_parallel else self.tokens
        return tokens * self.model.hidden


def memory_bytes_per_second(device: Device) -> float:
    """What element-wise kernels reach of the memory bandwidth."""
    return device.memory_bandwidth_bytes_per_second * device.fit.memory_fraction

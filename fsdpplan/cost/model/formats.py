"""Formats: bytes of one element of each kind of tensor, and how many tokens a rank sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdpplan.cost.model.block_sizes import FP32_BYTES, Kernels
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import DTYPE_BYTES, Training


def local_tokens(*, training: Training, layout: Layout) -> int:
    """Tokens of one micro-batch on one rank, before sequence parallelism splits them."""
    return layout.micro_batch * -(-training.seq_len // layout.cp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes of one element of each kind of tensor."""

    computed: int
    """Matmuls' inputs, outputs and weights."""
    gathered: int
    """Unsharded parameters and their gradients."""
    residual: int
    """The residual stream."""
    reduced: int
    """Gradients in the collectives."""
    gathered_matrix: int
    """Unsharded matrices of the blocks: fp8 where FSDP gathers them so."""
    resident: int
    """Parameters between steps, masters apart."""

    @property
    def autocasts(self) -> bool:
        """Weights and inputs are cast for each matmul."""
        return self.computed < self.gathered


def formats(*, training: Training, layout: Layout) -> Formats:
    """Number formats of a training: DDP has fp32 parameters and autocast, unless the runtime keeps
    them in half precision; FSDP2 gathers in the compute dtype. The reference decoder keeps its
    residual stream in the compute dtype under autocast too; a script of the runtime `autocast` has
    it in fp32, as plain autocast leaves it."""
    return _formats(training, layout.sharding == "fsdp")


@lru_cache(maxsize=64)
def _formats(training: Training, is_fsdp: bool) -> Formats:
    traits = training.traits
    computed = DTYPE_BYTES[training.activation_dtype]
    resident = computed if traits.half_parameters or traits.half_states else FP32_BYTES
    gathered = FP32_BYTES if traits.gathers_fp32 else computed if is_fsdp else resident
    is_fp8 = is_fsdp and training.fp8_all_gather
    return Formats(
        computed=computed,
        gathered=gathered,
        residual=FP32_BYTES if traits.fp32_residual else computed,
        reduced=DTYPE_BYTES[training.reduce_dtype],
        gathered_matrix=DTYPE_BYTES["fp8"] if is_fp8 else gathered,
        resident=resident,
    )


def kernels_of(*, training: Training, layout: Layout) -> Kernels:
    """How a block's kernels are written: by the compiler, or by the software.

    Transformer Engine, whose recipe is `delayed`, keeps matmul inputs in fp8 for backward; torchao
    keeps them as they came and casts again. Megatron's fused activation weighs routed experts.
    Sources: torchao torchao/float8/float8_linear.py; Transformer Engine
    transformer_engine/pytorch/module/linear.py; Megatron-LM
    megatron/core/fusions/fused_bias_swiglu.py, `WeightedSwiGLUFunction`.
    """
    return _kernels(training, layout.compile)


@lru_cache(maxsize=64)
def _kernels(training: Training, is_compiled: bool) -> Kernels:
    traits = training.traits
    is_fp8 = training.precision == "fp8"
    return Kernels(
        fused=is_compiled or traits.fused_kernels,
        drops_unused=is_compiled,
        flash=traits.flash_attention,
        reference_decoder=traits.reference_decoder,
        dropout=traits.dropout,
        fp8_inputs=is_fp8 and (training.fp8_recipe == "delayed" or traits.keeps_fp8),
        fp8_rows=is_fp8 and traits.keeps_fp8,
        remakes_latents=traits.remakes_latents,
        composite_norms=traits.composite_norms,
        weighs_inside=traits.fused_kernels,
        remakes_product=traits.remakes_product,
        gathers_again=traits.overlaps_weight_gradient or traits.regathers_inputs,
        ring_attention=traits.ring_attention,
    )

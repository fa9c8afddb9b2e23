"""Block work: what one block computes for one micro-batch on one rank.

`BlockWork` is all that decides a block's operators (`operators` beside it), and the key under which
what is read of them is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Literal

from fsdpplan.cost.model.attention_kernel import (
    AttentionKernel,
    added_width,
    attention_kernel,
    documents_one_by_one,
    masked_share,
)
from fsdpplan.cost.model.formats import formats, local_tokens
from fsdpplan.cost.model.params import block_tensors, trained_tensors
from fsdpplan.spec.layout import ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case
from fsdpplan.spec.runtime import StackFamily
from fsdpplan.spec.training import DTYPE_BYTES, Fp8Recipe, Precision, Training
from fsdpplan.spec.values import RemembersHash, remembered_hash

Kernels = Literal["eager", "compiled", "fused"]
"""Who writes the element-wise kernels: PyTorch, one an operator; its compiler, one a chain; or a
library by hand, one a norm, rotation, activation or addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork(RemembersHash):
    """What a block's shape comes down to; the key under which what is read of it is remembered."""

    __hash__ = remembered_hash

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
    document_tokens: float = inf
    """Mean length of documents that attention stays inside; infinite: sequences are whole."""
    cp: int = 1
    """Ranks over which a sequence is split; `tokens` are one rank's."""
    trades_heads: bool = False
    """Around attention those ranks have all tokens, of fewer heads."""
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
    attention_kernel: AttentionKernel = "flash"
    """What computes attention."""
    masks_windows: bool = False
    """Fused attention knows no windows: it is given a mask, and computes what that leaves out."""
    one_by_one: bool = False
    """Packed documents go through attention one after the other."""
    added_width: int = 0
    """Columns that are added to heads for what no kernel knows, to values as well."""
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

    reference_decoder: bool = False
    """The trainer's own block, on PyTorch's function of attention."""
    masked: bool = False
    """Attention is given a mask: kernels that take one read keys and values of every query head."""
    packed: bool = False
    """Positions are those of documents, other ones in each sequence."""
    ring_attention: bool = False
    """Context parallelism passes keys and values on, piece by piece; else it gathers them."""
    gathers_again: bool = False
    """Under sequence parallelism, matmuls keep the rank's part of their input and gather it again
    in backward, into a buffer that all share."""
    fp8_inputs: bool = False
    """Matmuls keep their inputs in fp8 for backward."""
    fp8_rows: bool = False
    """Rows of routed experts, gate and up are kept in fp8, too."""
    remakes_product: bool = False
    """The input of the down projection is not kept: backward makes it of gate and up."""

    @property
    def flash_attention(self) -> bool:
        """Scores are not written to memory."""
        return self.attention_kernel != "scores"

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
        return DTYPE_BYTES["bf16" if self.precision == "fp8" else self.precision]

    @property
    def casts_stream(self) -> bool:
        """The residual stream is wider than what is computed with, and cast by kernels."""
        return self.residual_bytes != self.element_bytes and not self.compiled

    @property
    def routed_tokens(self) -> float:
        """Tokens that this rank scores, and whose copies it sends to experts."""
        return self.tokens / self.tp if self.experts_over_tp else self.tokens

    @property
    def exchanges_rows(self) -> bool:
        """Copies of tokens go to the ranks of their experts and back."""
        return self.ep > 1 or self.experts_over_tp

    @property
    def drops_branches(self) -> bool:
        """The trainer's own block drops elements of its branches, and keeps what was drawn."""
        return self.dropout and self.reference_decoder

    @property
    def rank_seq_len(self) -> int:
        """The rank's part of a sequence."""
        return -(-self.seq_len // self.cp)

    @property
    def residual_tokens(self) -> int:
        """Rows of the residual stream on the fullest rank."""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    @property
    def residual_elements(self) -> float:
        """Elements of the residual stream on this rank."""
        tokens = self.tokens / self.tp if self.sequence_parallel else self.tokens
        return tokens * self.model.hidden


FSDP_UNIT_OPERATORS = 15.0
"""Operators that FSDP2 dispatches for one unit in each of forward and backward: allocations,
copies, collectives. Counted on the trainer's step (tests/ground_truth, torch 2.13, reshard always):
27 in both for a block of 9 parameters, 32 for one of 16."""

FSDP_PARAMETER_OPERATORS = 2.0
"""What its Python does in each of them for one parameter: views made, modules handed the parameter,
and the sharded one again. From 36 compiled units of GPT-2 Large on one H100, whose host takes 5 ms
a unit, beside 10 us for a bare kernel."""

ALONE_PARAMETER_OPERATORS = 2.0
"""Over one rank nothing is gathered, and each parameter is cast and copied by itself: counted in
the same profile."""

DDP_PARAMETER_OPERATORS = 0.5
"""DDP's reducer divides each gradient once in backward: half an operator in each pass. Read off
torch's reducer, not measured."""


def is_autocast(*, training: Training, layout: Layout) -> bool:
    """Whether blocks cast fp32 weights in each forward, instead of being handed cast ones."""
    traits = training.traits
    if training.precision == "fp32" or traits.half_parameters or training.half_states:
        return False
    if training.adapters is not None:  # which cast themselves to what the base is in
        return False
    return layout.sharding != "fsdp" or traits.gathers_fp32


@lru_cache(maxsize=4096)
def block_work(case: Case) -> BlockWork:
    """What one block computes for one micro-batch on one rank; of a model with experts, one that
    has them (`dense_view(model)` for one that has not).

    Sources of what is kept: torchao torchao/float8/float8_linear.py; Transformer Engine
    transformer_engine/pytorch/module/linear.py; Megatron-LM
    megatron/core/fusions/fused_bias_swiglu.py, whose fused activation weighs routed experts.
    """
    model, training, layout = case.model, case.training, case.layout
    device = case.cluster.device
    traits = training.traits
    if layout.sharding == "fsdp":
        each = FSDP_PARAMETER_OPERATORS
        each += ALONE_PARAMETER_OPERATORS if layout.shard_ranks == 1 else 0.0
        wrapper = FSDP_UNIT_OPERATORS / layout.wrap_blocks
        wrapper += 0.0 if traits.flat_parameters else each * len(block_tensors(model))
    elif layout.dp_replicate * layout.dp_shard > 1:
        wrapper = DDP_PARAMETER_OPERATORS * trained_tensors(model)
    else:
        wrapper = 0.0
    is_fp8 = training.precision == "fp8"
    caches_fp8_weights = training.fp8_recipe == "delayed"  # until the optimizer has changed them
    return BlockWork(
        model=model,
        tokens=local_tokens(training=training, layout=layout),
        seq_len=training.seq_len,
        document_tokens=training.document_tokens,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        precision=training.precision,
        mode=layout.activation_checkpointing,
        compiled=layout.compile,
        autocast=is_autocast(training=training, layout=layout),
        residual_bytes=formats(training=training, layout=layout).residual,
        wrapper_operators=wrapper,
        cp=layout.cp,
        trades_heads=layout.cp_attention == "ulysses",
        ep=layout.ep if model.experts else 1,
        experts_over_tp=layout.experts_over_tp and model.experts is not None,
        family=training.family,
        fused_kernels=traits.fused_kernels,
        joined_projections=traits.joined_projections,
        attention_kernel=attention_kernel(model=model, training=training, device=device),
        masks_windows=masked_share(model=model, training=training, device=device) > 0,
        one_by_one=documents_one_by_one(model=model, training=training, device=device),
        added_width=added_width(model) if traits.reference_decoder else 0,
        dropout=traits.dropout or training.dropped.residual > 0,
        composite_norms=traits.composite_norms,
        remakes_latents=traits.remakes_latents,
        repeats_whole_block=repeats_whole_block(model=model, training=training),
        fp8_recipe=training.fp8_recipe,
        fp8_all_gather=training.fp8_all_gather,
        weight_casts=1 / layout.num_microbatches if caches_fp8_weights else 1.0,
        reference_decoder=traits.reference_decoder,
        packed=training.packed,
        ring_attention=traits.ring_attention,
        gathers_again=traits.overlaps_weight_gradient or traits.regathers_inputs,
        # Transformer Engine, whose recipe this is, keeps inputs in fp8; torchao casts them again
        fp8_inputs=is_fp8 and (caches_fp8_weights or traits.keeps_fp8),
        fp8_rows=is_fp8 and traits.keeps_fp8,
        remakes_product=traits.remakes_product,
    )


def repeats_whole_block(*, model: Model, training: Training) -> bool:
    """Whether recomputation makes a block's last output again: torch's stops once backward has all
    that it needs, and a norm behind the feed-forward network needs what it normalizes, dropout
    there its mask."""
    of_the_last = model.post_norms or training.dropped.residual > 0
    return training.traits.repeats_whole_block or of_the_last

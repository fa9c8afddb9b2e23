"""Rank quantities: what one rank's memory phases add up.

`sizes` makes the quantities, `fsdp_moments`, `replica_moments` and `pipeline_moments` the
candidates for the peak, `peak` takes the highest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fsdpplan.cost.kernels.head import LossPieces
from fsdpplan.cost.memory.activations import BlockActivations
from fsdpplan.cost.memory.weight_gradients import SplitBackward
from fsdpplan.cost.schedule.moments import Moments


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSizes:
    """An FSDP unit of what no block holds."""

    gathered_bytes: int = 0
    buffer_bytes: int = 0
    """The flat buffer that it is gathered into."""
    gradient_bytes: int = 0
    """Unsharded, in the compute dtype, when its reduction begins."""
    last_gradient_bytes: int = 0
    """Of that, the gradient which is still there when the reduction returns."""
    reduce_bytes: int = 0
    """Its reduce-scatter input."""
    held_bytes: int = 0
    """Unsharded gradients of earlier micro-batches."""
    shard_elements: int = 0

    def __bool__(self) -> bool:
        return self.gathered_bytes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The units of a rank beside its blocks; each may be nothing."""

    tables: EndSizes
    """The embedding's, by itself: there in forward alone."""
    head: EndSizes
    """Of the final norm and the head: there from the end of forward to the beginning of backward.
    """
    root: EndSizes
    """The rest, or all: there from the first forward to the end of backward."""

    @property
    def gathered_bytes(self) -> int:
        """Of all."""
        return sum(end.gathered_bytes for end in (self.tables, self.head, self.root))

    @property
    def held_bytes(self) -> int:
        """Of all."""
        return sum(end.held_bytes for end in (self.tables, self.head, self.root))

    @property
    def shard_elements(self) -> int:
        """Of all."""
        return sum(end.shard_elements for end in (self.tables, self.head, self.root))

    @property
    def first(self) -> EndSizes:
        """What is gathered right before the first block."""
        return self.tables or self.root

    @property
    def last(self) -> EndSizes:
        """What is reduced last."""
        return self.tables or self.root


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRun:
    """Blocks of one kind, one behind another in an FSDP unit, and their routed experts, which
    expert parallelism gathers and reduces apart, a block's at a time."""

    end: int
    """Blocks of the unit up to the last of these."""
    number: int
    block: BlockActivations
    """Activations of one."""
    experts_bytes: int = 0
    """Parameters of one block's routed experts in the compute dtype; 0 where they are not apart."""
    experts_prefetched_bytes: int = 0
    """Their part of what is gathered ahead."""
    experts_buffer_bytes: int = 0
    """The flat buffer that they are gathered into."""
    experts_reduce_bytes: int = 0
    """Their reduce-scatter input."""
    experts_held_bytes: int = 0
    """Their unsharded gradients kept from earlier micro-batches."""
    experts_shard_elements: int = 0
    """Of one block's experts, the elements of a rank."""
    experts_kept_bytes: int = 0
    """What stays of one block's experts between forward and backward."""


class Left(NamedTuple):
    """What units leave behind: in forward what they save and keep, in backward their shards."""

    saved_bytes: int
    """Activations."""
    kept_bytes: int
    """Of gathered parameters."""
    held_bytes: int
    """Unsharded gradients of earlier micro-batches."""
    shard_elements: int
    """Elements of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """An FSDP unit of blocks, without routed experts that are units of their own."""

    runs: tuple[UnitRun, ...]
    """Its blocks, in the order of forward."""
    gathered_bytes: int
    """Its parameters in the compute dtype, padded."""
    buffer_bytes: int
    """The flat buffer that they are gathered into; 0 where one rank has all."""
    prefetched_bytes: int
    """What is gathered ahead of it."""
    gradient_bytes: int
    """Its unsharded gradient in the compute dtype, when its reduction begins."""
    reduce_bytes: int
    """Its reduce-scatter input."""
    held_bytes: int
    """Its unsharded gradient kept from earlier micro-batches."""
    kept_bytes: int
    """What stays of its parameters between forward and backward."""
    shard_elements: int

    @property
    def blocks(self) -> int:
        """How many it has."""
        return self.runs[-1].end

    @property
    def leaves(self) -> Left:
        """What there is of it while it is not at work, its routed experts counted."""
        return Left(
            saved_bytes=sum(run.number * run.block.saved_bytes for run in self.runs),
            kept_bytes=self.kept_bytes
            + sum(run.number * run.experts_kept_bytes for run in self.runs),
            held_bytes=self.held_bytes
            + sum(run.number * run.experts_held_bytes for run in self.runs),
            shard_elements=self.shard_elements
            + sum(run.number * run.experts_shard_elements for run in self.runs),
        )

    @property
    def last_prefetched_bytes(self) -> int:
        """What was gathered last when it went forward: its experts, where they are apart."""
        return self.runs[-1].experts_prefetched_bytes or self.prefetched_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What the phases add up: sizes on one rank."""

    blocks: int
    """Blocks on this rank."""
    unit_blocks: int
    """Blocks in an FSDP unit; the last unit may have fewer."""
    has_lean_units: bool
    """Buffers of a unit are gone when the next one's come (`torch_traits`)."""
    keeps_reduction_behind: bool
    """What a unit was reduced from is still there while the next one is (`torch_traits`)."""
    gathers_in_place: bool
    """Units are gathered where they are computed with (FSDP1); FSDP2 copies them out of buffers."""
    unit_kinds: tuple[UnitSizes, ...]
    """FSDP units of blocks, each once; none in a pipeline and without FSDP."""
    unit_order: tuple[int, ...]
    """Which of them each unit is, in the order of forward."""
    gathered_block_bytes: int
    """A block's parameters in the compute dtype, padded: in the mean."""
    copies_block_bytes: int
    """Autocast's copies of a block's weights in the compute dtype; 0 without autocast."""
    copies_root_bytes: int
    """The same of the head's weight."""
    caches_copies: bool
    """Those of all blocks stay to the end of forward, though backward makes them anew."""
    regathers: bool
    """Backward gathers the blocks again."""
    reduce_block_bytes: int
    """A block's part of the reduce-scatter input, without experts that are a unit of their own."""
    reduce_experts_bytes: int
    """Those experts' reduce-scatter input; 0 where there are none."""
    held_block_bytes: int
    """Unsharded gradient of a block kept from earlier micro-batches."""
    ends: Ends
    behind_ends_bytes: int
    """The last reduce-scatter input of the micro-batch before, kept until the next reduction."""
    head_gradient_bytes: int
    """Unsharded gradient of the head's weight, until its unit's reduction; 0 without a head."""
    head_gradient_made_bytes: int
    """The same at the moment when backward makes it."""
    embedding_gradient_bytes: int
    """Full gradients of the embedding tables (also under tensor parallelism); 0 without one."""
    bucket_copy_bytes: int
    """A bucket in the reduce dtype, where that is not the gradients'; DDP only."""
    head_copy_bytes: int
    """The same of the bucket that the head's gradient fills; 0 where gradients are not cast."""
    table_copy_bytes: int
    """The same of the one that the embedding's gradient fills, which is the last."""
    sent_copies_bytes: int
    """The same of all buckets, which a pipeline waits for when its step is through."""
    shard_block_elements: int
    earlier_gradient_bytes: int
    """Of one element of a gradient shard before the last micro-batch reduces it."""
    later_gradient_bytes: int
    """Of one element after that, with what HSDP keeps of its all-reduce."""
    reduced_bytes: int
    """Of one element of a gradient shard while it is reduced: the output, and its copy in the dtype
    of the parameters."""
    resident_gradient_bytes: int
    """Gradients and buckets that are there all the time; 0 under FSDP."""
    whole_table_gradient_bytes: int
    """Rows of the token table's gradient that other tensor-parallel ranks will keep: a pipeline
    without FSDP holds them from its first backward pass until they are reduced."""
    grown_block_bytes: int
    """Gradients that a block's backward leaves beside those, to be added after the pass."""
    grown_root_bytes: int
    """The same of embedding, final norm and head."""
    block: BlockActivations
    """Of a block as the layout's recomputation leaves it."""
    kept: BlockActivations
    """Of a block that keeps everything though the layout recomputes; the same where none does."""
    kept_blocks: int
    """Blocks on this rank of that kind: the last of each stage."""
    other_micro_batches_bytes: int
    """Activations of the other micro-batches in the pipeline."""
    beside_blocks_bytes: int
    """Part of that which is not saved by blocks, and there as long as anything is in flight."""
    split: SplitBackward
    """What splitting backward passes keeps."""
    pipeline_ends: int
    """Of embedding and head, how many are here."""
    moments: Moments
    """What a pipeline rank holds while it works through its schedule."""
    keeps_stages: bool
    """Parameters of all stages of a pipeline rank stay gathered; torch drops those that it will not
    soon need."""
    graded_blocks: int
    """Most blocks of a pipeline rank that have unsharded gradients at once."""
    frees_messages: bool
    """What a stage has sent is freed; torch keeps what the first one has."""
    reduces_tables_last: bool
    """Gradients of the embedding are reduced after those of the blocks, and the head's before, not
    the other way round; of a root that holds all, likewise."""
    message_buffers_bytes: int
    """Buffers for the messages of a pipeline's step."""
    recorded_bytes: int
    """What tensor-parallel collectives still use when the program has freed it."""
    last_residual_bytes: int
    """Input of the final norm; 0 without a head."""
    last_normed_bytes: int
    """Input of the head; 0 without a head."""
    unkept_normed_bytes: int
    """The same where a head that is not trained lets go of it."""
    logits_elements: int
    """Logits on this rank; 0 without a head."""
    logits_gather_bytes: int
    """Further logits while tensor-parallel ranks gather them for the loss."""
    loss_element_bytes: int
    """All tensors of the loss, for one of the logits, at its highest."""
    loss_gradient_element_bytes: int
    """The gradient of one of the logits, as the loss makes it."""
    element_bytes: int
    """Of the compute dtype."""
    pieces: LossPieces | None = None
    """Of a loss that is made in pieces; None: it is whole, or on another rank."""

    @property
    def units(self) -> int:
        """Number of block units."""
        return -(-self.blocks // self.unit_blocks)

    def unit(self, index: int) -> UnitSizes:
        """Unit `index`, in forward order."""
        return self.unit_kinds[self.unit_order[index]]

    def gradient_bytes(self, reduced: int) -> int:
        """Gradient shards when the last micro-batch has reduced so many elements; or the first one,
        where that leaves more."""
        elements = self.blocks * self.shard_block_elements + self.ends.shard_elements
        gained = self.later_gradient_bytes - self.earlier_gradient_bytes
        last = elements * self.earlier_gradient_bytes + reduced * gained
        return max(last, reduced * self.earlier_gradient_bytes)

    def copy_bytes(self, blocks: int) -> int:
        """Autocast's copies that `blocks` blocks keep for backward; recomputation makes them anew
        and has one block's."""
        kept = self.kept_among(blocks) if self.recomputes else blocks
        return (kept or min(blocks, 1)) * self.copies_block_bytes

    def forward_copy_bytes(self, blocks: int) -> int:
        """The same while forward is in the last of `blocks` blocks."""
        return blocks * self.copies_block_bytes if self.caches_copies else self.copy_bytes(blocks)

    @property
    def kept_copy_bytes(self) -> int:
        """The same of all blocks, when forward is behind them and none is at work."""
        return (self.kept_blocks if self.recomputes else self.blocks) * self.copies_block_bytes

    @property
    def recomputes(self) -> bool:
        """Backward makes again what blocks did not save."""
        return self.block.live_bytes > self.block.saved_bytes

    def kept_among(self, blocks: int) -> int:
        """Those of the first `blocks` blocks that keep everything though others recompute."""
        return max(0, blocks - (self.blocks - self.kept_blocks))

    def runs(self, first: int, blocks: int) -> list[tuple[int, int, BlockActivations]]:
        """The blocks from `first` on as (end, how many, activations of one): those that recompute,
        then those that keep everything."""
        end = first + blocks
        kept = min(blocks, self.kept_among(end))
        runs = ((end - kept, blocks - kept, self.block), (end, kept, self.kept))
        return [run for run in runs if run[1]]

    def saved_bytes(self, blocks: int) -> int:
        """Activations of the first `blocks` blocks, and of the other micro-batches in the
        pipeline."""
        kept = self.kept_among(blocks)
        return self.saved_bytes_by(blocks, kept=kept) + self.other_micro_batches_bytes

    def saved_bytes_by(self, blocks: int, *, kept: int) -> int:
        """Activations of `blocks` blocks of which `kept` keep everything."""
        return (blocks - kept) * self.block.saved_bytes + kept * self.kept.saved_bytes

    def held_bytes(self, blocks: int) -> int:
        """Unsharded gradients that `blocks` blocks and the other units keep from earlier
        micro-batches."""
        return blocks * self.held_block_bytes + self.ends.held_bytes

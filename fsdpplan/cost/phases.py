"""Phases: the moments of one step at which a rank's memory can be highest.

FSDP2 gathers a unit into a flat buffer, copies it out into parameters, computes and frees it; the
flat buffer of a forward gather lives until the next unit's copy-out is done. Backward gathers the
unit before in advance and keeps the reduce-scatter input of the unit behind until the next
reduction. The root (embedding, final norm, head) stays gathered from the first forward to the end
of backward. Each function below returns the candidates of one stretch of that timeline, in the last
micro-batch of a step, read off torch 2.13's `_fsdp_param_group.py` and `_fsdp_collectives.py` and
off real FSDP2 steps under fake tensors; every quantity is linear in the unit's index, so the first
and last two units bound the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.activations import BlockActivations


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One candidate for the peak: bytes beside the parameter shards and optimizer state."""

    name: str
    gradients: int = 0
    """fp32 gradient shards."""
    unsharded_parameters: int = 0
    """Gathered parameters, gather buffers, and autocast's copies of weights."""
    unsharded_gradients: int = 0
    """Gradients before reduction, and reduce-scatter inputs."""
    activations: int = 0
    """Saved for backward or recomputed."""
    logits: int = 0
    """Logits, log-probabilities and their gradients."""
    temporaries: int = 0
    """Of the operation at hand."""

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.gradients
            + self.unsharded_parameters
            + self.unsharded_gradients
            + self.activations
            + self.logits
            + self.temporaries
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSizes:
    """What the phases add up: sizes on one rank, in bytes unless said otherwise."""

    blocks: int
    """Blocks on this rank."""
    unit_blocks: int
    """Blocks in an FSDP unit; the last unit may have fewer."""
    gathered_block: int
    """A block's parameters in the compute dtype, padded."""
    buffer_block: int
    """A block's part of the flat gather buffer; 0 where one rank has all."""
    prefetched_block: int
    """A block's part of what is gathered one unit ahead."""
    copies_block: int
    """Autocast's copies of a block's weights in the compute dtype; 0 without autocast."""
    copies_root: int
    """The same of the head's weight."""
    kept_block: int
    """What stays of a gathered block between forward and backward: all (reshard never), a smaller
    shard (integer), nothing (always)."""
    regathers: bool
    """Backward gathers the blocks again."""
    block_gradient: int
    """Unsharded gradient of a block in the compute dtype, when its reduction begins."""
    reduce_block: int
    """A block's part of the reduce-scatter input."""
    held_block: int
    """Unsharded gradient of a block kept from earlier micro-batches."""
    gathered_root: int
    buffer_root: int
    root_gradient: int
    reduce_root: int
    held_root: int
    behind_root: int
    """The root's reduce-scatter input of the micro-batch before, kept until the next reduction."""
    head_gradient: int
    """Unsharded gradient of the head's weight, until the root's reduction; 0 without a head."""
    head_gradient_made: int
    """The same at the moment when backward makes it."""
    embedding_gradient: int
    """Full gradients of the embedding tables (also under tensor parallelism); 0 without one."""
    bucket_copy: int
    """A bucket in the reduce dtype, where that is not fp32; DDP only."""
    shard_block_elements: int
    shard_root_elements: int
    earlier_gradient_bytes: int
    """Of one element of a gradient shard before the last micro-batch reduces it."""
    later_gradient_bytes: int
    """Of one element after that, with what HSDP keeps of its all-reduce."""
    reduced_bytes: int
    """Of one element of a gradient shard while it is reduced: the output, and its fp32 copy."""
    block: BlockActivations
    other_micro_batches: int
    """Activations of the other micro-batches in the pipeline."""
    is_steady: bool
    """The pipeline has more micro-batches than this rank holds at once: gradients of earlier ones
    are held beside the most activations."""
    message_buffers: int
    """Buffers for the messages of a pipeline's step."""
    last_residual: int
    """Input of the final norm; 0 without a head."""
    last_normed: int
    """Input of the head; 0 without a head."""
    logits_elements: int
    """Logits on this rank; 0 without a head."""
    logits_gather_bytes: int
    """Further logits while tensor-parallel ranks gather them for the loss."""
    loss_element_bytes: int
    """All fp32 tensors of the loss, for one of the logits, at its highest."""
    element_bytes: int
    """Of the compute dtype."""

    @property
    def units(self) -> int:
        """Number of block units."""
        return -(-self.blocks // self.unit_blocks)

    def blocks_of(self, index: int) -> int:
        """Blocks of unit `index`, in forward order."""
        return min(self.unit_blocks, self.blocks - index * self.unit_blocks)

    def gradients(self, reduced_blocks: int) -> int:
        """Gradient shards when the last micro-batch has reduced so many blocks."""
        block_elements = self.shard_block_elements
        elements = self.blocks * block_elements + self.shard_root_elements
        gained = self.later_gradient_bytes - self.earlier_gradient_bytes
        return elements * self.earlier_gradient_bytes + reduced_blocks * block_elements * gained

    def copies(self, blocks: int) -> int:
        """Autocast's copies that `blocks` blocks keep for backward; recomputation makes them anew
        and has one block's."""
        recomputes = self.block.live_bytes > self.block.saved_bytes
        return min(blocks, 1 if recomputes else blocks) * self.copies_block

    def saved(self, blocks: int) -> int:
        """Activations of `blocks` blocks, and of the other micro-batches in the pipeline."""
        return blocks * self.block.saved_bytes + self.other_micro_batches

    def held(self, blocks: int) -> int:
        """Unsharded gradients that `blocks` blocks and the root keep from earlier micro-batches."""
        return blocks * self.held_block + self.held_root


def fsdp_phases(s: RankSizes) -> list[Phase]:
    """All candidates of an FSDP rank."""
    indices = sorted({s.units - 1, max(0, s.units - 2), min(1, s.units - 1), 0})
    forward = [phase for index in indices for phase in unit_forward_phases(s, index)]
    backward = [phase for index in indices for phase in unit_backward_phases(s, index)]
    return [*forward, *loss_phases(s), *backward, *root_backward_phases(s)]


def unit_forward_phases(s: RankSizes, index: int) -> list[Phase]:
    """Forward of unit `index`: its gather beside the buffer of the one before; its computation."""
    before, blocks = index * s.unit_blocks, s.blocks_of(index)
    behind = s.unit_blocks * s.prefetched_block if index else s.buffer_root
    parameters = (
        s.gathered_root
        + before * s.kept_block
        + blocks * (s.gathered_block + s.buffer_block)
        + before * s.copies_block
    )
    gather = Phase(
        name="forward",
        gradients=s.gradients(0),
        unsharded_parameters=parameters + behind,
        unsharded_gradients=s.held(s.blocks) + s.behind_root,
        activations=s.saved(before) + s.block.residual_bytes,
    )
    compute = Phase(
        name="forward",
        gradients=s.gradients(0),
        unsharded_parameters=parameters + blocks * s.copies_block,
        unsharded_gradients=s.held(s.blocks) + s.behind_root,
        activations=s.saved(before + blocks),
        temporaries=s.block.forward_transient_bytes,
    )
    return [gather, compute]


def loss_phases(s: RankSizes) -> list[Phase]:
    """Head and loss, forward and backward, with everything saved."""
    if not s.logits_elements:
        return []
    kept = s.gathered_root + s.copies_root + s.blocks * s.kept_block + s.copies(s.blocks)
    logits = s.element_bytes * s.logits_elements

    def phase(name: str, *, parameters: int, gradients: int, logits: int, extra: int) -> Phase:
        return Phase(
            name=name,
            gradients=s.gradients(0),
            unsharded_parameters=kept + parameters,
            unsharded_gradients=s.held(s.blocks) + s.behind_root + gradients,
            activations=s.saved(s.blocks) + s.last_residual + s.last_normed + extra,
            logits=logits,
        )

    last_blocks = s.blocks_of(s.units - 1)
    return [
        phase(
            "forward",
            parameters=last_blocks * s.buffer_block,
            gradients=0,
            logits=logits + s.logits_gather_bytes,
            extra=0,
        ),
        phase(
            "loss",
            parameters=0,
            gradients=0,
            logits=s.loss_element_bytes * s.logits_elements,
            extra=0,
        ),
        phase(
            "loss",
            parameters=last_blocks * s.prefetched_block if s.regathers else 0,
            gradients=s.head_gradient_made,
            logits=logits,
            extra=s.last_normed,
        ),
    ]


def unit_backward_phases(s: RankSizes, index: int) -> list[Phase]:
    """Backward of unit `index`: its copy-out, its computation, its reduction."""
    before, blocks = index * s.unit_blocks, s.blocks_of(index)
    done = s.blocks - before - blocks
    kept = s.gathered_root + before * s.kept_block
    prefetched = s.unit_blocks * s.prefetched_block if s.regathers and index else 0
    behind = s.blocks_of(index + 1) * s.reduce_block if done else s.behind_root
    held = s.held(before + blocks) + s.head_gradient
    recomputed = s.block.live_bytes - s.block.saved_bytes
    kept_by_later_blocks = (blocks - 1) * (s.block.weight_gradient_bytes - s.block.saved_bytes)
    last_gradient = s.block.last_weight_gradient_bytes

    def phase(*, parameters: int, gradients: int, shards: int, saved: int, extra: int = 0) -> Phase:
        return Phase(
            name="backward",
            gradients=s.gradients(done) + shards,
            unsharded_parameters=kept + parameters,
            unsharded_gradients=held + gradients,
            activations=saved + s.block.residual_bytes,
            temporaries=extra,
        )

    copies = s.copies(before + blocks)
    copy_out = phase(
        parameters=blocks * (s.gathered_block + s.buffer_block + s.kept_block) + copies,
        gradients=behind,
        shards=0,
        saved=s.saved(before + blocks),
    )
    compute = phase(
        parameters=blocks * s.gathered_block + prefetched + copies,
        gradients=behind,
        shards=0,
        saved=s.saved(before + blocks) + recomputed,
        extra=s.block.backward_peak_bytes + max(0, kept_by_later_blocks),
    )
    copy_in = phase(
        parameters=prefetched + s.copies(before),
        gradients=blocks * (s.reduce_block + s.block_gradient),
        shards=0,
        saved=s.saved(before),
    )
    reduced = phase(
        parameters=prefetched + s.copies(before),
        gradients=blocks * (s.reduce_block - s.held_block) + last_gradient,
        shards=blocks * s.shard_block_elements * s.reduced_bytes,
        saved=s.saved(before),
    )
    return [*([copy_out] if s.regathers else []), compute, copy_in, reduced]


def root_backward_phases(s: RankSizes) -> list[Phase]:
    """After the last block: the embedding's backward, then the root's reduction."""
    embedding = Phase(
        name="backward",
        gradients=s.gradients(s.blocks),
        unsharded_parameters=s.gathered_root,
        unsharded_gradients=s.head_gradient
        + s.embedding_gradient
        + s.blocks_of(0) * s.reduce_block
        + s.held_root,
        activations=s.block.residual_bytes + s.other_micro_batches,
    )
    copy_in = Phase(
        name="backward",
        gradients=s.gradients(s.blocks),
        unsharded_gradients=s.root_gradient + s.held_root + s.reduce_root,
        activations=s.other_micro_batches,
    )
    reduced = Phase(
        name="backward",
        gradients=s.gradients(s.blocks) + s.shard_root_elements * s.reduced_bytes,
        unsharded_gradients=s.head_gradient + s.reduce_root,
        activations=s.other_micro_batches,
    )
    return [embedding, copy_in, reduced]

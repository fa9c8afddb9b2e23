"""Phases: the moments of one step at which a rank's memory can be highest.

FSDP2 gathers a unit into a flat buffer, copies it out into parameters, computes and frees it; the
flat buffer of a forward gather lives until the next unit's copy-out. Backward gathers the unit
before in advance and keeps the reduce-scatter input of the unit behind until the next reduction.
The root (embedding, final norm, head) stays gathered from the first forward to the end of
backward. Each function below returns the candidates of one stretch of that timeline, read off real
FSDP2 steps under fake tensors; every quantity is linear in the unit's index, so the first and last
two units bound the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.activations import FP32_BYTES, BlockActivations


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

    units: int
    """Number of block units on this rank."""
    unit_blocks: int
    """Blocks in a unit."""
    blocks: int
    """Blocks on this rank."""
    gathered_unit: int
    """A block unit in the compute dtype, padded."""
    kept_unit: int
    """What stays of it between forward and backward: all (reshard never), a smaller shard
    (integer), nothing (always)."""
    regathers: bool
    """Backward gathers the blocks again."""
    unit_gradient: int
    """Unsharded gradient of a unit in the compute dtype."""
    reduce_unit: int
    """Reduce-scatter input of a unit."""
    held_unit: int
    """Unsharded gradient of a unit, in the reduce dtype, kept from earlier micro-batches."""
    gathered_root: int
    root_gradient: int
    reduce_root: int
    held_root: int
    head_gradient: int
    """Unsharded gradient of the head's weight; 0 without a head."""
    embedding_gradient: int
    """Full gradient of the token table (also under tensor parallelism); 0 without one."""
    gradient_shards: int
    """fp32 shards of all gradients."""
    gradient_shard_unit: int
    """fp32 shard of the gradients of one unit."""
    gradients_exist: bool
    """Earlier micro-batches have left gradient shards."""
    all_reduce_inputs: int
    """Reduced shards that HSDP keeps from the micro-batch before, until the last backward."""
    block: BlockActivations
    other_micro_batches: int
    """Activations of the other micro-batches in the pipeline."""
    last_residual: int
    """Input of the final norm; 0 without a head."""
    last_normed: int
    """Input of the head; 0 without a head."""
    logits_elements: int
    """Logits on this rank; 0 without a head."""
    element_bytes: int
    """Of the compute dtype."""

    @property
    def saved(self) -> int:
        """Activations of one micro-batch over all blocks, and of the others in the pipeline."""
        return self.blocks * self.block.saved_bytes + self.other_micro_batches

    @property
    def earlier_gradients(self) -> int:
        """Gradient shards that exist when the micro-batch starts."""
        return self.gradient_shards + self.all_reduce_inputs if self.gradients_exist else 0

    @property
    def held_gradients(self) -> int:
        """Unsharded gradients that exist when the micro-batch starts.

        Either whole gradients (no reduction before the last micro-batch), or the root's
        reduce-scatter input, which FSDP2 keeps until its next reduction.
        """
        if self.gradients_exist:
            return self.reduce_root
        return self.units * self.held_unit + self.held_root


def fsdp_phases(s: RankSizes) -> list[Phase]:
    """All candidates of an FSDP rank."""
    indices = sorted({s.units - 1, max(0, s.units - 2), min(1, s.units - 1), 0})
    backward = [phase for index in indices for phase in unit_backward_phases(s, index)]
    return [*forward_phases(s), *loss_phases(s), *backward, *root_backward_phases(s)]


def forward_phases(s: RankSizes) -> list[Phase]:
    """The root's gather, the first block's beside it, and the last block's computation."""
    start = Phase(
        name="forward",
        gradients=s.earlier_gradients,
        unsharded_parameters=2 * s.gathered_root,
        unsharded_gradients=s.held_gradients,
    )
    first = Phase(
        name="forward",
        gradients=s.earlier_gradients,
        unsharded_parameters=2 * (s.gathered_root + s.gathered_unit),
        unsharded_gradients=s.held_gradients,
        activations=s.block.residual_bytes + s.other_micro_batches,
    )
    kept = s.gathered_root + (s.units - 1) * s.kept_unit
    gather = Phase(
        name="forward",
        gradients=s.earlier_gradients,
        unsharded_parameters=kept + (3 if s.units > 1 else 2) * s.gathered_unit,
        unsharded_gradients=s.held_gradients,
        activations=s.saved - s.unit_blocks * s.block.saved_bytes + s.block.residual_bytes,
    )
    compute = Phase(
        name="forward",
        gradients=s.earlier_gradients,
        unsharded_parameters=kept + 2 * s.gathered_unit,
        unsharded_gradients=s.held_gradients,
        activations=s.saved,
        temporaries=s.block.forward_transient_bytes,
    )
    return [start, first, gather, compute]


def loss_phases(s: RankSizes) -> list[Phase]:
    """Head and loss, forward and backward, with everything saved.

    Cross-entropy in fp32 holds the compute-dtype logits, their fp32 copy and the log-probabilities
    in forward; log-probabilities and two gradients of that size in backward.
    """
    if not s.logits_elements:
        return []
    cast = s.element_bytes if s.element_bytes < FP32_BYTES else 0
    kept = s.gathered_root + s.units * s.kept_unit
    logits = s.element_bytes * s.logits_elements

    def phase(name: str, *, parameters: int, gradients: int, logits: int, extra: int) -> Phase:
        return Phase(
            name=name,
            gradients=s.earlier_gradients,
            unsharded_parameters=kept + parameters,
            unsharded_gradients=s.held_gradients + gradients,
            activations=s.saved + s.last_residual + s.last_normed + extra,
            logits=logits,
        )

    prefetched = s.gathered_unit if s.regathers else 0
    return [
        phase("forward", parameters=s.gathered_unit, gradients=0, logits=logits, extra=0),
        phase(
            "loss",
            parameters=0,
            gradients=0,
            logits=max(cast + 2 * FP32_BYTES, 3 * FP32_BYTES) * s.logits_elements,
            extra=0,
        ),
        phase(
            "loss",
            parameters=prefetched,
            gradients=s.head_gradient,
            logits=logits,
            extra=s.last_residual,
        ),
    ]


def unit_backward_phases(s: RankSizes, index: int) -> list[Phase]:
    """Backward of unit `index` (forward order): its computation, then its reduction."""
    done = s.units - 1 - index
    kept = index * s.kept_unit
    prefetched = s.gathered_unit if s.regathers and index > 0 else 0
    if s.gradients_exist:
        behind, held = (s.reduce_unit if done else s.reduce_root), s.head_gradient
    else:
        behind = s.reduce_unit if done else 0
        held = s.held_gradients - done * s.held_unit + s.head_gradient
    earlier = max(s.earlier_gradients, done * s.gradient_shard_unit)
    saved = s.saved - done * s.unit_blocks * s.block.saved_bytes
    recomputed = s.block.live_bytes - s.block.saved_bytes
    later_block = (s.unit_blocks - 1) * (s.block.weight_gradient_bytes - s.block.saved_bytes)
    compute = Phase(
        name="backward",
        gradients=earlier,
        unsharded_parameters=s.gathered_root + kept + s.gathered_unit + prefetched,
        unsharded_gradients=held + behind,
        activations=saved + recomputed + s.block.residual_bytes,
        temporaries=s.block.backward_peak_bytes + max(0, later_block),
    )
    reduction = Phase(
        name="backward",
        gradients=earlier,
        unsharded_parameters=s.gathered_root + kept + prefetched,
        unsharded_gradients=held + s.reduce_unit + (0 if s.held_unit else s.unit_gradient),
        activations=max(0, saved - s.unit_blocks * s.block.saved_bytes) + s.block.residual_bytes,
    )
    return [compute, reduction]


def root_backward_phases(s: RankSizes) -> list[Phase]:
    """After the last block: the embedding's backward, then the root's reduction."""
    embedding = Phase(
        name="backward",
        gradients=max(s.gradient_shards, s.earlier_gradients),
        unsharded_parameters=s.gathered_root,
        unsharded_gradients=(s.head_gradient + s.embedding_gradient + s.reduce_unit + s.held_root),
        activations=s.block.residual_bytes + s.other_micro_batches,
    )
    reduction = Phase(
        name="backward",
        gradients=max(s.gradient_shards, s.earlier_gradients),
        unsharded_gradients=max(s.root_gradient, s.held_root) + s.reduce_root,
        activations=s.other_micro_batches,
    )
    return [embedding, reduction]


def ddp_phases(s: RankSizes) -> list[Phase]:
    """All candidates of a DDP rank; gradients live in the reducer's buckets all the time.

    Autocast copies each matrix to the compute dtype in forward and the graph keeps the copies;
    `kept_unit` and `gathered_root` are those copies here.
    """
    copies = s.units * s.kept_unit + s.gathered_root
    forward = Phase(
        name="forward",
        gradients=s.gradient_shards,
        unsharded_parameters=copies,
        activations=s.saved,
        temporaries=s.block.forward_transient_bytes,
    )
    loss = [
        Phase(
            name=phase.name,
            gradients=s.gradient_shards,
            unsharded_parameters=copies,
            unsharded_gradients=(1 if s.element_bytes == FP32_BYTES else 3) * s.head_gradient
            if phase.unsharded_gradients > s.held_gradients
            else 0,
            activations=phase.activations,
            logits=phase.logits,
        )
        for phase in loss_phases(s)
    ]
    backward = Phase(
        name="backward",
        gradients=s.gradient_shards,
        unsharded_parameters=copies,
        activations=s.saved + s.block.live_bytes - s.block.saved_bytes + s.block.residual_bytes,
        temporaries=max(0, s.block.backward_peak_bytes),
    )
    embedding = Phase(
        name="backward",
        gradients=s.gradient_shards,
        unsharded_gradients=s.embedding_gradient,
        activations=s.block.residual_bytes + s.other_micro_batches,
    )
    return [forward, *loss, backward, embedding]

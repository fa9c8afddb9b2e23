"""Room: the least that a layout holds, by a few multiplications, and what it must recompute for it.

    state + gathered parameters + blocks in flight * what they save <= memory of the device

A lower bound: no moment of a step is looked at but the end of a forward pass, and there no logits
and no temporaries. What it rules out is never looked at in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fsdpplan.cost.device_memory import outside_allocator_bytes
from fsdpplan.cost.formats import formats
from fsdpplan.cost.ledger import rank_state
from fsdpplan.cost.shards import Stage, dense_blocks_among, stage_elements
from fsdpplan.cost.sizes import saved_bytes_a_block
from fsdpplan.search.question import Question
from fsdpplan.spec.layout import ActivationCheckpointing, Layout

MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")

Recomputed = dict[ActivationCheckpointing, int]
"""For each mode that may be enough, how many blocks of a rank it must recompute at the least."""


@dataclass(slots=True)
class Room:
    """What layouts of one question hold; what many share is computed once."""

    asked: Question
    saved: dict[tuple[object, ...], dict[str, int]] = field(default_factory=dict)
    held: dict[tuple[object, ...], int] = field(default_factory=dict)

    def recomputed(self, layout: Layout) -> Recomputed:
        """`none`: 0 where it may be that nothing has to be; empty where nothing helps.

        In a pipeline of the first rank, of which every split that is tried takes its share but for
        a block: there as many micro-batches are in flight as there are ranks, or more.
        """
        asked = self.asked
        if asked.pins.offload == "cpu" or asked.pins.stage_blocks is not None:
            return {"none": 0}
        blocks = self._blocks(layout)
        alive = min(layout.num_microbatches, layout.pp) * blocks
        saved = self._saved(layout)
        over = self._kept(layout) + alive * saved["none"] - asked.available_bytes
        if over <= 0:
            return {"none": 0}
        spared = {mode: alive * (saved["none"] - saved[mode]) for mode in MODES[1:]}
        return {
            mode: -(-over * blocks // bytes_spared)
            for mode, bytes_spared in spared.items()
            if bytes_spared >= over
        }

    def least_bytes(self, layout: Layout) -> int:
        """With whatever recomputation."""
        alive = min(layout.num_microbatches, layout.pp) * self._blocks(layout)
        return self._kept(layout) + alive * min(self._saved(layout).values())

    def _blocks(self, layout: Layout) -> int:
        layers = self.asked.model.layers
        return layers if layout.pp == 1 else max(0, layers // layout.pp - 1)

    def _kept(self, layout: Layout) -> int:
        """What is there whatever is recomputed."""
        outside = outside_allocator_bytes(
            layout=layout, training=self.asked.training, fit=self.asked.cluster.device.fit
        )
        return outside + self._held(layout, self._blocks(layout))

    def _held(self, layout: Layout, blocks: int) -> int:
        """Bytes of the first rank, with so many blocks, whatever it recomputes."""
        once = layout.num_microbatches == 1
        ways = (layout.tp, layout.ep, layout.shard_ranks, layout.sharding, layout.pp > 1)
        more = (layout.reshard_after_forward, layout.gradient_sync, layout.data_parallel > 1)
        key = (*ways, *more, once, blocks)
        if key not in self.held:
            self.held[key] = self._new_held(layout, blocks)
        return self.held[key]

    def _new_held(self, layout: Layout, blocks: int) -> int:
        model, training = self.asked.model, self.asked.training
        stage = Stage(
            blocks=blocks,
            has_embedding=True,
            has_head=layout.pp == 1,
            dense_blocks=dense_blocks_among(model=model, first_block=0, blocks=blocks),
        )
        state = rank_state(model=model, training=training, layout=layout, stage=stage)
        held = state.parameters + state.optimizer + state.gradients
        if layout.sharding != "fsdp":
            return held
        of = formats(training=training, layout=layout)
        whole = stage_elements(model=model, stage=stage, tp=layout.tp, ep=layout.ep)
        if layout.pp > 1 or layout.reshard_after_forward == "never":
            held += min(of.gathered, of.gathered_matrix) * whole
        if layout.pp == 1 and layout.num_microbatches > 1:
            sums = layout.gradient_sync == "last"
            held += of.reduced * (whole if sums else state.held_parameters)
        return held

    def _saved(self, layout: Layout) -> dict[str, int]:
        """Bytes that a block keeps of a micro-batch, by what is recomputed."""
        is_fsdp = layout.sharding == "fsdp"
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch, is_fsdp, layout.compile)
        if key not in self.saved:
            self.saved[key] = {
                mode: saved_bytes_a_block(
                    model=self.asked.model,
                    training=self.asked.training,
                    layout=replace(
                        layout,
                        activation_checkpointing=mode,
                        checkpoint_blocks="all",
                    ),
                )
                for mode in MODES
            }
        return self.saved[key]

"""Works: seconds of blocks and of what is before and behind them, each computed once a search.

A stage takes its ends and so many times each kind of its blocks (`plain_seconds` adds them up), so
a few of these say what any stage of any layout computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fsdpplan.cost.least import Pair, stage_waits
from fsdpplan.cost.passes import plain_seconds
from fsdpplan.cost.shards import Stage
from fsdpplan.search.question import Question
from fsdpplan.search.variants import overlapped
from fsdpplan.spec.layout import ActivationCheckpointing, Layout


@dataclass(slots=True)
class Works:
    """What one question asked for so far; private to its search."""

    asked: Question
    of_blocks: dict[tuple[object, ...], Pair] = field(default_factory=dict)
    of_ends: dict[tuple[object, ...], Pair] = field(default_factory=dict)
    of_moves: dict[tuple[object, ...], Pair] = field(default_factory=dict)

    def block(self, layout: Layout, mode: ActivationCheckpointing, *, dense: bool = False) -> Pair:
        """Of a block, its collectives as well hidden as can be, with buckets of FSDP as large as
        they can be: each costs some operators. `dense`: one without experts."""
        key = (*_ways(layout), layout.async_tp, mode, dense)
        if key not in self.of_blocks:
            stage = Stage(blocks=1, has_embedding=False, has_head=False, dense_blocks=int(dense))
            own = replace(
                layout,
                activation_checkpointing=mode,
                checkpoint_blocks="all",
                wrap_blocks=self.asked.pins.wrap_blocks or self.asked.model.layers,
                loss_chunks=1,
            )
            self.of_blocks[key] = self._least(stage, (own, *overlapped(self.asked, own)))
        return self.of_blocks[key]

    def ends(self, layout: Layout, *, embedding: bool, head: bool) -> Pair:
        """Of embedding, or head and loss, whole or in pieces, or both."""
        if not (embedding or head):
            return 0.0, 0.0
        key = (*_ways(layout), layout.loss_chunks, embedding, head)
        if key not in self.of_ends:
            pieces: tuple[Layout, ...] = (layout,)
            if head and layout.loss_chunks == 1 and self.asked.pins.loss_chunks is None:
                pieces = (layout, replace(layout, loss_chunks=2))
            stage = Stage(blocks=0, has_embedding=embedding, has_head=head)
            self.of_ends[key] = self._least(stage, pieces)
        return self.of_ends[key]

    def stage(self, layout: Layout, mode: ActivationCheckpointing, stage: Stage) -> Pair:
        """Of a stage whose blocks do as `mode` says, but for those that keep everything."""
        forward, backward = self.ends(layout, embedding=stage.has_embedding, head=stage.has_head)
        dense, kept_dense = stage.dense_blocks, 0
        if stage.kept_blocks:
            kept_dense = stage.kept_dense_blocks
        for number, kept, is_dense in (
            (stage.blocks - dense, stage.kept_blocks - kept_dense, False),
            (dense, kept_dense, True),
        ):
            for blocks, own in ((number - kept, mode), (kept, "none")):
                if blocks:
                    one = self.block(layout, own, dense=is_dense)
                    forward += blocks * one[0]
                    backward += blocks * one[1]
        return forward, backward

    def moves(self, layout: Layout, stage: Stage) -> Pair:
        """(gathers, reductions) of a stage under FSDP, one unit a block; else none."""
        if layout.sharding != "fsdp" or layout.wrap_blocks > 1:
            return 0.0, 0.0
        ways = (layout.tp, layout.cp, layout.ep, layout.dp_shard, layout.dp_replicate)
        key = (*ways, stage.blocks, stage.dense_blocks, stage.has_embedding, stage.has_head)
        if key not in self.of_moves:
            asked = self.asked
            self.of_moves[key] = stage_waits(
                model=asked.model,
                cluster=asked.cluster,
                training=asked.training,
                layout=layout,
                stage=replace(stage, kept_blocks=0),
            )
        return self.of_moves[key]

    def _least(self, stage: Stage, layouts: tuple[Layout, ...]) -> Pair:
        pairs = [self._seconds(layout, stage) for layout in layouts]
        return min(one for one, _ in pairs), min(other for _, other in pairs)

    def _seconds(self, layout: Layout, stage: Stage) -> Pair:
        asked = self.asked
        return plain_seconds(
            model=asked.model,
            cluster=asked.cluster,
            training=asked.training,
            layout=layout,
            stage=stage,
        )


def _ways(layout: Layout) -> tuple[object, ...]:
    """What of a layout decides the work of a micro-batch on blocks and ends alike."""
    ways = (layout.tp, layout.cp, layout.ep, layout.sharding, layout.data_parallel > 1)
    return (*ways, layout.micro_batch, layout.compile)

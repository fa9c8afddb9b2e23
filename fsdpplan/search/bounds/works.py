"""Works: seconds of blocks and of what is before and behind them, each computed once a search.

A stage takes its ends and so many times each kind of its blocks (as `plain_seconds` adds them up),
so a few of these say what any stage of any layout computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdpplan.cost.kernels.head import ends_seconds
from fsdpplan.cost.least import stage_waits
from fsdpplan.cost.model.params import kind_views
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.step.pipeline import Pair
from fsdpplan.cost.traffic.block_calls import block_calls
from fsdpplan.cost.traffic.block_times import block_times
from fsdpplan.cost.traffic.calls import call_seconds, group_level
from fsdpplan.cost.traffic.rank import tp_pass_calls
from fsdpplan.search.question import Question
from fsdpplan.search.variants import overlapped
from fsdpplan.spec.layout import ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.values import replace


class Work(NamedTuple):
    """Seconds of one micro-batch on one rank, data-parallel collectives apart."""

    forward: float = 0.0
    backward: float = 0.0
    """With what is recomputed."""
    computed: float = 0.0
    """Of both, what the device computes: what it does not wait for inside blocks."""

    @property
    def total(self) -> float:
        """Both passes."""
        return self.forward + self.backward

    def plus(self, other: Work, times: int) -> Work:
        """With so many times `other` behind it."""
        return Work(*(mine + times * its for mine, its in zip(self, other, strict=True)))


Passing = dict[str, float]
"""Seconds of what passes each level of the network, by its name."""


def least_work(works: Iterable[Work]) -> Work:
    """No more than any of `works` in any part."""
    return Work(*map(min, zip(*works, strict=True)))


def least_passing(all_passing: Iterable[Passing]) -> Passing:
    """No more than any of `all_passing` over any level."""
    first, *others = all_passing
    return {level: min(one.get(level, 0.0) for one in (first, *others)) for level in first}


@dataclass(slots=True)
class Works:
    """What one question asked for so far; private to its search."""

    asked: Question
    is_settled: bool = False
    """Layouts are taken as they are, not with collectives as well hidden, buckets as large and a
    loss as cheap as they can be."""
    of_blocks: dict[tuple[object, ...], Work] = field(default_factory=dict)
    of_ends: dict[tuple[object, ...], Work] = field(default_factory=dict)
    of_stages: dict[tuple[object, ...], Work] = field(default_factory=dict)
    of_end_calls: dict[tuple[object, ...], float] = field(default_factory=dict)
    of_moves: dict[tuple[object, ...], Pair] = field(default_factory=dict)
    of_links: dict[tuple[object, ...], Passing] = field(default_factory=dict)

    def block(self, layout: Layout, mode: ActivationCheckpointing, *, kind: int = -1) -> Work:
        """Of a block, its collectives as well hidden as can be, with buckets of FSDP as large as
        they can be: each costs some operators. `kind`: its place in `kind_views`, by default the
        last, which has experts where any has."""
        views = kind_views(self.asked.model)
        model = views[kind]
        experts = layout.expert_ways if model.experts or len(views) == 1 else None
        key = (*self._ways(layout), experts, layout.async_tp, mode, model, layout.wrap_blocks)
        if key not in self.of_blocks:
            own = replace(
                layout,
                activation_checkpointing=mode,
                checkpoint_blocks="all",
                wrap_blocks=layout.wrap_blocks
                if self.is_settled
                else self.asked.pins.wrap_blocks or self.asked.model.layers,
                loss_chunks=1,
            )
            # beside their matmuls collectives add no more than by themselves
            others = () if self.is_settled else overlapped(self.asked, own)
            self.of_blocks[key] = self._block(model, next(iter(others), own))
        return self.of_blocks[key]

    def _block(self, model: Model, layout: Layout) -> Work:
        block = block_times(self.asked.case(layout).of_blocks(model))
        forward, backward = block.forward_seconds, block.backward_seconds
        if self._hides_exchanges:
            waiting = block.waiting
            forward -= sum(one for axis, one in waiting.forward_by_axis if axis == "ep")
            backward -= sum(one for axis, one in waiting.backward_by_axis if axis == "ep")
        return Work(forward, backward, block.computed_seconds)

    @property
    def _hides_exchanges(self) -> bool:
        """Whether passes side by side may hide what experts exchange."""
        asked = self.asked
        return asked.training.traits.overlaps_passes and asked.pins.schedule == "dualpipev"

    def ends(self, layout: Layout, *, embedding: bool, head: bool) -> Work:
        """Of embedding, or head and loss, whole or in pieces, or both."""
        if not (embedding or head):
            return Work()
        key = (*self._ways(layout), layout.loss_chunks, embedding, head)
        if key not in self.of_ends:
            pieces: tuple[Layout, ...] = (layout,)
            is_open = not self.is_settled and self.asked.pins.loss_chunks is None
            if head and layout.loss_chunks == 1 and is_open:
                pieces = (layout, replace(layout, loss_chunks=2))
            self.of_ends[key] = least_work(self._ends(one, embedding, head) for one in pieces)
        return self.of_ends[key]

    def _ends(self, layout: Layout, embedding: bool, head: bool) -> Work:
        stage = Stage(blocks=0, has_embedding=embedding, has_head=head)
        forward, backward = ends_seconds(self.asked.case(layout), stage)
        return Work(forward, backward, forward + backward)

    def stage(self, layout: Layout, mode: ActivationCheckpointing, stage: Stage) -> Work:
        """Of a stage whose blocks do as `mode` says, but for those that keep everything."""
        ways = (
            *self._ways(layout),
            layout.expert_ways,
            layout.async_tp,
            layout.loss_chunks,
            layout.wrap_blocks,
        )
        key = (*ways, mode, stage)
        if key not in self.of_stages:
            self.of_stages[key] = self._stage(layout, mode, stage)
        return self.of_stages[key]

    def _stage(self, layout: Layout, mode: ActivationCheckpointing, stage: Stage) -> Work:
        work = self.ends(layout, embedding=stage.has_embedding, head=stage.has_head)
        for kind, number, kept in self._mix(stage):
            for blocks, own in ((number - kept, mode), (kept, "none")):
                if blocks:
                    work = work.plus(self.block(layout, own, kind=kind), blocks)
        return work

    def passing(self, layout: Layout, mode: ActivationCheckpointing, stage: Stage) -> Passing:
        """What the collectives inside the blocks of a stage send in a micro-batch; how well they
        are hidden is nothing to the links."""
        if layout.tp == layout.cp == layout.expert_ranks == 1:
            return {}
        spread = (layout.tp, layout.cp, *layout.expert_ways, layout.sequence_parallel)
        key = (*spread, layout.micro_batch, layout.cp_attention, mode, stage)
        if key not in self.of_links:
            views, found = kind_views(self.asked.model), Passing()
            for kind, number, kept in self._mix(stage):
                for blocks, of in ((number - kept, mode), (kept, "none")):
                    if not blocks:
                        continue
                    own = replace(layout, activation_checkpointing=of, checkpoint_blocks="all")
                    case = self.asked.case(own).of_blocks(views[kind])
                    for call in block_calls(case):
                        level = group_level(self.asked.cluster, call.group)
                        found[level] = found.get(level, 0.0) + blocks * call_seconds(
                            call, self.asked.cluster
                        )
            self.of_links[key] = found
        return self.of_links[key]

    def _mix(self, stage: Stage) -> Iterable[tuple[int, int, int]]:
        """(kind, its blocks in the stage, those that keep everything) of each kind."""
        if stage.mix:
            kept_mix = stage.kept_mix or (0,) * len(stage.mix)
            return zip(range(len(stage.mix)), stage.mix, kept_mix, strict=True)
        dense, kept_dense = stage.dense_blocks, 0
        if stage.kept_blocks:
            kept_dense = stage.kept_dense_blocks
        return (
            (-1, stage.blocks - dense, stage.kept_blocks - kept_dense),
            (0, dense, kept_dense),
        )

    def moves(self, layout: Layout, stage: Stage) -> Pair:
        """(gathers, reductions) of a stage under FSDP, one unit a block; else none, but of layouts
        as they are."""
        if layout.sharding != "fsdp" or (layout.wrap_blocks > 1 and not self.is_settled):
            return 0.0, 0.0
        ways = (layout.tp, layout.cp, *layout.expert_ways, layout.dp_shard, layout.dp_replicate)
        ends = (stage.has_embedding, stage.has_head)
        of_stage = (stage.blocks, stage.dense_blocks, stage.mix, *ends)
        key = (*ways, *of_stage, layout.wrap_blocks, layout.offload)
        if key not in self.of_moves:
            # what is gathered again is no part of it, and its groups may not divide the ranks
            case = self.asked.case(replace(layout, reshard_after_forward="never"))
            self.of_moves[key] = stage_waits(case, replace(stage, kept_blocks=0))
        return self.of_moves[key]

    def end_calls_seconds(self, layout: Layout, stage: Stage) -> float:
        """What a micro-batch waits for where tensor parallelism begins and ends: embedding and head
        that the stage has; a loss in parallel only of layouts as they are."""
        if layout.tp == 1 or not (stage.has_embedding or stage.has_head):
            return 0.0
        ways = (layout.tp, layout.cp, layout.micro_batch, layout.sharding, layout.loss_chunks)
        key = (*ways, stage.has_embedding, stage.has_head)
        if key not in self.of_end_calls:
            case = self.asked.case(replace(layout, num_microbatches=1))
            ends = Stage(blocks=0, has_embedding=stage.has_embedding, has_head=stage.has_head)
            self.of_end_calls[key] = sum(
                call_seconds(call, self.asked.cluster)
                for call in tp_pass_calls(case, ends)
                if self.is_settled or call.collective != "all_reduce"
            )
        return self.of_end_calls[key]

    def _ways(self, layout: Layout) -> tuple[object, ...]:
        """What of a layout decides the work of a micro-batch on blocks and ends alike."""
        # one fp8 cast of a weight serves all micro-batches
        casts = layout.num_microbatches if self.asked.training.fp8_recipe == "delayed" else 0
        ways = (layout.tp, layout.cp, layout.sharding, layout.data_parallel > 1, casts)
        return (*ways, layout.micro_batch, layout.compile)

"""Room: the least that a layout holds, by a few multiplications, and what it must recompute for it.

    context + (1 + fragmentation) * (state + gathered parameters + blocks in flight * what they save
    + gradients beside them) <= memory of the device

A lower bound: no moment of a step is looked at but the end of a forward pass and, in a pipeline,
the last backward pass; and there no logits and no temporaries. What it rules out is never looked at
in full.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fsdpplan.cost.device_memory import outside_allocator_bytes
from fsdpplan.cost.formats import formats
from fsdpplan.cost.ledger import rank_state
from fsdpplan.cost.pipeline_actions import ACTIVE_STAGES
from fsdpplan.cost.pipeline_order import round_microbatches
from fsdpplan.cost.pipeline_stages import balanced_stage_blocks, head_blocks, pipeline_ranks
from fsdpplan.cost.shards import Stage, dense_blocks_among, stage_elements, whole_model
from fsdpplan.cost.sizes import saved_bytes_a_block
from fsdpplan.search.question import Question
from fsdpplan.spec.layout import ActivationCheckpointing, Layout

MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")

Known = Literal["degrees", "schedule", "usual", "settled"]
"""What of a pipeline's layout is as it will be: how the ranks are spread; that its schedule is a
usual one, too; the number of micro-batches, too; or all of it."""

Recomputed = dict[ActivationCheckpointing, int]
"""For each mode that may be enough, how many blocks of a rank it must recompute at the least."""


Saved = dict[ActivationCheckpointing, int]
"""Bytes that a block keeps, by what is recomputed."""


class _Flight(NamedTuple):
    """What is in flight on a rank, at the least."""

    graded: int
    """When gradients of earlier micro-batches are there: 2 when most are in flight, 1 in the last
    backward pass, 0 never for sure."""
    alive: int
    """(micro-batch, block) pairs."""
    rows: int
    """Those of the first block of each of its `stages`."""
    stages: int


class _Rank(NamedTuple):
    """A rank, and bytes that are there whatever is recomputed."""

    flight: _Flight
    kept: int
    """When most is in flight."""
    at_the_end: int
    """When nothing may be, and gradients are there."""


@dataclass(slots=True)
class Room:
    """What layouts of one question hold; what many share is computed once."""

    asked: Question
    saved: dict[tuple[object, ...], Saved] = field(default_factory=dict)
    held: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)
    stages: dict[tuple[int, int, bool], Stage] = field(default_factory=dict)
    """What a rank of so many holds at the least, with any schedule or with a usual one."""

    def recomputed(self, layout: Layout, *, known: Known = "degrees") -> Recomputed:
        """`none`: 0 where it may be that nothing has to be; empty where nothing helps.

        In a pipeline of those ranks of which every split that is tried takes its share but for a
        block.
        """
        asked = self.asked
        if asked.pins.offload == "cpu" or asked.pins.stage_blocks is not None:
            return {"none": 0}
        saved, available = self._saved(layout), self._available(layout)
        needed: Recomputed = {"none": 0}
        for rank in self._ranks(layout, known):
            if rank.kept > available or rank.at_the_end > available:
                return {}
            flight = rank.flight
            over = rank.kept + flight.alive * saved["none"] - available
            if over <= 0:
                continue
            spared = {mode: saved["none"] - saved[mode] for mode in MODES[1:]}
            here = {
                mode: -(-over * flight.stages // (flight.rows * bytes_spared))
                for mode, bytes_spared in spared.items()
                if flight.alive * bytes_spared >= over
            }
            if "none" in needed:
                needed = here
            else:
                needed = {mode: max(n, needed[mode]) for mode, n in here.items() if mode in needed}
        return needed

    def least_bytes(self, layout: Layout) -> int:
        """With whatever recomputation."""
        saved = min(self._saved(layout).values())
        ranks = self._ranks(layout, "degrees")
        least = max(rank.kept + rank.flight.alive * saved for rank in ranks)
        return self._outside(layout) + int(least * (1 + self._fragmentation))

    @property
    def _fragmentation(self) -> float:
        return self.asked.cluster.device.fit.fragmentation_fraction

    def _outside(self, layout: Layout) -> int:
        return outside_allocator_bytes(
            layout=layout, training=self.asked.training, fit=self.asked.cluster.device.fit
        )

    def _available(self, layout: Layout) -> int:
        """What may be allocated."""
        left = self.asked.available_bytes - self._outside(layout)
        return int(left / (1 + self._fragmentation))

    def _ranks(self, layout: Layout, known: Known) -> list[_Rank]:
        """The ranks that are looked at: the first, and one without dense blocks of a mixture."""
        model, pp = self.asked.model, layout.pp
        if pp == 1:
            return [self._rank(layout, whole_model(model), _Flight(0, model.layers, 1, 1))]
        if known == "settled" and layout.schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
            stages = pipeline_ranks(model=model, layout=layout)
            full = max(range(pp), key=lambda rank: stages[rank].blocks - stages[rank].dense_blocks)
            return [
                self._rank(
                    layout,
                    stages[rank],
                    _in_flight(layout, stages[rank], rank),
                    keeps=layout.virtual_stages <= ACTIVE_STAGES,
                )
                for rank in dict.fromkeys((0, full))
            ]
        dense = model.dense_blocks if model.experts else 0  # each rank before has a block at least
        ranks = dict.fromkeys((0, min(dense, pp - 1)))
        return [self._least_rank(layout, rank, known) for rank in ranks]

    def _least_rank(self, layout: Layout, rank: int, known: Known) -> _Rank:
        """A rank with the fewest blocks that it may have."""
        number, pp = layout.num_microbatches, layout.pp
        is_usual = known in ("schedule", "usual")
        stage = self._least_stage(pp, rank, is_usual=is_usual)
        graded = 0
        if known == "usual":
            a_round = round_microbatches(
                schedule="interleaved_1f1b", pp=pp, num_microbatches=number
            )
            graded = _graded(number, a_round)
        most = self.asked.pins.virtual_stages or (1 if is_usual else self.asked.model.layers)
        keeps = (layout.virtual_stages if known == "settled" else most) <= ACTIVE_STAGES
        rows = min(number, pp - rank)
        flight = _Flight(graded, rows * stage.blocks, rows, 1)
        return self._rank(layout, stage, flight, keeps=keeps)

    def _least_stage(self, pp: int, rank: int, *, is_usual: bool) -> Stage:
        key = (pp, rank, is_usual)
        if key not in self.stages:
            model = self.asked.model
            blocks = max(0, model.layers // pp - 1)
            if is_usual:
                blocks = self._fewest_blocks(pp, rank)
            self.stages[key] = Stage(
                blocks=blocks,
                has_embedding=rank == 0,
                has_head=False,
                dense_blocks=dense_blocks_among(model=model, first_block=rank, blocks=blocks),
            )
        return self.stages[key]

    def _fewest_blocks(self, pp: int, rank: int) -> int:
        """Of `rank`, however many stages a rank has with a usual schedule."""
        model, stages = self.asked.model, self.asked.pins.virtual_stages
        counts = (stages,) if stages else range(1, ACTIVE_STAGES + 1)
        return min(
            sum(
                balanced_stage_blocks(
                    layers=model.layers, stages=pp * number, head_blocks=head_blocks(model)
                )[rank::pp]
            )
            for number in counts
            if pp * number <= model.layers
        )

    def _rank(self, layout: Layout, stage: Stage, flight: _Flight, *, keeps: bool = True) -> _Rank:
        held, gradients = self._held(layout, stage, keeps=keeps)
        return _Rank(
            flight=flight,
            kept=held + (gradients if flight.graded == 2 else 0),
            at_the_end=held + (gradients if flight.graded else 0),
        )

    def _held(self, layout: Layout, stage: Stage, *, keeps: bool) -> tuple[int, int]:
        """Bytes of a rank, whatever it recomputes; and of its gradients in a pipeline. `keeps`: all
        its stages stay gathered, being no more than torch keeps."""
        once = layout.num_microbatches == 1
        ways = (layout.tp, *layout.expert_ways, layout.shard_ranks, layout.sharding, layout.pp > 1)
        more = (layout.reshard_after_forward, layout.gradient_sync, layout.data_parallel > 1)
        key = (*ways, *more, once, stage, keeps)
        if key not in self.held:
            self.held[key] = self._new_held(layout, stage, keeps=keeps)
        return self.held[key]

    def _new_held(self, layout: Layout, stage: Stage, *, keeps: bool) -> tuple[int, int]:
        model, training = self.asked.model, self.asked.training
        state = rank_state(model=model, training=training, layout=layout, stage=stage)
        held = state.parameters + state.optimizer + state.gradients
        if layout.sharding != "fsdp":
            return held, 0
        of = formats(training=training, layout=layout)
        whole = stage_elements(model=model, stage=stage, tp=layout.tp, ep=layout.ep)
        if keeps and (layout.pp > 1 or layout.reshard_after_forward == "never"):
            held += min(of.gathered, of.gathered_matrix) * whole
        if layout.pp == 1 and layout.num_microbatches > 1:
            sums = layout.gradient_sync == "last"
            held += of.reduced * (whole if sums else state.held_parameters)
        return held, of.reduced * whole if layout.pp > 1 else 0

    def _saved(self, layout: Layout) -> Saved:
        """Bytes that a block keeps of a micro-batch, by what is recomputed."""
        is_fsdp = layout.sharding == "fsdp"
        spread = (layout.tp, layout.cp, *layout.expert_ways)
        key = (*spread, layout.micro_batch, is_fsdp, layout.compile)
        if key not in self.saved:
            self.saved[key] = saved_bytes_a_block(
                model=self.asked.model, training=self.asked.training, layout=layout
            )
        return self.saved[key]


def _in_flight(layout: Layout, stage: Stage, rank: int) -> _Flight:
    """Of a rank that holds `stage`, under a schedule that does not split the backward pass.

    The first pairs are those before a rank's first backward pass; with enough micro-batches as many
    are there again behind it.
    """
    number, pp = layout.num_microbatches, layout.pp
    if layout.schedule == "gpipe":
        return _Flight(int(number > 1), number * stage.blocks, number, 1)
    if layout.schedule == "1f1b":
        graded, rows = 2 if number > pp else int(number > 1), min(number, pp - rank)
        return _Flight(graded, rows * stage.blocks, rows, 1)
    a_round = round_microbatches(schedule=layout.schedule, pp=pp, num_microbatches=number)
    *earlier, last = (piece.blocks for piece in stage.pieces)
    of_the_last = min(a_round, 2 * (pp - 1 - rank) + 1)
    return _Flight(
        _graded(number, a_round),
        a_round * sum(earlier) + of_the_last * last,
        a_round * len(earlier) + of_the_last,
        1 + len(earlier),
    )


def _graded(num_microbatches: int, a_round: int) -> int:
    """When gradients are there under interleaved 1F1B: under 1F1B, whose round is no longer, no
    later."""
    return 2 if num_microbatches > 3 * a_round else int(num_microbatches > a_round)

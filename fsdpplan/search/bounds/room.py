"""Room: the least that a layout holds, by a few multiplications, and what it must recompute for it.

    context + (1 + fragmentation) * (state + gathered parameters + blocks in flight * what they save
    + the block at work + gradients beside them + buffers of gathers and messages) <= memory of the
    device

A lower bound: no moment of a step is looked at but the first and the last backward passes, at their
first block, where all that is saved is still there; and there no logits. Buffers of gathers have a
pool of their own (`cost.reserve`), so they count at whatever moment. What it rules out is never
looked at in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, NamedTuple

from fsdpplan.cost.memory.ledger import rank_state, weight_gradients_of
from fsdpplan.cost.memory.peak import fragments_fraction, outside_allocator_bytes
from fsdpplan.cost.memory.sizes import (
    activations_of_block,
    message_buffer_bytes,
    saved_bytes_a_block,
)
from fsdpplan.cost.model.formats import formats
from fsdpplan.cost.model.params import kind_views
from fsdpplan.cost.model.shards import (
    Stage,
    block_size,
    dense_blocks_among,
    end_units,
    expert_size,
    stage_elements,
    whole_model,
)
from fsdpplan.cost.schedule.actions import ACTIVE_STAGES, PassOrder
from fsdpplan.cost.schedule.stages import (
    balanced_stage_blocks,
    head_blocks,
    most_stages,
    pipeline_ranks,
)
from fsdpplan.search.bounds.flight import Flight, flights, graded_when_interleaved
from fsdpplan.search.question import Question
from fsdpplan.spec.layout import MESH_AXES, ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.values import replace

MODES: tuple[ActivationCheckpointing, ...] = ("none", "attention", "op", "full")

Known = Literal["degrees", "schedule", "usual", "settled", "alike"]
"""What of a layout is as it will be: how the ranks are spread; that a pipeline's schedule is a
usual one, and that all blocks recompute alike, too; the number of micro-batches, too; all but what
blocks recompute; or that, and that all do alike."""

Recomputed = dict[ActivationCheckpointing, int]
"""For each mode that may be enough, how many blocks of a rank it must recompute at the least."""


Bytes = dict[ActivationCheckpointing, int]
"""By what is recomputed."""


class _Blocks(NamedTuple):
    """Bytes of the blocks of a rank."""

    saved: Bytes
    """What one keeps of a micro-batch; in the mean of those of the rank, or of the kind that keeps
    less."""
    work: Bytes
    """What is there beside that when the backward pass of the last of those of a micro-batch is
    under way: what it makes anew, its input and the gradient of its output, and, where policies are
    as they will be, what it allocates."""


class _Rank(NamedTuple):
    """A rank, and bytes that are there whatever is recomputed."""

    stage: Stage
    flight: Flight
    kept: int
    """When most is in flight."""
    at_the_end: int
    """When nothing may be, and gradients are there."""


class _Frame(NamedTuple):
    """What layouts hold that spread their ranks and keep parameters and gradients alike, whatever
    their micro-batches are."""

    outside: tuple[int, float]
    """(bytes outside of the allocator, fragments as a share of what is allocated)."""
    ranks: tuple[tuple[int, Stage, int, int], ...]
    """Of each rank that is looked at: (its number, what it has at the least, bytes that are there
    whatever is recomputed, those of its blocks' gradients in a pipeline)."""


_FRAMED = attrgetter(
    *(*MESH_AXES, "ep", "experts_over_tp", "sharding", "offload"),
    *("reshard_after_forward", "gradient_sync"),
)
"""Of a layout, what decides its frame."""

_OF_BLOCKS = attrgetter(
    *("tp", "cp", "ep", "experts_over_tp", "micro_batch", "compile", "sharding"),
)
"""Of a layout, what decides what a block keeps."""


@dataclass(slots=True)
class Room:
    """What layouts of one question hold; what many share is computed once."""

    asked: Question
    kinds: tuple[Model, ...] = field(init=False)
    """Models of the blocks that there are, the largest first: with experts."""
    saved: dict[tuple[object, ...], Bytes] = field(default_factory=dict)
    """Of a block of one kind."""
    blocks: dict[tuple[object, ...], _Blocks] = field(default_factory=dict)
    held: dict[tuple[object, ...], tuple[int, int]] = field(default_factory=dict)
    frames: dict[tuple[object, ...], _Frame] = field(default_factory=dict)
    most_bytes: int = field(init=False)
    """The highest peak that is planned with."""
    stages: dict[tuple[int, int, bool], Stage] = field(default_factory=dict)
    """What a rank of so many holds at the least, with any schedule or with a usual one."""

    def __post_init__(self) -> None:
        self.kinds = kind_views(self.asked.model)[::-1]
        self.most_bytes = self.asked.available_bytes

    def of_bytes(self, most_bytes: int) -> Room:
        """On devices where so much is planned with: what layouts hold is the same."""
        return replace(self, asked=replace(self.asked, most_bytes=most_bytes))

    def recomputed(self, layout: Layout, *, known: Known = "degrees") -> Recomputed:
        """`none`: 0 where it may be that nothing has to be; empty where nothing helps.

        In a pipeline of those ranks of which every split that is tried takes its share but for a
        block.
        """
        asked = self.asked
        if asked.pins.stage_blocks is not None:
            return {"none": 0}
        (outside, fragments), ranks = self._ranks(layout, known)
        # what may be allocated; whole bytes are rounded as they can be
        available = 1 + int((self.most_bytes - outside + 1) / (1 + fragments))
        needed: Recomputed = {"none": 0}
        for rank in ranks:
            if rank.kept > available or rank.at_the_end > available:
                return {}
            saved, work = self._blocks(layout, rank.stage, known)
            if not rank.stage.pieces[-1].blocks:  # with it the backward passes begin
                work = _NO_WORK
            over = rank.kept + rank.flight.alive * saved["none"] - available
            if over + work["none"] <= 0:
                continue
            here: Recomputed = {}
            for mode in MODES[1:]:
                spared = saved["none"] - saved[mode]
                if rank.flight.alive * spared >= over + work[mode]:
                    most = self._most_spared(layout, mode, mean=spared)
                    here[mode] = _least_blocks(rank.flight, over + work[mode], most)
            if "none" in needed:
                needed = here
            else:
                needed = {mode: max(n, needed[mode]) for mode, n in here.items() if mode in needed}
        return needed

    def _most_spared(self, layout: Layout, mode: ActivationCheckpointing, *, mean: int) -> int:
        """Bytes that a recomputed block spares: those of a pattern's kind that spares most may come
        first, elsewhere all are taken to be like the mean."""
        if not self.asked.model.is_patterned:
            return mean
        each = (self._saved(layout, kind) for kind in self.kinds)
        return max(mean, *(saved["none"] - saved[mode] for saved in each))

    def least_bytes(self, layout: Layout) -> int:
        """With whatever recomputation."""
        (outside, fragments), ranks = self._ranks(layout, "degrees")
        least = max(
            rank.kept
            + rank.flight.alive * min(self._blocks(layout, rank.stage, "degrees").saved.values())
            for rank in ranks
        )
        return outside + int(least * (1 + fragments))

    def _outside(self, layout: Layout) -> tuple[int, float]:
        """(bytes outside of the allocator, fragments as a share of what is allocated)."""
        asked = self.asked
        outside = outside_allocator_bytes(
            layout=layout, training=asked.training, fit=asked.cluster.device.fit
        )
        return outside, fragments_fraction(asked.case(layout))

    def _ranks(self, layout: Layout, known: Known) -> tuple[tuple[int, float], list[_Rank]]:
        """What `_outside` says, and the ranks that are looked at: the first, and one without dense
        blocks of a mixture."""
        if layout.pp > 1 and _is_settled(layout, known):
            return self._outside(layout), self._settled_ranks(layout)
        outside, ranks = self._frame(layout, known)
        return outside, [
            _rank(stage, self._least_flight(layout, stage, rank, known), held, gradients)
            for rank, stage, held, gradients in ranks
        ]

    def _settled_ranks(self, layout: Layout) -> list[_Rank]:
        stages = pipeline_ranks(model=self.asked.model, layout=layout)
        full = max(stages, key=lambda stage: stage.blocks - stage.dense_blocks)
        keeps = layout.virtual_stages <= ACTIVE_STAGES
        found = []
        for rank in dict.fromkeys((0, stages.index(full))):
            stage = stages[rank]
            held, gradients = self._held(layout, stage, keeps=keeps, is_settled=True)
            held += self._messages(layout, stage)
            found += [_rank(stage, one, held, gradients) for one in flights(layout, stage, rank)]
        return found

    def _frame(self, layout: Layout, known: Known) -> _Frame:
        """Of ranks with the fewest blocks that they may have."""
        if layout.pp == 1:
            known = "usual"  # one rank holds all, whatever is known
        is_usual = known in ("schedule", "usual")
        most = self.asked.pins.virtual_stages or (1 if is_usual else self.asked.model.layers)
        is_whole = known in ("settled", "alike")
        keeps = (layout.virtual_stages if is_whole else most) <= ACTIVE_STAGES
        key = (is_usual, keeps, layout.num_microbatches == 1, *_FRAMED(layout))
        if key not in self.frames:
            self.frames[key] = self._new_frame(layout, is_usual=is_usual, keeps=keeps)
        return self.frames[key]

    def _new_frame(self, layout: Layout, *, is_usual: bool, keeps: bool) -> _Frame:
        model, pp = self.asked.model, layout.pp
        if pp == 1:
            stages = {0: whole_model(model)}
        else:
            # each rank before has a block at least
            dense = model.dense_blocks if model.experts else 0
            dense += pp == most_stages(model.layers)  # but the first, with the embedding alone
            stages = {
                rank: self._least_stage(pp, rank, is_usual=is_usual)
                for rank in (0, min(dense, pp - 1))
            }
        ranks = (
            (rank, stage, *self._held(layout, stage, keeps=keeps, is_settled=False))
            for rank, stage in stages.items()
        )
        return _Frame(self._outside(layout), tuple(ranks))

    def _least_flight(self, layout: Layout, stage: Stage, rank: int, known: Known) -> Flight:
        number, pp = layout.num_microbatches, layout.pp
        if pp == 1:
            return Flight(0, stage.blocks, 1, 1)
        graded = 0
        if known == "usual":
            a_round = PassOrder("interleaved_1f1b", pp, number, 2).round_size
            graded = graded_when_interleaved(number, a_round)
        rows = min(number, pp - rank)
        return Flight(graded, rows * stage.blocks, rows, 1)

    def _least_stage(self, pp: int, rank: int, *, is_usual: bool) -> Stage:
        key = (pp, rank, is_usual)
        if key not in self.stages:
            model = self.asked.model
            blocks = max(0, model.layers // pp - 1)
            if is_usual:
                blocks = self._fewest_blocks(pp, rank)
            smallest = (blocks, *[0] * (len(self.kinds) - 1))
            self.stages[key] = Stage(
                blocks=blocks,
                has_embedding=rank == 0,
                has_head=False,
                dense_blocks=dense_blocks_among(model=model, first_block=rank, blocks=blocks),
                mix=smallest if model.is_patterned else (),
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
            if pp * number <= most_stages(model.layers)
        )

    def _held(
        self, layout: Layout, stage: Stage, *, keeps: bool, is_settled: bool
    ) -> tuple[int, int]:
        """Bytes of a rank, whatever it recomputes; and of its blocks' gradients in a pipeline.
        `keeps`: all its stages stay gathered, being no more than torch keeps. `is_settled`: it
        holds this stage and no other."""
        once = layout.num_microbatches == 1
        ways = (layout.tp, *layout.expert_ways, layout.shard_ranks, layout.sharding, layout.pp > 1)
        more = (layout.reshard_after_forward, layout.gradient_sync, layout.data_parallel > 1)
        key = (*ways, *more, layout.offload, once, stage, keeps, is_settled)
        if key not in self.held:
            self.held[key] = self._new_held(layout, stage, keeps=keeps, is_settled=is_settled)
        return self.held[key]

    def _new_held(
        self, layout: Layout, stage: Stage, *, keeps: bool, is_settled: bool
    ) -> tuple[int, int]:
        training = self.asked.training
        state = rank_state(self.asked.case(layout), stage)
        on_host = layout.offload == "cpu"
        held = 0 if on_host else state.parameters + state.optimizer + state.gradients
        if layout.sharding != "fsdp":
            return held, 0
        of = formats(training=training, layout=layout)
        blocks, root = self._elements(layout, stage)
        block = self._gathered_elements(layout, stage, blocks, is_settled=is_settled)
        gathered = min(of.gathered, of.gathered_matrix)
        if layout.pp > 1:
            stays = 0 if layout.reshards_stages else blocks
            held += gathered * (block + (stays + root if keeps else 0))
            stay = layout.gradient_sync == "last" and not training.traits.reduces_rounds
            return held, of.reduced * blocks if stay else 0
        has_buffer = layout.shard_ranks > 1 and not training.traits.flat_parameters
        held += gathered * self._buffered_elements(layout) if has_buffer else 0
        is_kept = layout.reshard_after_forward == "never"
        # units of the ends are not there in backward, but for what was reduced of the head
        there = end_units(self.asked.case(layout), stage).root.elements
        held += gathered * (there + (blocks if is_kept else block))
        if layout.num_microbatches > 1:
            sums = layout.gradient_sync == "last"
            kept = 0 if on_host else state.held_parameters
            held += of.reduced * (blocks + root if sums else kept)
        return held, 0

    def _elements(self, layout: Layout, stage: Stage) -> tuple[int, int]:
        """(of its blocks, of embedding and head)."""
        given = {"model": self.asked.model, "tp": layout.tp, "ep": layout.ep}
        root = stage_elements(stage=replace(stage, blocks=0, dense_blocks=0, mix=()), **given)
        return stage_elements(stage=stage, **given) - root, root

    def _gathered_elements(
        self, layout: Layout, stage: Stage, blocks: int, *, is_settled: bool
    ) -> int:
        """Of what is gathered at a time: a block in the mean of a pipeline's stage, or the smaller
        kind where that may have others; without a pipeline the last kind, where that is known."""
        if is_settled:
            return blocks // max(1, stage.blocks)
        kinds = [
            stage_elements(model=kind, stage=_BLOCK, tp=layout.tp, ep=layout.ep)
            for kind in self.kinds
        ]
        return min(kinds) if layout.pp > 1 or self.asked.model.is_patterned else kinds[0]

    def _buffered_elements(self, layout: Layout) -> int:
        """Of the largest buffer of a gather: routed experts that are a unit of their own have
        another one than their block."""
        ways = {"tp": layout.tp, "shard_ranks": layout.shard_ranks, "ep": layout.ep}
        return max(
            size(model=kind, **ways).elements
            for kind in self.kinds
            for size in (block_size, expert_size)
        )

    def _messages(self, layout: Layout, stage: Stage) -> int:
        """Buffers of a pipeline's messages, where they are of all its micro-batches."""
        asked = self.asked
        if asked.training.traits.half_parameters:
            return 0
        return message_buffer_bytes(
            asked.case(layout),
            stage,
            in_flight=1,
            message_bytes=self._saved(layout, self.kinds[0])["full"],  # what a block reads
        )

    def _blocks(self, layout: Layout, stage: Stage, known: Known) -> _Blocks:
        """Of the blocks of a rank that holds `stage`, or may hold other blocks, where what is known
        leaves that open."""
        is_whole = known in ("settled", "alike") and layout.schedule in _WHOLE_BACKWARD
        key: tuple[object, ...] = (known, is_whole, layout.pp > 1, *_OF_BLOCKS(layout))
        mix: tuple[int, ...] | None = None
        if len(self.kinds) > 1 and (layout.pp == 1 or is_whole):
            dense = stage.dense_blocks
            mix = stage.mix[::-1] if stage.mix else (stage.blocks - dense, dense)
        if is_whole:
            sums = weight_gradients_of(training=self.asked.training, layout=layout)
            key = (*key, sums, layout.shard_ranks if self.asked.model.experts else 1)
        if (*key, mix) not in self.blocks:
            self.blocks[*key, mix] = self._new_blocks(layout, mix, known)
        return self.blocks[*key, mix]

    def _new_blocks(self, layout: Layout, mix: tuple[int, ...] | None, known: Known) -> _Blocks:
        each = [
            _Blocks(saved=saved, work=self._work(layout, kind, saved, known))
            for kind in self.kinds
            for saved in (self._saved(layout, kind),)
        ]
        if len(each) == 1:
            return each[0]
        if mix is None:
            return _Blocks(_least(one.saved for one in each), _least(one.work for one in each))
        mean = {
            mode: sum(number * one.saved[mode] for number, one in zip(mix, each, strict=True))
            // max(1, sum(mix))
            for mode in MODES
        }
        there = [one.work for number, one in zip(mix, each, strict=True) if number]
        if not self.asked.model.is_patterned:
            there = there[:1]  # the kind with experts decides, which is the first
        return _Blocks(saved=mean, work=_least(there or [each[-1].work]))

    def _saved(self, layout: Layout, kind: Model) -> Bytes:
        is_fsdp = layout.sharding == "fsdp"
        experts = layout.expert_ways if kind.experts else None
        spread = (layout.tp, layout.cp, experts, kind)
        key = (*spread, layout.micro_batch, is_fsdp, layout.compile)
        if key not in self.saved:
            self.saved[key] = saved_bytes_a_block(self.asked.case(layout).of_blocks(kind))
        return self.saved[key]

    def _work(self, layout: Layout, kind: Model, saved: Bytes, known: Known) -> Bytes:
        """Of a block that makes all anew in its backward pass: that, and no less beside it than one
        that keeps all. Not known of schedules that split backward passes."""
        is_whole = known in ("settled", "alike")
        if known == "degrees" or (is_whole and layout.schedule not in _WHOLE_BACKWARD):
            return _NO_WORK
        work = dict.fromkeys(MODES, saved["full"])  # its input
        if is_whole:
            keeping = replace(layout, activation_checkpointing="none", checkpoint_blocks="all")
            case = self.asked.case(keeping).of_blocks(kind)
            allocated = activations_of_block(case).backward_peak_bytes
            work = {mode: n + (0 if mode == "attention" else allocated) for mode, n in work.items()}
        if known != "settled":  # there the last block may keep everything
            for mode in ("op", "full"):
                work[mode] += saved["none"] - saved[mode]
        return work


def _least(several: Iterable[Bytes]) -> Bytes:
    found = tuple(several)
    return {mode: min(one[mode] for one in found) for mode in MODES}


def _rank(stage: Stage, flight: Flight, held: int, gradients: int) -> _Rank:
    """A rank that holds so much whatever it recomputes, and so much of its blocks' gradients."""
    graded = gradients
    if flight.graded != 2:
        graded = gradients * flight.graded_blocks // max(1, stage.blocks)
    return _Rank(
        stage=stage,
        flight=flight,
        kept=held + graded,
        at_the_end=held + (gradients if flight.graded else 0),
    )


_BLOCK = Stage(blocks=1, has_embedding=False, has_head=False)

_NO_WORK: Bytes = dict.fromkeys(MODES, 0)

_WHOLE_BACKWARD = ("none", "gpipe", "1f1b", "interleaved_1f1b")
"""Schedules that are looked at here and do not split backward passes."""


def _is_settled(layout: Layout, known: Known) -> bool:
    """Whether it is known what each rank of a pipeline holds, and what is in flight there."""
    return known in ("settled", "alike") and layout.schedule in _WHOLE_BACKWARD


def _least_blocks(flight: Flight, over_bytes: int, spared_bytes: int) -> int:
    """Blocks of a rank, `spared_bytes` a micro-batch each, that spare `over_bytes`."""
    if over_bytes <= 0:
        return 1
    return -(-over_bytes * flight.stages // (flight.rows * spared_bytes))

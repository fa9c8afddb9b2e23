"""Floors: the least that a step takes, by a few multiplications.

Where measured runs correct the steps, floors are times the least factor that they give a layout.

Of given degrees whatever their policies, and of a layout with usual settings before it is known
what it must recompute. What is not known yet is taken as what costs least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypedDict

from fsdpplan.cost.estimate import slowest_factor
from fsdpplan.cost.kernels.gradients import gradient_seconds
from fsdpplan.cost.kernels.optimizer import layout_optimizer_seconds
from fsdpplan.cost.kernels.rates import untiled
from fsdpplan.cost.least import (
    Rounds,
    least_fsdp_seconds,
    least_update_seconds,
    least_way_seconds,
    message_seconds,
    moved_seconds,
    played_seconds,
    queued_seconds,
    rounds,
)
from fsdpplan.cost.model.params import kind_views
from fsdpplan.cost.model.shards import Stage, whole_model
from fsdpplan.cost.schedule.actions import ACTIVE_STAGES, PassOrder
from fsdpplan.cost.schedule.stages import (
    balanced_stage_blocks,
    head_blocks,
    layout_rank_stages,
    most_stages,
    pipeline_stages,
    stage_kinds,
)
from fsdpplan.cost.step.pipeline import Pair
from fsdpplan.cost.traffic.fsdp import Units, fsdp_units
from fsdpplan.search.bounds.room import Known, Room
from fsdpplan.search.bounds.works import Passing, Work, Works, least_passing, least_work
from fsdpplan.search.enumerate import (
    USUAL_SCHEDULES,
    Degrees,
    layout_of,
    micro_batches,
    sync_policies,
)
from fsdpplan.search.question import Question
from fsdpplan.search.variants import buckets, reshards
from fsdpplan.spec.layout import (
    SPLIT_BACKWARD_SCHEDULES,
    ActivationCheckpointing,
    Layout,
    Schedule,
)
from fsdpplan.spec.values import replace


class _Pipeline(TypedDict):
    """What a pipeline takes."""

    passes: list[Pair]
    """(forward, backward) of each stage."""
    gathers: list[float]
    """Of each stage, by FSDP."""
    send: float
    """A message."""


@dataclass(slots=True)
class Floors:
    """Floors of one question; what many degrees share is computed once."""

    asked: Question
    room: Room
    works: Works = field(init=False)
    """Of layouts whose overlap, buckets and loss are not known yet."""
    rows: Works = field(init=False)
    """The same of devices without tiles, where a sequence takes no longer among more of them."""
    settled: Works = field(init=False)
    """Of layouts as they are."""
    late: float = field(init=False)
    """How many times as long as the mean the slowest device computes."""
    updates: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Of the optimizer over the whole model."""
    moves: dict[tuple[object, ...], Units] = field(default_factory=dict)
    """What FSDP moves in a step without a pipeline, as if what is gathered were kept."""
    block_moves: dict[tuple[object, ...], Pair] = field(default_factory=dict)
    """The same of a block in a pipeline."""
    families: dict[Degrees, float] = field(default_factory=dict)
    """Of all ways to spread the ranks that compute the same."""
    plains: dict[tuple[Degrees, int], Layout] = field(default_factory=dict)
    """Layouts with plain policies."""
    sequences: dict[tuple[object, ...], Work] = field(default_factory=dict)
    """Of one sequence among many."""

    def __post_init__(self) -> None:
        cluster = self.asked.cluster
        even = replace(cluster, device=untiled(cluster.device))
        self.works = Works(self.asked)
        self.rows = Works(replace(self.asked, cluster=even))
        self.settled = Works(self.asked, is_settled=True)
        self.late = slowest_factor(
            gpus=cluster.gpus, straggler_fraction=cluster.device.fit.straggler_fraction
        )

    def in_room(self, room: Room, *, least_factor: float) -> Floors:
        """The same with other room and another least factor: of all that was computed, only what
        may fit is asked again."""
        other = copy(self)
        other.asked = replace(self.asked, least_factor=least_factor)
        other.room, other.families = room, {}
        return other

    def at_first_sight(self, d: Degrees) -> float:
        """The least of all micro-batches, as if all shards were as small as they can be, and moved
        in no time: the same for many. Infinite where nothing fits."""
        if d.sharding != "ddp":
            d = d._replace(dp_replicate=1, dp_shard=d.data_parallel)
        if d not in self.families:
            self.families[d] = inf
            if self._may_fit_at_all(d):
                plain = self.plain(d, self.sizes(d)[0])
                sequences = plain.num_microbatches * plain.micro_batch / d.pp
                least = sequences * self._slowest(self._sequence(plain, "none"))
                if d.offload == "cpu":  # the host's optimizer is slow enough to decide
                    least += self._update_seconds(plain) / d.pp
                self.families[d] = self.asked.least_factor * least
        return self.families[d]

    def _sequence(self, layout: Layout, mode: ActivationCheckpointing) -> Work:
        """A sequence through the whole model, as one of the whole global batch on a rank: it takes
        no longer in a larger micro-batch, so few of these bound those of any size."""
        spread = (layout.tp, layout.cp, *layout.expert_ways, layout.sharding)
        ways = (*spread, layout.data_parallel > 1, mode)
        if ways not in self.sequences:
            batch = self.asked.training.global_batch
            all_at_once = replace(layout, micro_batch=batch, num_microbatches=1)
            work = self.rows.stage(all_at_once, mode, whole_model(self.asked.model))
            self.sequences[ways] = Work(*(part / batch for part in work))
        return self.sequences[ways]

    def _block_sequence(self, layout: Layout, modes: Sequence[ActivationCheckpointing]) -> Work:
        """The same of a block, of the kind that takes least with one of the modes."""
        spread = (layout.tp, layout.cp, *layout.expert_ways, layout.sharding)
        ways = (*spread, layout.data_parallel > 1, *modes, "block")
        if ways not in self.sequences:
            batch = self.asked.training.global_batch
            all_at_once = replace(layout, micro_batch=batch, num_microbatches=1)
            work = least_work(
                self.rows.block(all_at_once, mode, kind=kind)
                for mode in modes
                for kind in range(len(kind_views(self.asked.model)))
            )
            self.sequences[ways] = Work(*(part / batch for part in work))
        return self.sequences[ways]

    def _head_sequence(self, layout: Layout) -> Work:
        """The same of the head."""
        ways = (layout.tp, layout.cp, layout.sharding, layout.data_parallel > 1, "head")
        if ways not in self.sequences:
            batch = self.asked.training.global_batch
            all_at_once = replace(layout, micro_batch=batch, num_microbatches=1)
            work = self.rows.ends(all_at_once, embedding=False, head=True)
            self.sequences[ways] = Work(*(part / batch for part in work))
        return self.sequences[ways]

    def _usual_modes(self, layout: Layout) -> list[ActivationCheckpointing]:
        """What all blocks alike may recompute in order to fit."""
        possible = self.room.recomputed(self._leanest_policies(layout), known="usual")
        return [mode for mode in self.asked.modes if "none" in possible or mode in possible]

    def largest_size(self, d: Degrees) -> int:
        """The largest micro-batch that may fit, 0 where none may: as long as there are several of
        them, a larger one needs no less, and none less than the largest where a rank of a pipeline
        has all of them in flight."""
        sizes = self.sizes(d)
        if self._may_fit(d, sizes[-1]):
            return sizes[-1]
        at = bisect_left(
            sizes, True, hi=len(sizes) - 1, key=lambda size: not self._may_fit(d, size)
        )
        return sizes[at - 1] if at else 0

    def _may_fit_at_all(self, d: Degrees) -> bool:
        """Whether any micro-batch may: then the smallest, or the largest does."""
        sizes = self.sizes(d)
        return self._may_fit(d, sizes[0]) or self._may_fit(d, sizes[-1])

    def _may_fit(self, d: Degrees, size: int) -> bool:
        known: Known = "schedule" if self._is_usual else "degrees"
        return bool(self.room.recomputed(self._leanest_policies(self.plain(d, size)), known=known))

    @property
    def _is_usual(self) -> bool:
        """Whether all blocks do alike, and a pipeline's schedule is a usual one."""
        pins = self.asked.pins
        return pins.schedule in USUAL_SCHEDULES and pins.checkpoint_blocks in (None, "all")

    def sizes(self, d: Degrees) -> tuple[int, ...]:
        """Micro-batches that there can be, the smallest first."""
        training = self.asked.training
        return micro_batches(training=training, data_parallel=d.data_parallel, pins=self.asked.pins)

    def plain(self, d: Degrees, size: int) -> Layout:
        """A layout with these degrees and this micro-batch, and plain policies."""
        if (d, size) not in self.plains:
            self.plains[d, size] = self._plain(d, size)
        return self.plains[d, size]

    def _plain(self, d: Degrees, size: int) -> Layout:
        asked = self.asked
        number = max(1, asked.training.global_batch // (d.data_parallel * size))
        schedule: Schedule = "none" if d.pp == 1 else "1f1b"
        return layout_of(
            d,
            micro_batch=size,
            num_microbatches=number,
            reshard=reshards(asked, d)[0],
            sync=sync_policies(d=d, num_microbatches=number, pins=asked.pins)[0],
            schedule=schedule,
            virtual_stages=1,
            compiled=asked.compiled,
            pins=asked.pins,
            model=asked.model,
            training=asked.training,
        )

    def at(self, layout: Layout) -> float:
        """With its micro-batch, whatever its other policies: its share of what is to be computed,
        with what must be recomputed, or what FSDP moves; then the optimizer. Infinite where nothing
        fits."""
        return self._with_moves(layout, self._passing(layout))

    def may_be_below(self, layout: Layout, seconds: float) -> bool:
        """Whether `at` is below that: first as if nothing were recomputed, and each sequence took
        no longer than among many."""
        work, size = self._sequence(layout, "none"), layout.micro_batch
        passing = layout.num_microbatches * size * self._slowest(work) / layout.pp
        return self._with_moves(layout, passing) < seconds and self.at(layout) < seconds

    def of_changes(self, layout: Layout) -> float:
        """The least of `layout` with its policies, whatever it recomputes that its memory asks for,
        however large its buckets are and into however many pieces its loss is cut. Infinite where
        nothing fits. In a pipeline, and without FSDP, as `at`."""
        if layout.loss_chunks > 1 and self.asked.pins.loss_chunks is None:
            layout = replace(layout, loss_chunks=1)  # whole, or in two pieces if that is faster
        if layout.pp > 1 or layout.sharding != "fsdp":
            return self.at(layout)
        blocks = self.room.recomputed(layout, known="settled")
        if not blocks:
            return inf
        again = min(n and n * self._again(layout, mode) for mode, n in blocks.items())
        asked, (stage,) = self.asked, pipeline_stages(model=self.asked.model, layout=layout)
        moved = self._least_moved(layout)
        ends, whole = (
            fsdp_units(asked.case(replace(moved, wrap_blocks=n)), whole_model(asked.model))
            for n in (asked.pins.wrap_blocks or 1, asked.pins.wrap_blocks or asked.model.layers)
        )
        work = self._work(layout)
        least = least_fsdp_seconds(
            whole,
            ends=ends,
            cluster=asked.cluster,
            often=rounds(layout),
            late=self.late,
            computed=work.computed + again / self.late,
            waiting=work.total - work.computed + self.works.end_calls_seconds(layout, stage),
            gradients=gradient_seconds(asked.case(layout), stage),
        )
        return asked.least_factor * (least + self._update_seconds(layout))

    def may_change_below(self, layout: Layout, seconds: float) -> bool:
        """Whether `layout`, or what its changes make of it, may take less: by `of_changes`, and
        where FSDP moves as much as it computes with units of each size, which that does not ask."""
        if self.of_changes(layout) >= seconds:
            return False
        if layout.pp > 1 or layout.sharding != "fsdp":
            return True
        return any(self.of_settled(one) < seconds for one in self._keeping_all(layout))

    def _keeping_all(self, layout: Layout) -> Iterator[Layout]:
        """`layout` with all that its changes may spare at once, with units of each size."""
        pins = self.asked.pins
        moved = self._least_moved(layout)
        plain = replace(moved, activation_checkpointing="none", checkpoint_blocks="all")
        pieces = (layout.loss_chunks,) if pins.loss_chunks is not None else (1, 2)
        for number in pieces:
            cut = replace(plain, loss_chunks=number)
            yield cut
            yield from buckets(self.asked, cut)

    def _least_moved(self, layout: Layout) -> Layout:
        """To fewer ranks, one of the changes, nothing may be moved in the backward pass."""
        is_cut = layout.reshard_after_forward != "never" and layout.ep == layout.tp == 1
        return replace(layout, reshard_after_forward="never") if is_cut else layout

    def at_usual(self, layout: Layout) -> float:
        """The same of its usual settings: all blocks do alike, and the schedule is 1F1B or
        interleaved 1F1B."""
        if not self._is_usual:
            return self.at(layout)
        modes = self._usual_modes(layout)
        if not modes:
            return inf
        if layout.pp == 1 and layout.sharding == "fsdp":
            return self._flat_usual(layout, modes)
        return self._with_moves(layout, self._passing_alike(layout, modes))

    def _flat_usual(self, layout: Layout, modes: Sequence[ActivationCheckpointing]) -> float:
        """Without a pipeline, whichever way FSDP reshards and reduces: as if what is gathered were
        kept, what is reduced were reduced once, and gradients were added in no time."""
        moves = self._kept_moves(layout)
        seldom = Rounds(layout.num_microbatches, scatters=1, reduces=1)
        work, size = least_work(self._sequence(layout, mode) for mode in modes), layout.micro_batch
        least = least_fsdp_seconds(
            moves,
            ends=moves,
            cluster=self.asked.cluster,
            often=seldom,
            late=self.late,
            computed=size * work.computed,
            waiting=size * (work.total - work.computed),
            gradients=0.0,
        )
        least += self._update_seconds(layout)
        links = self._flat_links_seconds(layout, modes, moved_seconds(moves, seldom))
        return self.asked.least_factor * max(least, links)

    def _with_moves(self, layout: Layout, passing: float) -> float:
        """With what FSDP moves where that takes longer than `passing`, and the optimizer."""
        least, links = passing, 0.0
        if layout.pp == 1 and layout.sharding == "fsdp" and least < inf:
            moves, seldom = self._least_moves(layout), Rounds(layout.num_microbatches, 1, 1)
            least = max(least, queued_seconds(moves, seldom))
            links = self._flat_links_seconds(layout, ("none",), moved_seconds(moves, seldom))
        least += (self._update_seconds(layout) + self._gradient_seconds(layout)) / layout.pp
        return self.asked.least_factor * max(least, links)

    def _passing(self, layout: Layout) -> float:
        """What is to be computed, with what must be recomputed; infinite where nothing fits."""
        pp, blocks = layout.pp, self.room.recomputed(self._leanest_policies(layout))
        if not blocks:
            return inf
        work = self._work(layout)
        again = min(
            number and number * self._again(layout, mode) for mode, number in blocks.items()
        )
        share = (pp - 1) / pp if pp > 1 else 1.0  # the last rank may have few blocks
        least = layout.num_microbatches * (self._slowest(work) / pp + share * again)
        # a backward pass may be split, and the half that others wait for come first
        return least + self._way(layout, work.total) / 2

    def _passing_alike(self, layout: Layout, modes: Sequence[ActivationCheckpointing]) -> float:
        """The same where all blocks do alike, as one of `modes` says, and backward passes are
        whole: as if each sequence took no longer than among many."""
        work, size = least_work(self._sequence(layout, mode) for mode in modes), layout.micro_batch
        sequences = layout.num_microbatches * size / layout.pp
        least = sequences * self._slowest(work)
        if layout.pp == 1:
            return least
        late = sequences * (self.late - 1) * work.computed
        return max(
            least + size * self._way(layout, work.total), late + self._usual_way(layout, modes)
        )

    def _usual_way(self, layout: Layout, modes: Sequence[ActivationCheckpointing]) -> float:
        """The least of `least_way_seconds` over the usual schedules, with what the first stage
        reduces, as if all blocks were of the kind that takes least, nothing were sent, and the head
        alone were behind them.

        With n blocks on the way and on a rank (`_blocks_in_turn`), and f, b, g and r seconds of a
        block's passes, gather and reduction:

            T >= n * (f + b) + m * (head, of the last rank) + blocks of the first stage * (g + r)

        Under 1F1B stages are gathered as they compute: max(0, g - f) of each block on the way.
        """
        model, number, size = self.asked.model, layout.num_microbatches, layout.micro_batch
        work = self._block_sequence(layout, modes)
        block, head = size * work.total, number * size * self._head_sequence(layout).total
        gather, reduction = self._block_moves(layout)
        own = self.asked.pins.virtual_stages
        least = inf
        for each in (own,) if own else range(1, ACTIVE_STAGES + 1):
            if each > 1 and layout.pp * each > model.layers:
                break
            turns = _blocks_in_turn(
                layers=model.layers,
                head_blocks=head_blocks(model),
                pp=layout.pp,
                virtual_stages=each,
                num_microbatches=number,
            )
            most, last = turns.most * block, turns.last * block + head
            if each == 1:
                last += turns.before_last * max(0.0, gather - size * work.forward)
            else:
                most, last = most + turns.first * gather, last + turns.first * gather
            least = min(least, max(most, last) + turns.first * reduction)
        return least

    def _block_moves(self, layout: Layout) -> Pair:
        """(gather, reduction) of a block by FSDP in a pipeline, of the kind that takes least."""
        model = self.asked.model
        if model.is_patterned:
            return 0.0, 0.0
        key = _OF_MOVES(layout)
        if key not in self.block_moves:
            kinds = (0, 1) if model.experts and model.dense_blocks else (0,)
            blocks = (replace(_BLOCK, dense_blocks=dense) for dense in kinds)
            gathers, reductions = zip(
                *(self.works.moves(layout, block) for block in blocks), strict=True
            )
            self.block_moves[key] = min(gathers), min(reductions)
        return self.block_moves[key]

    def _slowest(self, work: Work) -> float:
        """Of the slowest device: it waits no longer for collectives than the others."""
        return work.total + (self.late - 1) * work.computed

    def _way(self, layout: Layout, work: float) -> float:
        """The first micro-batch to the last rank of a pipeline and the last one back from it, of
        `work` a micro-batch; a stage may have a block less than its share."""
        layers, pp = self.asked.model.layers, layout.pp
        stages = pp * (self.asked.pins.virtual_stages or 1)
        passed = pp - 1 - (stages == most_stages(layers))  # the embedding may be alone
        return passed * max(1, layers // (pp * ACTIVE_STAGES) - 1) * work / layers

    def _leanest_policies(self, layout: Layout) -> Layout:
        """With what keeps least of parameters and gradients."""
        pp, pins = layout.pp, self.asked.pins
        frees = pp == 1 or self.asked.training.traits.reshards_stages
        frees |= layout.sharding != "fsdp"
        reshard = pins.reshard_after_forward or ("always" if frees else "never")
        sync = pins.gradient_sync or ("every" if pp == 1 else "last")
        if (reshard, sync) == (layout.reshard_after_forward, layout.gradient_sync):
            return layout
        return replace(layout, reshard_after_forward=reshard, gradient_sync=sync)

    def of_usual(self, layout: Layout, modes: Sequence[ActivationCheckpointing]) -> float:
        """Of `layout` as it is but for what it recomputes, one of `modes`, and for its loss, whole
        or in pieces; infinite without a mode."""
        return self._of(layout, modes, self.works) if modes else inf

    def of_settled(self, layout: Layout) -> float:
        """Of `layout` as it is."""
        return self._of(layout, (layout.activation_checkpointing,), self.settled)

    def _of(self, layout: Layout, modes: Sequence[ActivationCheckpointing], works: Works) -> float:
        if layout.pp > 1:
            pipeline = self._pipeline(layout, modes, works)
            least = least_way_seconds(layout, **pipeline)
            least += self._beside_seconds(layout, modes, works)
        else:
            least = self._flat(layout, modes, works) + self._update_seconds(layout)
        least = max(least, self._links_seconds(layout, modes, works))
        return self.asked.least_factor * least

    def _links_seconds(
        self, layout: Layout, modes: Sequence[ActivationCheckpointing], works: Works
    ) -> float:
        """What passes one level of the network, one after another: inside blocks, and by FSDP
        without a pipeline. Of the rank that has least of it."""
        if layout.pp == 1:
            moved: Passing = {}
            if layout.sharding == "fsdp":
                moves = fsdp_units(self.asked.case(layout), whole_model(self.asked.model))
                moved = moved_seconds(moves, rounds(layout))
            return self._flat_links_seconds(layout, modes, moved)
        stages = stage_kinds(model=self.asked.model, layout=layout)
        each = [
            least_passing(works.passing(layout, mode, stage) for mode in modes)
            for stage in stages.kinds
        ]
        return layout.num_microbatches * min(
            max(
                sum(each[stages.places[at]].get(level.name, 0.0) for at in held)
                for level in self.asked.cluster.levels
            )
            for held in layout_rank_stages(layout)
        )

    def _flat_links_seconds(
        self, layout: Layout, modes: Sequence[ActivationCheckpointing], moved: Passing
    ) -> float:
        """The same without a pipeline, where FSDP sends so much."""
        whole, number = whole_model(self.asked.model), layout.num_microbatches
        inside = least_passing(self.works.passing(layout, mode, whole) for mode in modes)
        each = (
            number * inside.get(level, 0.0) + moved.get(level, 0.0)
            for level in inside.keys() | moved.keys()
        )
        return max(each, default=0.0)

    def _flat(
        self, layout: Layout, modes: Sequence[ActivationCheckpointing], works: Works
    ) -> float:
        """All but the optimizer, without a pipeline."""
        asked = self.asked
        (stage,) = pipeline_stages(model=asked.model, layout=layout)
        case = asked.case(layout)
        work = least_work(works.stage(layout, mode, stage) for mode in modes)
        waiting = work.total - work.computed + works.end_calls_seconds(layout, stage)
        gradients = gradient_seconds(case, stage)
        if layout.sharding == "fsdp":
            moves = fsdp_units(case, whole_model(asked.model))
            return least_fsdp_seconds(
                moves,
                ends=moves,
                cluster=asked.cluster,
                often=rounds(layout),
                late=self.late,
                computed=work.computed,
                waiting=waiting,
                gradients=gradients,
            )
        number = layout.num_microbatches
        return self.late * (number * work.computed + gradients) + number * waiting

    def played(self, layout: Layout) -> float:
        """The same of a pipeline, by playing its schedule: it costs more, and says more."""
        if layout.pp == 1 or layout.schedule in SPLIT_BACKWARD_SCHEDULES:
            return 0.0
        modes = (layout.activation_checkpointing,)
        least = played_seconds(layout, **self._pipeline(layout, modes, self.settled))
        least += self._beside_seconds(layout, modes, self.settled)
        return self.asked.least_factor * least

    def _beside_seconds(
        self, layout: Layout, modes: Sequence[ActivationCheckpointing], works: Works
    ) -> float:
        """What a step of a pipeline takes beside its passes: by how much the busiest rank, which
        has no less than its share, computes longer than the mean device would; gradients and the
        optimizer of the rank where each takes longest; and what the first stage, the last to be
        done, reduces."""
        stages = stage_kinds(model=self.asked.model, layout=layout)
        kinds = [
            least_work(works.stage(layout, mode, stage) for mode in modes) for stage in stages.kinds
        ]
        computed = sum(stages.each([kind.computed for kind in kinds])) / layout.pp
        late = (self.late - 1) * layout.num_microbatches * computed
        reduced = 0.0
        if layout.schedule not in SPLIT_BACKWARD_SCHEDULES:
            reduced = works.moves(layout, stages.kinds[0])[1]
        return late + reduced + self.late * self._rank_update_seconds(layout)

    def _rank_update_seconds(self, layout: Layout) -> float:
        ways = (layout.tp, *layout.expert_ways, layout.pp, layout.sharding, layout.dp_replicate)
        order = (layout.schedule, layout.virtual_stages, layout.stage_blocks, layout.gradient_sync)
        key = (*ways, layout.offload, layout.shard_ranks, *order, layout.num_microbatches)
        if key not in self.updates:
            self.updates[key] = least_update_seconds(self.asked.case(layout))
        return self.updates[key]

    def _gradient_seconds(self, layout: Layout) -> float:
        """What the gradients of the whole model cost in a pipeline, where it is known when they are
        reduced."""
        if layout.pp == 1:
            return 0.0
        stage = whole_model(self.asked.model)
        return self.late * gradient_seconds(self.asked.case(layout), stage)

    def _pipeline(
        self, layout: Layout, modes: Sequence[ActivationCheckpointing], works: Works
    ) -> _Pipeline:
        asked = self.asked
        stages = stage_kinds(model=asked.model, layout=layout)
        kinds = [
            least_work(works.stage(layout, mode, stage) for mode in modes) for stage in stages.kinds
        ]
        # as the pipeline has them, half in each pass
        halves = [works.end_calls_seconds(layout, stage) / 2 for stage in stages.kinds]
        return {
            "passes": stages.each(
                [
                    (kind.forward + half, kind.backward + half)
                    for kind, half in zip(kinds, halves, strict=True)
                ]
            ),
            "gathers": stages.each([works.moves(layout, stage)[0] for stage in stages.kinds]),
            "send": message_seconds(asked.case(layout)),
        }

    def leanest(self, d: Degrees) -> Layout:
        """The layout with these degrees that needs least, or nearly so."""
        smallest = self.plain(d, self.sizes(d)[0])
        return replace(smallest, activation_checkpointing=self.asked.modes[-1])

    def _least_moves(self, layout: Layout) -> Units:
        """What FSDP moves of layouts that spread their ranks alike, with units as large as can be
        and what is gathered kept."""
        return self._kept_moves(layout, wrap_blocks=self.asked.model.layers)

    def _kept_moves(self, layout: Layout, *, wrap_blocks: int = 0) -> Units:
        """The same with units as they are, or of so many blocks."""
        ways = (layout.tp, *layout.expert_ways, layout.cp, layout.dp_replicate, layout.dp_shard)
        key = (*ways, layout.offload, wrap_blocks or layout.wrap_blocks)
        if key not in self.moves:
            own = replace(
                layout, wrap_blocks=wrap_blocks or layout.wrap_blocks, reshard_after_forward="never"
            )
            self.moves[key] = fsdp_units(self.asked.case(own), whole_model(self.asked.model))
        return self.moves[key]

    def _update_seconds(self, layout: Layout) -> float:
        """The optimizer over the whole model."""
        asked = self.asked
        ways = (layout.tp, *layout.expert_ways, layout.pp, layout.sharding)
        key = (*ways, layout.offload, layout.dp_replicate, layout.shard_ranks)
        if key not in self.updates:
            stage = whole_model(asked.model)
            self.updates[key] = layout_optimizer_seconds(asked.case(layout), stage)
        return self.late * self.updates[key]

    def _work(self, layout: Layout) -> Work:
        """One micro-batch through the whole model, keeping everything."""
        return self.works.stage(layout, "none", whole_model(self.asked.model))

    def _again(self, layout: Layout, mode: ActivationCheckpointing) -> float:
        """One block that is recomputed."""
        works = self.works
        return min(
            self._slowest(works.block(layout, mode, kind=kind))
            - self._slowest(works.block(layout, "none", kind=kind))
            for kind in range(len(kind_views(self.asked.model)))
        )


@dataclass(slots=True)
class PhasedFloors:
    """Floors of the mean step of a run whose precision changes: those of its parts, each as often
    as it is taken. Each part's is no more than its step, so neither is their mean.

    What there can be, and what may fit, is asked of the first part: what does not fit there does
    not fit the run.
    """

    parts: tuple[tuple[float, Floors], ...]

    @property
    def first(self) -> Floors:
        """Of the first part."""
        return self.parts[0][1]

    def in_room(self, room: Room, *, least_factor: float) -> PhasedFloors:
        """With other room, of which each part has as much as the first."""
        most = room.asked.available_bytes
        rooms = (room, *(part.room.of_bytes(most) for _, part in self.parts[1:]))
        parts = (
            (share, part.in_room(own, least_factor=least_factor))
            for (share, part), own in zip(self.parts, rooms, strict=True)
        )
        return PhasedFloors(tuple(parts))

    def at_first_sight(self, d: Degrees) -> float:
        """As in Floors, as are all below."""
        return sum(share * part.at_first_sight(d) for share, part in self.parts)

    def at(self, layout: Layout) -> float:
        """With its micro-batch."""
        return sum(share * part.at(layout) for share, part in self.parts)

    def may_be_below(self, layout: Layout, seconds: float) -> bool:
        """By that."""
        return self.at(layout) < seconds

    def of_changes(self, layout: Layout) -> float:
        """Of it and its changes."""
        return sum(share * part.of_changes(layout) for share, part in self.parts)

    def may_change_below(self, layout: Layout, seconds: float) -> bool:
        """By what its changes take at the least."""
        return self.of_changes(layout) < seconds

    def at_usual(self, layout: Layout) -> float:
        """With usual settings."""
        return sum(share * part.at_usual(layout) for share, part in self.parts)

    def of_usual(self, layout: Layout, modes: Sequence[ActivationCheckpointing]) -> float:
        """With one of the modes."""
        return sum(share * part.of_usual(layout, modes) for share, part in self.parts)

    def of_settled(self, layout: Layout) -> float:
        """As it is."""
        return sum(share * part.of_settled(layout) for share, part in self.parts)

    def played(self, layout: Layout) -> float:
        """By its schedule."""
        return sum(share * part.played(layout) for share, part in self.parts)

    def largest_size(self, d: Degrees) -> int:
        """The largest micro-batch that may fit."""
        return self.first.largest_size(d)

    def sizes(self, d: Degrees) -> tuple[int, ...]:
        """Micro-batches that there can be."""
        return self.first.sizes(d)

    def plain(self, d: Degrees, size: int) -> Layout:
        """With plain policies."""
        return self.first.plain(d, size)

    def leanest(self, d: Degrees) -> Layout:
        """What needs least."""
        return self.first.leanest(d)


_BLOCK = Stage(blocks=1, has_embedding=False, has_head=False)

_OF_MOVES = attrgetter(
    *("tp", "cp", "ep", "experts_over_tp", "dp_shard", "dp_replicate"),
    *("sharding", "wrap_blocks", "offload"),
)
"""Of a layout, what decides what FSDP moves of a block in a pipeline."""


class _Turns(NamedTuple):
    """Blocks that a step of a pipeline takes one after another at the least, forward and as many
    backward."""

    most: int
    """Of the rank where most."""
    last: int
    """Of the last rank."""
    before_last: int
    """Before that rank's first stage."""
    first: int
    """Of the first stage."""


@lru_cache(maxsize=4096)
def _blocks_in_turn(
    *, layers: int, head_blocks: float, pp: int, virtual_stages: int, num_microbatches: int
) -> _Turns:
    """What `least_way_seconds` counts, of equal blocks and without messages and gathers.

    n = m * blocks of the rank + max over its stages of (blocks before the stage - a round of
        micro-batches through those of the rank before it)
    """
    blocks = balanced_stage_blocks(
        layers=layers, stages=pp * virtual_stages, head_blocks=head_blocks
    )
    schedule: Schedule = "1f1b" if virtual_stages == 1 else "interleaved_1f1b"
    a_round = PassOrder(schedule, pp, num_microbatches, virtual_stages).round_size
    before = list(accumulate(blocks, initial=0))
    most = last = 0
    for rank in range(pp):
        own = way = 0
        for stage in range(rank, pp * virtual_stages, pp):
            way = max(way, before[stage] - a_round * own)
            own += blocks[stage]
        last = num_microbatches * own + way
        most = max(most, last)
    return _Turns(most=most, last=last, before_last=before[pp - 1], first=blocks[0])


def floors_of(asked: Question, room: Room) -> Floors | PhasedFloors:
    """Floors of a question; `room` is that of its first part."""
    if asked.training.precision_switch == "none":
        return Floors(asked, room)
    (share, first), *others = asked.phases
    parts = [(share, Floors(first, room)), *((s, Floors(q, Room(q))) for s, q in others)]
    return PhasedFloors(tuple(parts))

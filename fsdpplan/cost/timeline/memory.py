"""Memory over a step: what each pipeline rank has allocated while its timeline goes on.

What `cost/memory` says is held and freed, in the order of time: of FSDP unit by unit, of whole
parameters block by block, of a pipeline action by action. The highest point is the estimate's peak.
Between two points memory is as at the first.

Earlier micro-batches have the sizes of the last one, but for gradients: the first one finds none,
and what is not reduced in one of them stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fsdpplan.cost.memory.activations import mask_bytes
from fsdpplan.cost.memory.fsdp_moments import fsdp_moments
from fsdpplan.cost.memory.ledger import StateBytes, rank_state
from fsdpplan.cost.memory.peak import stage_phases, staging_bytes
from fsdpplan.cost.memory.pipeline_moments import moment_phases
from fsdpplan.cost.memory.rank_quantities import Ends, EndSizes, RankSizes, UnitSizes
from fsdpplan.cost.memory.replica_moments import pipelined_phase, replica_moments
from fsdpplan.cost.memory.sizes import rank_sizes
from fsdpplan.cost.model.formats import formats
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.play.heap import Moment, Phase
from fsdpplan.cost.schedule.moments import Moment as RankMoment
from fsdpplan.cost.schedule.moments import moments_of_rank
from fsdpplan.cost.schedule.order import layout_order, rank_actions
from fsdpplan.cost.schedule.stages import (
    in_flight_blocks,
    layout_stage_blocks,
    pipeline_ranks,
    pipeline_stages,
    resharded_blocks,
)
from fsdpplan.cost.timeline.events import COMPUTE, Event, MemoryPoint
from fsdpplan.spec.plan import Case

_At = tuple[float, Phase]
"""From when on, what is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What is known of one pipeline rank."""

    case: Case
    number: int
    stage: Stage
    sizes: RankSizes
    state: StateBytes
    phases: list[Phase]
    """Candidates for the peak; the optimizer's is the last."""

    @property
    def peak(self) -> Phase:
        """The highest of them."""
        return max(self.phases, key=lambda phase: phase.total_bytes)


def memory_points(
    case: Case,
    events: Sequence[Event],
    *,
    actions: Sequence[Sequence[tuple[float, float]]],
    end: float,
) -> tuple[MemoryPoint, ...]:
    """What each rank has allocated; `actions`: from when to when it does each of its schedule's."""
    stages = pipeline_ranks(model=case.model, layout=case.layout)
    in_flight = in_flight_blocks(model=case.model, layout=case.layout)
    found: list[MemoryPoint] = []
    for number, (stage, blocks) in enumerate(zip(stages, in_flight, strict=True)):
        sizes, state = rank_sizes(case, stage, in_flight_blocks=blocks), rank_state(case, stage)
        rank = _Rank(
            case=case,
            number=number,
            stage=stage,
            sizes=sizes,
            state=state,
            phases=stage_phases(case, stage, sizes=sizes, state=state),
        )
        own = [e for e in events if e.rank == number and e.stream == COMPUTE]
        update = next((e.start_seconds for e in own if e.kind == "optimizer"), end)
        if case.layout.pp == 1:
            passes = _Passes.of(own)
            fill = _fsdp if case.layout.sharding == "fsdp" else _whole
            line = [at for each in passes for at in fill(rank, each, len(passes))]
        else:
            line = _pipeline(rank, actions[number])
        peak = rank.peak  # once: a step has thousands of moments
        line = [(when, _at_most(phase, peak)) for when, phase in line if when < update]
        line.append((update, rank.phases[-1]))
        found += _points(rank, _with_peak(line, peak))
    return tuple(found)


def _points(rank: _Rank, line: Iterable[_At]) -> list[MemoryPoint]:
    layout, training = rank.case.layout, rank.case.training
    on_device = layout.offload == "none"
    kept = formats(training=training, layout=layout).kept_gradient
    staged = 0 if on_device else staging_bytes(rank.sizes, kept)
    masks = mask_bytes(rank.case, rank.stage)
    return [
        MemoryPoint(
            rank=rank.number,
            start_seconds=when,
            phase=phase.name,
            parameters_bytes=rank.state.parameters if on_device else 0,
            optimizer_bytes=rank.state.optimizer if on_device else 0,
            gradients_bytes=phase.gradients_bytes + staged,
            unsharded_parameters_bytes=phase.unsharded_parameters_bytes,
            unsharded_gradients_bytes=phase.unsharded_gradients_bytes,
            activations_bytes=phase.activations_bytes + masks,
            logits_bytes=phase.logits_bytes,
            temporaries_bytes=phase.temporaries_bytes,
        )
        for when, phase in line
    ]


def _at_most(phase: Phase, peak: Phase) -> Phase:
    """What is only approximated of a moment, of which the peak is known."""
    beyond = phase.total_bytes - peak.total_bytes
    if beyond <= 0:
        return phase
    for part in ("temporaries_bytes", "activations_bytes", "unsharded_gradients_bytes"):
        taken = min(beyond, getattr(phase, part))
        phase = replace(phase, **{part: getattr(phase, part) - taken})
        beyond -= taken
    return phase


def _with_peak(line: list[_At], peak: Phase) -> list[_At]:
    """With the peak, which candidates of a bound may have alone, where most is of its kind."""
    line.sort(key=lambda at: at[0])
    if any(phase.total_bytes == peak.total_bytes for _, phase in line):
        return line
    alike = [at for at, (_, phase) in enumerate(line) if phase.name == peak.name]
    among = alike or range(len(line))
    highest = max(among, key=lambda at: line[at][1].total_bytes)
    line[highest] = (line[highest][0], peak)
    return line


def _spread(phases: Sequence[Phase], start: float, end: float) -> list[_At]:
    """One after another, evenly."""
    return [(start + (end - start) * at / len(phases), phase) for at, phase in enumerate(phases)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """When one micro-batch goes forward and back, block by block as far as that is shown."""

    number: int
    forward: tuple[float, float]
    backward: tuple[float, float]
    blocks: dict[tuple[bool, int], tuple[float, float]]
    """(is backward, block) -> from when to when."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> list[_Passes]:
        """Of all micro-batches of a rank, in order."""
        spans: dict[int, dict[bool, tuple[float, float]]] = {}
        blocks: dict[int, dict[tuple[bool, int], tuple[float, float]]] = {}
        for event in events:
            if event.micro_batch is None or not event.direction:
                continue
            is_back = event.direction != "forward"
            both = spans.setdefault(event.micro_batch, {})
            begun = both.get(is_back, (event.start_seconds, 0.0))[0]
            both[is_back] = (begun, event.end_seconds)
            if event.block is not None:
                own = blocks.setdefault(event.micro_batch, {})
                key = (is_back, event.block)
                own[key] = (own.get(key, (event.start_seconds,))[0], event.end_seconds)
        return [
            cls(
                number=number,
                forward=both[False],
                backward=both[True],
                blocks=blocks.get(number, {}),
            )
            for number, both in sorted(spans.items())
        ]

    def of_blocks(self, first: int, last: int, count: int, *, back: bool) -> tuple[float, float]:
        """From when to when the blocks `first` to `last` of `count` are at work."""
        early, late = (last, first) if back else (first, last)
        if (back, early) in self.blocks and (back, late) in self.blocks:
            return self.blocks[back, early][0], self.blocks[back, late][1]
        begin, end = self.backward if back else self.forward
        one = (end - begin) / (count + 2)
        before = count - 1 - last if back else first
        return begin + (before + 1) * one, begin + (before + 2 + last - first) * one


def _fsdp(rank: _Rank, passes: _Passes, count: int) -> list[_At]:
    """One micro-batch under FSDP."""
    s, is_last = rank.sizes, passes.number == count - 1
    held = 0
    if not is_last:
        s, held = _earlier(s, is_first=passes.number == 0), s.held_bytes(s.blocks)

    def holding(moment: Moment) -> Phase:
        """With the gradients of earlier micro-batches: the first one finds none, and leaves its
        own unit by unit."""
        kept = held
        if passes.number == 0 and not is_last:
            done = 0
            if moment.part == "backward":
                done = s.blocks - moment.unit * s.unit_blocks
            elif moment.part == "last":
                done = s.blocks
            kept = rank.sizes.held_block_bytes * done
        return _holding(moment.phase, kept)

    moments = fsdp_moments(s, range(s.units))
    found = (moment._replace(phase=holding(moment)) for moment in moments)
    return _along(found, passes, blocks=s.blocks, unit_blocks=s.unit_blocks)


def _whole(rank: _Rank, passes: _Passes, _count: int) -> list[_At]:
    """One micro-batch with whole parameters."""
    s = rank.sizes
    moments = replica_moments(s, range(s.blocks))
    return _along(moments, passes, blocks=s.blocks, unit_blocks=1)


def _along(
    moments: Iterable[Moment], passes: _Passes, *, blocks: int, unit_blocks: int
) -> list[_At]:
    """Moments of one micro-batch, those of a part one after another while that goes on."""

    def of_unit(index: int, *, back: bool) -> tuple[float, float]:
        first = index * unit_blocks
        last = min(first + unit_blocks, blocks) - 1
        return passes.of_blocks(first, last, blocks, back=back)

    units = -(-blocks // unit_blocks)

    def window(moment: Moment) -> tuple[float, float]:
        match moment.part:
            case "first":
                return passes.forward[0], of_unit(0, back=False)[0]
            case "ends":
                return of_unit(units - 1, back=False)[1], of_unit(units - 1, back=True)[0]
            case "last":
                return of_unit(0, back=True)[1], passes.backward[1]
            case part:
                return of_unit(moment.unit, back=part == "backward")

    line: list[_At] = []
    for _, alike in groupby(moments, key=lambda moment: (moment.part, moment.unit)):
        stretch = list(alike)
        line += _spread([moment.phase for moment in stretch], *window(stretch[0]))
    return line


def _holding(phase: Phase, held: int) -> Phase:
    if not held:
        return phase
    return replace(phase, unsharded_gradients_bytes=phase.unsharded_gradients_bytes + held)


def _earlier(s: RankSizes, *, is_first: bool) -> RankSizes:
    """The sizes of a micro-batch that is not the last: unsharded gradients of earlier ones are
    counted apart, and gradient shards are there before and behind it, of the first behind it."""
    kept = s.earlier_gradient_bytes
    reduces = kept > 0

    def end(sizes: EndSizes) -> EndSizes:
        reduced = sizes.reduce_bytes if reduces else 0
        return replace(sizes, held_bytes=0, reduce_bytes=reduced)

    ends = Ends(tables=end(s.ends.tables), head=end(s.ends.head), root=end(s.ends.root))
    return replace(
        s,
        held_block_bytes=0,
        ends=ends,
        earlier_gradient_bytes=0 if is_first else kept,
        later_gradient_bytes=kept,
        reduced_bytes=s.reduced_bytes if reduces else 0,
        unit_kinds=tuple(_earlier_unit(unit, reduces=reduces) for unit in s.unit_kinds),
        behind_ends_bytes=0 if is_first else s.behind_ends_bytes,
    )


def _earlier_unit(unit: UnitSizes, *, reduces: bool) -> UnitSizes:
    runs = tuple(replace(run, experts_held_bytes=0) for run in unit.runs)
    reduced = unit.reduce_bytes if reduces else 0
    return replace(unit, runs=runs, reduce_bytes=reduced, held_bytes=0)


def _pipeline(rank: _Rank, actions: Sequence[tuple[float, float]]) -> list[_At]:
    """What a rank holds in each action of its schedule."""
    case, layout, s = rank.case, rank.case.layout, rank.sizes
    todo = rank_actions(layout_order(layout))[rank.number]
    kept = [one.kept_blocks for one in pipeline_stages(model=case.model, layout=layout)]
    each = moments_of_rank(
        todo,
        layout_stage_blocks(model=case.model, layout=layout),
        kept if rank.stage.kept_blocks else (),
        resharded_to=resharded_blocks(layout),
    )
    line: list[_At] = []
    for (_, micro_batch, _), (start, end), moments in zip(todo, actions, each, strict=True):
        own = map(RankMoment._make, moments)
        if layout.sharding == "fsdp":
            found = [phase for moment in own for phase in moment_phases(s, moment)]
        else:
            found = [pipelined_phase(s, moment) for moment in own]
        if micro_batch:  # only first passes gather
            found = [phase for phase in found if not phase.gathers_bytes]
        line += _spread(found, start, end)
    return line

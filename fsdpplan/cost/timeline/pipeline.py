"""Pipelines laid out: what each rank does of its schedule, and the collectives around it.

The schedule is played to its last action, as a step is priced, with the parameters that
first passes wait for. Collectives of data parallelism are put where that prices them: gathers
before first passes, reductions behind each stage's last one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, chain

from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.network.placement import pp_group
from fsdpplan.cost.play.pipeline import PlayedPass, played_in_full
from fsdpplan.cost.read.pipeline import PipelineParts, pipeline_parts
from fsdpplan.cost.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    regathering_passes,
)
from fsdpplan.cost.schedule.order import gathers_in_turn, layout_order
from fsdpplan.cost.schedule.stages import layout_rank_stages, pipeline_ranks, pipeline_stages
from fsdpplan.cost.step.pipeline import PipelineStep
from fsdpplan.cost.timeline.data_parallel import (
    GradientSeconds,
    Unit,
    bucket_sent,
    ends_sent,
    parameter_sent,
    stage_passes,
    stage_units,
    tp_gradient_sent,
)
from fsdpplan.cost.timeline.events import Detail
from fsdpplan.cost.timeline.lanes import Lanes, Mark, Sent, relabel, sent_calls
from fsdpplan.cost.timeline.pieces import Direction, Passes, Piece, merged
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.cost.traffic.fsdp import reduced_rounds
from fsdpplan.cost.traffic.rank import message_bytes, table_calls, table_seconds
from fsdpplan.spec.plan import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One virtual stage, as all its micro-batches have it."""

    stage: Stage
    kernels: Passes
    """As finely as was asked."""
    passes: Passes
    """Pass by pass."""
    ends: tuple[tuple[Sent, ...], tuple[Sent, ...]]
    """Tensor parallelism around the blocks in (forward, backward)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A pipeline, and how it is shown."""

    case: Case
    parts: PipelineParts
    stages: tuple[_Stage, ...]
    detail: Detail
    detailed: int
    played: tuple[tuple[PlayedPass, ...], ...]
    """Rank by rank."""

    @property
    def begun(self) -> float:
        """When the step begins: behind gathers that nothing is beside."""
        return self.parts.before

    @property
    def end(self) -> float:
        """When all passes are over, from then on."""
        return max(passes[-1].end for passes in self.played)

    def is_whole(self, micro_batch: int) -> bool:
        """Whether it is shown as finely as was asked."""
        last = self.case.layout.num_microbatches - 1
        return self.detail != "passes" and (micro_batch < self.detailed or micro_batch == last)


def pipeline_lanes(case: Case, *, detail: Detail, detailed: int) -> tuple[int, list[Lanes]]:
    """The rank that computes most, and the lanes of all."""
    layout, parts = case.layout, pipeline_parts(case)
    shape = _Shape(
        case=case,
        parts=parts,
        stages=_stages(case, detail),
        detail=detail,
        detailed=detailed,
        played=played_in_full(parts.step),
    )
    held = pipeline_ranks(model=case.model, layout=layout)
    gradients = GradientSeconds.of(case, held)
    lanes = [
        _rank_lanes(shape, rank, gradients if rank == parts.rank else None)
        for rank in range(layout.pp)
    ]
    _first_waits(lanes[parts.rank], parts.exposed.all_gather)
    after = [tp_gradient_sent(case, stage) for stage in held]
    most = max(sum(sent.seconds for sent in sents) for sents in after)
    for rank, (one, stage) in enumerate(zip(lanes, held, strict=True)):
        _gathers(shape, rank, one)
        _reductions(shape, rank, one)
        one.wait(parts.exposed.reduce_scatter, "reduce_scatter")
        one.wait(parts.exposed.all_reduce, "all_reduce")
        tables = tuple(
            sent_calls(calls, case.cluster, stream="pp", name="gradient of the tied table")
            for calls in table_calls(case, stage)
        )
        seconds = table_seconds(case)
        one.wait(seconds, "pp", sent=tables, inserted=True)
        one.wait(most, "tp", sent=after[rank], inserted=True)
    return parts.rank, lanes


def _stages(case: Case, detail: Detail) -> tuple[_Stage, ...]:
    """What is known of each virtual stage; equal ones have equal passes but for their names."""
    stages = pipeline_stages(model=case.model, layout=case.layout)
    firsts = accumulate((stage.blocks for stage in stages), initial=0)
    found = []
    for stage, first in zip(stages, firsts, strict=False):
        kernels = stage_passes(case, stage, detail=detail, first_block=first)
        found.append(
            _Stage(
                stage=stage,
                kernels=kernels,
                passes=Passes(
                    merged(kernels.forward, "forward"), merged(kernels.backward, "backward")
                ),
                ends=ends_sent(case, stage),
            )
        )
    return tuple(found)


def _rank_lanes(shape: _Shape, rank: int, gradients: GradientSeconds | None) -> Lanes:
    """The passes of one rank, and its messages."""
    case, begun, total = shape.case, shape.begun, shape.end
    lanes = Lanes(least=1e-12 * total)
    lanes.wait(begun, "all_gather")
    clock = 0.0
    for one in shape.played[rank]:
        mark, kind = _mark(one.action), one.action[2]
        seconds = one.seconds - _regathering_seconds(shape.parts.step, one)
        waited = one.end - one.start - one.received - seconds
        lanes.add(one.start - clock, "bubble", "bubble", "bubble", mark=mark)
        lanes.wait(one.received, "pp", mark=mark)
        lanes.wait(waited, "all_gather", mark=mark)
        _pass(shape, lanes, one, seconds, mark)
        lanes.clock, clock = begun + one.end, one.end
        lanes.actions.append((begun + one.start, begun + one.end))
        if gradients is not None and kind in (BACKWARD, BACKWARD_WEIGHT):
            share = len(layout_rank_stages(case.layout)[rank])
            own = replace(gradients, each=gradients.each / share)
            own.put(lanes, mark)
        if one.sent is not None:
            _message(shape, lanes, one, begun + one.sent, mark)
    lanes.add(total - clock, "bubble", "bubble", "bubble")
    return lanes


def _mark(action: Action) -> Mark:
    stage, micro_batch, kind = action
    direction: Direction = "forward" if kind == FORWARD else "backward"
    return Mark(direction=direction, micro_batch=micro_batch, stage=stage)


def _regathering_seconds(step: PipelineStep, one: PlayedPass) -> float:
    """What a pass waits for parameters that the one before it has left resharded."""
    if not (one.is_paired and step.regathers):
        return 0.0
    stage, _, kind = one.action
    way = 0 if kind == FORWARD else 1
    return step.paired[stage][way] - step.passes[stage][way]


def _message(shape: _Shape, lanes: Lanes, one: PlayedPass, arrives: float, mark: Mark) -> None:
    """What the pass leaves for another rank: on its way beside passes, or while that one waits."""
    case = shape.case
    calls = Calls(
        collective="send_recv",
        group=pp_group(case.layout),
        dtype=case.training.activation_dtype,
        count=1,
        call_bytes=message_bytes(case),
    )
    stream = "pp_next" if one.is_sent_on else "pp_previous"
    name = f"{'gradients' if mark.direction == 'backward' else 'activations'} of stage {mark.stage}"
    lanes.send(arrives, sent_calls(calls, case.cluster, stream=stream, name=name), mark)


def _pass(shape: _Shape, lanes: Lanes, one: PlayedPass, seconds: float, mark: Mark) -> None:
    """What one action computes and waits for inside of its blocks, in so many seconds."""
    stage, micro_batch, kind = one.action
    of, way = shape.stages[stage], 0 if kind == FORWARD else 1
    own = of.kernels if shape.is_whole(micro_batch) else of.passes
    pieces, ends = (own.forward, own.backward)[way], of.ends[way]
    whole, left = shape.parts.step.passes[stage][way], shape.parts.pairs.exchange_left
    at_ends = whole - sum(piece.seconds for piece in pieces)
    if kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
        pieces, at_ends, ends = _half(of, pieces, at_ends, one.action, seconds)
    elif one.is_paired and left:
        pieces = _scaled(pieces, seconds - at_ends, left[stage][way])
    lanes.pieces(pieces, shape.case.cluster, mark)
    if ends or at_ends > 1e-9 * whole:
        lanes.wait(at_ends, "tp", mark=mark, sent=ends)


def _scaled(
    pieces: tuple[Piece, ...], seconds: float, exchange_left: float = 1.0
) -> tuple[Piece, ...]:
    """Pieces that take `seconds` in all, of their waits for experts so much: what is computed makes
    up for what is not waited for."""
    waits = {
        at: piece.seconds * (exchange_left if piece.calls[0].group.axis == "ep" else 1.0)
        for at, piece in enumerate(pieces)
        if piece.calls
    }
    computed = sum(piece.seconds for piece in pieces if not piece.calls)
    factor = (seconds - sum(waits.values())) / computed if computed else 1.0
    return tuple(
        piece._replace(seconds=waits[at] if at in waits else factor * piece.seconds)
        for at, piece in enumerate(pieces)
    )


def _half(
    of: _Stage, pieces: tuple[Piece, ...], at_ends: float, action: Action, seconds: float
) -> tuple[tuple[Piece, ...], float, tuple[Sent, ...]]:
    """The inputs' or the weights' half of a backward pass, with what is waited for in the first;
    the first stage has no such half."""
    stage, _, kind = action
    is_weight = kind == BACKWARD_WEIGHT
    if stage == 0:
        return (pieces, at_ends, of.ends[1]) if is_weight else ((), 0.0, ())
    by_kernel = any(_is_of_weights(piece) for piece in pieces)
    if is_weight:
        products = tuple(
            piece
            for piece in pieces
            if (_is_of_weights(piece) if by_kernel else piece.kind == "backward")
        )
        return _scaled(products, seconds), 0.0, ()
    rest = tuple(piece for piece in pieces if not _is_of_weights(piece))
    return _scaled(rest, seconds - at_ends), at_ends, of.ends[1]


def _is_of_weights(piece: Piece) -> bool:
    """Whether a kernel makes a weight's gradient."""
    return piece.name.endswith("by weight")


def _first_waits(lanes: Lanes, seconds: float) -> None:
    """Let the rank wait `seconds` for parameters: what others gather delays it, too, and of its own
    gathers some fall into bubbles that there are anyway."""
    own = [at for at, one in enumerate(lanes.main) if one.cause == "all_gather"]
    held = sum(lanes.main[at].raw_seconds for at in own)
    if held > seconds:
        relabel(lanes, held - seconds, to="bubble", cause="", candidates=reversed(own))
    elif held < seconds:
        idle = [at for at, one in enumerate(lanes.main) if one.term == "bubble"]
        relabel(lanes, seconds - held, to="exposed", cause="all_gather", candidates=idle)


def _gathers(shape: _Shape, rank: int, lanes: Lanes) -> None:
    """Parameters of a rank's stages, where its first passes, or later ones, need them."""
    case, passes = shape.case, shape.played[rank]
    if case.layout.sharding != "fsdp":
        clock = 0.0
        of_rank = pipeline_ranks(model=case.model, layout=case.layout)[rank]
        for sent in parameter_sent(case, of_rank):
            clock += sent.seconds
            lanes.send(clock, sent)
        return
    units = {stage: _stage_units(shape, stage) for stage in layout_rank_stages(case.layout)[rank]}
    todo = [one.action for one in passes]
    first = {one.action[0]: one.gathering for one in passes if one.gathering is not None}
    due = []
    for at, stage in gathers_in_turn(todo):
        if stage in first or not case.training.traits.keeps_stages:
            moment = first.pop(stage, passes[at].start)
            due.append((moment, Mark(stage=stage), [unit.gathers for unit in units[stage]]))
    for at in sorted(regathering_passes(todo)) if case.layout.reshards_stages else ():
        stage, _, kind = todo[at]
        own = units[stage] if kind == FORWARD else units[stage][::-1]
        due.append((passes[at].start, _mark(todo[at]), [unit.regathers for unit in own]))
    clock = 0.0
    for moment, mark, sents in sorted(due, key=lambda each: each[0]):
        clock = max(clock, moment)
        for sent in chain.from_iterable(sents):
            clock += sent.seconds
            lanes.send(clock, sent, mark)


def _stage_units(shape: _Shape, stage: int) -> list[Unit]:
    """The units of a stage, the root first."""
    first = sum(one.stage.blocks for one in shape.stages[:stage])
    *units, root = stage_units(
        shape.case, shape.stages[stage].stage, detail="passes", first_block=first
    )
    return [root, *units]


def _reductions(shape: _Shape, rank: int, lanes: Lanes) -> None:
    """Gradients of a rank's stages, behind the last backward pass of each, one stage after
    another; of software that reduces each round, also behind those."""
    case, layout, begun = shape.case, shape.case.layout, shape.begun
    held = layout_rank_stages(layout)[rank]
    ends: dict[int, list[float]] = {stage: [] for stage in held}
    for one in shape.played[rank]:
        if one.action[2] in (BACKWARD, BACKWARD_WEIGHT):
            ends[one.action[0]].append(begun + one.end)
    clock = 0.0
    if layout.sharding == "fsdp":
        rounds = reduced_rounds(training=case.training, layout=layout)
        size = layout_order(layout).round_size
        moments = sorted(
            (ends[stage][-1 if number == rounds - 1 else (number + 1) * size - 1], stage, number)
            for stage in held
            for number in range(rounds)
        )
        for moment, stage, number in moments:
            root, *units = _stage_units(shape, stage)
            reduces = layout.gradient_sync == "every" or number == rounds - 1
            clock = _reduce_units([*units[::-1], root], lanes, max(clock, moment), stage, reduces)
        return
    step = shape.parts.step
    if step.reduces_at_the_end:
        clock = begun + shape.played[rank][-1].end
    # a rank fills its buckets over all of its stages, and prices them stage by stage
    own = list(bucket_sent(case, pipeline_ranks(model=case.model, layout=layout)[rank]))
    for number, stage in enumerate(sorted(held, key=lambda stage: ends[stage][-1])):
        clock = max(clock, ends[stage][-1] - step.hidden[stage])
        first, behind = (len(own) * at // len(held) for at in (number, number + 1))
        for sent in chain.from_iterable(own[first:behind]):
            clock += sent.seconds
            lanes.send(clock, sent, Mark(direction="backward", stage=stage))


def _reduce_units(
    units: list[Unit], lanes: Lanes, clock: float, stage: int, reduces: bool
) -> float:
    """Reduce-scatters one after another from then on, each all-reduce behind its own; when the
    reduce-scatters are through."""
    mark, later = Mark(direction="backward", stage=stage), clock
    for unit in units:
        clock += sum(sent.seconds for sent in unit.scatters)
        lanes.send_all(unit.scatters, clock, mark)
        if reduces:
            later = max(later, clock) + sum(sent.seconds for sent in unit.reduces)
            lanes.send_all(unit.reduces, later, mark)
    return clock

"""Pipelines played: when each operation of a pipelined step ends.

Long steps are played until a whole round of micro-batches advances every rank by the same time, and
are extended by that time: exactly, since nothing that decides the next round has changed but the
clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.schedule.actions import PAIRED_BACKWARD, PAIRED_FORWARD, Action, PassOrder
from fsdpplan.cost.schedule.order import rank_actions
from fsdpplan.cost.step.pipeline import (
    GATHER,
    GATHERED,
    NOTHING,
    SEND,
    PipelineOp,
    PipelineProgram,
    PipelineStep,
    Seconds,
    Shape,
    pipeline_program,
)

FIRST_ROUNDS = 6
"""Rounds of micro-batches played before looking for a steady state; then four times as many, until
there is one or all are played."""

_STEADY_ROUNDS = 2
"""Rounds that must advance alike: more than any message waits to be used."""

_ALIKE = 1e-10
"""Share of a round's time within which two rounds are taken as equal: rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTiming:
    """What is read off a pipelined step that was played."""

    busy_seconds: tuple[float, ...]
    """Compute of each rank, each pass as long as alone."""
    end_seconds: tuple[float, ...]
    """When each rank's last pass ends."""
    stage_end_seconds: tuple[float, ...]
    """When each stage's last backward pass ends, first stage first."""
    reduced_seconds: tuple[float, ...]
    """When each rank is through with its passes and has reduced its gradients."""

    @property
    def total_seconds(self) -> float:
        """From the first forward pass to the last backward pass."""
        return max(self.end_seconds)

    @property
    def reducing_seconds(self) -> float:
        """By how much reductions prolong that. The first ranks end last: what others reduce
        meanwhile hides in their wait."""
        return max(0.0, max(self.reduced_seconds) - self.total_seconds)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """What each rank waits, up to the end of all passes."""
        return tuple(max(0.0, self.total_seconds - busy) for busy in self.busy_seconds)

    @property
    def bubble_seconds(self) -> float:
        """What the busiest rank waits."""
        return min(self.idle_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The same as a share of the whole."""
        return self.bubble_seconds / self.total_seconds if self.total_seconds else 0.0


def played_pipeline(step: PipelineStep) -> PipelineTiming:
    """A step played, its steady state only until it is known."""
    shape = step.shape
    ranks, stages = pass_ends(shape, step.seconds)
    held = step.order.all_held
    work = [sum(passes) for passes in step.passes]
    return PipelineTiming(
        busy_seconds=tuple(step.order.num_microbatches * sum(work[s] for s in of) for of in held),
        end_seconds=ranks,
        stage_end_seconds=stages,
        reduced_seconds=_reduced(step, held, ranks, stages) if step.reductions else ranks,
    )


def operation_ends(program: PipelineProgram, seconds: Seconds) -> list[float]:
    """When each operation ends, by its number; the start of the step is number 0. An operation
    begins when its stream is free and what it waits for is over."""
    ends = [0.0] * (len(program.ops) + 1)
    clocks = [0.0] * (4 * len(program.passes))
    for number, (stream, at, after) in enumerate(program.ops, start=1):
        ready, free = ends[after], clocks[stream]
        ends[number] = clocks[stream] = (ready if ready > free else free) + seconds[at]
    return ends


@lru_cache(maxsize=2048)
def pass_ends(shape: Shape, seconds: Seconds) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(when each rank's last pass ends, when each stage's last backward pass does)."""
    rounds, order = FIRST_ROUNDS, shape.order
    size = order.round_size if order.round_size < order.num_microbatches else order.pp
    # one pass, then the other: no common rhythm
    has_rhythm = order.schedule not in ("gpipe", "looped_bfs")
    while True:
        short = order.shortened(rounds) if has_rhythm else order
        program = pipeline_program(shape._replace(order=short))
        ends = operation_ends(program, seconds)
        later = 0.0
        if short != order:
            done = [[ends[one] for one in passes] for passes in program.passes]
            advance = _steady_advance_seconds(short, done, size)
            if advance is None:
                rounds *= 4
                continue
            later = (order.num_microbatches - short.num_microbatches) // size * advance
        ranks = tuple([ends[passes[-1]] + later for passes in program.passes])
        return ranks, tuple([ends[one] + later for one in program.last])


@lru_cache(maxsize=256)
def _steady_ends(order: PassOrder, round_size: int) -> tuple[tuple[int, int], ...]:
    """For each rank, (where its steady state ends, actions of a round): as far as its list is the
    start of the list with one round more."""
    more = order._replace(num_microbatches=order.num_microbatches + round_size)
    lists, longer = rank_actions(order), rank_actions(more)
    ends = []
    for todo, other in zip(lists, longer, strict=True):
        both = enumerate(zip(todo, other, strict=False))
        same = next((at for at, (one, another) in both if one != another), len(todo))
        ends.append((same, len(other) - len(todo)))
    return tuple(ends)


def _steady_advance_seconds(
    order: PassOrder, done: list[list[float]], round_size: int
) -> float | None:
    """By how much a round advances all ranks alike; None before the steady state."""
    ends = _steady_ends(order, round_size)
    first_end, first_period = ends[0]
    if first_end < first_period + 1:
        return None
    advance = done[0][first_end - 1] - done[0][first_end - 1 - first_period]
    tolerance = _ALIKE * (advance + done[0][first_end - 1])
    for times, (end, period) in zip(done, ends, strict=True):
        if end < (_STEADY_ROUNDS + 1) * period:
            return None
        window = range(end - _STEADY_ROUNDS * period, end)
        if any(abs(times[at] - times[at - period] - advance) > tolerance for at in window):
            return None
    return advance


def _reduced(
    step: PipelineStep,
    held: tuple[tuple[int, ...], ...],
    ranks: tuple[float, ...],
    stages: tuple[float, ...],
) -> tuple[float, ...]:
    """A rank reduces its stages one after another, in the order in which they end, or at the end of
    all of its passes. So of several stages a rank all but the one that ends last are reduced behind
    passes of others."""
    hidden = step.hidden or (0.0,) * len(stages)
    ends = []
    for of_rank, end in zip(held, ranks, strict=True):
        clock = end if step.reduces_at_the_end else 0.0
        for stage in sorted(of_rank, key=stages.__getitem__):
            clock = max(clock, stages[stage] - hidden[stage]) + step.reductions[stage]
        ends.append(max(clock, end))
    return tuple(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPass:
    """One action of a rank, in a step that is played to its end."""

    action: Action
    """Its pass that of the rank's list, whatever is beside it."""
    is_paired: bool
    """Side by side with another one, or with parameters to gather again."""
    start: float
    """When the rank is free and the input there, or on its way where the rank waits for it."""
    end: float
    seconds: float
    """Of its own; what lies between start and end beyond is for its input or for parameters."""
    received: float
    """Of that for its input."""
    gathering: float | None
    """When the gather begins that it waits for."""
    sent: float | None = None
    """When its output is there on another rank."""
    is_sent_on: bool = False
    """To the rank behind."""


def played_in_full(step: PipelineStep) -> tuple[tuple[PlayedPass, ...], ...]:
    """What each rank does, in order, to the last micro-batch."""
    shape, seconds = step.shape, step.seconds
    pp, stages, program = shape.order.pp, shape.order.stages, pipeline_program(shape)
    lists = rank_actions(shape.order)
    ends = operation_ends(program, seconds)
    place_of = {
        number: (rank, place)
        for rank, passes in enumerate(program.passes)
        for place, number in enumerate(passes)
    }
    played: list[list[PlayedPass]] = [[] for _ in lists]
    own: list[dict[int, PipelineOp]] = [{} for _ in lists]
    """By kind, what a rank has done of the action that it is at."""
    for number, op in enumerate(map(PipelineOp._make, program.ops), start=1):
        kind, rank = op.at // stages if op.at >= 0 else op.at, op.stream
        if kind == SEND:
            sender, place = place_of[op.after]
            is_on = rank % 2 == 0 if rank >= pp else (rank - sender) % pp == 1
            done = played[sender]
            done[place] = replace(done[place], sent=ends[number], is_sent_on=is_on)
        if rank >= pp:
            continue
        own[rank][kind] = op
        if number not in place_of:
            continue
        done, parts = played[rank], own[rank]
        (taken,) = (kind for kind in parts if 0 <= kind < GATHER)
        gate = parts.get(NOTHING) or parts.get(GATHERED)
        gather = program.ops[gate.after - 1] if gate else None
        begun = ends[parts.get(SEND, parts[taken]).after]
        done.append(
            PlayedPass(
                action=lists[rank][len(done)],
                is_paired=taken in (PAIRED_FORWARD, PAIRED_BACKWARD),
                start=max(begun, done[-1].end if done else 0.0),
                end=ends[number],
                seconds=seconds[parts[taken].at],
                received=step.send if SEND in parts else 0.0,
                gathering=ends[gate.after] - seconds[gather[1]] if gate and gather else None,
            )
        )
        own[rank] = {}
    return tuple(map(tuple, played))

"""Pipeline simulation: plays the ranks' action lists; when each action ends falls out.

A rank does one thing at a time, in the order of its list; an action starts when its rank is free
and its input has arrived. Messages between two ranks leave one after another in each direction.
Long runs are played until a whole round advances every rank by the same time, and are extended by
that time: exactly, since nothing that decides the next round has changed but the clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.pipeline_actions import BACKWARD, BACKWARD_WEIGHT, FORWARD, Action
from fsdpplan.cost.pipeline_order import (
    rank_actions,
    rank_stages,
    round_microbatches,
    steady_microbatches,
)
from fsdpplan.spec.layout import Schedule

FIRST_ROUNDS = 6
"""Rounds of micro-batches played before looking for a steady state; then four times as many, until
there is one or all are played."""

_STEADY_ROUNDS = 2
"""Rounds that must advance alike: more than any message waits to be used."""

_ALIKE = 1e-10
"""Share of a round's time within which two rounds are taken as equal: rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to play."""

    schedule: Schedule
    pp: int
    virtual_stages: int
    num_microbatches: int
    seconds: tuple[tuple[float, ...], ...]
    """Of each stage in one micro-batch, by pass: forward, backward, its input and weight half;
    with the receive that a rank waits for, under schedules that wait."""
    send_seconds: float
    """Between two ranks, beside compute; 0 where the ranks wait instead."""
    gathered_seconds: tuple[float, ...]
    """Before this moment a stage's first forward pass cannot end; empty: no such limit."""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of one rank."""
        return rank_stages(
            schedule=self.schedule, pp=self.pp, virtual_stages=self.virtual_stages, rank=rank
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """When everything is done, from the start of the first forward pass."""

    ranks: tuple[float, ...]
    """Each rank's last action."""
    stages: tuple[float, ...]
    """Each stage's last backward pass."""

    def later(self, seconds: float) -> Ends:
        """All of it, so much later."""
        return Ends(
            ranks=tuple(end + seconds for end in self.ranks),
            stages=tuple(end + seconds for end in self.stages),
        )


def run_ends(run: Run) -> Ends:
    """Play `run`, its steady state only until it is known."""
    if run.schedule in ("gpipe", "looped_bfs"):  # one pass, then the other: no common rhythm
        return _ends(run, _played(run))
    rounds = FIRST_ROUNDS
    while True:
        short = steady_microbatches(
            schedule=run.schedule,
            pp=run.pp,
            num_microbatches=run.num_microbatches,
            rounds=rounds,
        )
        part = replace(run, num_microbatches=short)
        done = _played(part)
        if short == run.num_microbatches:
            return _ends(part, done)
        round_size = _round_size(run)
        advance = _steady_advance_seconds(part, done, round_size)
        if advance is not None:
            skipped = (run.num_microbatches - short) // round_size
            return _ends(part, done).later(skipped * advance)
        rounds *= 4


def _round_size(run: Run) -> int:
    if run.schedule in ("1f1b", "zbv", "dualpipev"):
        return run.pp
    return round_microbatches(
        schedule=run.schedule, pp=run.pp, num_microbatches=run.num_microbatches
    )


def _actions(run: Run) -> tuple[tuple[Action, ...], ...]:
    return rank_actions(
        schedule=run.schedule,
        pp=run.pp,
        num_microbatches=run.num_microbatches,
        virtual_stages=run.virtual_stages,
    )


@lru_cache(maxsize=256)
def _steady_ends(
    schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int, round_size: int
) -> tuple[tuple[int, int], ...]:
    """For each rank, (where its steady state ends, actions of a round): as far as its list is the
    start of the list with one round more."""

    def lists(count: int) -> tuple[tuple[Action, ...], ...]:
        return rank_actions(
            schedule=schedule, pp=pp, num_microbatches=count, virtual_stages=virtual_stages
        )

    ends = []
    for todo, longer in zip(
        lists(num_microbatches), lists(num_microbatches + round_size), strict=True
    ):
        pairs = enumerate(zip(todo, longer, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(todo))
        ends.append((same, len(longer) - len(todo)))
    return tuple(ends)


def _steady_advance_seconds(run: Run, done: list[list[float]], round_size: int) -> float | None:
    """By how much a round advances all ranks alike; None before the steady state."""
    ends = _steady_ends(run.schedule, run.pp, run.num_microbatches, run.virtual_stages, round_size)
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


def _ends(run: Run, done: list[list[float]]) -> Ends:
    stages = [0.0] * len(run.seconds[FORWARD])
    for todo, times in zip(_actions(run), done, strict=True):
        for (stage, _, kind), time in zip(todo, times, strict=True):
            if kind in (BACKWARD, BACKWARD_WEIGHT):
                stages[stage] = time
    return Ends(ranks=tuple(times[-1] for times in done), stages=tuple(stages))


def _played(run: Run) -> list[list[float]]:
    """When each action of each rank ends."""
    links = _links(run)
    inputs = _Inputs(len(run.seconds[FORWARD]), run.num_microbatches)
    actions = _actions(run)
    done: list[list[float]] = [[] for _ in actions]
    link_free = [0.0] * (2 * run.pp)
    waiting = list(range(run.pp))
    while waiting:
        waiting = [
            rank
            for rank in waiting
            if not _advance(run, actions[rank], done[rank], inputs, links, link_free)
        ]
    return done


class _Inputs:
    """When the input of each stage's passes is there, by micro-batch; -1: not yet known."""

    def __init__(self, stages: int, count: int) -> None:
        self.forward = [[-1.0] * count for _ in range(stages + 1)]
        self.backward = [[-1.0] * count for _ in range(stages + 1)]
        self.forward[0] = [0.0] * count
        self.backward[stages - 1] = [0.0] * count


def _links(run: Run) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The link on which each stage sends forward and backward; -1: its neighbour is on the same
    rank, or there is none. Links 2 r and 2 r + 1 lead from rank r to the ranks behind and before
    it; of two ranks each has one."""
    stages = len(run.seconds[FORWARD])
    rank_of = {stage: rank for rank in range(run.pp) for stage in run.stages_of(rank)}

    def link(stage: int, peer: int) -> int:
        rank = rank_of[stage]
        if not 0 <= peer < stages or rank_of[peer] == rank:
            return -1
        is_behind = (rank_of[peer] - rank) % run.pp == 1
        return 2 * rank + (0 if is_behind else 1)

    return (
        tuple(link(stage, stage + 1) for stage in range(stages)),
        tuple(link(stage, stage - 1) for stage in range(stages)),
    )


def _advance(
    run: Run,
    todo: tuple[Action, ...],
    times: list[float],
    inputs: _Inputs,
    links: tuple[tuple[int, ...], tuple[int, ...]],
    link_free: list[float],
) -> bool:
    """Do what one rank can do by now; whether that is all of it."""
    seconds, hop, gathered = run.seconds, run.send_seconds, run.gathered_seconds
    forwards, backwards = inputs.forward, inputs.backward
    now = times[-1] if times else 0.0
    for at in range(len(times), len(todo)):
        stage, index, kind = todo[at]
        if kind == BACKWARD_WEIGHT:
            now += seconds[kind][stage]
            times.append(now)
            continue
        ready = (backwards if kind else forwards)[stage][index]
        if ready < 0:
            return False
        now = (ready if ready > now else now) + seconds[kind][stage]
        if kind:
            link, outputs = links[1][stage], backwards[stage - 1]
        else:
            if gathered and index == 0 and gathered[stage] > now:
                now = gathered[stage]
            link, outputs = links[0][stage], forwards[stage + 1]
        times.append(now)
        if link < 0 or not hop:
            outputs[index] = now
        else:  # a message leaves when the one before it has arrived
            free = link_free[link]
            outputs[index] = link_free[link] = (free if free > now else now) + hop
    return True

"""Pipeline simulation: plays the ranks' action lists; when each action ends falls out.

A rank does one thing at a time, in the order of its list; an action starts when its rank is free
and its input has arrived. Messages between two ranks leave one after another in each direction.
Long runs are played until a whole round advances every rank by the same time, and are extended by
that time: exactly, since nothing that decides the next round has changed but the clock.

Pipeline gathers: how often FSDP gathers the stages of a pipeline rank in one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from fsdpplan.cost.schedule.actions import (
    ACTIVE_STAGES,
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    PAIRED_BACKWARD,
    PAIRED_FORWARD,
    Action,
    gathered_stages,
    overlapped_pairs,
    rank_stages,
    regathering_passes,
)
from fsdpplan.cost.schedule.order import rank_actions, round_microbatches, steady_microbatches
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
    """Of each stage in one micro-batch, by pass: forward, backward, its input and weight half,
    forward and backward side by side with one of the other kind, or that gather parameters again;
    with the receive that a rank waits for, under schedules that wait."""
    send_seconds: float
    """Between two ranks, beside compute; 0 where the ranks wait instead."""
    gathered_seconds: tuple[float, ...]
    """Before this moment a stage's first forward pass cannot end; empty: no such limit."""
    regathers: bool = False
    """Forward passes leave parameters resharded."""


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
    last = _program_of(run).last_backward
    return Ends(
        ranks=tuple([times[-1] for times in done]),
        stages=tuple([done[rank][at] for rank, at in last]),
    )


def _played(run: Run) -> list[list[float]]:
    """When each action of each rank ends."""
    program = _program_of(run)
    seconds = [each for of_pass in run.seconds for each in of_pass]
    hop, gathered = run.send_seconds, run.gathered_seconds
    arrived = [0.0] * program.slots
    link_free = [0.0] * (2 * run.pp)
    clocks = [0.0] * run.pp
    done: list[list[float]] = [[] for _ in range(run.pp)]
    for rank, at, source, target, link, first in program.steps:
        now, ready = clocks[rank], arrived[source]
        now = (ready if ready > now else now) + seconds[at]
        if first >= 0 and gathered and gathered[first] > now:
            now = gathered[first]
        clocks[rank] = now
        done[rank].append(now)
        if link < 0 or not hop:
            arrived[target] = now
        else:  # a message leaves when the one before it has arrived
            free = link_free[link]
            arrived[target] = link_free[link] = (free if free > now else now) + hop
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedAction:
    """One action of a run that is played in full."""

    action: Action
    """Its pass that of the rank's list, whatever is beside it."""
    is_paired: bool
    """Side by side with another one, or with parameters to gather again."""
    start: float
    """When the rank is free and the input there."""
    end: float
    seconds: float
    """Of its own; what lies between start and end beyond is for parameters."""
    link: int
    """On which its output leaves: 2 r from rank r to the one behind, 2 r + 1 to the one before it;
    -1: it stays, or there is none."""
    sent: float
    """When that has arrived; of a schedule whose ranks wait for messages, when it leaves."""
    received_by: tuple[int, int] | None = None
    """(rank, place in its list) of the action that takes it; None: no message."""


def played_actions(run: Run) -> tuple[tuple[PlayedAction, ...], ...]:
    """What each rank does, in order, to the last micro-batch: what `run_ends` is the end of."""
    program = _program_of(run)
    lists = rank_actions(
        schedule=run.schedule,
        pp=run.pp,
        num_microbatches=run.num_microbatches,
        virtual_stages=run.virtual_stages,
    )
    seconds = [each for of_pass in run.seconds for each in of_pass]
    stages = run.pp * run.virtual_stages
    arrived = [0.0] * program.slots
    takers: dict[int, tuple[int, int]] = {}
    link_free = [0.0] * (2 * run.pp)
    played: list[list[PlayedAction]] = [[] for _ in range(run.pp)]
    targets: list[list[int]] = [[] for _ in range(run.pp)]
    for rank, at, source, target, link, first in program.steps:
        done = played[rank]
        takers[source] = (rank, len(done))
        start = max(done[-1].end if done else 0.0, arrived[source])
        end = start + seconds[at]
        if first >= 0 and run.gathered_seconds:
            end = max(end, run.gathered_seconds[first])
        arrived[target] = end
        if link >= 0 and run.send_seconds:
            link_free[link] = max(link_free[link], end) + run.send_seconds
            arrived[target] = link_free[link]
        targets[rank].append(target)
        done.append(
            PlayedAction(
                action=lists[rank][len(done)],
                is_paired=at // stages in (PAIRED_FORWARD, PAIRED_BACKWARD),
                start=start,
                end=end,
                seconds=seconds[at],
                link=link,
                sent=arrived[target],
            )
        )
    return tuple(
        tuple(
            replace(one, received_by=takers.get(target)) if one.link >= 0 else one
            for one, target in zip(done, of_rank, strict=True)
        )
        for done, of_rank in zip(played, targets, strict=True)
    )


Step = tuple[int, int, int, int, int, int]
"""(rank, place of its seconds, slot of its input, slot of its output, link of its message or -1,
stage whose first forward pass it is or -1)."""

_START, _NOWHERE = 0, 1
"""Slots of what is there from the start, and of what nobody waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """The actions of all ranks in an order in which each comes behind its input: the same for
    every run of one schedule, whatever its seconds."""

    steps: tuple[Step, ...]
    slots: int
    last_backward: tuple[tuple[int, int], ...]
    """(rank, place in its list) of each stage's last backward pass."""


def _program_of(run: Run) -> _Program:
    shape = (run.schedule, run.pp, run.num_microbatches, run.virtual_stages)
    return _program(*shape, run.regathers)


@lru_cache(maxsize=64)
def _program(
    schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int, regathers: bool
) -> _Program:
    shape = {"schedule": schedule, "pp": pp, "virtual_stages": virtual_stages}
    lists = rank_actions(num_microbatches=num_microbatches, **shape)
    held = [rank_stages(rank=rank, **shape) for rank in range(pp)]  # type: ignore[arg-type]
    stages = pp * virtual_stages
    links = _links(held, stages)
    last: dict[int, tuple[int, int]] = {}
    for rank, todo in enumerate(lists):
        for at, (stage, _, kind) in enumerate(todo):
            if kind in (BACKWARD, BACKWARD_WEIGHT):
                last[stage] = (rank, at)
    return _Program(
        steps=tuple(
            _steps(lists, stages, num_microbatches, links, _pairs(lists, schedule, regathers))
        ),
        slots=2 + 2 * stages * num_microbatches,
        last_backward=tuple(last[stage] for stage in range(stages)),
    )


def _pairs(
    lists: tuple[tuple[Action, ...], ...], schedule: Schedule, regathers: bool
) -> list[set[int]]:
    """Of each rank, which of its actions are side by side with the next or the last one; or which
    gather parameters again."""
    if regathers:
        return [regathering_passes(todo) for todo in lists]
    return [
        overlapped_pairs(schedule=schedule, rank=rank, pp=len(lists), actions=todo)
        for rank, todo in enumerate(lists)
    ]


def _steps(
    lists: tuple[tuple[Action, ...], ...],
    stages: int,
    count: int,
    links: tuple[tuple[int, ...], tuple[int, ...]],
    pairs: list[set[int]],
) -> list[Step]:
    """Each rank as far as its inputs are there, in turn, until all is done."""
    is_there = bytearray(2 + 2 * stages * count)
    is_there[_START] = 1
    backwards = 2 + stages * count
    steps: list[Step] = []
    places = [0] * len(lists)
    waiting = list(range(len(lists)))
    while waiting:
        still = []
        for rank in waiting:
            todo = lists[rank]
            for at in range(places[rank], len(todo)):
                stage, index, kind = todo[at]
                link = first = -1
                source, target = _START, _NOWHERE
                if kind == FORWARD:
                    source = 2 + (stage - 1) * count + index if stage else _START
                    target, link = 2 + stage * count + index, links[0][stage]
                    first = stage if index == 0 else -1
                elif kind != BACKWARD_WEIGHT:
                    is_last = stage == stages - 1
                    source = _START if is_last else backwards + (stage + 1) * count + index
                    target, link = backwards + stage * count + index, links[1][stage]
                if not is_there[source]:
                    places[rank] = at
                    still.append(rank)
                    break
                is_there[target] = 1
                if at in pairs[rank]:
                    kind = PAIRED_FORWARD if kind == FORWARD else PAIRED_BACKWARD
                steps.append((rank, kind * stages + stage, source, target, link, first))
        waiting = still
    return steps


def _links(held: list[tuple[int, ...]], stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The link on which each stage sends forward and backward; -1: its neighbour is on the same
    rank, or there is none. Links 2 r and 2 r + 1 lead from rank r to the ranks behind and before
    it; of two ranks each has one."""
    rank_of = {stage: rank for rank, of_rank in enumerate(held) for stage in of_rank}

    def link(stage: int, peer: int) -> int:
        rank = rank_of[stage]
        if not 0 <= peer < stages or rank_of[peer] == rank:
            return -1
        is_behind = (rank_of[peer] - rank) % len(held) == 1
        return 2 * rank + (0 if is_behind else 1)

    return (
        tuple(link(stage, stage + 1) for stage in range(stages)),
        tuple(link(stage, stage - 1) for stage in range(stages)),
    )


STEADY_ROUNDS = 6
"""Rounds of micro-batches after which another one adds what the one before it did."""


@lru_cache(maxsize=1024)
def stage_gathers(
    *, schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int
) -> tuple[tuple[int, ...], ...]:
    """For each rank, how often a step gathers the parameters of each of its stages.

    Under reshard never: once, but with more than `ACTIVE_STAGES` stages a rank, which torch drops
    and gathers again.
    """
    shape = {"pp": pp, "virtual_stages": virtual_stages}
    if virtual_stages <= ACTIVE_STAGES:
        return ((1,) * virtual_stages,) * pp
    short = steady_microbatches(
        schedule=schedule, pp=pp, num_microbatches=num_microbatches, rounds=STEADY_ROUNDS
    )
    if schedule != "looped_bfs" and short < num_microbatches:
        return _with_more_rounds(schedule, pp, num_microbatches, virtual_stages, short)
    actions = rank_actions(schedule=schedule, num_microbatches=num_microbatches, **shape)
    return tuple(
        _gathers_of_rank(todo, rank_stages(schedule=schedule, rank=rank, **shape))
        for rank, todo in enumerate(actions)
    )


def _with_more_rounds(
    schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int, short: int
) -> tuple[tuple[int, ...], ...]:
    """What so few micro-batches take, and once more for each further round what one round adds."""
    size = round_microbatches(schedule=schedule, pp=pp, num_microbatches=num_microbatches)
    size = size if size < num_microbatches else pp
    shape = {"schedule": schedule, "pp": pp, "virtual_stages": virtual_stages}
    most = stage_gathers(num_microbatches=short, **shape)
    fewer = stage_gathers(num_microbatches=short - size, **shape)
    rounds = (num_microbatches - short) // size
    return tuple(
        tuple(one + rounds * (one - other) for one, other in zip(now, before, strict=True))
        for now, before in zip(most, fewer, strict=True)
    )


def _gathers_of_rank(actions: tuple[Action, ...], stages: tuple[int, ...]) -> tuple[int, ...]:
    gathers = dict.fromkeys(stages, 0)
    active: set[int] = set()
    for wanted in gathered_stages(actions):
        for stage in wanted:
            gathers[stage] += stage not in active
        active = set(wanted)
    return tuple(gathers[stage] for stage in stages)

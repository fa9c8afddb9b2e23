"""Pipeline actions: the order in which each rank of a schedule works.

Written from torch 2.13's torch/distributed/pipelining/schedules.py; a test compares every list
action by action with that of torch's own classes. Steps in which a rank idles are left out: when an
action starts is the simulation's matter. DualPipeV's overlapped pairs are a forward and a backward
pass one after the other, as torch runs them without an overlap callback; `overlapped_pairs` says
which they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, zip_longest
from typing import Final, NamedTuple, assert_never

from fsdpplan.spec.conventions import V_SCHEDULES
from fsdpplan.spec.layout import Schedule

Action = tuple[int, int, int]
"""(stage, micro-batch, pass); the pass is one of the four below."""

FORWARD: Final = 0
BACKWARD: Final = 1
"""By inputs and by weights in one go."""
BACKWARD_INPUT: Final = 2
"""By inputs only: what the stage before waits for."""
BACKWARD_WEIGHT: Final = 3
"""By weights, later, where nobody waits: it fills bubbles."""
PAIRED_FORWARD: Final = 4
PAIRED_BACKWARD: Final = 5
"""Forward and whole backward pass side by side with one of the other kind (`overlapped_pairs`), or
with parameters to gather again (`regathering_passes`): in the list of a rank they stand as plain
ones, and take other times."""

ROUND_SCHEDULES: tuple[Schedule, ...] = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Micro-batches go through them in equal rounds of about pp."""

ACTIVE_STAGES = 3
"""Stages whose parameters torch's pipeline runtime keeps gathered: the next that it will need."""


class PassOrder(NamedTuple):
    """What decides which passes the ranks of a pipeline do, and in which order."""

    schedule: Schedule
    pp: int
    num_microbatches: int
    virtual_stages: int
    """Stages of each rank."""

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.pp * self.virtual_stages

    def held(self, rank: int) -> tuple[int, ...]:
        """Stages of one rank, in order: r, r + p, r + 2 p, ...; or the two arms of a V."""
        if self.schedule in V_SCHEDULES:
            return (rank, 2 * self.pp - 1 - rank)
        return tuple(range(rank, self.stages, self.pp))

    @property
    def all_held(self) -> tuple[tuple[int, ...], ...]:
        """Of each rank."""
        return tuple(self.held(rank) for rank in range(self.pp))

    @property
    def round_size(self) -> int:
        """Micro-batches that go through a stage in turn before the rank's next stage does."""
        number = self.num_microbatches
        return number // max(1, number // self.pp) if self.schedule in ROUND_SCHEDULES else number

    def shortened(self, rounds: int) -> PassOrder:
        """Of fewer micro-batches, with the same start and end: at most `rounds` rounds, each of pp
        micro-batches, or of as many as the schedule sends through a stage in turn."""
        number = self.num_microbatches
        size = self.round_size if self.schedule in ROUND_SCHEDULES else self.pp
        if number <= rounds * size:
            return self
        return self._replace(num_microbatches=(rounds - 1) * size + number % size)


def overlapped_pairs(order: PassOrder, rank: int, actions: Sequence[Action]) -> set[int]:
    """Where in a rank's `actions` DualPipeV has a forward and a backward pass side by side: a
    forward pass right before a whole backward pass, and that one.

    The last rank's first such pair is not overlapped, so that the last stage's backward begins at
    once. Source: torch 2.13 schedules.py, OVERLAP_F_B of ScheduleDualPipeV.
    """
    if order.schedule != "dualpipev":
        return set()
    kinds = [kind for _, _, kind in actions]
    firsts = [at for at, pair in enumerate(pairwise(kinds)) if pair == (FORWARD, BACKWARD)]
    if rank == order.pp - 1:
        firsts = firsts[1:]
    return {at + second for at in firsts for second in (0, 1)}


def regathering_passes(actions: Sequence[Action]) -> set[int]:
    """Where in a rank's `actions` a pass finds the blocks of its stage resharded, as a forward pass
    leaves them: as many as there are forward passes."""
    found, last = set[int](), dict[int, int]()
    for at, (stage, _, kind) in enumerate(actions):
        if last.get(stage) == FORWARD:
            found.add(at)
        last[stage] = kind
    return found


def gathered_stages(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    """At each of a rank's actions, the stages whose parameters are gathered.

    Source: torch 2.13 schedules.py, `_add_unshard_reshard`.
    """
    coming: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for stage, _, _ in reversed(actions):  # when each is needed next, seen from the end of the list
        following = (stage, *(other for other in following if other != stage))
        coming.append(following[:ACTIVE_STAGES])
    return coming[::-1]


def actions_of_rank(order: PassOrder, rank: int) -> Iterator[Action]:
    """What one rank does, in order."""
    schedule, pp, num_microbatches, virtual_stages = order
    round_size = order.round_size
    match schedule:
        case "gpipe":
            yield from ((rank, index, FORWARD) for index in range(num_microbatches))
            yield from ((rank, index, BACKWARD) for index in range(num_microbatches))
        case "looped_bfs":
            stages = range(rank, pp * virtual_stages, pp)
            for stage in stages:
                yield from ((stage, index, FORWARD) for index in range(num_microbatches))
            for stage in reversed(stages):
                yield from ((stage, index, BACKWARD) for index in reversed(range(num_microbatches)))
        case "zbv":
            for action in _zbv(rank, pp, max(2 * pp - 1, num_microbatches)):
                if action[1] < num_microbatches:
                    yield action
        case "dualpipev":
            yield from _DualPipeV(rank, pp).actions(num_microbatches)
        case "interleaved_zero_bubble":
            yield from _zero_bubble(rank, pp, num_microbatches, virtual_stages, round_size)
        case "1f1b" | "interleaved_1f1b" | "none":
            yield from _one_f_one_b(
                rank, pp, num_microbatches, virtual_stages, round_size, schedule == "1f1b"
            )
        case _:  # a new schedule is none of the others
            assert_never(schedule)


def _in_rounds(
    rank: int, pp: int, num_microbatches: int, virtual_stages: int, round_size: int, kind: int
) -> list[Action]:
    """Rounds of `round_size` micro-batches, each through all stages of the rank in turn."""
    stages = range(rank, rank + virtual_stages * pp, pp)
    return [
        (stage, index, kind)
        for start in range(0, num_microbatches, round_size)
        for stage in (stages if kind == FORWARD else reversed(stages))
        for index in range(start, start + round_size)
    ]


def _one_f_one_b(
    rank: int,
    pp: int,
    num_microbatches: int,
    virtual_stages: int,
    round_size: int,
    is_plain: bool,
) -> Iterator[Action]:
    """Some forward passes first, then one of each, then the rest of the backward passes."""
    behind = pp - 1 - rank
    warmup = behind if is_plain else (virtual_stages - 1) * round_size + 2 * behind
    forwards = _in_rounds(rank, pp, num_microbatches, virtual_stages, round_size, FORWARD)
    backwards = _in_rounds(rank, pp, num_microbatches, virtual_stages, round_size, BACKWARD)
    yield from forwards[:warmup]
    yield from chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    yield from backwards[max(0, len(forwards) - warmup) :]


def _zero_bubble(
    rank: int, pp: int, num_microbatches: int, virtual_stages: int, round_size: int
) -> Iterator[Action]:
    """ZB1P: as interleaved 1F1B with half the warm-up; weights `rank` micro-batches behind inputs.

    Source: torch's ScheduleInterleavedZeroBubble, commonly credited to arXiv 2401.10241.
    """
    settings = (rank, pp, num_microbatches, virtual_stages, round_size)
    warmup = (virtual_stages - 1) * round_size + pp - 1 - rank
    forwards = _in_rounds(*settings, FORWARD)
    weights = _in_rounds(*settings, BACKWARD_WEIGHT)
    yield from forwards[:warmup]
    later = (None,) * rank
    for forward, by_input, by_weight in zip_longest(
        forwards[warmup:], _in_rounds(*settings, BACKWARD_INPUT), (*later, *weights)
    ):
        if forward:
            yield forward
        if by_input:
            yield by_input
        if by_weight:
            yield by_weight


def _zbv(rank: int, pp: int, num_microbatches: int) -> Iterator[Action]:
    """ZBV: two arms of a V; the last rank turns around and starts backward at once.

    Source: torch's ScheduleZBVZeroBubble; needs at least 2 p - 1 micro-batches, of which the
    caller drops those that are too many.
    """
    stages = (rank, 2 * pp - 1 - rank)
    counts = {(arm, kind): 0 for arm in (0, 1) for kind in (FORWARD, 2, 3)}

    def act(arm: int, kind: int) -> Action:
        index = counts[arm, kind]
        counts[arm, kind] += 1
        return stages[arm], index, kind

    def backward(arm: int) -> Iterator[Action]:
        yield act(arm, BACKWARD_INPUT)
        yield act(arm, BACKWARD_WEIGHT)

    yield from (act(0, FORWARD) for _ in range(2 * (pp - rank) - 1))
    for _ in range(rank):
        yield act(1, FORWARD)
        yield act(0, FORWARD)
    for _ in range(pp - rank):
        yield act(1, FORWARD)
        yield from backward(1)
    while counts[1, FORWARD] < counts[0, FORWARD] or counts[0, FORWARD] < num_microbatches:
        if counts[0, FORWARD] < num_microbatches:
            yield act(0, FORWARD)
        yield from backward(0)
        yield act(1, FORWARD)
        yield from backward(1)
    for _ in range(rank):
        yield act(0, BACKWARD_INPUT)
        yield act(1, BACKWARD_INPUT)
    for _ in range(pp - rank):
        yield from backward(0)
    for arm in (1, 0):
        while counts[arm, BACKWARD_WEIGHT] < counts[arm, BACKWARD_INPUT]:
            yield act(arm, BACKWARD_WEIGHT)


class _DualPipeV:
    """DualPipeV of one rank: forward of one arm beside backward of the other.

    Source: torch's ScheduleDualPipeV, step by step; commonly credited to arXiv 2412.19437.
    """

    def __init__(self, rank: int, pp: int) -> None:
        self.rank, self.pp = rank, pp
        self.stages = (rank, 2 * pp - 1 - rank)
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.pending: deque[Action] = deque()

    def _forward(self, arm: int) -> Action:
        self.forwards[arm] += 1
        return self.stages[arm], self.forwards[arm] - 1, FORWARD

    def _backward(self, arm: int, kind: int = BACKWARD) -> Action:
        stage, index = self.stages[arm], self.backwards[arm]
        self.backwards[arm] += 1
        if kind == BACKWARD_INPUT:
            self.pending.append((stage, index, BACKWARD_WEIGHT))
        return stage, index, kind

    def _weights(self) -> Iterator[Action]:
        if self.pending:
            yield self.pending.popleft()

    def actions(self, num_microbatches: int) -> Iterator[Action]:
        """The eight steps of the schedule."""
        rank, behind = self.rank, self.pp - 1 - self.rank
        yield from (self._forward(0) for _ in range(2 * behind))
        for _ in range(rank + 1):
            yield self._forward(0)
            yield self._forward(1)
        for _ in range(behind):
            yield self._backward(1, BACKWARD_INPUT)
            yield from self._weights()
            yield self._forward(1)
        for _ in range(num_microbatches - 2 * self.pp + rank + 1):
            yield self._forward(0)
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        for _ in range(behind):
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        yield from self._drain(rank, behind)

    def _drain(self, rank: int, behind: int) -> Iterator[Action]:
        """Backward passes only; from half-way on, weights wait."""
        half = (rank + 1) // 2
        kind = BACKWARD
        for position in range(rank + 1):
            if position == half and rank % 2 == 1:
                kind = BACKWARD_INPUT
            yield self._backward(1, kind)
            if position == half and rank % 2 == 0:
                kind = BACKWARD_INPUT
            yield self._backward(0, kind)
        for _ in range(behind):
            yield from self._weights()
            yield self._backward(0, kind)
        for _ in range(rank + 1):
            yield from self._weights()

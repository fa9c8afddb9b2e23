"""Pipelines: a step of all ranks as one list of operations.

A stage is a slice of the model; ranks hold stages as in `PassOrder.held` and do passes in the order
of `rank_actions`. Under GPipe and 1F1B a rank waits for each message: torch issues the receive
behind the compute before it and waits for it, and under 1F1B sends the rank's own message in the
same call (torch 2.13 torch/distributed/pipelining/schedules.py, `_step_microbatches` of
ScheduleGPipe and Schedule1F1B; Megatron Core's forward_backward_pipelining_without_interleaving
does as well). Under the others messages travel beside compute, and only what is not there in time
is waited for. A stage on the same rank is handed its input without one.

Gathers of parameters and reductions of gradients are those of a stage as a whole, on a stream of
the rank beside its passes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Final, Literal, NamedTuple

from fsdpplan.cost.schedule.actions import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    PAIRED_BACKWARD,
    PAIRED_FORWARD,
    PassOrder,
    overlapped_pairs,
    regathering_passes,
)
from fsdpplan.cost.schedule.order import rank_actions
from fsdpplan.spec.layout import Schedule

WAITING_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""A rank waits for each message when it needs it, not before."""

Pair = tuple[float, float]
"""Seconds of one micro-batch in one stage: (forward, backward with what is recomputed)."""
Seconds = tuple[float, ...]

Gathering = Literal["", "in passes", "ahead", "beside"]
"""When the parameters of a stage are gathered: not at all, or beforehand; by its first forward
pass, from the moment when there is something to compute with; from the start of the step, stage by
stage of a rank, before that pass begins; likewise, before it ends."""


def fsdp_gathering(schedule: Schedule) -> Gathering:
    """FSDP's: one stage a rank is gathered block by block by its own forward pass. Of several, a
    rank gathers the whole first ones from the start of the step, one after another, and waits for
    all of a stage's gathers before its first forward pass.

    Source: torch 2.13 torch/distributed/pipelining/schedules.py, `_add_unshard_reshard` and
    `_assert_unsharded` of schedules with several stages a rank; FSDP's hooks under the others.
    """
    return "in passes" if schedule in WAITING_SCHEDULES else "ahead"


GATHER: Final = 6
GATHERED: Final = 7
"""Operations of a stage beside its passes: its gather, and that its first forward pass has it."""
SEND: Final = -2
NOTHING: Final = -1
"""Places of the seconds of a message, and of what takes no time."""

START: Final = 0
"""What has to wait for nothing waits for the start of the step."""


class PipelineOp(NamedTuple):
    """An operation, in the order in which each comes behind what it waits for."""

    stream: int
    """Rank r of p computes on stream r, gathers on p + r, and sends on 2 p + 2 r to the rank behind
    it, and on the next one to the rank before it. A stream does one thing at a time."""
    at: int
    """Place of its seconds: its kind times the number of stages, and its stage; a pass has the kind
    of its action, side by side with another one that of the pair."""
    after: int
    """Number of the operation that it waits for, from 1 on."""


class Shape(NamedTuple):
    """What decides the operations, whatever they take."""

    order: PassOrder
    gathering: Gathering
    regathers: bool
    """Forward passes leave their stage resharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgram:
    """The operations of a step, the same for all that has its shape."""

    ops: tuple[tuple[int, int, int], ...]
    """Each a `PipelineOp`, as a plain tuple: there are very many."""
    passes: tuple[tuple[int, ...], ...]
    """For each rank and action of its list, the number of the operation that ends it."""
    last: tuple[int, ...]
    """The same of each stage's last backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStep:
    """A step, and what its operations take, of stages that may be uneven. All seconds are of one
    micro-batch in each stage, first to last."""

    order: PassOrder
    passes: tuple[Pair, ...]
    send: float = 0.0
    """Of a message between two ranks."""
    weights: Seconds = ()
    """Part of a backward pass that makes the weights' gradients, where the schedule splits it."""
    paired: tuple[Pair, ...] = ()
    """What passes take where DualPipeV has each of them side by side with one of the rank's other
    stage; with `regathers`, behind a forward pass of their stage. Empty: as long as alone."""
    regathers: bool = False
    gathering: Gathering = ""
    gathers: Seconds = ()
    first_waits: float = 0.0
    """By how much the first stage's gather prolongs its first forward pass at the least."""
    reductions: Seconds = ()
    """Of the gradients of each stage, behind its last backward pass."""
    hidden: Seconds = ()
    """Part of that which runs beside the pass; empty: nothing."""
    reduces_at_the_end: bool = False
    """Of all passes of the rank."""

    @property
    def alone(self) -> PipelineStep:
        """Passes and messages, without what gathers and reductions add."""
        return replace(
            self,
            paired=() if self.regathers else self.paired,
            regathers=False,
            gathers=(),
            first_waits=0.0,
            reductions=(),
            hidden=(),
            reduces_at_the_end=False,
        )

    @property
    def shape(self) -> Shape:
        """Which operations they are."""
        return Shape(self.order, self.gathering, self.regathers)

    @property
    def seconds(self) -> Seconds:
        """By the places that operations name."""
        forward, backward = zip(*self.passes, strict=True)
        # the first stage has no input to differentiate by: its weights' half is all of it
        weights = (backward[0], *(self.weights or (0.0,) * len(backward))[1:])
        inputs = (whole - half for whole, half in zip(backward, weights, strict=True))
        pairs = zip(*(self.paired or self.passes), strict=True)
        none = (0.0,) * len(backward)
        waits = (self.first_waits, *none[1:])
        gathers = self.gathers or none
        return (*chain(forward, backward, inputs, weights, *pairs, gathers, waits), self.send, 0.0)


@lru_cache(maxsize=64)
def pipeline_program(shape: Shape) -> PipelineProgram:
    """The operations of all ranks: each rank's as far as its inputs are there, in turn, until all
    is done."""
    order, gathering, regathers = shape
    schedule, pp, count, _ = order
    lists, stages = rank_actions(order), order.stages
    pairs = [
        regathering_passes(todo) if regathers else overlapped_pairs(order, rank, todo)
        for rank, todo in enumerate(lists)
    ]
    waits = schedule in WAITING_SCHEDULES and pp > 1
    links = _links(order.all_held)
    ops: list[tuple[int, int, int]] = []
    number = 0
    gather_of = [START] * stages
    if gathering in ("ahead", "beside"):
        for rank, held in enumerate(order.all_held):
            for stage in held:
                ops += ((pp + rank, GATHER * stages + stage, START),)
                gather_of[stage] = number = number + 1
    # number of what hands over each micro-batch, forward and back; 0 as long as there is none
    arrived = [[0] * (stages * count), [0] * (stages * count)]
    passes: list[list[int]] = [[] for _ in lists]
    last = [0] * stages
    places = [0] * pp
    waiting = list(range(pp))
    while waiting:
        still: list[int] = []
        for rank in waiting:
            done, beside, todo = passes[rank], pairs[rank], lists[rank]
            for place in range(places[rank], len(todo)):
                stage, index, kind = todo[place]
                way, peer = (0, stage - 1) if kind == FORWARD else (1, stage + 1)
                after = START
                if kind != BACKWARD_WEIGHT and 0 <= peer < stages:
                    after = arrived[way][peer * count + index]
                    if not after:
                        places[rank] = place
                        still += (rank,)
                        break
                    if waits:
                        ops += ((rank, SEND, after),)
                        after = number = number + 1
                is_first = gathering and kind == FORWARD and not index
                if is_first and gathering == "in passes":
                    ops += ((pp + rank, GATHER * stages + stage, after),)
                    gather_of[stage] = number = number + 1
                elif is_first and gathering == "ahead":
                    ops += ((rank, NOTHING, gather_of[stage]),)
                    number += 1
                taken = kind
                if place in beside:
                    taken = PAIRED_FORWARD if kind == FORWARD else PAIRED_BACKWARD
                ops += ((rank, taken * stages + stage, after),)
                number += 1
                if is_first and gathering != "ahead":
                    ops += ((rank, GATHERED * stages + stage, gather_of[stage]),)
                    number += 1
                done += (number,)
                if kind in (BACKWARD, BACKWARD_WEIGHT):
                    last[stage] = number
                if kind == BACKWARD_WEIGHT:
                    continue
                link = links[way][stage]
                if link >= 0 and not waits:
                    ops += ((2 * pp + link, SEND, number),)
                    number += 1
                arrived[way][stage * count + index] = number
        waiting = still
    return PipelineProgram(ops=tuple(ops), passes=tuple(map(tuple, passes)), last=tuple(last))


def _links(held: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """The link on which each stage sends forward and backward; -1: its neighbour is on the same
    rank, or there is none. Links 2 r and 2 r + 1 lead from rank r to the ranks behind and before
    it; of two ranks each has one."""
    rank_of = {stage: rank for rank, of_rank in enumerate(held) for stage in of_rank}

    def link(stage: int, peer: int) -> int:
        rank = rank_of[stage]
        if rank_of.get(peer, rank) == rank:
            return -1
        is_behind = (rank_of[peer] - rank) % len(held) == 1
        return 2 * rank + (0 if is_behind else 1)

    stages = range(len(rank_of))
    return [link(one, one + 1) for one in stages], [link(one, one - 1) for one in stages]

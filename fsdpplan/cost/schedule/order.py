"""Pipeline order: what each rank does with its micro-batches, and how many are alive at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from fsdpplan.cost.schedule.actions import (
    ACTIVE_STAGES,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    ROUND_SCHEDULES,
    Action,
    PassOrder,
    actions_of_rank,
    gathered_stages,
    overlapped_pairs,
)
from fsdpplan.cost.schedule.moments import Moments, highest, moments_of_rank, short_actions
from fsdpplan.errors import SpecError
from fsdpplan.spec.conventions import V_SCHEDULES
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout, Schedule

SIMULATED_SCHEDULES: tuple[Schedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
"""Schedules whose time and memory are known here: all."""

_PEAK_ROUNDS = 4
"""Rounds of p micro-batches after which no rank holds more than before."""


def microbatches_refusal(*, schedule: Schedule, pp: int, num_microbatches: int) -> str | None:
    """Why torch refuses this number of micro-batches under the schedule; None if it does not."""
    if schedule == "1f1b" and num_microbatches < pp:
        return f"1f1b needs at least as many micro-batches as stages: {num_microbatches} < {pp}"
    if schedule == "dualpipev" and num_microbatches < 2 * pp:
        return (
            f"dualpipev needs at least as many micro-batches as stages: {num_microbatches} < "
            f"2 x {pp}"
        )
    if schedule in ROUND_SCHEDULES:
        rounds = max(1, num_microbatches // pp)
        if num_microbatches % rounds:
            return (
                f"{schedule} needs micro-batches in {rounds} equal rounds: "
                f"{num_microbatches} is not a multiple of {rounds}"
            )
    return None


def stages_refusal(*, schedule: Schedule, virtual_stages: int) -> str | None:
    """Why torch refuses this number of stages a rank; None if it does not."""
    if schedule in ("gpipe", "1f1b") and virtual_stages != 1:
        return (
            f"schedule {schedule} has one stage a rank, not {virtual_stages}: use "
            "--schedule interleaved_1f1b or --virtual-stages 1"
        )
    if schedule in V_SCHEDULES and virtual_stages != 2:
        return (
            f"schedule {schedule} has two stages a rank, not {virtual_stages}: use "
            "--virtual-stages 2"
        )
    return None


def require_simulated(order: PassOrder) -> None:
    """Raise unless the schedule is known here and takes these micro-batches and stages."""
    schedule, pp, number, virtual_stages = order
    if schedule not in SIMULATED_SCHEDULES:
        raise SpecError(
            f"schedule {schedule} cannot be predicted: use --schedule with one of "
            f"{', '.join(SIMULATED_SCHEDULES)}"
        )
    refusal = stages_refusal(schedule=schedule, virtual_stages=virtual_stages)
    if not refusal and schedule != "1f1b":
        refusal = microbatches_refusal(schedule=schedule, pp=pp, num_microbatches=number)
    if refusal:
        raise SpecError(refusal)


def layout_order(layout: Layout) -> PassOrder:
    """That of a layout."""
    return PassOrder(layout.schedule, layout.pp, layout.num_microbatches, layout.virtual_stages)


@lru_cache(maxsize=256)  # long lists
def rank_actions(order: PassOrder) -> tuple[tuple[Action, ...], ...]:
    """What each rank does, in order."""
    require_simulated(order)
    return tuple(tuple(actions_of_rank(order, rank)) for rank in range(order.pp))


@lru_cache(maxsize=1024)
def peak_in_flight(
    order: PassOrder, stage_weights: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], ...]:
    """For each rank, the micro-batches whose activations each of its stages holds at the peak.

    Stages as in `PassOrder.held`. The peak is when the rank holds most in all, each stage counted
    by its weight of `stage_weights` (its blocks; empty: all alike); activations live from the start
    of the forward to the end of the backward pass, of its weight half where it is split (torch
    keeps the graph for it).
    """
    schedule, pp, number, virtual_stages = order
    if schedule in ("gpipe", "looped_bfs"):
        require_simulated(order)
        return ((number,) * virtual_stages,) * pp
    if schedule == "1f1b":  # a rank starts as many forwards as stages are left behind it
        return tuple((min(number, pp - rank),) for rank in range(pp))
    return tuple(alive for alive, _ in _peaks(order.shortened(_PEAK_ROUNDS), stage_weights))


def peak_weights_pending(order: PassOrder) -> tuple[tuple[int, ...], ...]:
    """For each rank, the micro-batches of each of its stages that wait for their weights' half of
    the backward pass when the rank holds most: their outputs' gradients are kept for it."""
    if order.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return ((0,) * order.virtual_stages,) * order.pp
    return tuple(pending for _, pending in _peaks(order.shortened(_PEAK_ROUNDS), ()))


@lru_cache(maxsize=1024)
def adding_stages(order: PassOrder) -> tuple[tuple[bool, ...], ...]:
    """For each rank, whether FSDP2 adds up the gradients of each of its stages before it reduces
    them.

    It does so in a backward pass, or in the inputs' half of one that is split: what the weights'
    halves leave behind the last of these, where all of them are, is reduced as it is.
    Source: torch 2.13 `FSDPParamGroup.post_backward`; the dtypes of its calls (tests/ground_truth).
    """
    if order.schedule not in SPLIT_BACKWARD_SCHEDULES:
        return ((True,) * order.virtual_stages,) * order.pp
    found = []
    for rank, actions in enumerate(rank_actions(order.shortened(_PEAK_ROUNDS))):
        left, adds = set[int](), {0}  # the first stage's backward pass is never split
        for stage, _, kind in actions:
            if kind == BACKWARD or (kind == BACKWARD_INPUT and stage in left):
                adds.add(stage)
            elif kind == BACKWARD_WEIGHT:
                left.add(stage)
        found.append(tuple(stage in adds for stage in order.held(rank)))
    return tuple(found)


@lru_cache(maxsize=8192)
def moments_of(
    order: PassOrder,
    rank: int,
    stage_weights: tuple[int, ...],
    kept_weights: tuple[int, ...] = (),
    resharded_to: int = 0,
) -> Moments:
    """What a rank holds at the moments of a step that may hold most; `stage_weights` are the blocks
    of each stage, `kept_weights` those that keep everything (empty: none). `resharded_to` as in
    `moments_of_rank`."""
    schedule, pp, number, _ = order
    if schedule in ("gpipe", "looped_bfs", "1f1b"):
        most = min(number, pp - rank) if schedule == "1f1b" else number
        few: Sequence[Action] = short_actions(order.held(rank), most=most, several=most < number)
    else:
        few = rank_actions(order.shortened(_PEAK_ROUNDS))[rank]
    each = moments_of_rank(few, stage_weights, kept_weights, resharded_to=resharded_to)
    return highest(chain.from_iterable(each))


_Peak = tuple[tuple[int, ...], tuple[int, ...]]
"""Micro-batches in each stage of a rank when it holds most, and those of them between the two
halves of their backward pass."""


@lru_cache(maxsize=256)
def _peaks(order: PassOrder, stage_weights: tuple[int, ...]) -> tuple[_Peak, ...]:
    weights = stage_weights or (1,) * order.stages
    return tuple(map(_peak_of_rank, rank_actions(order), order.all_held, (weights,) * order.pp))


def _peak_of_rank(
    actions: Sequence[Action], stages: Sequence[int], weights: Sequence[int]
) -> _Peak:
    alive, pending = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    peak, most = (tuple(alive.values()), tuple(pending.values())), (0, 0)
    held = waiting = 0
    for stage, _, kind in actions:
        if kind == FORWARD:
            alive[stage] += 1
            held += weights[stage]
        elif kind == BACKWARD_INPUT:
            pending[stage] += 1
            waiting += weights[stage]
        if (held, waiting) > most:
            most = (held, waiting)
            peak = (tuple(alive.values()), tuple(pending.values()))
        if kind in (BACKWARD, BACKWARD_WEIGHT):
            alive[stage] -= 1
            held -= weights[stage]
        if kind == BACKWARD_WEIGHT:
            pending[stage] -= 1
            waiting -= weights[stage]
    return peak


def paired_passes(order: PassOrder) -> tuple[tuple[int, int], ...]:
    """For each rank of DualPipeV, how many forward passes of its (first, second) stage are side by
    side with a backward pass of the other one."""
    found = []
    for rank, actions in enumerate(rank_actions(order)):
        pairs = overlapped_pairs(order, rank, actions)
        stages = [actions[at][0] for at in pairs if actions[at][2] == FORWARD]
        first, second = order.held(rank)
        found.append((stages.count(first), stages.count(second)))
    return tuple(found)


STEADY_ROUNDS = 6
"""Rounds of micro-batches after which another one adds what the one before it did."""


@lru_cache(maxsize=1024)
def stage_gathers(order: PassOrder) -> tuple[tuple[int, ...], ...]:
    """For each rank, how often a step gathers the parameters of each of its stages.

    Under reshard never: once, but with more than `ACTIVE_STAGES` stages a rank, which torch drops
    and gathers again.
    """
    if order.virtual_stages <= ACTIVE_STAGES:
        return ((1,) * order.virtual_stages,) * order.pp
    short = order.shortened(STEADY_ROUNDS)
    if order.schedule != "looped_bfs" and short != order:
        return _with_more_rounds(order, short)
    return tuple(
        tuple(map(Counter(stage for _, stage in gathers_in_turn(todo)).__getitem__, held))
        for todo, held in zip(rank_actions(order), order.all_held, strict=True)
    )


def _with_more_rounds(order: PassOrder, short: PassOrder) -> tuple[tuple[int, ...], ...]:
    """What so few micro-batches take, and once more for each further round what one round adds."""
    size = order.round_size if order.round_size < order.num_microbatches else order.pp
    fewer = short._replace(num_microbatches=short.num_microbatches - size)
    rounds = (order.num_microbatches - short.num_microbatches) // size
    return tuple(
        tuple(one + rounds * (one - other) for one, other in zip(now, before, strict=True))
        for now, before in zip(stage_gathers(short), stage_gathers(fewer), strict=True)
    )


def gathers_in_turn(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """(place, stage) of the gathers of a rank: at which of its actions, of which stage."""
    active: set[int] = set()
    for at, wanted in enumerate(gathered_stages(actions)):
        yield from ((at, stage) for stage in wanted if stage not in active)
        active = set(wanted)

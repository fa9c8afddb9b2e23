"""Pipeline order: what each rank does with its micro-batches, and how many are alive at once.

A stage is a slice of the model; rank r of p holds stages r, r + p, r + 2p, ... (`virtual_stages`
of them). The orders are those of torch 2.13's distributed/pipelining/schedules.py; a test compares
them action by action.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Schedule

Action = tuple[int, int, bool]
"""(stage, micro-batch, whether it is the backward pass)."""

SIMULATED_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs")
"""Schedules whose time and memory are known here; all keep the backward pass whole."""

_PEAK_ROUNDS = 4
"""Rounds of p micro-batches after which no rank holds more than before."""


def microbatches_refusal(*, schedule: Schedule, pp: int, num_microbatches: int) -> str | None:
    """Why torch refuses this number of micro-batches under the schedule; None if it does not."""
    if schedule == "1f1b" and num_microbatches < pp:
        return f"1f1b needs at least as many micro-batches as stages: {num_microbatches} < {pp}"
    if schedule == "interleaved_1f1b":
        rounds = max(1, num_microbatches // pp)
        if num_microbatches % rounds:
            return (
                f"interleaved_1f1b needs micro-batches in {rounds} equal rounds: "
                f"{num_microbatches} is not a multiple of {rounds}"
            )
    return None


@lru_cache(maxsize=64)  # long lists
def rank_actions(
    *, schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int
) -> tuple[tuple[Action, ...], ...]:
    """What each rank does, in order."""
    require_simulated(
        schedule=schedule,
        pp=pp,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    return tuple(
        tuple(_actions_of_rank(schedule, rank, pp, num_microbatches, virtual_stages))
        for rank in range(pp)
    )


def require_simulated(
    *, schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int
) -> None:
    """Raise unless the schedule is known here and takes these micro-batches and stages."""
    if schedule not in SIMULATED_SCHEDULES:
        raise SpecError(
            f"schedule {schedule} cannot be predicted: use --schedule with one of "
            f"{', '.join(SIMULATED_SCHEDULES)}"
        )
    if schedule in ("gpipe", "1f1b") and virtual_stages != 1:
        raise SpecError(
            f"schedule {schedule} has one stage a rank, not {virtual_stages}: use "
            "--schedule interleaved_1f1b or --virtual-stages 1"
        )
    if schedule == "interleaved_1f1b":
        refusal = microbatches_refusal(schedule=schedule, pp=pp, num_microbatches=num_microbatches)
        if refusal:
            raise SpecError(refusal)


def _actions_of_rank(
    schedule: Schedule, rank: int, pp: int, num_microbatches: int, virtual_stages: int
) -> Iterator[Action]:
    match schedule:
        case "gpipe":
            yield from ((rank, index, False) for index in range(num_microbatches))
            yield from ((rank, index, True) for index in range(num_microbatches))
        case "looped_bfs":
            stages = range(rank, pp * virtual_stages, pp)
            for stage in stages:
                yield from ((stage, index, False) for index in range(num_microbatches))
            for stage in reversed(stages):
                yield from ((stage, index, True) for index in reversed(range(num_microbatches)))
        case _:
            warmup = min(num_microbatches * virtual_stages, pp - 1 - rank)
            round_size = num_microbatches
            if schedule == "interleaved_1f1b":
                round_size = num_microbatches // max(1, num_microbatches // pp)
                warmup = (virtual_stages - 1) * round_size + 2 * (pp - 1 - rank)
                warmup = min(warmup, num_microbatches * virtual_stages)
            forwards = _in_rounds(rank, pp, num_microbatches, virtual_stages, round_size, False)
            backwards = _in_rounds(rank, pp, num_microbatches, virtual_stages, round_size, True)
            for position, forward in enumerate(forwards):
                yield forward
                if position >= warmup:
                    yield next(backwards)
            yield from backwards


def _in_rounds(
    rank: int, pp: int, num_microbatches: int, virtual_stages: int, round_size: int, backward: bool
) -> Iterator[Action]:
    """Rounds of `round_size` micro-batches, each through all stages of the rank in turn."""
    chunks = range(virtual_stages)
    for start in range(0, num_microbatches, round_size):
        for chunk in reversed(chunks) if backward else chunks:
            for index in range(start, start + round_size):
                yield rank + chunk * pp, index, backward


@lru_cache(maxsize=1024)
def peak_in_flight(
    *, schedule: Schedule, pp: int, num_microbatches: int, virtual_stages: int
) -> tuple[tuple[int, ...], ...]:
    """For each rank, the micro-batches whose activations each of its stages holds at the peak.

    The peak is when the rank holds most in all; activations live from the start of the forward to
    the end of the backward pass.
    """
    if schedule in ("gpipe", "looped_bfs"):
        require_simulated(
            schedule=schedule,
            pp=pp,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
        )
        return ((num_microbatches,) * virtual_stages,) * pp
    if schedule == "1f1b":  # a rank starts as many forwards as stages are left behind it
        return tuple((min(num_microbatches, pp - rank),) for rank in range(pp))
    actions = rank_actions(
        schedule=schedule,
        pp=pp,
        num_microbatches=steady_microbatches(
            schedule=schedule, pp=pp, num_microbatches=num_microbatches, rounds=_PEAK_ROUNDS
        ),
        virtual_stages=virtual_stages,
    )
    return tuple(_peak_of_rank(todo, pp, virtual_stages) for todo in actions)


def _peak_of_rank(actions: tuple[Action, ...], pp: int, virtual_stages: int) -> tuple[int, ...]:
    alive = [0] * virtual_stages
    peak, total, most = tuple(alive), 0, 0
    for stage, _, backward in actions:
        change = -1 if backward else 1
        alive[stage // pp] += change
        total += change
        if total > most:
            peak, most = tuple(alive), total
    return peak


def steady_microbatches(*, schedule: Schedule, pp: int, num_microbatches: int, rounds: int) -> int:
    """Fewer micro-batches with the same start and end: at most `rounds` rounds of pp.

    Not fewer where the rounds of an interleaved schedule would change their size.
    """
    most = rounds * pp
    if num_microbatches <= most or (schedule == "interleaved_1f1b" and num_microbatches % pp):
        return num_microbatches
    return most - pp + num_microbatches % pp

"""Pipeline gathers: how often FSDP gathers the stages of a pipeline rank in one step."""

from __future__ import annotations

from functools import lru_cache

from fsdpplan.cost.schedule.actions import ACTIVE_STAGES, Action, gathered_stages, rank_stages
from fsdpplan.cost.schedule.order import rank_actions, round_microbatches, steady_microbatches
from fsdpplan.spec.layout import Schedule

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

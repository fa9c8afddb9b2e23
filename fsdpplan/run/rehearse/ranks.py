"""Which ranks to rehearse, and which others each of them stands for."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.model.shards import Stage, stage_elements, stage_shard_elements
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model

DEFAULT_RANKS = "0,last,kinds"
"""The first rank, the last one, and the first of each kind of pipeline stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRank:
    """A rank to rehearse."""

    rank: int
    stands_for: str
    """Which ranks do the same; what the last ranks hold may be less, by padding."""


def chosen_ranks(model: Model, layout: Layout, wish: str) -> tuple[ChosenRank, ...]:
    """The ranks that `wish` names, separated by commas: numbers, `last`, `stages` for the first
    rank of each pipeline stage, `kinds` for one stage of those that hold the same."""
    ranks: set[int] = set()
    for word in wish.split(","):
        ranks |= set(_ranks_of(word.strip(), model, layout))
    same = _same_stages(model, layout)
    return tuple(
        ChosenRank(rank=rank, stands_for=_stands_for(rank, layout, same, ranks))
        for rank in sorted(ranks)
    )


def stage_of(rank: int, layout: Layout) -> int:
    """The pipeline rank of `rank`: pp is the outermost axis."""
    return rank // (layout.world // layout.pp)


def _same_stages(model: Model, layout: Layout) -> dict[int, list[int]]:
    """Of each pipeline rank, those from it on that hold the same blocks."""
    stages = pipeline_ranks(model=model, layout=layout)
    return {
        number: [other for other in range(number, layout.pp) if stages[other] == stage]
        for number, stage in enumerate(stages)
    }


def _ranks_of(word: str, model: Model, layout: Layout) -> tuple[int, ...]:
    per_stage = layout.world // layout.pp
    if word == "last":
        return (layout.world - 1,)
    if word == "stages":
        return tuple(range(0, layout.world, per_stage))
    if word == "kinds":
        stages = pipeline_ranks(model=model, layout=layout)
        firsts = [per_stage * stages.index(stage) for stage in dict.fromkeys(stages)]
        last = layout.world - per_stage
        if layout.pp > 1 and last in firsts and not _is_padded(stages[-1], model, layout):
            # the last rank of all holds as much, and may stand for its stage
            firsts[firsts.index(last)] = layout.world - 1
        return tuple(firsts)
    if not word.isdecimal():
        raise SpecError(
            "--ranks takes numbers, last, stages and kinds, separated by commas, not "
            f"{word!r}: type such as --ranks {DEFAULT_RANKS}"
        )
    if int(word) >= layout.world:
        raise SpecError(
            f"there is no rank {word}: the plan has ranks 0 to {layout.world - 1}; type --ranks "
            "last for the last of them"
        )
    return (int(word),)


def _is_padded(stage: Stage, model: Model, layout: Layout) -> bool:
    """Whether the last ranks of a stage may hold less than the first."""
    fullest = stage_shard_elements(
        model=model, stage=stage, tp=layout.tp, shard_ranks=layout.shard_ranks, ep=layout.ep
    )
    whole = stage_elements(model=model, stage=stage, tp=layout.tp, ep=layout.ep)
    return fullest * layout.shard_ranks > whole


def _stands_for(rank: int, layout: Layout, same: dict[int, list[int]], ranks: set[int]) -> str:
    if layout.pp == 1:
        where = {0: f"ranks 0 to {layout.world - 1}", layout.world - 1: "the last rank"}
        return where.get(rank, "itself")
    stage, per_stage = stage_of(rank, layout), layout.world // layout.pp
    rehearsed = {stage_of(other, layout) for other in ranks}
    beside = [other for other in sorted(ranks) if stage_of(other, layout) == stage]
    if rank == beside[0]:
        others = [other for other in same[stage][1:] if other not in rehearsed]
        return f"stages {stage} to {others[-1]}" if others else f"stage {stage}"
    is_last = rank == (stage + 1) * per_stage - 1
    return f"stage {stage}, {'its last rank' if is_last else 'itself'}"

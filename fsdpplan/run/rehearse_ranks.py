"""Which ranks to rehearse, and which others each of them stands for."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout

DEFAULT_RANKS = "0,last,stages"
"""The first rank, the last one, and the first rank of each pipeline stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRank:
    """A rank to rehearse."""

    rank: int
    stands_for: str
    """Which ranks do the same; what the last ranks hold may be less, by padding."""


def chosen_ranks(layout: Layout, wish: str) -> tuple[ChosenRank, ...]:
    """The ranks that `wish` names: numbers, `last` and `stages`, separated by commas."""
    ranks: set[int] = set()
    for word in wish.split(","):
        ranks |= set(_ranks_of(word.strip(), layout))
    return tuple(
        ChosenRank(rank=rank, stands_for=_stands_for(rank, layout)) for rank in sorted(ranks)
    )


def stage_of(rank: int, layout: Layout) -> int:
    """The pipeline rank of `rank`: pp is the outermost axis."""
    return rank // (layout.world // layout.pp)


def _ranks_of(word: str, layout: Layout) -> tuple[int, ...]:
    per_stage = layout.world // layout.pp
    if word == "last":
        return (layout.world - 1,)
    if word == "stages":
        return tuple(range(0, layout.world, per_stage))
    if not word.isdecimal():
        raise SpecError(
            f"--ranks takes numbers, last and stages, separated by commas, not {word!r}: "
            f"for example --ranks {DEFAULT_RANKS}"
        )
    if int(word) >= layout.world:
        raise SpecError(
            f"there is no rank {word}: the plan has ranks 0 to {layout.world - 1}; --ranks last is "
            "the last of them"
        )
    return (int(word),)


def _stands_for(rank: int, layout: Layout) -> str:
    per_stage = layout.world // layout.pp
    stage = rank // per_stage
    if per_stage == 1:
        return f"stage {stage}"
    first, last = stage * per_stage, (stage + 1) * per_stage - 1
    where = f"stage {stage}, " if layout.pp > 1 else ""
    if rank == first:
        return f"{where}ranks {first} to {last}"
    if rank == last:
        return f"{where}padded shards"
    return f"{where}itself"

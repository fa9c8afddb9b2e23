"""Pipeline stages: which blocks of the model each one has, and which rank has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from ..config import LayoutConfig, PlanConfig
from ..shared import conventions

V_SCHEDULES = conventions.V_SCHEDULES
SPLIT_BACKWARD_SCHEDULES = conventions.SPLIT_BACKWARD_SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """What one stage is made of."""

    index: int
    """Of all stages, from 0."""
    blocks: range
    """Numbers of its blocks in the whole model."""
    is_first: bool
    """It has the embedding."""
    is_last: bool
    """It has the norm and the output head."""


class RankModel(nn.Module):
    """The stages of one rank under their names in the whole model; nothing to call."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for stage in stages:
            for name, child in stage.named_children():
                if name == "layers":
                    self.layers.update(child.named_children())  # type: ignore[arg-type]
                else:
                    self.add_module(name, child)


def rank_stages(layout: LayoutConfig, *, pp_rank: int) -> tuple[int, ...]:
    """Indices of the stages of a pipeline rank: r, r + p, r + 2 p, ...; or the two arms of a V."""
    if layout.schedule in V_SCHEDULES:
        return (pp_rank, 2 * layout.pp - 1 - pp_rank)
    return tuple(range(pp_rank, layout.pp * layout.virtual_stages, layout.pp))


def rank_shares(plan: PlanConfig, *, pp_rank: int) -> tuple[StageShare, ...]:
    """The stages of pipeline rank `pp_rank`, in order of their index; the plan says which blocks
    each has."""
    starts = list(accumulate(plan.layout.stage_blocks, initial=0))
    return tuple(
        StageShare(
            index=index,
            blocks=range(starts[index], starts[index + 1]),
            is_first=index == 0,
            is_last=index == len(starts) - 2,
        )
        for index in rank_stages(plan.layout, pp_rank=pp_rank)
    )

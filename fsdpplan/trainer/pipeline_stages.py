"""Pipeline stages: which blocks of the model each one has, and which rank has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor

from torch import nn

from .config import LayoutConfig, PlanConfig
from .flops import matmul_parameters

V_SCHEDULES = ("zbv", "dualpipev")
"""Rank r of p has stages r and 2 p - 1 - r: the first rank also has the last stage."""

SPLIT_BACKWARD_SCHEDULES = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that compute gradients by inputs first, and by weights where nobody waits."""

_ROUNDING = 1e-9


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


def stage_blocks(plan: PlanConfig) -> tuple[int, ...]:
    """Blocks of each stage: those that the plan names, or the split that is balanced."""
    model, layout = plan.model, plan.layout
    if layout.stage_blocks:
        return layout.stage_blocks
    head = model.vocab * model.hidden
    return balanced_stage_blocks(
        layers=model.layers,
        stages=layout.pp * layout.virtual_stages,
        head_blocks=head * model.layers / (matmul_parameters(model) - head),
    )


def balanced_stage_blocks(*, layers: int, stages: int, head_blocks: float) -> tuple[int, ...]:
    """The split whose largest stage is smallest, with the head as `head_blocks` in the last stage:
    the rule by which the plan was priced.

        min over splits of max(n_1, ..., n_(S-1), n_S + head_blocks)

    Each stage has a block at least. What may be left out anywhere is left out of the first stages.
    """
    loads = {float(n) for n in range(1, layers + 1)}
    loads |= {n + head_blocks for n in range(1, layers + 1)}
    for load in sorted(loads):
        most = floor(load + _ROUNDING)
        last = max(1, floor(load - head_blocks + _ROUNDING))
        if most >= 1 and (stages - 1) * most + last >= layers:
            break
    blocks = [most] * (stages - 1) + [last]
    while sum(blocks) > layers:
        fullest = max(blocks)
        blocks[blocks.index(fullest)] -= 1
    return tuple(blocks)


def rank_stages(layout: LayoutConfig, *, pp_rank: int) -> tuple[int, ...]:
    """Indices of the stages of a pipeline rank: r, r + p, r + 2 p, ...; or the two arms of a V."""
    if layout.schedule in V_SCHEDULES:
        return (pp_rank, 2 * layout.pp - 1 - pp_rank)
    return tuple(range(pp_rank, layout.pp * layout.virtual_stages, layout.pp))


def rank_shares(plan: PlanConfig, *, pp_rank: int) -> tuple[StageShare, ...]:
    """The stages of pipeline rank `pp_rank`, in order of their index."""
    starts = list(accumulate(stage_blocks(plan), initial=0))
    return tuple(
        StageShare(
            index=index,
            blocks=range(starts[index], starts[index + 1]),
            is_first=index == 0,
            is_last=index == len(starts) - 2,
        )
        for index in rank_stages(plan.layout, pp_rank=pp_rank)
    )

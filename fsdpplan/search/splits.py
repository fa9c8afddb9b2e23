"""Stage splits: uneven splits of the blocks over a pipeline's stages that are worth pricing.

The default split counts the head by its matmul alone. What the ends really cost is in seconds: the
loss, the embedding's backward; attention makes blocks dearer at long sequences, recomputation too.
And what a block costs in memory depends on its rank: under 1F1B the first holds most micro-batches.

    min over splits of max_i (c_i n_i + e_i)

with c a block's cost in stage or rank i and e that of embedding, head and all else. Giving each
block to where the load is least after it finds it: loads only grow. Left out: that dense blocks of
a mixture may cost more or less than the others; they count as the mean.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heapreplace

from fsdpplan.cost.memory.peak import available_bytes, stage_memory
from fsdpplan.cost.model.shards import Stage, whole_model
from fsdpplan.cost.read.pipeline import stage_seconds
from fsdpplan.cost.schedule.stages import (
    in_flight_blocks,
    layout_rank_stages,
    layout_stage_blocks,
    pipeline_ranks,
)
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case

Split = tuple[int, ...]


@lru_cache(maxsize=4096)
def least_load_split(
    *, blocks: int, costs: tuple[float, ...], extras: tuple[float, ...], least: Split, most: Split
) -> Split | None:
    """Blocks of each place, from `least` to `most`, whose highest load is least; None where so many
    do not fill them, or fill more.

    What may be left out anywhere is left out of the first places.
    """
    if not sum(least) <= blocks <= sum(most):
        return None
    found = list(least)
    loads = [
        (cost * (number + 1) + extra, -place)
        for place, (cost, extra, number) in enumerate(zip(costs, extras, least, strict=True))
    ]
    heapify(loads)
    left = blocks - sum(least)
    while left:
        load, place = loads[0]
        if found[-place] >= most[-place]:
            heappop(loads)
            continue
        found[-place] += 1
        left -= 1
        heapreplace(loads, (load + costs[-place], place))
    return tuple(found)


def stage_splits(case: Case) -> tuple[Split, ...]:
    """Splits other than the default one to price for a layout with a pipeline: by the seconds of
    its stages; by those of its ranks; and, where the default does not fit, by those of its ranks as
    far as each has room.

    Each stage has a block at least, but for the last, whose head may be more than a share.
    """
    model, layout = case.model, case.layout
    if layout.pp == 1 or layout.pp * layout.virtual_stages > model.layers:
        return ()
    even = replace(layout, stage_blocks=())
    of_even = replace(case, layout=even)
    block, ends = _stage_seconds(of_even)
    anything = (model.layers,) * layout.pp
    found = [
        least_load_split(
            blocks=model.layers,
            costs=(block,) * len(ends),
            extras=ends,
            least=_least(len(ends)),
            most=(model.layers,) * len(ends),
        ),
        _over_ranks(even, model.layers, block=block, ends=ends, most=anything),
    ]
    room = _room(of_even)
    if room is not None:
        found.append(_over_ranks(even, model.layers, block=block, ends=ends, most=room))
    default = layout_stage_blocks(model=model, layout=even)
    return tuple(split for split in dict.fromkeys(found) if split and split != default)


def _least(stages: int) -> Split:
    return (1,) * (stages - 1) + (0,)


def _stage_seconds(case: Case) -> tuple[float, tuple[float, ...]]:
    """(seconds of a block in the mean, those of each stage's ends), forward and backward."""
    model, layout = case.model, case.layout

    def seconds(stage: Stage) -> float:
        return sum(stage_seconds(case, stage))

    first = seconds(Stage(blocks=0, has_embedding=True, has_head=False))
    last = seconds(Stage(blocks=0, has_embedding=False, has_head=True))
    inner = replace(whole_model(model), has_embedding=False, has_head=False)
    between = (0.0,) * (layout.pp * layout.virtual_stages - 2)
    return seconds(inner) / model.layers, (first, *between, last)


def _over_ranks(
    layout: Layout, blocks: int, *, block: float, ends: tuple[float, ...], most: Split
) -> Split | None:
    """Blocks over ranks by their seconds, at most so many each, and those of each rank over its
    stages as even as its ends allow."""
    least = _least(len(ends))
    held = layout_rank_stages(layout)
    of_ranks = least_load_split(
        blocks=blocks,
        costs=(block,) * len(held),
        extras=tuple(sum(ends[stage] for stage in stages) for stages in held),
        least=tuple(sum(least[stage] for stage in stages) for stages in held),
        most=most,
    )
    if of_ranks is None:
        return None
    found = dict.fromkeys(range(len(ends)), 0)
    for stages, number in zip(held, of_ranks, strict=True):
        shares = least_load_split(
            blocks=number,
            costs=(block,) * len(stages),
            extras=tuple(ends[stage] for stage in stages),
            least=tuple(least[stage] for stage in stages),
            most=(number,) * len(stages),
        )
        found.update(zip(stages, shares or (), strict=True))
    return tuple(found.values())


def _room(case: Case) -> Split | None:
    """The most blocks that each rank has memory for, its peak taken as the line through the default
    split and one with a block more in each stage; None where the default fits everywhere.

    Micro-batches in flight keep their number: it is the schedule's.
    """
    model, layout = case.model, case.layout
    available = available_bytes(cluster=case.cluster, training=case.training)
    split = layout_stage_blocks(model=model, layout=layout)
    larger = replace(model, layers=model.layers + len(split))
    default = _rank_peaks(case)
    if all(peak <= available for _, peak in default):
        return None
    longer = replace(layout, stage_blocks=tuple(blocks + 1 for blocks in split))
    more = _rank_peaks(replace(case, model=larger, layout=longer))
    most = []
    for (blocks, peak), (more_blocks, higher) in zip(default, more, strict=True):
        of_a_block = (higher - peak) // (more_blocks - blocks)
        most.append(blocks + (available - peak) // max(1, of_a_block))
    return tuple(max(0, number) for number in most)


def _rank_peaks(case: Case) -> list[tuple[int, int]]:
    """(blocks, peak bytes) of each pipeline rank."""
    model, layout = case.model, case.layout
    stages = pipeline_ranks(model=model, layout=layout)
    return [
        (stage.blocks, stage_memory(case, stage, in_flight_blocks=alive).peak_device_bytes)
        for stage, alive in zip(stages, in_flight_blocks(model=model, layout=layout), strict=True)
    ]

"""Pipeline stages: how many blocks each stage of a pipeline holds.

The default balances what the stages cost, the head counted as so many blocks; the rules of some
training softwares are here too, for `Layout.stage_blocks` of a run that they made. Each rule is a
pure function of its numbers; its source was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from math import floor, isclose
from typing import TypeVar

from fsdpplan.cost.model.params import kind_places, matmul_parameter_count
from fsdpplan.cost.model.shards import Stage, blocks_mix
from fsdpplan.cost.schedule.actions import ACTIVE_STAGES, PassOrder
from fsdpplan.cost.schedule.moments import Moments, all_at_once, highest
from fsdpplan.cost.schedule.order import (
    adding_stages,
    layout_order,
    moments_of,
    peak_in_flight,
    peak_weights_pending,
    stage_gathers,
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout, Schedule
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case

_ROUNDING = 1e-9

T = TypeVar("T")
_Kinds = int | tuple[int, ...]
"""Dense blocks at the start; of a model with a pattern, the kind of each block."""
_Split = tuple[tuple[int, ...], _Kinds, int]
"""(blocks of each stage, kinds of all, blocks of a stage that recompute)."""


def even_stage_blocks(
    *, layers: int, stages: int, fewer_in_first: int = 0, fewer_in_last: int = 0
) -> tuple[int, ...]:
    """The same number of blocks in each stage; so many fewer in the first and last one.

        (L + fewer) / S each

    As Megatron splits: `fewer_in_first` and `fewer_in_last` are 1 where it accounts for embedding
    and loss as a layer each, and 0 otherwise; what does not divide it refuses. BLOOM's 70 layers
    and 12 stages have one fewer at both ends. Source: Megatron-LM
    megatron/core/transformer/transformer_block.py, `get_num_layers_to_build`.
    """
    whole = layers + fewer_in_first + fewer_in_last
    if whole % stages or whole // stages < max(fewer_in_first, fewer_in_last):
        raise SpecError(
            f"{layers} blocks do not split evenly over {stages} stages with {fewer_in_first} and "
            f"{fewer_in_last} fewer at the ends: leave stage_blocks empty, or name each stage's"
        )
    each = whole // stages
    blocks = [each] * stages
    blocks[0] -= fewer_in_first
    blocks[-1] -= fewer_in_last
    return tuple(blocks)


def torchtitan_stage_blocks(
    *, layers: int, stages: int, input_weight: int = 1, output_weight: int = 1
) -> tuple[int, ...]:
    """Embedding and head count as a layer each; what is left over goes to the first stages.

    Source: torchtitan torchtitan/distributed/pipeline_parallel.py,
    `generate_llm_fqn_per_model_part`; the weights are its options
    `pipeline_parallel_first_stage_less_layers` and `..._last_stage_less_layers`, 1 by default.
    """
    if stages == 1:
        return (layers,)
    each, left = divmod(layers + input_weight + output_weight, stages)
    if each < max(1, input_weight, output_weight):
        raise SpecError(
            f"{layers} blocks do not fill {stages} pipeline stages whose ends count as "
            f"{input_weight} and {output_weight} more: use a smaller --pp or --virtual-stages"
        )
    blocks = [each + (stage < left) for stage in range(stages)]
    blocks[0] -= input_weight
    blocks[-1] -= output_weight
    return tuple(blocks)


def threshold_stage_blocks(*, layers: int, stages: int, head_blocks: float) -> tuple[int, ...]:
    """nanotron's rule: a stage is full when the cost so far exceeds its share of the whole.

    Blocks in order, the head at the end as `head_blocks` of them; stage i takes blocks until their
    cumulative cost is more than (i + 1) / S of all, so it ends above its share, and the last
    stages hold less, maybe no block. Source: nanotron src/nanotron/models/base.py, `build_model`;
    there a block costs 4 hidden**2 + 3 hidden ffn (whatever its key heads) and the head
    hidden vocab (src/nanotron/models/llama.py, `get_block_compute_costs`).
    """
    whole = layers + head_blocks
    blocks = [0] * stages
    stage = 0
    for done in range(1, layers + 1):
        blocks[stage] += 1
        share = whole * (stage + 1) / stages
        if done > share and not isclose(done, share, rel_tol=_ROUNDING):
            stage += 1
    return tuple(blocks)


def nanotron_head_blocks(model: Model) -> float:
    """The head's cost in blocks, as nanotron counts it for `threshold_stage_blocks`."""
    return model.vocab / (4 * model.hidden + 3 * model.ffn_hidden)


def most_stages(layers: int) -> int:
    """Of a pipeline of so many blocks: each has one, or the embedding or the head alone."""
    return layers + 2


@lru_cache(maxsize=4096)
def balanced_stage_blocks(*, layers: int, stages: int, head_blocks: float = 0.0) -> tuple[int, ...]:
    """The split whose largest stage is smallest, with the head as `head_blocks` in the last stage.

        min over splits of max(n_1, ..., n_(S-1), n_S + head_blocks)

    Each stage has a block at least, as long as there are so many: with a stage more the last one
    has the head alone, with two the first one the embedding alone. What may be left out anywhere is
    left out of the first stages: they hold the most micro-batches, and the embedding.
    """
    if stages > most_stages(layers):
        raise SpecError(
            f"{layers} blocks do not fill {stages} pipeline stages, two of which may hold the "
            "embedding and the head alone: use --pp and --virtual-stages whose product is at most "
            f"{most_stages(layers)}"
        )
    if stages == 1:
        return (layers,)
    if stages > layers:
        return (layers + 2 - stages, *(1,) * (stages - 2), 0)
    loads = {float(n) for n in range(1, layers + 1)}
    loads |= {n + head_blocks for n in range(1, layers + 1)}
    for load in sorted(loads):
        most = floor(load + _ROUNDING)
        last = max(1, floor(load - head_blocks + _ROUNDING))
        if most >= 1 and (stages - 1) * most + last >= layers:
            return _filled(layers, [most] * (stages - 1) + [last])
    raise AssertionError("a stage of all layers holds them")


def _filled(layers: int, most: list[int]) -> tuple[int, ...]:
    """`layers` in all, at most as many in each stage: fewer in the fullest, the first first."""
    blocks = list(most)
    while sum(blocks) > layers:
        fullest = max(blocks)
        blocks[blocks.index(fullest)] -= 1
    return tuple(blocks)


@lru_cache(maxsize=256)
def head_blocks(model: Model) -> float:
    """The output head's product as so many blocks' products.

        V h / (matmul weights of a block, in the mean)

    Left out: attention, which makes blocks costlier at long sequences, and the loss, which makes
    the head costlier.
    """
    head = model.vocab * model.hidden
    return head * model.layers / (matmul_parameter_count(model) - head)


def layout_stage_blocks(*, model: Model, layout: Layout) -> tuple[int, ...]:
    """Blocks of each pipeline stage: those that the layout names, or the default rule's."""
    if layout.stage_blocks:
        if sum(layout.stage_blocks) != model.layers:
            raise SpecError(
                f"stage_blocks add up to {sum(layout.stage_blocks)}, but {model.name} has "
                f"{model.layers} blocks: make them add up to that, or leave stage_blocks empty"
            )
        return layout.stage_blocks
    return balanced_stage_blocks(
        layers=model.layers,
        stages=layout.pp * layout.virtual_stages,
        head_blocks=head_blocks(model),
    )


def named_stages(*, model: Model, layout: Layout) -> Layout:
    """`layout` with the blocks of its pipeline's stages named: for those who run it."""
    if layout.pp == 1:
        return layout
    return replace(layout, stage_blocks=layout_stage_blocks(model=model, layout=layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKinds:
    """The stages of a pipeline, those that are alike as one."""

    kinds: tuple[Stage, ...]
    """Stages that differ, in the order in which they come."""
    places: tuple[int, ...]
    """Of each stage, first to last, which of them it is."""

    def each(self, of_kinds: Sequence[T]) -> list[T]:
        """Of each stage what is given of its kind."""
        return [of_kinds[place] for place in self.places]


def pipeline_stages(*, model: Model, layout: Layout) -> tuple[Stage, ...]:
    """What each stage of the pipeline holds, first to last; one stage without a pipeline."""
    return _stages(*_split(model, layout))


def stage_kinds(*, model: Model, layout: Layout) -> StageKinds:
    """`pipeline_stages`, those that are alike as one."""
    return _stage_kinds(*_split(model, layout))


def pipeline_ranks(*, model: Model, layout: Layout) -> tuple[Stage, ...]:
    """What each pipeline rank holds, over all its stages."""
    return _ranks(*_split(model, layout), _counted_order(layout))


def fullest_ranks(*, model: Model, layout: Layout) -> tuple[tuple[Stage, int], ...]:
    """(what it holds, (micro-batch, block) pairs alive at its schedule's worst moment) of each
    pipeline rank that differs: of equal ones, of that with most in flight."""
    if layout.pp == 1:
        return tuple((stage, model.layers) for stage in pipeline_ranks(model=model, layout=layout))
    return _fullest_ranks(*_split(model, layout), _counted_order(layout), layout.num_microbatches)


def _split(model: Model, layout: Layout) -> _Split:
    """What decides the stages of a layout's pipeline: plain numbers, quick keys of tables."""
    return (
        layout_stage_blocks(model=model, layout=layout),
        _kinds(model),
        model.layers if layout.checkpoint_blocks == "all" else layout.checkpoint_blocks,
    )


def _kinds(model: Model) -> _Kinds:
    if model.is_patterned:
        return kind_places(model)
    return model.dense_blocks if model.experts else 0


def _counted_order(layout: Layout) -> PassOrder:
    """What beside it decides what the ranks hold: without the number of micro-batches where that
    says nothing."""
    counts = layout.schedule in SPLIT_BACKWARD_SCHEDULES or layout.virtual_stages > ACTIVE_STAGES
    number = layout.num_microbatches if counts else 0
    return PassOrder(layout.schedule, layout.pp, number, layout.virtual_stages)


def layout_rank_stages(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Indices of the stages that each pipeline rank holds."""
    return _rank_stages(layout.schedule, layout.pp, layout.virtual_stages)


def in_flight_blocks(*, model: Model, layout: Layout) -> tuple[int, ...]:
    """For each pipeline rank, (micro-batch, block) pairs alive at its schedule's worst moment."""
    if layout.pp == 1:
        return (model.layers,)
    blocks = layout_stage_blocks(model=model, layout=layout)
    return _in_flight_blocks(blocks, layout_order(layout))


def stage_moments(case: Case, stage: Stage, *, in_flight_blocks: int) -> Moments:
    """What the pipeline ranks that hold `stage`, and so much in flight, hold at the moments of a
    step; of what is on no rank of the layout, or in no pipeline, all at once."""
    layout = case.layout
    at_once = all_at_once(alive=in_flight_blocks, blocks=stage.blocks, kept=stage.kept_blocks)
    if layout.pp == 1:
        return at_once
    found = _stage_moments(
        *_split(case.model, layout),
        _counted_order(layout),
        layout.num_microbatches,
        stage,
        in_flight_blocks,
        resharded_blocks(layout),
    )
    return found or at_once


RESHARDED_UNITS = 3
"""Units of FSDP that a pass which gathers them again has of them at once: what it computes with,
the flat buffer that this came in, and the one that the next unit comes in."""


def resharded_blocks(layout: Layout) -> int:
    """Blocks of a pipeline's stage whose parameters are there at once while a pass gathers them
    again; 0 where they stay."""
    return RESHARDED_UNITS * layout.wrap_blocks if layout.reshards_stages else 0


@lru_cache(maxsize=4096)
def _stage_moments(
    per_stage: tuple[int, ...],
    kinds: _Kinds,
    checkpoint_blocks: int,
    counted: PassOrder,
    num_microbatches: int,
    stage: Stage,
    in_flight_blocks: int,
    resharded_to: int,
) -> Moments | None:
    split = (per_stage, kinds, checkpoint_blocks)
    ranks, order = _ranks(*split, counted), counted._replace(num_microbatches=num_microbatches)
    kept = tuple(one.kept_blocks for one in _stages(*split)) if stage.kept_blocks else ()
    in_flight = _in_flight_blocks(per_stage, order)
    same = [
        moments_of(order, rank, per_stage, kept, resharded_to)
        for rank, (holds, blocks) in enumerate(zip(ranks, in_flight, strict=True))
        if holds == stage and blocks == in_flight_blocks
    ]
    return highest(chain.from_iterable(same)) if same else None


@lru_cache(maxsize=4096)
def _stages(per_stage: tuple[int, ...], kinds: _Kinds, checkpoint_blocks: int) -> tuple[Stage, ...]:
    firsts = accumulate(per_stage, initial=0)
    return tuple(
        Stage(
            blocks=blocks,
            has_embedding=index == 0,
            has_head=index == len(per_stage) - 1,
            dense_blocks=max(0, min(kinds - first, blocks)) if isinstance(kinds, int) else 0,
            kept_blocks=max(0, blocks - checkpoint_blocks),
            mix=_mix(kinds, first, first + blocks),
            kept_mix=_mix(kinds, min(first + checkpoint_blocks, first + blocks), first + blocks)
            if blocks > checkpoint_blocks
            else (),
        )
        for index, (blocks, first) in enumerate(zip(per_stage, firsts, strict=False))
    )


def _mix(kinds: _Kinds, first: int, behind: int) -> tuple[int, ...]:
    """Of the blocks from `first` on, how many are of each kind; nothing without a pattern."""
    if isinstance(kinds, int):
        return ()
    return blocks_mix(kinds[first:behind], max(kinds) + 1)


def _summed(mixes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Of several stages together."""
    return tuple(map(sum, zip(*filter(None, mixes), strict=True)))


@lru_cache(maxsize=4096)
def _stage_kinds(per_stage: tuple[int, ...], kinds: _Kinds, checkpoint_blocks: int) -> StageKinds:
    stages = _stages(per_stage, kinds, checkpoint_blocks)
    places: dict[Stage, int] = {}
    return StageKinds(
        places=tuple(places.setdefault(stage, len(places)) for stage in stages),
        kinds=tuple(places),
    )


@lru_cache(maxsize=4096)
def _rank_stages(schedule: Schedule, pp: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    return PassOrder(schedule, pp, 0, virtual_stages).all_held


@lru_cache(maxsize=4096)
def _ranks(
    per_stage: tuple[int, ...], kinds: _Kinds, checkpoint_blocks: int, order: PassOrder
) -> tuple[Stage, ...]:
    stages = _stages(per_stage, kinds, checkpoint_blocks)
    if order.pp == 1:
        return stages
    waiting, gathers, adds = peak_weights_pending(order), stage_gathers(order), adding_stages(order)
    return tuple(
        Stage(
            blocks=sum(stages[index].blocks for index in held),
            has_embedding=any(stages[index].has_embedding for index in held),
            has_head=any(stages[index].has_head for index in held),
            dense_blocks=sum(stages[index].dense_blocks for index in held),
            kept_blocks=sum(stages[index].kept_blocks for index in held),
            mix=_summed(stages[index].mix for index in held),
            kept_mix=_summed(stages[index].kept_mix for index in held),
            inner_boundaries=sum(index + 1 in held for index in held),
            adds_gradients=all(adds[rank]),
            parts=tuple(
                replace(stages[index], gathers=times, adds_gradients=are_added)
                for index, times, are_added in zip(held, gathers[rank], adds[rank], strict=True)
            )
            if len(held) > 1
            else (),
            waiting_blocks=sum(
                count * stages[index].blocks
                for count, index in zip(waiting[rank], held, strict=True)
                if index  # the first stage's backward pass is never split
            ),
        )
        for rank, held in enumerate(order.all_held)
    )


@lru_cache(maxsize=4096)
def _fullest_ranks(
    per_stage: tuple[int, ...],
    kinds: _Kinds,
    checkpoint_blocks: int,
    counted: PassOrder,
    num_microbatches: int,
) -> tuple[tuple[Stage, int], ...]:
    ranks = _ranks(per_stage, kinds, checkpoint_blocks, counted)
    in_flight = _in_flight_blocks(per_stage, counted._replace(num_microbatches=num_microbatches))
    most: dict[Stage, int] = {}
    for stage, blocks in zip(ranks, in_flight, strict=True):
        most[stage] = max(blocks, most.get(stage, 0))
    return tuple(most.items())


@lru_cache(maxsize=4096)
def _in_flight_blocks(per_stage: tuple[int, ...], order: PassOrder) -> tuple[int, ...]:
    return tuple(
        max(
            sum(per_stage[index] for index in held),
            sum(count * per_stage[index] for count, index in zip(counts, held, strict=True)),
        )
        for counts, held in zip(peak_in_flight(order, per_stage), order.all_held, strict=True)
    )

"""Shards: FSDP units of one rank, with experts and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import block_tensors, dense_view, elements, parameter_count
from fsdpplan.cost.model.shards import (
    Stage,
    block_kinds,
    block_size,
    block_units,
    dense_blocks_among,
    expert_size,
    stage_elements,
    stage_shard_elements,
    whole_model,
)
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.cost.problems import case
from tests.strategies import any_models, mixtures


@given(any_models(), st.sampled_from([1, 2]))
def test_the_ranks_together_hold_every_parameter_once(model: Model, ep: int) -> None:
    whole = whole_model(model)
    dense = stage_elements(model=dense_view(model), stage=replace(whole, dense_blocks=0), tp=1)
    if model.experts is None:
        assert stage_elements(model=model, stage=whole, tp=1, ep=ep) == dense
    block = block_size(model=model, tp=1, shard_ranks=1, ep=ep)
    experts = expert_size(model=model, tp=1, shard_ranks=ep, ep=ep)
    assert block.elements + ep * experts.elements == elements(block_tensors(model))
    assert block.tensors + experts.tensors == len(block_tensors(model))
    assert stage_elements(model=model, stage=whole, tp=1) == parameter_count(model)


@given(mixtures(), st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_padded_shards_hold_the_unit_and_experts_need_fewer_ranks(
    model: Model, ep: int, expert_ranks: int
) -> None:
    assert model.experts is not None
    shard_ranks = ep * expert_ranks
    block = block_size(model=model, tp=1, shard_ranks=shard_ranks, ep=ep)
    experts = expert_size(model=model, tp=1, shard_ranks=shard_ranks, ep=ep)
    assert block.padded_elements >= block.elements
    assert experts.padded_elements >= experts.elements
    assert block.shard_elements(shard_ranks) * shard_ranks == block.padded_elements
    assert experts.shard_elements(expert_ranks) * expert_ranks == experts.padded_elements
    # widths are multiples of 64: whichever dimension is split, nothing is padded but biases
    if model.experts.experts % shard_ranks == 0:
        assert experts.padded_elements == experts.elements


@given(any_models(), st.sampled_from([1, 2]), st.sampled_from([1, 2, 8]))
def test_more_ranks_never_keep_more(model: Model, ep: int, shard_ranks: int) -> None:
    def kept(ranks: int) -> int:
        return stage_shard_elements(
            model=model, stage=whole_model(model), tp=1, shard_ranks=ranks, ep=ep
        )

    ranks = ep * shard_ranks
    whole = stage_elements(model=model, stage=whole_model(model), tp=1)
    assert kept(ranks) * ranks >= whole
    assert kept(ranks) <= whole
    assert kept(1) == whole if ep == 1 else kept(ep) <= kept(1 * ep)


def test_fewer_experts_than_ranks_are_split_by_rows_and_not_padded() -> None:
    mixtral = load_model("mixtral-8x7b")
    routed = 3 * 8 * 4096 * 14336
    for ep, shard_ranks in ((1, 64), (8, 64), (4, 64), (2, 8)):
        unit = block_size(model=mixtral, tp=1, shard_ranks=shard_ranks, ep=ep)
        experts = expert_size(model=mixtral, tp=1, shard_ranks=shard_ranks, ep=ep)
        padding = unit.padded_elements - unit.elements
        assert padding == (64 - 8) * 4096 * (shard_ranks == 64)  # the router has eight rows
        assert experts.padded_elements == experts.elements == (routed // ep if ep > 1 else 0)


def test_dense_models_have_no_expert_unit() -> None:
    model = load_model("llama-3.1-8b")
    unit = block_size(model=model, tp=2, shard_ranks=8)
    assert block_size(model=model, tp=2, shard_ranks=8, ep=4) == unit
    assert expert_size(model=model, tp=2, shard_ranks=8, ep=4).padded_elements == 0
    assert whole_model(model) == Stage(blocks=32, has_embedding=True, has_head=True)
    assert block_kinds(model=model, stage=whole_model(model)) == ((model, 32),)


@given(mixtures(), st.data())
def test_stages_share_the_dense_blocks_at_the_start(model: Model, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, model.layers))
    spans = ((0, cut), (cut, model.layers - cut))
    stages = [
        Stage(
            blocks=blocks,
            has_embedding=first == 0,
            has_head=first > 0,
            dense_blocks=dense_blocks_among(model=model, first_block=first, blocks=blocks),
        )
        for first, blocks in spans
    ]
    assert sum(stage.dense_blocks for stage in stages) == model.dense_blocks
    assert all(0 <= stage.dense_blocks <= stage.blocks for stage in stages)
    kinds = [kind for stage in stages for kind in block_kinds(model=model, stage=stage)]
    assert sum(number for _, number in kinds) == model.layers
    if not model.tied_embeddings and cut > 0:
        held = sum(stage_elements(model=model, stage=stage, tp=1) for stage in stages)
        assert held == parameter_count(model)


@pytest.mark.parametrize(
    ("blocks", "wrap_blocks", "units"),
    [(8, 1, (1,) * 8), (8, 3, (3, 3, 2)), (2, 4, (2,)), (0, 2, ())],
)
def test_units_cover_the_blocks(blocks: int, wrap_blocks: int, units: tuple[int, ...]) -> None:
    of = case("llama-3.1-8b", dp_shard=8, wrap_blocks=wrap_blocks)
    found = block_units(of, Stage(blocks=blocks, has_embedding=True, has_head=True))
    assert tuple(unit.blocks for unit in found for _ in range(unit.number)) == units


@pytest.mark.parametrize("wrap_blocks", [1, 4, 61])
def test_a_unit_may_span_blocks_of_several_kinds(wrap_blocks: int) -> None:
    """Three dense blocks, then blocks with experts, which are gathered each by itself."""
    of = case("deepseek-v3", dp_shard=64, ep=8, wrap_blocks=wrap_blocks)
    units = block_units(of, whole_model(of.model))
    assert sum(unit.number for unit in units) == -(-61 // wrap_blocks)
    assert sum(unit.number * unit.expert_blocks for unit in units) == 58
    if wrap_blocks == 4:
        assert [blocks for _, blocks, _ in units[0].mix] == [3, 1]
    held = sum(
        unit.number * (unit.size.elements + unit.expert_blocks * unit.experts.elements)
        for unit in units
    )
    headless = replace(whole_model(of.model), has_embedding=False, has_head=False)
    assert held == stage_elements(model=of.model, stage=headless, tp=1, ep=8)

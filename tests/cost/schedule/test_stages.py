"""Which blocks each pipeline stage holds, by the default rule and those of training softwares."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.model.shards import stage_elements
from fsdpplan.cost.schedule.stages import (
    balanced_stage_blocks,
    even_stage_blocks,
    head_blocks,
    in_flight_blocks,
    layout_rank_stages,
    layout_stage_blocks,
    nanotron_head_blocks,
    pipeline_ranks,
    pipeline_stages,
    threshold_stage_blocks,
    torchtitan_stage_blocks,
)
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout, Schedule
from tests.cost.clusters import golden

LLAMA_8B = load_model("llama-3.1-8b")
HEADS = st.floats(0, 12)


@pytest.mark.parametrize("row", golden("pipeline")["splits"], ids=lambda row: row["claim"])
def test_splits_that_are_written_down(row: dict[str, object]) -> None:
    rules = {
        "even": even_stage_blocks,
        "torchtitan": torchtitan_stage_blocks,
        "threshold": threshold_stage_blocks,
    }
    found = rules[str(row["rule"])](**row["arguments"])  # type: ignore[operator, arg-type]
    assert list(found) == row["blocks"]


@given(st.integers(1, 9), st.integers(1, 6), HEADS)
def test_no_split_has_a_smaller_largest_stage(layers: int, stages: int, head: float) -> None:
    if stages > layers + 2:
        with pytest.raises(SpecError, match="do not fill"):
            balanced_stage_blocks(layers=layers, stages=stages, head_blocks=head)
        return
    found = balanced_stage_blocks(layers=layers, stages=stages, head_blocks=head)
    if stages > layers:
        assert sum(found) == layers
        assert found[-1] == 0
        assert set(found[1:-1]) <= {1}
        return
    cuts = combinations_with_replacement(range(layers + 1), stages - 1)
    splits = [tuple(b - a for a, b in zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]
    best = min(_largest(split, head) for split in splits if min(split) >= 1)
    assert sum(found) == layers
    assert min(found) >= 1
    assert _largest(found, head) == pytest.approx(best)


def _largest(blocks: tuple[int, ...], head: float) -> float:
    return max(*blocks, blocks[-1] + head)


@given(st.integers(2, 120), st.integers(1, 40), st.floats(0.1, 12))
def test_what_may_be_left_out_is_left_out_of_the_first_stages(
    layers: int, stages: int, head: float
) -> None:
    if stages > layers:
        return
    *others, last = balanced_stage_blocks(layers=layers, stages=stages, head_blocks=head)
    assert others == sorted(others)
    if others:
        assert max(others) - min(others) <= 1
        assert last <= max(others)


@given(st.integers(1, 200), st.integers(1, 64), HEADS)
def test_a_threshold_split_holds_every_block(layers: int, stages: int, head: float) -> None:
    blocks = threshold_stage_blocks(layers=layers, stages=stages, head_blocks=head)
    assert len(blocks) == stages
    assert sum(blocks) == layers


def test_rules_refuse_what_their_software_refuses() -> None:
    with pytest.raises(SpecError, match="do not split evenly"):
        even_stage_blocks(layers=70, stages=12)
    with pytest.raises(SpecError, match="whose ends count as"):
        torchtitan_stage_blocks(layers=6, stages=9)


def test_a_large_vocabulary_shortens_the_last_stage() -> None:
    """Llama 3's head is worth 2.4 blocks of the 8B model and 1.2 of the 70B one."""
    assert head_blocks(LLAMA_8B) == pytest.approx(2.409, abs=1e-3)
    assert head_blocks(load_model("llama-3.1-70b")) == pytest.approx(1.228, abs=1e-3)
    assert nanotron_head_blocks(LLAMA_8B) < head_blocks(LLAMA_8B)
    layout = Layout(pp=4, schedule="1f1b", num_microbatches=8)
    assert layout_stage_blocks(model=LLAMA_8B, layout=layout) == (8, 9, 9, 6)


def test_a_layout_says_otherwise() -> None:
    layout = Layout(pp=4, schedule="1f1b", num_microbatches=8, stage_blocks=(10, 11, 11, 0))
    stages = pipeline_stages(model=LLAMA_8B, layout=layout)
    assert [stage.blocks for stage in stages] == [10, 11, 11, 0]
    wrong = replace(layout, stage_blocks=(8, 8, 8, 9))
    with pytest.raises(SpecError, match="add up to 33"):
        layout_stage_blocks(model=LLAMA_8B, layout=wrong)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2), ("dualpipev", 2)],
)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_ranks_hold_the_whole_model_between_them(
    schedule: Schedule, virtual: int, name: str
) -> None:
    model = load_model(name)
    layout = Layout(pp=2, schedule=schedule, virtual_stages=virtual, num_microbatches=8)
    ranks = pipeline_ranks(model=model, layout=layout)
    assert sum(rank.blocks for rank in ranks) == model.layers
    if model.experts:
        assert sum(rank.dense_blocks for rank in ranks) == model.experts.dense_layers
    assert sum(stage_elements(model=model, stage=rank, tp=1) for rank in ranks) == parameter_count(
        model
    )


def test_the_first_rank_of_a_v_has_both_ends_and_the_last_hands_over_to_itself() -> None:
    layout = Layout(pp=4, schedule="zbv", virtual_stages=2, num_microbatches=8)
    first, *_, last = pipeline_ranks(model=LLAMA_8B, layout=layout)
    assert layout_rank_stages(layout) == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert first.has_embedding
    assert first.has_head
    assert [piece.has_head for piece in first.pieces] == [False, True]
    assert (first.inner_boundaries, last.inner_boundaries) == (0, 1)


def test_a_tied_table_is_there_twice_where_its_ends_are_apart() -> None:
    model = replace(LLAMA_8B, tied_embeddings=True)
    table = model.vocab * model.hidden
    for schedule, virtual in (("1f1b", 1), ("zbv", 2)):
        layout = Layout(pp=2, schedule=schedule, virtual_stages=virtual, num_microbatches=8)
        ranks = pipeline_ranks(model=model, layout=layout)
        held = sum(stage_elements(model=model, stage=rank, tp=1) for rank in ranks)
        assert held == parameter_count(model) + table


@given(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv"]), st.integers(1, 6))
def test_a_rank_holds_at_least_one_micro_batch_and_at_most_all(
    schedule: Schedule, rounds: int
) -> None:
    layout = Layout(
        pp=4,
        schedule=schedule,
        virtual_stages=1 if schedule in ("gpipe", "1f1b") else 2,
        num_microbatches=4 * rounds,
    )
    ranks = pipeline_ranks(model=LLAMA_8B, layout=layout)
    for rank, alive in zip(ranks, in_flight_blocks(model=LLAMA_8B, layout=layout), strict=True):
        assert rank.blocks <= alive <= layout.num_microbatches * rank.blocks

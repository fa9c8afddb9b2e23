"""Recomputation of the first blocks of each stage: what is kept, and what is computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.estimate import executed_flops_ratio
from fsdpplan.cost.model.shards import block_cases
from fsdpplan.cost.schedule.stages import layout_stage_blocks, pipeline_ranks, pipeline_stages
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from tests.cost.problems import Case, case, cases


def _fewest(drawn: Case) -> int:
    return max(layout_stage_blocks(model=drawn.model, layout=drawn.layout))


@given(cases())
def test_as_many_blocks_as_the_largest_stage_has_are_all(drawn: Case) -> None:
    assume(drawn.layout.activation_checkpointing != "none")
    every = drawn.with_layout(checkpoint_blocks="all")
    assert drawn.with_layout(checkpoint_blocks=_fewest(drawn)).estimate == every.estimate


@given(cases(), st.data())
def test_more_recomputed_blocks_compute_more_and_keep_less(
    drawn: Case, data: st.DataObject
) -> None:
    """Whole blocks: those keep least. In between lies between nothing and all."""
    most = _fewest(drawn)
    assume(most > 1 and drawn.layout.loss_chunks == 1)
    number = data.draw(st.integers(1, most - 1))
    drawn = drawn.with_layout(activation_checkpointing="full", checkpoint_blocks="all")
    none = drawn.with_layout(activation_checkpointing="none").estimate
    few = drawn.with_layout(checkpoint_blocks=number).estimate
    more = drawn.with_layout(checkpoint_blocks=number + 1).estimate
    memories = [one.memory.peak_allocated_bytes for one in (none, few, more)]
    times = [one.time.total_seconds for one in (none, few, more)]
    executed = [one.hfu_fraction / one.mfu_fraction for one in (none, few, more)]
    assert memories == sorted(memories, reverse=True)
    assert times == pytest.approx(sorted(times), rel=1e-9)
    assert executed == sorted(executed)


def test_the_first_blocks_of_each_stage_recompute() -> None:
    layout = Layout(
        pp=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
        stage_blocks=(3, 2, 1, 2),
        activation_checkpointing="full",
        checkpoint_blocks=2,
    )
    model = replace(load_model("llama-3.1-8b"), layers=8)
    assert [stage.kept_blocks for stage in pipeline_stages(model=model, layout=layout)] == [
        *(1, 0, 0, 0)
    ]
    first, second = pipeline_ranks(model=model, layout=layout)
    assert (first.kept_blocks, second.kept_blocks) == (1, 0)


def test_in_a_mixture_the_dense_blocks_are_the_first_that_recompute() -> None:
    model = load_model("deepseek-v3")
    layout = Layout(activation_checkpointing="full", checkpoint_blocks=5)
    (stage,) = pipeline_stages(model=model, layout=layout)
    assert model.experts is not None
    assert model.experts.dense_layers == 3
    found = [
        (own.model.experts is not None, own.layout.activation_checkpointing, blocks)
        for own, blocks in block_cases(replace(case(dp_shard=8), model=model, layout=layout), stage)
    ]
    assert found == [(False, "full", 3), (True, "full", 2), (True, "none", model.layers - 5)]
    fewer = replace(layout, checkpoint_blocks=2)
    (stage,) = pipeline_stages(model=model, layout=fewer)
    assert stage.kept_dense_blocks == 1


def test_half_of_the_blocks_repeat_half_of_the_work() -> None:
    whole = case("llama-3.1-8b", dp_shard=8, activation_checkpointing="full")
    half = whole.with_layout(checkpoint_blocks=16)
    ratios = [executed_flops_ratio(one) - 1 for one in (whole, half)]
    assert ratios[1] == pytest.approx(ratios[0] / 2)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"checkpoint_blocks": 2}, "does not go with activation_checkpointing none"),
        ({"activation_checkpointing": "full", "checkpoint_blocks": 0}, "at least 1"),
        ({"activation_checkpointing": "full", "checkpoint_blocks": True}, "at least 1"),
        ({"activation_checkpointing": "full", "checkpoint_blocks": "some"}, "must be all"),
    ],
)
def test_a_number_that_means_nothing_is_refused(layout: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Layout(**layout)  # type: ignore[arg-type]


def test_words_say_which_blocks() -> None:
    layout = Layout(activation_checkpointing="full", checkpoint_blocks=4)
    assert replace(layout, checkpoint_blocks="all").recomputation == "full"
    assert layout.recomputation == "full in the first 4 blocks"
    piped = replace(layout, pp=2, schedule="1f1b", checkpoint_blocks=1)
    assert piped.recomputation == "full in the first 1 block of each stage"

"""Uneven splits of a pipeline's blocks: least loads, and what is proposed to be priced."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.cost.read.passes import plain_seconds
from fsdpplan.cost.schedule.stages import (
    layout_rank_stages,
    layout_stage_blocks,
    named_stages,
    pipeline_stages,
)
from fsdpplan.files.catalogue import load_model
from fsdpplan.search.splits import least_load_split, stage_splits
from fsdpplan.spec.layout import SPLIT_BACKWARD_SCHEDULES, Layout
from fsdpplan.spec.model import Model
from tests.cost.problems import Case, case, some_models

COSTS = st.lists(st.floats(0.1, 4), min_size=1, max_size=4)


@given(COSTS, st.data(), st.integers(0, 7))
def test_no_split_has_a_lower_highest_load(
    costs: list[float], data: st.DataObject, blocks: int
) -> None:
    places = len(costs)
    extras = tuple(data.draw(st.floats(0, 5)) for _ in costs)
    least = tuple(data.draw(st.integers(0, 1)) for _ in costs)
    most = tuple(data.draw(st.integers(1, 7)) for _ in costs)
    found = least_load_split(
        blocks=blocks, costs=tuple(costs), extras=extras, least=least, most=most
    )
    ranges = [range(low, high + 1) for low, high in zip(least, most, strict=True)]
    splits = [split for split in product(*ranges) if sum(split) == blocks]
    if not splits:
        assert found is None
        return

    def highest(split: tuple[int, ...]) -> float:
        return max(costs[i] * split[i] + extras[i] for i in range(places))

    assert found in splits
    assert highest(found) == pytest.approx(min(map(highest, splits)))


def splits_of(drawn: Case) -> tuple[tuple[int, ...], ...]:
    """What is proposed."""
    return stage_splits(drawn)


SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}


def piped(schedule: str, model: str | Model = "llama-3.1-8b", **layout: object) -> Case:
    """A pipeline of four ranks under `schedule`."""
    given = {
        "pp": 4,
        "dp_shard": 2,
        "schedule": schedule,
        "virtual_stages": SCHEDULES[schedule],
        "num_microbatches": 8,
        "reshard_after_forward": "never",
        "gradient_sync": "last",
        "compile": schedule not in SPLIT_BACKWARD_SCHEDULES,
        **layout,
    }
    return case(model, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-4b", "llama-3.2-1b", "qwen3-30b-a3b"])
def test_every_proposal_is_legal_and_priced_under_every_schedule(schedule: str, model: str) -> None:
    drawn = piped(schedule, model)
    default = layout_stage_blocks(model=drawn.model, layout=drawn.layout)
    found = splits_of(drawn)
    assert default not in found
    assert len(found) == len(set(found)) <= 3
    for split in found:
        other = drawn.with_layout(stage_blocks=split)
        assert other.problem is None
        assert other.seconds > 0


@pytest.mark.parametrize(
    ("layers", "pp", "virtual_stages", "first", "last"),
    [(14, 4, 4, 0, 0), (15, 4, 4, 1, 0), (16, 4, 4, 1, 1), (126, 16, 8, 0, 0)],
)
def test_with_a_stage_or_two_more_than_blocks_the_ends_are_alone(
    layers: int, pp: int, virtual_stages: int, first: int, last: int
) -> None:
    model = replace(load_model("llama-3.1-405b"), layers=layers)
    drawn = piped(
        "interleaved_1f1b", model, pp=pp, virtual_stages=virtual_stages, num_microbatches=pp
    )
    inner = (1,) * (pp * virtual_stages - 2)
    assert layout_stage_blocks(model=model, layout=drawn.layout) == (first, *inner, last)
    assert drawn.problem is None
    assert drawn.seconds > 0
    fewer = replace(drawn, model=replace(model, layers=pp * virtual_stages - 3))
    assert fewer.problem.reason == "more pipeline stages than blocks"  # type: ignore[attr-defined]


def rank_seconds(drawn: Case) -> float:
    """Those of the busiest rank's stages, for one micro-batch."""
    stages = pipeline_stages(model=drawn.model, layout=drawn.layout)
    times = [sum(plain_seconds(drawn, stage)) for stage in stages]
    return max(sum(times[index] for index in held) for held in layout_rank_stages(drawn.layout))


@given(
    some_models(),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from([2, 3, 4]),
    st.sampled_from(["none", "attention", "full"]),
)
def test_some_proposal_or_the_default_has_the_least_busy_rank(
    model: Model, schedule: str, pp: int, mode: str
) -> None:
    """Moving a block from any stage to any other makes the busiest rank no less busy."""
    assume(pp * SCHEDULES[schedule] <= model.layers)
    drawn = piped(schedule, model, pp=pp, activation_checkpointing=mode)
    default = layout_stage_blocks(model=drawn.model, layout=drawn.layout)
    proposed = {split: drawn.with_layout(stage_blocks=split) for split in splits_of(drawn)}
    proposed[default] = drawn.with_layout(stage_blocks=default)
    best = min(proposed, key=lambda split: rank_seconds(proposed[split]))
    least = rank_seconds(proposed[best])
    for source, target in product(range(len(best)), repeat=2):
        moved = list(best)
        moved[source] -= 1
        moved[target] += 1
        if source == target or moved[source] < int(source < len(best) - 1):
            continue
        other = drawn.with_layout(stage_blocks=tuple(moved))
        assert rank_seconds(other) >= least * (1 - 1e-9)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_blocks_and_a_faster_step() -> None:
    """262,144 tokens: the loss costs as much as blocks that the head's product does not count."""
    drawn = piped("1f1b", "gemma-3-4b", num_microbatches=32)
    default = layout_stage_blocks(model=drawn.model, layout=drawn.layout)
    best = min(
        (drawn.with_layout(stage_blocks=s) for s in splits_of(drawn)), key=lambda c: c.seconds
    )
    assert best.layout.stage_blocks != default
    assert best.seconds < 0.97 * drawn.seconds


def test_where_the_default_does_not_fit_a_split_by_the_room_of_each_rank_does() -> None:
    """The first rank holds sixteen micro-batches, the last one."""
    drawn = piped(
        "1f1b", "llama-3.1-405b", pp=16, dp_shard=8, tp=8, num_microbatches=64, seq_len=4096
    ).with_layout(sequence_parallel=True, loss_parallel=True)
    available = available_bytes(cluster=drawn.cluster, training=drawn.training)

    def peak(one: Case) -> int:
        return max(rank_memory(one).stage_peak_device_bytes)

    assert peak(drawn) > available
    assert (
        min(peak(drawn.with_layout(stage_blocks=split)) for split in splits_of(drawn)) <= available
    )


def test_naming_the_stages_changes_no_price() -> None:
    for schedule in SCHEDULES:
        drawn = piped(schedule)
        named = named_stages(model=drawn.model, layout=drawn.layout)
        assert sum(named.stage_blocks) == drawn.model.layers
        assert replace(named, stage_blocks=()) == drawn.layout
        assert replace(drawn, layout=named).estimate == drawn.estimate


def test_without_a_pipeline_there_is_nothing_to_split() -> None:
    drawn = case(dp_shard=8)
    assert splits_of(drawn) == ()
    assert (
        named_stages(model=load_model("llama-3.1-8b"), layout=Layout(dp_shard=8)).stage_blocks == ()
    )

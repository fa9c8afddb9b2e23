"""Fitting: what is left out by a bound would not have fitted, or is no better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from fsdpplan.cost.step import estimate
from fsdpplan.search.fitting import fewest_blocks, needed_bytes
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import CHECKPOINTING, Question
from fsdpplan.search.room import Room
from fsdpplan.search.space import Space
from fsdpplan.spec.layout import Layout
from tests.cost.problems import Case, cases
from tests.search.questions import WIDE, question


def asked(drawn: Case) -> Question:
    """The question that a case answers."""
    return Question(model=drawn.model, cluster=drawn.cluster, training=drawn.training, pins=Pins())


@settings(max_examples=80, deadline=None)
@given(cases())
def test_the_search_sees_the_memory_that_the_estimate_has(drawn: Case) -> None:
    found = estimate(
        model=drawn.model, cluster=drawn.cluster, training=drawn.training, layout=drawn.layout
    )
    assert needed_bytes(asked(drawn), drawn.layout) == found.memory.peak_device_bytes


@settings(max_examples=80, deadline=None)
@given(cases(data_parallel_only=True))
def test_keeping_parameters_never_needs_less(drawn: Case) -> None:
    if drawn.layout.sharding != "fsdp":
        return
    resharded = replace(drawn.layout, reshard_after_forward="always")
    kept = replace(drawn.layout, reshard_after_forward="never")
    assert needed_bytes(asked(drawn), resharded) <= needed_bytes(asked(drawn), kept)
    if isinstance(drawn.layout.reshard_after_forward, int):
        between = needed_bytes(asked(drawn), drawn.layout)
        assert needed_bytes(asked(drawn), resharded) <= between


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_larger_micro_batch_never_needs_less(drawn: Case) -> None:
    if drawn.layout.num_microbatches == 1 or drawn.layout.pp > 1:
        return
    larger = drawn.with_layout(micro_batch=2 * drawn.layout.micro_batch)
    assert needed_bytes(asked(drawn), drawn.layout) <= needed_bytes(asked(larger), larger.layout)


TIGHT = {
    "8 GPUs of 40 GB": question(WIDE, 8, "dgx-a100-40g-hdr", global_batch=16),
    "16 GPUs": question("llama-3.1-8b", 16, "dgx-a100-40g-hdr", global_batch=64, tp=1, pp=1, cp=1),
    "replicas": question(
        "llama-3.1-8b", 32, "dgx-a100-40g-hdr", global_batch=64, dp_replicate=2, cp=1
    ),
}


@pytest.mark.parametrize("name", TIGHT)
def test_all_that_is_found_fits_with_the_least_recomputation_that_fits(name: str) -> None:
    wanted = TIGHT[name]
    space = Space(wanted.asked)
    found = [layout for d in space.spreads() for layout in space.layouts(d)]
    assert found
    for layout in found:
        assert space.fits(layout)
        if layout.async_tp:  # it needs a little less, and takes what the plain one recomputes
            continue
        at = CHECKPOINTING.index(layout.activation_checkpointing)
        for less in CHECKPOINTING[:at]:
            assert not space.fits(replace(layout, activation_checkpointing=less))


@settings(max_examples=80, deadline=None)
@given(cases())
def test_the_least_bytes_are_a_lower_bound(drawn: Case) -> None:
    """What is ruled out by them, or by the blocks that they say must be recomputed, cannot fit."""
    room = Room(asked(drawn))
    if drawn.layout.stage_blocks or drawn.layout.loss_chunks > 1:
        return
    whole = replace(drawn.layout, checkpoint_blocks="all")
    assert room.least_bytes(whole) <= needed_bytes(asked(drawn), whole)
    for known in ("degrees", "schedule", "usual", "settled"):
        needed = room.recomputed(whole, known=known)
        for mode in CHECKPOINTING:
            layout = replace(whole, activation_checkpointing=mode)
            case = replace(drawn, layout=layout)
            if case.problem is None and mode not in needed and "none" not in needed:
                available = asked(drawn).available_bytes
                assert needed_bytes(asked(drawn), layout) > available


def test_the_fewest_recomputed_blocks_fit_and_one_less_does_not() -> None:
    wanted = question("llama-3.1-8b", 8, global_batch=64, pp=1, tp=1)
    layout = Layout(dp_shard=8, micro_batch=4, num_microbatches=2, activation_checkpointing="full")
    number = fewest_blocks(wanted.asked, layout)
    available = wanted.asked.available_bytes
    some = replace(layout, checkpoint_blocks=number)
    assert needed_bytes(wanted.asked, some) <= available
    fewer = replace(layout, checkpoint_blocks=number - 1)
    assert needed_bytes(wanted.asked, fewer) > available

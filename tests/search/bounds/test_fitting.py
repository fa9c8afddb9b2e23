"""Fitting: what is left out by a bound would not have fitted, or is no better."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random

import pytest
from hypothesis import given

from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.schedule.actions import ACTIVE_STAGES
from fsdpplan.search.bounds.fitting import fewest_blocks, needed_bytes
from fsdpplan.search.bounds.room import Known, Room
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import CHECKPOINTING, Question
from fsdpplan.search.space import Space
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from tests.cost.problems import Case, cases
from tests.search.questions import WIDE, policies, question


def asked(drawn: Case) -> Question:
    """The question that a case answers."""
    return Question(model=drawn.model, cluster=drawn.cluster, training=drawn.training, pins=Pins())


@given(cases())
def test_the_search_sees_the_memory_that_the_estimate_has(drawn: Case) -> None:
    found = estimate(drawn)
    assert needed_bytes(asked(drawn), drawn.layout) == found.memory.peak_device_bytes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactly(Question):
    """A question on devices that have so much, and no more."""

    bytes_there: int

    @property
    def available_bytes(self) -> int:
        return self.bytes_there


@given(cases())
def test_the_least_bytes_are_a_lower_bound(drawn: Case) -> None:
    """With just what it needs nothing is ruled out, by them or by the blocks that they say must be
    recomputed."""
    if drawn.layout.stage_blocks or drawn.layout.loss_chunks > 1:
        return
    whole = replace(drawn.layout, checkpoint_blocks="all")
    assert Room(asked(drawn)).least_bytes(whole) <= needed_bytes(asked(drawn), whole)
    for mode in CHECKPOINTING:
        layout = replace(whole, activation_checkpointing=mode)
        if replace(drawn, layout=layout).problem is None:
            assert_not_ruled_out(drawn.model, asked(drawn), layout)


def assert_not_ruled_out(model: Model, wanted: Question, layout: Layout) -> None:
    """Whatever is known of `layout`, which all of a device's memory is taken to be for."""
    needed = needed_bytes(wanted, layout)
    room = Room(
        Exactly(**{f.name: getattr(wanted, f.name) for f in fields(wanted)}, bytes_there=needed)
    )
    some = layout.checkpoint_blocks
    is_usual = layout.schedule in ("none", "1f1b", "interleaved_1f1b")
    levels: list[Known] = ["degrees", "settled"]
    if some == "all":
        levels += ["alike", *(("schedule", "usual") if is_usual else ())]
    for known in levels:
        if known in ("schedule", "usual") and layout.virtual_stages > ACTIVE_STAGES:
            continue
        blocks = room.recomputed(layout, known=known)
        most = model.layers if some == "all" else some * layout.virtual_stages
        is_possible = blocks.get(layout.activation_checkpointing, most + 1) <= most
        assert "none" in blocks or is_possible, known


ROOMY = {
    "dense": (
        question("llama-3.1-8b", 16),
        ("fsdp2", "fsdp1", "autocast", "llama3", "megatron", "automodel"),
    ),
    "mixture": (question("mixtral-8x7b", 32), ("fsdp2", "megatron")),
    "behind dense blocks": (
        question("deepseek-v3", 64, global_batch=240),
        ("fsdp2", "megatron", "hai_llm"),
    ),
    "windows": (question("gemma-3-4b", 16), ("fsdp2",)),
}
"""Questions, and the softwares that can train them."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "runtime"), [(name, one) for name, (_, those) in ROOMY.items() for one in those]
)
def test_a_device_that_has_just_enough_is_never_ruled_out(name: str, runtime: str) -> None:
    """Of layouts as the search makes them, and as it changes them."""
    wanted, _ = ROOMY[name]
    wanted = replace(wanted, training=replace(wanted.training, runtime=runtime))  # type: ignore[arg-type]
    space, draw = Space(wanted.asked), Random(0)
    leaves = list(policies(wanted))
    varied = (_varied(draw, wanted.model, draw.choice(leaves)) for _ in range(500))
    layouts = [one for one in varied if one is not None and space.is_legal(one)]
    assert len(layouts) > 20
    for layout in layouts:
        assert_not_ruled_out(wanted.model, space.asked, layout)


def _varied(draw: Random, model: Model, layout: Layout) -> Layout | None:
    """`layout` with rarer settings; None where they do not go together."""
    blocks = model.layers // (layout.pp * layout.virtual_stages)
    changes: dict[str, object] = {
        "activation_checkpointing": draw.choice(CHECKPOINTING),
        "wrap_blocks": draw.choice((1, 1, 2, 5)),
        "compile": draw.random() < 0.7,
        "async_tp": layout.tp > 1 and draw.random() < 0.3,
    }
    if layout.pp > 1 and draw.random() < 0.3:
        stages = draw.choice((2, 4))
        schedule = draw.choice(("looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble"))
        changes |= {"schedule": schedule, "virtual_stages": stages}
        blocks = model.layers // (layout.pp * stages)
    if draw.random() < 0.3 and changes["activation_checkpointing"] != "none" and blocks:
        changes["checkpoint_blocks"] = draw.randint(1, blocks)
    return replace(layout, **changes) if blocks else None  # type: ignore[arg-type]


def test_the_fewest_recomputed_blocks_fit_and_one_less_does_not() -> None:
    wanted = question("llama-3.1-8b", 8, global_batch=64, pp=1, tp=1)
    layout = Layout(dp_shard=8, micro_batch=4, num_microbatches=2, activation_checkpointing="full")
    number = fewest_blocks(wanted.asked, layout)
    available = wanted.asked.available_bytes
    some = replace(layout, checkpoint_blocks=number)
    assert needed_bytes(wanted.asked, some) <= available
    fewer = replace(layout, checkpoint_blocks=number - 1)
    assert needed_bytes(wanted.asked, fewer) > available

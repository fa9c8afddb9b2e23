"""Floors: no step is below the bounds by which the search leaves layouts out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.read.passes import plain_seconds
from fsdpplan.cost.schedule.stages import pipeline_stages
from fsdpplan.search.enumerate import USUAL_SCHEDULES, Degrees, divisors
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import CHECKPOINTING, Question
from fsdpplan.search.space import Space
from fsdpplan.search.variants import buckets
from fsdpplan.spec.layout import ActivationCheckpointing
from tests.cost.problems import SMALL, Case, case, cases
from tests.cost.test_least import MIXTURE, MORE, ROUNDING
from tests.cost.wide import wide_cases


def space(drawn: Case) -> Space:
    """The space of the question that a case answers."""
    return Space(
        Question(model=drawn.model, cluster=drawn.cluster, training=drawn.training, pins=Pins())
    )


def degrees(drawn: Case) -> Degrees:
    """How a case spreads its ranks."""
    layout = drawn.layout
    return Degrees(
        pp=layout.pp,
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        sharding=layout.sharding,
        offload=layout.offload,
    )


def floors(drawn: Case) -> dict[str, float]:
    """All floors of a case by name; those of layouts with its own recomputation."""
    found, layout = space(drawn).floors, drawn.layout
    modes = (layout.activation_checkpointing,)
    named = {
        "at first sight": found.at_first_sight(degrees(drawn)),
        "at": found.at(layout),
        "of changes": found.of_changes(layout),
    }
    is_even = layout.checkpoint_blocks == "all" and not layout.stage_blocks
    is_tried = layout.activation_checkpointing in CHECKPOINTING
    if layout.schedule in USUAL_SCHEDULES and is_even and is_tried:
        named["at usual"] = found.at_usual(layout)
    if layout.compile:  # the search takes what is compiled, if anything can be
        named |= {
            "usual": found.of_usual(layout, modes),
            "settled": found.of_settled(layout),
            "played": found.played(layout),
            "sharp": space(drawn).floor(layout),
        }
    return named


@given(cases(), st.sampled_from([2, 4, 32]))
def test_changes_take_no_less_into_however_many_pieces_the_loss_is_cut(
    drawn: Case, pieces: int
) -> None:
    """What was cut to fit is whole again with some blocks recomputed: one floor for all."""
    found = space(drawn).floors
    cut, whole = (replace(drawn.layout, loss_chunks=number) for number in (pieces, 1))
    assert found.of_changes(cut) == found.of_changes(whole)


@given(cases(), st.data())
def test_what_changes_bring_is_foreseen(drawn: Case, data: st.DataObject) -> None:
    """Units of any size, a loss in any number of pieces, a reshard to any ranks, at once."""
    layout = drawn.layout
    if layout.sharding != "fsdp" or layout.pp > 1 or not layout.compile:
        return
    asked = space(drawn)
    sizes = [one.wrap_blocks for one in buckets(asked.asked, layout)]
    is_cut = layout.reshard_after_forward != "never" and layout.ep == layout.tp == 1
    ranks = divisors(layout.shard_ranks)[1:-1] if is_cut else ()
    other = replace(
        layout,
        wrap_blocks=data.draw(st.sampled_from([layout.wrap_blocks, *sizes])),
        loss_chunks=data.draw(st.sampled_from([1, 2, 8, layout.loss_chunks])),
        reshard_after_forward=data.draw(
            st.sampled_from([layout.reshard_after_forward, *ranks]),
        ),
        activation_checkpointing=data.draw(st.sampled_from(CHECKPOINTING)),
        checkpoint_blocks="all",
    )
    changed = replace(drawn, layout=other)
    if changed.problem is None and asked.fits(other):
        assert asked.floors.may_change_below(layout, changed.seconds * ROUNDING)


def _holds(drawn: Case) -> None:
    if drawn.problem is not None or not space(drawn).fits(drawn.layout):
        return
    least = floors(drawn)
    seconds = drawn.seconds
    for name, floor in least.items():
        assert floor <= seconds * ROUNDING, name


@given(cases())
def test_no_step_is_below_a_floor(drawn: Case) -> None:
    _holds(drawn)


@given(wide_cases())
def test_nor_of_any_software_with_any_kind_of_model(drawn: Case) -> None:
    _holds(drawn)


@pytest.mark.parametrize("options", MORE, ids=str)
@settings(max_examples=4, deadline=None)
@given(seq_len=st.sampled_from([512, 4096]), micro_batch=st.sampled_from([1, 4]))
def test_nor_with_any_kind_of_parallelism(
    options: dict[str, object], seq_len: int, micro_batch: int
) -> None:
    asked = case(seq_len=seq_len, micro_batch=micro_batch, **options)  # type: ignore[arg-type]
    _holds(asked)


@given(cases())
def test_a_stage_is_its_ends_and_its_blocks(drawn: Case) -> None:
    """What is added up from a few blocks is what the cost model says of the stage, or less where a
    collective could be hidden better or the loss cut."""
    if drawn.layout.checkpoint_blocks != "all":
        return
    works, mode = space(drawn).floors.works, drawn.layout.activation_checkpointing
    for stage in pipeline_stages(model=drawn.model, layout=drawn.layout):
        least = works.stage(drawn.layout, mode, stage)
        large = replace(drawn.layout, wrap_blocks=drawn.model.layers)
        whole = plain_seconds(replace(drawn, layout=large), stage)
        for one, other in zip(least[:2], whole, strict=True):
            assert one <= other * ROUNDING
            if drawn.layout.tp == 1 and not stage.has_head:
                assert one == pytest.approx(other, rel=1e-9)


def test_a_pipeline_that_is_played_is_nearly_as_long_as_its_step() -> None:
    asked = case(
        replace(MIXTURE, layers=16),
        dp_shard=2,
        pp=4,
        num_microbatches=16,
        reshard_after_forward="never",
        gradient_sync="last",
        schedule="interleaved_1f1b",
        virtual_stages=2,
        micro_batch=2,
    )
    found = floors(asked)
    assert found["at first sight"] <= found["usual"] <= found["played"] * ROUNDING
    # 0.7998: FSDP's own operators are left out, a fiftieth of blocks as small as these
    assert 0.79 * asked.seconds < found["played"] <= asked.seconds


@given(cases() | wide_cases(), st.sampled_from([1, 2, 3, 5, 1000]), st.sampled_from(CHECKPOINTING))
def test_a_sequence_takes_no_longer_in_a_larger_micro_batch(
    drawn: Case, times: int, mode: ActivationCheckpointing
) -> None:
    """So the whole global batch on a rank bounds all of them, whatever they recompute."""
    works, layout = space(drawn).floors.rows, drawn.layout
    larger = replace(layout, micro_batch=layout.micro_batch + times)
    for one, other in (
        (works.block(layout, mode), works.block(larger, mode)),
        (
            works.ends(layout, embedding=True, head=True),
            works.ends(larger, embedding=True, head=True),
        ),
    ):
        each = sum(one) / layout.micro_batch
        assert sum(other) / larger.micro_batch <= each * ROUNDING


def test_fewer_shards_never_make_the_first_sight_less_true() -> None:
    """One floor serves all ways to split data parallelism: it is that of the most shards."""
    for dp_replicate in (1, 2, 4, 8):
        asked = case(
            SMALL,
            dp_replicate=dp_replicate,
            dp_shard=8 // dp_replicate,
            sharding="fsdp" if dp_replicate < 8 else "ddp",
        )
        first = space(asked).floors.at_first_sight(degrees(asked))
        assert first <= asked.seconds

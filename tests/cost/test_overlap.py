"""Overlap: what a simulated step of FSDP2's streams leaves exposed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.overlap import (
    MicroBatch,
    Timeline,
    UnitSeconds,
    ddp_exposed_seconds,
    finish,
    fsdp_timeline,
    run_micro_batch,
)

SECONDS = st.floats(0, 1)


def unit(**seconds: float) -> UnitSeconds:
    """A unit that takes nothing but what is given."""
    names = UnitSeconds.__dataclass_fields__
    return UnitSeconds(**{**dict.fromkeys(names, 0.0), **seconds})


@st.composite
def units(draw: st.DrawFn) -> UnitSeconds:
    """Any unit."""
    return UnitSeconds(**{name: draw(SECONDS) for name in UnitSeconds.__dataclass_fields__})


@st.composite
def batches(draw: st.DrawFn) -> MicroBatch:
    """Any micro-batch; the root is not gathered again."""
    return MicroBatch(
        units=draw(st.integers(1, 5)),
        unit=draw(units()),
        root=replace(draw(units()), regather=0.0),
        links_shared=draw(st.booleans()),
    )


def step(batch: MicroBatch, num_microbatches: int = 1) -> Timeline:
    """A step of equal micro-batches."""
    return fsdp_timeline(early=batch, last=batch, num_microbatches=num_microbatches)


def busy(batch: MicroBatch) -> float:
    """What the compute stream does in one micro-batch."""
    one = batch.unit
    copies = one.copy_out * (2 if one.regather else 1) + (one.copy_in if one.reduce_scatter else 0)
    root = batch.root
    root_copies = root.copy_out + (root.copy_in if root.reduce_scatter else 0)
    return (
        batch.units * (one.forward + one.backward + copies)
        + root.forward
        + root.backward
        + root_copies
    )


@given(batches(), st.integers(1, 6))
def test_time_is_work_plus_waiting(batch: MicroBatch, num_microbatches: int) -> None:
    timeline = step(batch, num_microbatches)
    work = num_microbatches * busy(batch)
    assert timeline.compute == pytest.approx(work + timeline.exposed)
    assert timeline.exposed >= 0


@given(batches())
def test_waiting_is_at_most_what_the_collectives_take(batch: MicroBatch) -> None:
    one, root = batch.unit, batch.root
    reductions = one.reduce_scatter + (one.all_reduce if one.reduce_scatter else 0)
    root_reductions = root.reduce_scatter + (root.all_reduce if root.reduce_scatter else 0)
    total = batch.units * (one.gather + one.regather + reductions) + root.gather + root_reductions
    assert step(batch).exposed <= total + 1e-9


@given(batches())
def test_free_collectives_expose_nothing(batch: MicroBatch) -> None:
    free = {"gather": 0.0, "regather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    silent = replace(batch, unit=replace(batch.unit, **free), root=replace(batch.root, **free))
    assert step(silent).exposed == 0


@given(batches(), st.sampled_from(sorted(UnitSeconds.__dataclass_fields__)), SECONDS)
def test_no_part_taking_longer_makes_the_step_shorter(
    batch: MicroBatch, name: str, more: float
) -> None:
    if getattr(batch.unit, name) == 0:
        return  # a zero switches a collective off: another step, not a longer one
    slower = replace(batch, unit=replace(batch.unit, **{name: getattr(batch.unit, name) + more}))
    assert step(slower).compute >= step(batch).compute - 1e-9


@given(batches())
def test_repeating_the_second_micro_batch_is_simulating_it(batch: MicroBatch) -> None:
    timeline = Timeline()
    for _ in range(8):
        timeline = run_micro_batch(batch, timeline)
    # exact once the queues have settled, which takes the first two
    assert step(batch, 8).compute == pytest.approx(finish(timeline).compute, rel=0.02)


def test_a_gather_shorter_than_a_block_hides_but_for_the_first() -> None:
    batch = MicroBatch(
        units=4,
        unit=unit(forward=1.0, backward=2.0, gather=0.5, regather=0.5),
        root=unit(forward=1.0, backward=2.0, gather=0.25),
        links_shared=False,
    )
    timeline = step(batch)
    assert timeline.gather_exposed == 0.25 + 0.5  # the root's and the first block's
    assert timeline.compute == 4 * 3.0 + 3.0 + 0.75


def test_the_last_reduce_scatter_is_exposed() -> None:
    batch = MicroBatch(
        units=4,
        unit=unit(forward=1.0, backward=2.0, reduce_scatter=1.0),
        root=unit(reduce_scatter=0.5),
        links_shared=False,
    )
    assert step(batch).reduce_scatter_exposed == 1.5  # the first block's, then the root's


def test_gathers_queue_behind_reduce_scatters_of_their_communicator() -> None:
    inside = unit(forward=1.0, backward=2.0, gather=0.1, regather=1.0, reduce_scatter=1.5)
    batch = MicroBatch(units=6, unit=inside, root=unit(forward=1.0), links_shared=False)
    assert step(batch).exposed > 6 * 0.4  # 1.0 + 1.5 do not fit beside 2.0


def test_shared_links_make_all_reduces_stand_in_the_way() -> None:
    inside = unit(forward=1.0, backward=2.0, regather=0.5, reduce_scatter=0.5, all_reduce=1.5)
    apart = MicroBatch(units=6, unit=inside, root=unit(forward=1.0), links_shared=False)
    assert step(replace(apart, links_shared=True)).compute > step(apart).compute


def test_ddp_exposes_the_last_bucket_and_what_queued_before_it() -> None:
    hidden = ddp_exposed_seconds(
        bucket_seconds=(0.1, 0.1, 0.1), bucket_bytes=(1, 1, 1), backward_seconds=3.0
    )
    assert hidden == pytest.approx(0.1)
    queued = ddp_exposed_seconds(
        bucket_seconds=(2.0, 2.0, 2.0), bucket_bytes=(1, 1, 1), backward_seconds=3.0
    )
    assert queued == pytest.approx(1.0 + 6.0 - 3.0)


@given(st.lists(st.tuples(SECONDS, st.integers(1, 100)), min_size=1, max_size=8), SECONDS)
def test_ddp_exposes_at_least_its_last_bucket(
    buckets: list[tuple[float, int]], backward: float
) -> None:
    seconds, sizes = zip(*buckets, strict=True)
    exposed = ddp_exposed_seconds(
        bucket_seconds=seconds, bucket_bytes=sizes, backward_seconds=backward
    )
    assert seconds[-1] - 1e-9 <= exposed <= sum(seconds) + 1e-9

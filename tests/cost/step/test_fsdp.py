"""FSDP's program: what a played step of FSDP2's streams leaves exposed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.play.clocks import Played, played
from fsdpplan.cost.step.fsdp import MicroBatch, UnitSeconds, fsdp_step

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
        runs=((draw(units()), draw(st.integers(1, 5))),),
        root=replace(draw(units()), regather=0.0),
        links_shared=draw(st.booleans()),
        is_flat=draw(st.booleans()),
    )


def only_unit(batch: MicroBatch) -> tuple[UnitSeconds, int]:
    """The unit of a batch whose units are all alike, and how many there are."""
    ((one, number),) = batch.runs
    return one, number


def with_unit(batch: MicroBatch, one: UnitSeconds) -> MicroBatch:
    """The same with another unit."""
    return replace(batch, runs=((one, only_unit(batch)[1]),))


def step(batch: MicroBatch, num_microbatches: int = 1) -> Played:
    """A step of equal micro-batches."""
    return played(fsdp_step(early=batch, last=batch, num_microbatches=num_microbatches))


def busy(batch: MicroBatch) -> float:
    """What the compute stream does in one micro-batch."""
    one, number = only_unit(batch)
    adding = sum(
        n * each.adding for each, n in ((one, number), (batch.root, 1)) if each.reduce_scatter
    )
    copies = one.copy_out * (2 if one.regather else 1) + (one.copy_in if one.reduce_scatter else 0)
    root = batch.root
    root_copies = root.copy_out + (root.copy_in if root.reduce_scatter else 0)
    return (
        number * (one.forward + one.backward + copies)
        + (root.forward + root.backward + root_copies)
        + adding
    )


@given(batches(), st.integers(1, 6))
def test_time_is_work_plus_waiting(batch: MicroBatch, num_microbatches: int) -> None:
    timeline = step(batch, num_microbatches)
    work = num_microbatches * busy(batch)
    assert timeline.seconds == pytest.approx(work + timeline.exposed)
    assert timeline.exposed >= 0


@given(batches())
def test_waiting_is_at_most_what_the_collectives_take(batch: MicroBatch) -> None:
    (one, number), root = only_unit(batch), batch.root
    reductions = one.reduce_scatter + (one.all_reduce if one.reduce_scatter else 0)
    root_reductions = root.reduce_scatter + (root.all_reduce if root.reduce_scatter else 0)
    total = number * (one.gather + one.regather + reductions) + root.gather + root_reductions
    # a shard comes from the host before each gather, a gradient goes there behind its reduction
    total += number * (2 * one.upload + one.download + one.adding)
    total += root.upload + root.download + root.adding
    assert step(batch).exposed <= total + 1e-9


@given(batches())
def test_free_collectives_expose_nothing(batch: MicroBatch) -> None:
    collectives = ("gather", "regather", "reduce_scatter", "all_reduce")
    free = dict.fromkeys((*collectives, "upload", "download", "adding"), 0.0)
    one, _ = only_unit(batch)
    silent = replace(with_unit(batch, replace(one, **free)), root=replace(batch.root, **free))
    assert step(silent).exposed == 0


@given(batches(), st.sampled_from(sorted(UnitSeconds.__dataclass_fields__)), SECONDS)
def test_no_part_taking_longer_makes_the_step_shorter(
    batch: MicroBatch, name: str, more: float
) -> None:
    one, _ = only_unit(batch)
    if getattr(one, name) == 0:
        return  # a zero switches a collective off: another step, not a longer one
    slower = with_unit(batch, replace(one, **{name: getattr(one, name) + more}))
    assert step(slower).seconds >= step(batch).seconds - 1e-9


def test_a_gather_shorter_than_a_block_hides_but_for_the_first() -> None:
    batch = MicroBatch(
        runs=((unit(forward=1.0, backward=2.0, gather=0.5, regather=0.5), 4),),
        root=unit(forward=1.0, backward=2.0, gather=0.25),
        links_shared=False,
    )
    timeline = step(batch)
    assert timeline.waited["all_gather"] == 0.25 + 0.5  # the root's and the first block's
    assert timeline.seconds == 4 * 3.0 + 3.0 + 0.75


def test_the_last_reduce_scatter_is_exposed() -> None:
    batch = MicroBatch(
        runs=((unit(forward=1.0, backward=2.0, reduce_scatter=1.0), 4),),
        root=unit(reduce_scatter=0.5),
        links_shared=False,
    )
    assert step(batch).waited["reduce_scatter"] == 1.5  # the first block's, then the root's


def test_gathers_queue_behind_reduce_scatters_of_their_communicator() -> None:
    inside = unit(forward=1.0, backward=2.0, gather=0.1, regather=1.0, reduce_scatter=1.5)
    batch = MicroBatch(runs=((inside, 6),), root=unit(forward=1.0), links_shared=False)
    assert step(batch).exposed > 6 * 0.4  # 1.0 + 1.5 do not fit beside 2.0


def test_shared_links_make_all_reduces_stand_in_the_way() -> None:
    inside = unit(forward=1.0, backward=2.0, regather=0.5, reduce_scatter=0.5, all_reduce=1.5)
    apart = MicroBatch(runs=((inside, 6),), root=unit(forward=1.0), links_shared=False)
    assert step(replace(apart, links_shared=True)).seconds > step(apart).seconds


def test_a_run_of_many_units_is_as_good_as_many_runs() -> None:
    inside = unit(forward=1.0, backward=2.0, gather=0.5, regather=0.7, reduce_scatter=0.9)
    root = unit(forward=1.0, backward=2.0, gather=0.25)
    one_run = MicroBatch(runs=((inside, 4),), root=root, links_shared=False)
    runs = replace(one_run, runs=((inside, 1), (inside, 3)))
    assert step(one_run) == step(runs)


def test_a_large_unit_is_waited_for_where_it_stands() -> None:
    small = unit(forward=1.0, backward=2.0, gather=0.5)
    large = unit(forward=1.0, backward=2.0, gather=5.0)
    batch = MicroBatch(runs=((small, 2), (large, 1), (small, 1)), root=unit(), links_shared=False)
    # from 1.0, when the second unit is gathered, to 6.0; the second unit computes until 2.5
    assert step(batch).waited["all_gather"] == pytest.approx(0.5 + 3.5)


def test_a_flat_parameter_is_freed_later_and_holds_fewer_gathers() -> None:
    inside = unit(forward=1.0, backward=2.0, gather=1.5)
    fsdp2 = MicroBatch(
        runs=((unit(forward=4.0, backward=2.0, gather=0.5), 1), (inside, 2)),
        root=unit(),
        links_shared=False,
    )
    assert (
        step(replace(fsdp2, is_flat=True)).waited["all_gather"] > step(fsdp2).waited["all_gather"]
    )


def test_fsdp1_does_not_wait_for_the_reduction_of_the_unit_before() -> None:
    inside = unit(forward=1.0, backward=1.0, reduce_scatter=2.0)
    fsdp2 = MicroBatch(runs=((inside, 4),), root=unit(), links_shared=False)
    flat = step(replace(fsdp2, is_flat=True))
    assert flat.seconds == step(fsdp2).seconds == pytest.approx(4.0 + 1.0 + 8.0)


def test_a_shard_comes_from_the_host_while_the_unit_before_computes() -> None:
    def timeline(upload: float) -> Played:
        inside = unit(forward=1.0, backward=2.0, gather=0.5, regather=0.5, upload=upload)
        return step(MicroBatch(runs=((inside, 4),), root=unit(backward=4.0), links_shared=False))

    hidden, seen = timeline(0.75), timeline(1.75)
    assert hidden.exposed == 0.75 + 0.5  # before the first gather
    assert seen.exposed > 4 * 0.75  # copies queue behind one another, and forward is shorter


def test_a_copy_to_the_host_holds_up_the_next_reduction_and_the_optimizer_alone() -> None:
    def timeline(download: float) -> Played:
        inside = unit(forward=1.0, backward=2.0, reduce_scatter=0.5, download=download)
        return step(MicroBatch(runs=((inside, 4),), root=unit(), links_shared=False))

    assert timeline(1.0).seconds == 4 * 3.0 + 0.5 + 1.0
    assert timeline(2.0).seconds > 4 * 3.0 + 0.5 + 2.0


def test_the_device_waits_while_the_host_adds() -> None:
    inside = unit(forward=1.0, backward=2.0, reduce_scatter=0.5, adding=4.0)
    timeline = step(MicroBatch(runs=((inside, 4),), root=unit(), links_shared=False))
    assert timeline.waited["host"] == 4 * 0.5
    assert timeline.seconds == 4 * (3.0 + 0.5 + 4.0)


def test_the_ends_are_the_first_and_the_last_unit() -> None:
    """The embedding's gather and reduction are exposed, the head's are hidden by blocks."""
    inside = unit(forward=4.0, backward=8.0, gather=1.0, regather=1.0, reduce_scatter=1.0)
    end = unit(forward=2.0, backward=2.0, gather=1.0, reduce_scatter=1.0)
    apart = MicroBatch(runs=((inside, 4),), root=unit(), tables=end, head=end, links_shared=False)
    both = replace(end, forward=4.0, backward=4.0, gather=2.0, reduce_scatter=2.0)
    rooted = MicroBatch(runs=((inside, 4),), root=both, links_shared=False)
    assert step(apart).exposed == 2.0  # the first block's gather runs beside the embedding
    assert step(rooted).exposed == (2.0 + 1.0) + (1.0 + 2.0)
    assert step(apart).seconds == step(rooted).seconds - 4.0

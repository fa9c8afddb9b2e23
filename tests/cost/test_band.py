"""The band: errors by kind of part, carried into the step and into differences."""

from __future__ import annotations

from dataclasses import fields, replace
from math import exp, hypot, isclose, log

from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import (
    MOST_INDISTINGUISHABLE_FRACTION,
    NORMAL_80,
    difference_fraction,
    difference_log_error,
    log_error,
    step_interval,
    step_shares,
    tie_fraction,
    widened,
)
from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.model.shape import infer_model
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import load_device
from fsdpplan.spec.cluster import StepError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, TimeBreakdown
from fsdpplan.spec.training import Training

NOTHING = StepError(**dict.fromkeys([field.name for field in fields(StepError)], 0.0))


def times() -> st.SearchStrategy[TimeBreakdown]:
    seconds = st.floats(0.001, 1e3)
    share = st.floats(0, 0.3)
    return st.builds(
        lambda compute, exposed, bubble, optimizer, shares, inside: TimeBreakdown(
            compute_seconds=compute,
            exposed_communication_seconds=exposed,
            bubble_seconds=bubble,
            optimizer_seconds=optimizer,
            matmul_seconds=shares[0] * compute,
            attention_seconds=shares[1] * compute,
            launch_seconds=shares[2] * compute,
            exposed_inside_seconds=inside * exposed,
            exposed_across_seconds=(1 - inside) * exposed,
        ),
        seconds,
        seconds,
        seconds,
        seconds,
        st.tuples(share, share, share),
        st.floats(0, 1),
    )


def errors() -> st.SearchStrategy[StepError]:
    return st.builds(StepError, **{field.name: st.floats(0, 0.5) for field in fields(StepError)})


@given(times())
def test_shares_of_the_parts_add_up_to_the_step(time: TimeBreakdown) -> None:
    assert isclose(sum(step_shares(time).values()), 1.0)


@given(times(), errors())
def test_the_band_holds_the_expected_value(time: TimeBreakdown, error: StepError) -> None:
    interval = step_interval(time, error)
    assert interval.lower <= interval.expected <= interval.upper
    assert isclose(interval.expected, time.total_seconds)


@given(times(), errors())
def test_a_step_is_known_no_better_than_its_base_and_no_worse_than_all_errors_together(
    time: TimeBreakdown, error: StepError
) -> None:
    kinds = [getattr(error, f.name) for f in fields(StepError) if f.name != "layout_fraction"]
    least = hypot(error.base_fraction, error.stack_fraction)
    assert least <= log_error(time, error) * (1 + 1e-9)
    assert log_error(time, error) <= sum(kinds) + 1e-9


def test_the_error_of_one_part_counts_by_its_share() -> None:
    time = TimeBreakdown(
        compute_seconds=3.0,
        exposed_communication_seconds=1.0,
        bubble_seconds=0.0,
        optimizer_seconds=0.0,
        exposed_across_seconds=1.0,
    )
    error = replace(NOTHING, across_fraction=0.4)
    assert isclose(log_error(time, error), 0.1)
    assert isclose(log(step_interval(time, error).upper / 4.0), NORMAL_80 * 0.1)


def test_a_device_known_by_its_datasheet_alone_has_the_wider_band() -> None:
    time = TimeBreakdown(
        compute_seconds=8.0,
        exposed_communication_seconds=1.0,
        bubble_seconds=1.0,
        optimizer_seconds=0.1,
        matmul_seconds=5.0,
        attention_seconds=1.0,
        exposed_inside_seconds=1.0,
    )
    fitted = load_device("h100-sxm-80g").device
    relative = load_device("h200-sxm-141g").device
    assert (fitted.evidence, relative.evidence) == ("fitted", "datasheet")
    assert log_error(time, fitted.error) < log_error(time, relative.error)


def test_what_two_layouts_share_cancels() -> None:
    cluster = load_cluster("dgx-h100", gpus=16).cluster
    model, training = infer_model(8_000_000_000), Training(seq_len=4096, global_batch=64)
    layouts = (
        Layout(dp_shard=16, num_microbatches=4),
        Layout(dp_replicate=2, dp_shard=8, num_microbatches=4),
        Layout(dp_shard=8, tp=2, sequence_parallel=True, num_microbatches=8),
    )
    flat, hybrid, split = (
        estimate(Case(model=model, cluster=cluster, training=training, layout=layout))
        for layout in layouts
    )
    own = exp(NORMAL_80 * cluster.device.error.layout_fraction) - 1
    alike = difference_fraction(flat, flat, cluster=cluster)
    assert isclose(alike, own)
    whole = exp(NORMAL_80 * log_error(flat.time, cluster.device.error)) - 1
    for other in (hybrid, split):  # and the spread between stacks is the same for both
        assert alike <= difference_fraction(flat, other, cluster=cluster) < 2 * whole


@given(st.floats(0, 1))
def test_a_large_error_makes_no_more_ties(error_fraction: float) -> None:
    tied = tie_fraction(error_fraction)
    assert tied <= error_fraction
    assert tied <= MOST_INDISTINGUISHABLE_FRACTION
    assert tied in (error_fraction, MOST_INDISTINGUISHABLE_FRACTION)


@given(times(), times(), errors())
def test_what_a_stack_is_off_by_cancels_between_its_layouts(
    one: TimeBreakdown, other: TimeBreakdown, error: StepError
) -> None:
    known = replace(error, stack_fraction=0.0)
    assert difference_log_error(one, other, error) == difference_log_error(one, other, known)
    assert log_error(one, known) <= log_error(one, error)


@given(times(), errors(), st.floats(0, 0.5))
def test_one_more_error_widens_a_band_by_its_square(
    time: TimeBreakdown, error: StepError, more: float
) -> None:
    band = widened(step_interval(time, error), more)
    found = log(band.upper / band.expected) / NORMAL_80
    assert isclose(found, hypot(log_error(time, error), more), abs_tol=1e-6)
    assert isclose(band.expected**2, band.lower * band.upper, rel_tol=1e-6)

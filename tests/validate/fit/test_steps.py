"""The fit of the step time's constants: what it may fit, and that it finds what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose, log

import pytest

from fsdpplan.files.profiles.catalogue import load_device, load_profile
from fsdpplan.files.profiles.devices import DEVICE_FIT, PHYSICS, PhysicsProfile
from fsdpplan.files.runs.table import MeasuredRun, known_runs
from fsdpplan.validate.compare.predict import Prediction, predict_row
from fsdpplan.validate.fit.steps import (
    CONSTANTS,
    FITTED_DEVICES,
    OWN_POWER,
    OWN_STACK,
    fit,
    fits_of,
    log_errors,
    new_profiles,
    profile_values,
    relative_shares,
    usable_rows,
)
from fsdpplan.validate.runs.projects import project_of, tells_of_hardware

MOST_SHARED, MOST_A_DEVICE = 24, 5
"""Seventeen of them of steps and of what is allocated; three came with the band of memory: two
errors, and the fragments that stay; two with offload, which nothing is fitted to; one is
attention's backward on asynchronous tensor cores, one the allocator's."""


@pytest.fixture(scope="module")
def runs() -> tuple[MeasuredRun, ...]:
    return known_runs()


def some_rows(runs: Sequence[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    """A few rows of three projects on the two fitted devices."""
    wanted = ("mosaicml_llmfoundry", "fms_fsdp", "internevo")
    rows = [run for run in runs if project_of(run.source_id) in wanted and tells_of_hardware(run)]
    return tuple(rows[::12])


def test_few_constants_are_fitted_and_none_belongs_to_a_source() -> None:
    physics = load_profile(PHYSICS)
    assert isinstance(physics, PhysicsProfile)
    assert len(physics.fit) <= MOST_SHARED
    assert len(DEVICE_FIT) <= MOST_A_DEVICE
    assert {constant.device for constant in CONSTANTS} == {
        PHYSICS,
        *FITTED_DEVICES,
        *OWN_POWER,
        *OWN_STACK,
    }
    assert all(one.name in DEVICE_FIT for one in CONSTANTS if one.device != PHYSICS)


def test_relatives_follow_the_device_that_they_take_their_numbers_from() -> None:
    values = profile_values()
    fits = fits_of({**values, "h100-sxm-80g.sustained_fraction": 0.6})
    share = relative_shares()["h100-sxm-96g-500w"]["sustained_fraction"]
    assert isclose(share, (500 / 700) ** (1 / 3), rel_tol=1e-3)
    assert isclose(fits.devices["h100-sxm-96g-500w"]["sustained_fraction"], 0.6 * share)
    assert fits.devices["a800-sxm-80g"] == fits.devices["a100-sxm-80g"]


def test_the_profiles_constants_predict_what_the_profiles_predict(
    runs: tuple[MeasuredRun, ...],
) -> None:
    rows = usable_rows(some_rows(runs))
    with_values = log_errors(rows, fits_of(profile_values()))
    for run, error in zip(rows, with_values, strict=True):
        outcome = predict_row(run)
        assert isinstance(outcome, Prediction)
        assert run.measured_step_seconds is not None
        plain = log(outcome.step_seconds.expected / run.measured_step_seconds)
        assert isclose(error, plain, abs_tol=1e-9)


def test_a_fit_finds_the_constants_that_made_the_rows(runs: tuple[MeasuredRun, ...]) -> None:
    truth = profile_values() | {
        "a100-sxm-80g.stack_fraction": 0.8,
        "h100-sxm-80g.stack_fraction": 0.78,
        "a100-sxm-80g.attention_forward_fraction": 0.57,
    }
    made = []
    for run in usable_rows(some_rows(runs)):
        outcome = predict_row(run, fits_of(truth))
        assert isinstance(outcome, Prediction)
        made.append(replace(run, step_seconds=outcome.step_seconds.expected))
    found = fit(made)
    # what is expected of each constant still pulls a little, for the rows are few, and an effect of
    # each of three projects takes a part of what they have in common
    assert max(map(abs, log_errors(made, fits_of(found)))) < 0.08
    assert found["a100-sxm-80g.stack_fraction"] == pytest.approx(0.8, rel=0.08)
    assert found["h100-sxm-80g.stack_fraction"] == pytest.approx(0.78, rel=0.08)
    assert fit(made) == found  # to the digit


def test_new_profiles_say_how_their_numbers_were_found() -> None:
    texts = new_profiles(profile_values(), how="by a test", date="2026-01-02")
    for name, text in texts.items():
        assert 'how = "by a test"' in text, name
        assert 'date = "2026-01-02"' in text, name
    numbers = load_device("h100-sxm-80g").device.fit
    assert f"sustained_fraction = {{ value = {numbers.sustained_fraction}" in texts["h100-sxm-80g"]


def test_rows_of_unnamed_devices_and_poorly_tuned_layouts_are_not_fitted_to(
    runs: tuple[MeasuredRun, ...],
) -> None:
    used = [run for run in runs if tells_of_hardware(run)]
    assert all(run.gpu for run in used)
    nanotron = [run for run in used if "nanotron" in run.source_id]
    assert nanotron
    assert all(run.pp == 1 and run.tp <= 8 for run in nanotron)

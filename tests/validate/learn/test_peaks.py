"""Measured peaks of memory move and narrow the band of their stack, and flatter no plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, hypot, log
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import NORMAL_80, fits_fraction
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.learning import load_widths
from fsdpplan.files.runs.table import MeasuredRun, MemoryKind, bundled_runs, read_runs
from fsdpplan.spec.cluster import LearnedPeaks
from fsdpplan.validate.fit.peaks import fit_peak_errors, peaks_of
from fsdpplan.validate.learn.features import Stack
from fsdpplan.validate.learn.peaks import (
    JobPeak,
    KnownPeak,
    learned_peaks,
    peaks_among,
    priced_peaks,
    told_peaks,
)
from fsdpplan.validate.learn.surprise import shuffled
from fsdpplan.validate.runs.projects import HALF_AUTOCAST, project_of
from tests.validate.learn.made import STACK, of_other
from tests.validate.tables import run

DEVICE = load_cluster("dgx-h100", gpus=8).cluster.device
STACKS = DEVICE.fit.peak_memory_stack_fraction
ODD = 0.3
"""Log of a peak that is far off."""
ratios = st.floats(-0.3, 0.3)


def peak(
    log_ratio: float, *, kind: MemoryKind = "reserved", least: bool = False, stack: Stack = STACK
) -> KnownPeak:
    return KnownPeak(stack=stack, kind=kind, log_ratio=log_ratio, is_least=least)


def learned(known: Sequence[KnownPeak]) -> LearnedPeaks:
    found = learned_peaks(known, STACK, fit=DEVICE.fit, widths=load_widths())
    assert found is not None
    return found


def chance(known: Sequence[KnownPeak], *, peak_bytes: float) -> float:
    device = replace(DEVICE, learned_peaks=learned(known)) if known else DEVICE
    return fits_fraction(peak_bytes=peak_bytes, device=device)


def test_peaks_above_the_predicted_raise_what_is_expected_of_others() -> None:
    one, three = (learned([peak(0.08)] * runs) for runs in (1, 3))
    assert 0.02 < one.shift_log < three.shift_log < 0.08
    assert chance([peak(0.08)], peak_bytes=70 * 2**30) < chance([], peak_bytes=70 * 2**30)


def test_peaks_as_predicted_narrow_the_band_and_leave_what_each_job_has_of_its_own() -> None:
    found = [learned([peak(0.0, kind="nvidia-smi")] * runs).stack_fraction for runs in (1, 3, 10)]
    assert STACKS > found[0] > found[1] > found[2] > 0
    base = DEVICE.fit.peak_memory_base_fraction
    assert hypot(found[2], base) < 1.1 * base


def test_what_nobody_counted_stays_open() -> None:
    kinds: tuple[MemoryKind, ...] = ("alloc", "reserved", "nvidia-smi")
    left = [learned([peak(0.0, kind=kind)] * 10).stack_fraction for kind in kinds]
    assert left == sorted(left, reverse=True)
    assert left[0] > (2 / 3) ** 0.5 * STACKS
    assert learned([peak(0.1, kind="alloc")] * 10).shift_log > 0.05


@given(st.lists(ratios, max_size=6), ratios, st.floats(40, 79))
def test_a_run_that_filled_its_device_makes_no_plan_look_safer(
    known: list[float], least: float, gib: float
) -> None:
    peaks = [peak(one) for one in known]
    full = [*peaks, peak(least, kind="nvidia-smi", least=True)]
    assert chance(full, peak_bytes=gib * 2**30) <= chance(peaks, peak_bytes=gib * 2**30) + 1e-9


def test_a_run_that_ran_out_of_memory_raises_what_is_expected() -> None:
    fine = [peak(0.0)] * 3
    assert learned([*fine, peak(0.05, kind="nvidia-smi", least=True)]).shift_log > 0.005
    assert learned([peak(-0.2, kind="nvidia-smi", least=True)]).shift_log == 0


def test_one_odd_job_hardly_pulls_at_others_that_agree() -> None:
    agreeing = learned([peak(0.02)] * 5)
    assert learned([*[peak(0.02)] * 5, peak(ODD)]).shift_log < agreeing.shift_log + 0.02
    assert learned([*[peak(0.02)] * 5, peak(-ODD)]).shift_log > agreeing.shift_log - 0.02


def test_peaks_that_are_all_far_off_widen_the_band() -> None:
    assert learned([peak(ODD)] * 2).stack_fraction > STACKS
    assert learned([peak(-ODD)] * 2).stack_fraction > STACKS


def test_another_format_says_a_part_however_often_it_ran() -> None:
    own, other = ([peak(0.08, stack=stack)] * 30 for stack in (STACK, of_other(precision="fp8")))
    assert 0.2 < learned(other).shift_log / learned(own).shift_log < 0.75
    assert learned(other).stack_fraction > learned(own).stack_fraction


def test_nothing_is_learned_of_nothing() -> None:
    assert learned_peaks([], STACK, fit=DEVICE.fit, widths=load_widths()) is None
    cpu = load_cluster("cpu", gpus=2).cluster.device
    assert learned_peaks([peak(0.1)], STACK, fit=cpu.fit, widths=load_widths()) is None


def known_of(*rows: MeasuredRun) -> list[KnownPeak]:
    return peaks_among(one for told in told_peaks(rows) for one in priced_peaks(told))


def test_a_row_tells_what_it_counted_and_runs_of_one_job_are_one() -> None:
    rows = [run(peak_mem_gib=gib, notes="mem_kind=reserved") for gib in ("40", "41", "60")]
    (one,) = known_of(*rows)
    assert (one.kind, one.runs, one.is_least) == ("reserved", 3, False)
    (alone,) = known_of(rows[1])
    assert one.log_ratio == alone.log_ratio


def test_a_row_that_filled_its_device_or_ran_out_says_no_less() -> None:
    (full,) = known_of(run(peak_mem_gib="78.9", notes="mem_kind=nvidia-smi"))
    assert full.is_least
    (out,) = known_of(run(peak_mem_gib="", notes="", oom="y"))
    assert out.is_least
    assert out.log_ratio > 0


def test_a_row_that_does_not_say_what_it_counted_tells_nothing() -> None:
    assert not told_peaks([run(peak_mem_gib="50", notes=""), run(peak_mem_gib="", notes="")])


def test_published_peaks_after_runs_of_their_stack() -> None:
    """Band and spread fitted without the project, whose rows are each predicted after some others:
    the band is narrower than without them, and holds seven in ten or more."""
    runs = read_runs(bundled_runs())
    all_peaks = peaks_of(runs, {})
    stacks: dict[tuple[str, Stack], list[list[JobPeak]]] = {}
    for one in runs:
        for told in told_peaks([one]):
            if told.counted and project_of(one.source_id) != HALF_AUTOCAST:
                key = (project_of(one.source_id), told.stack)
                stacks.setdefault(key, []).append(priced_peaks(told))
    for after in (1, 3, 10):
        inside, errors = [], []
        for (project, stack), rows in stacks.items():
            if len(rows) < after + 4:
                continue
            spread = fit_peak_errors([one for one in all_peaks if one.project != project])
            fit = replace(
                DEVICE.fit,
                peak_memory_stack_fraction=spread.stack_fraction,
                peak_memory_base_fraction=spread.base_fraction,
            )
            for draw in range(6):
                order = shuffled(len(rows), draw)
                known = peaks_among(one for place in order[:after] for one in rows[place])
                kind = known[0].kind
                said = learned_peaks(known, stack, fit=fit, widths=load_widths(), kind=kind)
                assert said is not None
                half = NORMAL_80 * hypot(said.stack_fraction, spread.base_fraction)
                left = [
                    rows[place][0][1].log_ratio - said.shift_log
                    for place in order[after:]
                    if not rows[place][0][1].is_least
                ]
                inside.append(mean(float(abs(one) <= half) for one in left))
                errors.append(median(abs(exp(one) - 1) for one in left))
        assert 0.7 <= mean(inside) <= 0.92, (after, mean(inside))
        assert mean(errors) < 0.04, (after, mean(errors))


def test_a_stack_that_is_far_off_is_learned() -> None:
    """InternEvo's peaks, taken as nvidia-smi counts them, lie 10 % above the predicted ones."""
    runs = read_runs(bundled_runs())
    off = [one.log_residual for one in peaks_of(runs, {}) if one.project == "internevo"]
    assert median(off) == pytest.approx(log(1.1), abs=0.03)
    after: list[float] = []
    for draw in range(6):
        order = shuffled(len(off), draw)
        said = learned([peak(off[place], kind="nvidia-smi") for place in order[:3]])
        after += [abs(off[place] - said.shift_log) for place in order[3:]]
    assert median(after) < 0.75 * median(map(abs, off))

"""A cluster that is not what its profile says shows itself in its finished runs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import log
from statistics import mean, median

import pytest

from fsdpplan.cost.band import log_error, step_interval
from fsdpplan.spec.corrected import corrected
from fsdpplan.spec.correction import PARTS
from fsdpplan.validate.finished_jobs import finished_jobs
from fsdpplan.validate.learned import Learned, learned
from tests.ledgers import (
    cluster_of,
    jobs,
    measured_seconds,
    predicted,
    row_of,
    rows_of_a_slow_cluster,
)

CLUSTER = cluster_of(64)
SEEDS = (1, 2, 3)
RUNS, NEW = 10, 40


def of_rows(rows: list) -> Learned:  # type: ignore[type-arg]
    found = learned(finished_jobs(rows, CLUSTER), CLUSTER)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def trials() -> list[tuple[float, float, float, float]]:
    """(error before, error after, coverage, half width over the profile's) on new jobs, after ten
    runs."""
    found = []
    for seed in SEEDS:
        rows = rows_of_a_slow_cluster(RUNS, seed=seed)
        after = of_rows(rows)
        chance = random.Random(100 + seed)
        new = chance.sample([one for one in jobs() if one[0] not in [r.job for r in rows]], NEW)
        before_errors, after_errors, inside, widths = [], [], [], []
        for job, gpus in new:
            truth = measured_seconds(job, gpus, chance, outliers=False)
            profile = cluster_of(gpus)
            told = corrected(profile, after.correction, after.error)
            estimate = predicted(job, told)
            band = estimate.step_seconds
            before = predicted(job, profile).step_seconds
            before_errors.append(abs(log(before.expected / truth)))
            after_errors.append(abs(log(band.expected / truth)))
            inside.append(band.lower <= truth <= band.upper)
            widths.append(log(band.upper / band.expected) / log(before.upper / before.expected))
        found.append((median(before_errors), median(after_errors), mean(inside), median(widths)))
    return found


def test_after_ten_runs_the_median_error_on_new_jobs_at_least_halves(
    trials: list[tuple[float, float, float, float]],
) -> None:
    before = mean(trial[0] for trial in trials)
    after = mean(trial[1] for trial in trials)
    assert before > 0.08
    assert after <= before / 2


def test_the_band_is_narrower_and_keeps_what_it_promises(
    trials: list[tuple[float, float, float, float]],
) -> None:
    number = len(SEEDS) * NEW
    sampling = 2 * (0.8 * 0.2 / number) ** 0.5
    assert mean(trial[2] for trial in trials) >= 0.8 - sampling
    assert mean(trial[3] for trial in trials) < 1


def test_without_runs_nothing_is_learned() -> None:
    assert learned((), CLUSTER) is None
    assert finished_jobs([], CLUSTER) == ()


def test_runs_as_predicted_change_no_time_and_narrow_the_band() -> None:
    chosen = jobs()[:: len(jobs()) // 10][:10]
    rows = [
        row_of(job, cluster_of(gpus), predicted(job, cluster_of(gpus)).step_seconds.expected)
        for job, gpus in chosen
    ]
    found = of_rows(rows)
    assert list(found.correction.factors.values()) == pytest.approx([1.0] * len(PARTS), abs=1e-6)
    assert found.correction.step_factor == pytest.approx(1.0, abs=1e-6)
    times = [row.predicted.time for row in rows]
    widths = [
        step_interval(time, found.error).upper / step_interval(time, CLUSTER.device.error).upper
        for time in times
    ]
    assert median(widths) < 1
    assert log_error(times[0], found.error) < log_error(times[0], CLUSTER.device.error)


def test_the_order_of_the_runs_does_not_matter() -> None:
    rows = rows_of_a_slow_cluster(5, seed=7)
    one, other = of_rows(rows), of_rows(rows[::-1])
    assert one.correction.factors == pytest.approx(other.correction.factors)


def test_few_runs_hardly_move_anything_and_fewer_than_three_nothing() -> None:
    job, gpus = jobs()[0]
    cluster = cluster_of(gpus)
    slow = 1.3 * predicted(job, cluster).step_seconds.expected
    rows = [row_of(job, cluster, slow)] * 3
    assert finished_jobs(rows[:2], CLUSTER) == ()
    (one,) = finished_jobs(rows, CLUSTER)
    alone = learned([replace(one, runs=1)], CLUSTER)
    assert alone is not None
    assert 1.0 < alone.correction.step_factor < 1.1
    often = learned([replace(one, runs=100)], CLUSTER)
    assert often is not None
    assert alone.correction.step_factor < often.correction.step_factor <= 1.3


def test_one_far_run_in_ten_hardly_pulls() -> None:
    rows = rows_of_a_slow_cluster(10, seed=11, outliers=False)
    calm = of_rows(rows)
    seconds = rows[0].observed.step_seconds
    assert seconds is not None
    odd = replace(rows[0], observed=replace(rows[0].observed, step_seconds=3 * seconds))
    pulled = of_rows([odd, *rows[1:]])
    assert pulled.correction.step_factor == pytest.approx(calm.correction.step_factor, rel=0.05)

"""How far plans were off, cluster by cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.validate.compare.errors import cluster_errors
from tests.ledgers import cluster_of, jobs, predicted, row_of

(JOB, GPUS), *_ = jobs()
CLUSTER = cluster_of(GPUS)
EXPECTED = predicted(JOB, CLUSTER).step_seconds.expected


def test_errors_are_over_the_runs_that_were_measured() -> None:
    rows = [row_of(JOB, CLUSTER, EXPECTED * factor) for factor in (1.0, 1.25, 2.0)]
    rows.append(row_of(JOB, CLUSTER, None, exit_code=1, failure="out_of_memory"))
    (errors,) = cluster_errors(rows)
    assert (errors.runs, errors.failed, errors.compared) == (4, 1, 3)
    assert errors.median_abs_error_fraction == pytest.approx(0.2)
    assert errors.bias_fraction == pytest.approx(-0.2)
    assert errors.coverage_fraction is not None
    assert 1 / 3 <= errors.coverage_fraction < 1


def test_each_cluster_has_its_own() -> None:
    row = row_of(JOB, CLUSTER, EXPECTED)
    other = replace(row, machines=replace(row.machines, cluster="another"))
    assert [one.cluster for one in cluster_errors([row, other, row])] == ["dgx-h100", "another"]
    assert cluster_errors([]) == ()


def test_without_a_measured_run_there_is_no_error() -> None:
    (errors,) = cluster_errors([row_of(JOB, CLUSTER, None)])
    assert (errors.compared, errors.median_abs_error_fraction) == (0, None)
    assert errors.coverage_fraction is None

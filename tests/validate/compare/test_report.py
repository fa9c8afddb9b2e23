"""Errors are counted over timed, predicted rows; sources weigh the same whatever their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.validate.compare.compared import compare
from fsdpplan.validate.compare.errors import Errors, mean_errors
from fsdpplan.validate.compare.report import Report, report
from tests.validate.tables import GPT_PIPELINE, run


def measured_as(factor: float, source_id: str = "mine") -> MeasuredRun:
    """A run that took `factor` times what is predicted."""
    one = run(source_id=source_id)
    outcome = compare(one).outcome
    return replace(one, step_seconds=factor * outcome.step_seconds.expected)  # type: ignore[union-attr]


def errors_of(result: Report, source_id: str = "mine") -> Errors:
    (errors,) = [one.errors for one in result.sources if one.source_id == source_id]
    assert errors is not None
    return errors


def test_errors_are_predicted_over_measured_less_1() -> None:
    errors = errors_of(report([measured_as(0.8), measured_as(1.0), measured_as(2.0)]))
    assert errors.median_abs_error_fraction == pytest.approx(0.25)
    assert errors.mean_abs_error_fraction == pytest.approx((0.25 + 0 + 0.5) / 3)
    assert errors.bias_fraction == pytest.approx((0.25 + 0 - 0.5) / 3)


def test_coverage_is_the_share_inside_the_band() -> None:
    assert errors_of(report([measured_as(1.0), measured_as(3.0)])).coverage_fraction == 0.5


def test_the_overall_mean_is_over_sources() -> None:
    rows = [measured_as(2.0, "few"), *[measured_as(1.0, "many")] * 9]
    result = report(rows)
    assert result.mean_over_sources is not None
    assert result.mean_over_sources.median_abs_error_fraction == pytest.approx(0.25)
    assert [source.source_id for source in result.sources] == ["few", "many"]


def test_untimed_rows_are_predicted_and_not_compared() -> None:
    out = run(oom="y", step_time_s="")
    excluded = run(notes="EXCLUDE")
    (source,) = report([out, excluded]).sources
    assert (source.rows, source.predicted, source.timed, source.compared) == (2, 2, 0, 0)
    assert source.errors is None
    assert compare(out).fits is not None


def test_skips_are_counted_by_reason() -> None:
    rows = [run(dp_shard="32"), run(dp_shard="16"), run(offload="nvme"), run()]
    (source,) = report(rows).sources
    assert list(source.skipped.values()) == [2, 1]
    assert source.predicted + sum(source.skipped.values()) == source.rows
    assert (source.timed, source.compared) == (4, 1)


def test_memory_is_compared_in_the_rows_own_kind() -> None:
    kinds = ("alloc", "reserved", "nvidia-smi")
    peaks = [
        compare(run(peak_mem_gib="50", notes=f"mem_kind={kind}")).predicted_peak_memory_bytes
        for kind in kinds
    ]
    assert None not in peaks
    assert peaks == sorted(peaks, key=lambda peak: peak or 0)
    assert compare(run(peak_mem_gib="50")).predicted_peak_memory_bytes is None


def test_no_errors_have_no_mean() -> None:
    assert mean_errors([]) is None
    assert report([run(offload="nvme")]).mean_over_sources is None


def test_published_fsdp2_runs_are_predicted_within_15_percent() -> None:
    # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md at commit b5bcd76c: Llama 3.1 8B on
    # 8 H100 of 96 GB, local batch 2: eager 2.843 s, compiled 2.457 s a step.
    rows = [
        run(
            gpu="H100-96GB-HBM2e-500W",
            gpus="8",
            dp_shard="8",
            micro_batch="2",
            global_batch="16",
            compile=compiled,
            step_time_s=seconds,
        )
        for compiled, seconds in (("n", "2.84346"), ("y", "2.45748"))
    ]
    for row in rows:
        error = compare(row).error_fraction
        assert error is not None
        assert abs(error) < 0.15


def test_a_pipeline_is_compared_too() -> None:
    assert compare(run(GPT_PIPELINE)).error_fraction is not None

"""Errors: how far predictions of step times were off, over any rows.

The interval score of an 80 % band (lower, upper) at a measured x, as a share of x, is

    (upper - lower) / x + 2 / 0.2 * (max(0, lower - x) + max(0, x - upper)) / x

Least is best: wide bands and misses both cost. Source: Gneiting and Raftery, Strictly Proper
Scoring Rules, Prediction, and Estimation (2007), equation 43.

Ledger errors: how far the plans of finished runs were off, cluster by cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import mean, median

from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.validate.compare.compared import ComparedRun

BAND_FRACTION = 0.8
PENALTY = 2 / (1 - BAND_FRACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions were off."""

    median_abs_error_fraction: float
    mean_abs_error_fraction: float
    p90_abs_error_fraction: float
    """Nine rows in ten are off by no more."""
    bias_fraction: float
    """Mean of the signed errors: above 0 predicts too slow."""
    coverage_fraction: float
    """Share of the measured values inside the 80 % band."""
    median_half_width_fraction: float
    """Half of the band's width over the expected value."""
    interval_score: float
    """Mean interval score, as a share of the measured value; least is best."""


def errors_over(rows: Sequence[ComparedRun]) -> Errors | None:
    """The errors of those rows that have a time to compare; None where there are none."""
    timed = [row for row in rows if row.error_fraction is not None]
    if not timed:
        return None
    signed = [row.error_fraction or 0.0 for row in timed]
    sizes = [abs(error) for error in signed]
    return Errors(
        median_abs_error_fraction=median(sizes),
        mean_abs_error_fraction=mean(sizes),
        p90_abs_error_fraction=percentile(sizes, 0.9),
        bias_fraction=mean(signed),
        coverage_fraction=mean(float(row.is_covered) for row in timed),
        median_half_width_fraction=median(_half_width(row) for row in timed),
        interval_score=mean(_interval_score(row) for row in timed),
    )


def mean_errors(errors: Sequence[Errors]) -> Errors | None:
    """The mean of each number."""
    if not errors:
        return None
    means = {
        field.name: mean(getattr(one, field.name) for one in errors) for field in fields(Errors)
    }
    return Errors(**means)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of `values` do not pass, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _half_width(row: ComparedRun) -> float:
    assert row.prediction is not None
    band = row.prediction.step_seconds
    return (band.upper - band.lower) / 2 / band.expected


def _interval_score(row: ComparedRun) -> float:
    measured = row.run.measured_step_seconds
    assert row.prediction is not None
    assert measured is not None
    band = row.prediction.step_seconds
    missed = max(0.0, band.lower - measured) + max(0.0, measured - band.upper)
    return (band.upper - band.lower + PENALTY * missed) / measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterErrors:
    """The runs of one cluster. None: there is no run to compare."""

    cluster: str
    device: str
    runs: int
    failed: int
    """Those that did not end well."""
    compared: int
    """Those with enough measured steps."""
    median_abs_error_fraction: float | None
    p90_abs_error_fraction: float | None
    """Nine runs in ten are off by no more."""
    bias_fraction: float | None
    """Median of the signed errors: above 0 predicts too slow."""
    coverage_fraction: float | None
    """Share of the measured step times inside the 80 % band that their plans gave."""


def cluster_errors(rows: Sequence[LedgerRow]) -> tuple[ClusterErrors, ...]:
    """One entry a cluster and device, in the order of their first runs."""
    groups: dict[tuple[str, str], list[LedgerRow]] = {}
    for row in rows:
        groups.setdefault((row.machines.cluster, row.machines.device), []).append(row)
    return tuple(_errors(cluster, device, group) for (cluster, device), group in groups.items())


def _errors(cluster: str, device: str, rows: Sequence[LedgerRow]) -> ClusterErrors:
    pairs = [(row.error_fraction, row.is_covered) for row in rows]
    signed = [error for error, _ in pairs if error is not None]
    inside = [float(covered) for error, covered in pairs if error is not None]
    sizes = [abs(error) for error in signed]
    return ClusterErrors(
        cluster=cluster,
        device=device,
        runs=len(rows),
        failed=sum(row.observed.failure is not None for row in rows),
        compared=len(signed),
        median_abs_error_fraction=median(sizes) if sizes else None,
        p90_abs_error_fraction=percentile(sizes, 0.9) if sizes else None,
        bias_fraction=median(signed) if signed else None,
        coverage_fraction=mean(inside) if inside else None,
    )

"""Ledger errors: how far the plans of finished runs were off, cluster by cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from fsdpplan.spec.ledger import LedgerRow
from fsdpplan.validate.compare.errors import percentile


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

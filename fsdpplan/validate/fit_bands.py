"""Fit the band to residuals of held-out projects.

The score of an 80 % band from l to u around a measured y, in log time, is its width and ten times
what y lies outside of it: (u - l) + 10 max(0, l - y, y - u). It is least, on average, where the
band is as narrow as may be and holds 80 % (Gneiting and Raftery 2007, interval score at 0.2).
Projects have the same weight whatever their number of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import exp, log

from fsdpplan.cost.band import NORMAL_80, log_error
from fsdpplan.spec.cluster import StepError
from fsdpplan.validate.held_out import HeldOutRow

MISS_COST = 10.0
"""Two over the share of measured values that an 80 % band may miss."""

LEAST_ERROR, MOST_ERROR = 0.005, 1.5
"""Between these an error is looked for."""


def interval_score(*, half_width: float, log_residual: float) -> float:
    """Score of a symmetric 80 % band in log time; less is better."""
    return 2 * half_width + MISS_COST * max(0.0, abs(log_residual) - half_width)


def mean_interval_score(rows: Sequence[HeldOutRow], errors: Mapping[str, StepError]) -> float:
    """Mean over projects of the mean score; `errors` by the evidence behind the device."""
    counts = Counter(row.project for row in rows)
    total = 0.0
    for row in rows:
        residual = log(row.predicted_step_seconds / row.measured_step_seconds)
        half_width = NORMAL_80 * log_error(row.time, errors[row.evidence])
        score = interval_score(half_width=half_width, log_residual=residual)
        total += score / counts[row.project]
    return total / len(counts)


def fit_error(rows: Sequence[HeldOutRow], *, evidence: str, start: StepError) -> StepError:
    """The errors of least mean score on rows whose device has that evidence."""
    from scipy.optimize import minimize  # a development dependency

    names = [field.name for field in fields(StepError) if field.name != "layout_fraction"]
    own = tuple(row for row in rows if row.evidence == evidence)

    def error_at(point: Sequence[float]) -> StepError:
        values = {
            name: min(MOST_ERROR, max(LEAST_ERROR, exp(float(at))))
            for name, at in zip(names, point, strict=True)
        }
        return StepError(**values, layout_fraction=start.layout_fraction)

    found = minimize(
        lambda point: mean_interval_score(own, {evidence: error_at(point)}),
        [log(getattr(start, name)) for name in names],
        method="Nelder-Mead",
        options={"maxiter": 2000, "xatol": 1e-2, "fatol": 1e-5},
    )
    best = error_at(found.x)
    return StepError(**{f.name: float(f"{getattr(best, f.name):.3g}") for f in fields(StepError)})

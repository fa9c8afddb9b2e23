"""Fit the band to residuals of held-out projects.

    python -m fsdpplan.validate.fit.bands [--check] [--table RUNS.csv] [--date YYYY-MM-DD]

The score of an 80 % band from l to u around a measured y, in log time, is its width and ten times
what y lies outside of it: (u - l) + 10 max(0, l - y, y - u). It is least, on average, where the
band is as narrow as may be and holds 80 % (Gneiting and Raftery 2007, interval score at 0.2).
n rows of a project count as sqrt(n), as in `steps`.

What all rows of a project are off by alike is an error of its own, `stack_fraction`: the spread of
the projects' medians, each project counting once, and wider for their small number; no less than
strangers were found to lie apart where nothing had been chosen with them in sight
(`OUTSIDE_SPREAD`). It is found first, and the others with it: they are what is left within
projects. What a row leaves open is in its band, too. The package's own trainer is no stranger
(`OWN_SPREAD`).

Two layouts' difference has an error beyond that of its parts, fitted to pairs of layouts of one
model, cluster and batch (`differences`). Rows of code that waits where others overlap (`projects`)
would widen the band of code that does not, and are left out. What is measured on the user's own
machine has no rows yet: half of the fitted devices' errors is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean, median

from fsdpplan.cost.band import (
    NORMAL_80,
    kind_errors,
    log_error,
    step_interval,
    step_shares,
    widened,
)
from fsdpplan.cost.estimate import HOST_LOG_ERROR
from fsdpplan.files.profiles.catalogue import profile_text, profiles_folder
from fsdpplan.files.profiles.devices import PHYSICS
from fsdpplan.files.profiles.edit import with_numbers, with_source
from fsdpplan.files.runs.table import MeasuredRun, bundled_runs, known_runs, read_runs
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.cluster import Evidence, StepError
from fsdpplan.validate.compare.pairs import (
    coverage,
    fit_layout_error,
    layout_pairs,
    log_residual,
)
from fsdpplan.validate.fit.held_out import HELD_OUT, HeldOutRow, read_held_out
from fsdpplan.validate.fit.robust import MAD
from fsdpplan.validate.runs.projects import (
    HALF_AUTOCAST,
    OWN,
    POORLY_TUNED,
    tells_of_hardware,
)

MISS_COST = 10.0
"""Two over the share of measured values that an 80 % band may miss."""

LEAST_ERROR = 0.02
"""No error is looked for below this."""

LEAST_ERRORS = {
    "base_fraction": LEAST_ERROR,
    "matmul_fraction": 0.05,
    "attention_fraction": 0.05,
    "element_wise_fraction": 0.05,
    "launch_fraction": HOST_LOG_ERROR,
    "inside_fraction": 0.1,
    "across_fraction": 0.1,
    "bubble_fraction": 0.1,
}
"""No part of a step is known better than by itself: matmuls are off by 5 % in the median,
collectives by 10 (`--matmuls`, `--collectives`), a bubble is made of both, and hosts differ by as
much as the chance to wait for one takes. Below, the score is flat."""

MOST_ERROR = HOST_LOG_ERROR
"""Above this no error is looked for: hardly a row waits for its host, which is known least."""

OUTSIDE_SPREAD = 0.14
"""Standard deviation, robust, of the medians of 28 sources that were predicted from outside on
2026-11-27, at b06610f1, before any of them was known here."""

OWN_SPREAD = 0.07
"""Of machines, drivers and releases of torch under the package's own trainer: half of that. Chosen,
for it was measured on one machine alone."""

STARTS = (0.03, 0.1, 0.3)
"""Where the fit begins, all errors alike: the best of three searches is taken."""

MEASURED_SHARE = 0.5
"""Errors on a machine that was measured, as a share of those on a fitted device. Not yet shown."""


def interval_score(*, half_width: float, log_residual: float) -> float:
    """Score of a symmetric 80 % band in log time; less is better."""
    return 2 * half_width + MISS_COST * max(0.0, abs(log_residual) - half_width)


def mean_interval_score(rows: Sequence[HeldOutRow], errors: Mapping[Evidence, StepError]) -> float:
    """Mean score, n rows of a project weighing sqrt(n); `errors` by the device's evidence."""
    counts = Counter(row.project for row in rows)
    total = 0.0
    for row in rows:
        half_width = half_width_log(row, errors)
        score = interval_score(half_width=half_width, log_residual=log_residual(row))
        total += score / sqrt(counts[row.project])
    return total / sum(map(sqrt, counts.values()))


def fit_error(
    rows: Sequence[HeldOutRow],
    *,
    evidence: Evidence,
    stack_fraction: float,
    least: StepError | None = None,
) -> StepError:
    """The errors of least mean score on rows whose device has that evidence.

    None is below those of `least`: no part is known better by weaker evidence.
    """
    from scipy.optimize import minimize  # a development dependency

    names = list(LEAST_ERRORS)
    floors = asdict(least) if least else LEAST_ERRORS
    own = tuple(row for row in rows if row.evidence == evidence)

    def error_at(point: Sequence[float]) -> StepError:
        values = {
            name: min(MOST_ERROR, max(floors[name], exp(float(at))))
            for name, at in zip(names, point, strict=True)
        }
        return StepError(**values, layout_fraction=0.0, stack_fraction=stack_fraction)

    known = [(step_shares(row.time), row.unknown_log_error, log_residual(row)) for row in own]
    counts = Counter(row.project for row in own)
    weights = [counts[row.project] ** -0.5 for row in own]

    def score(point: Sequence[float]) -> float:
        """`mean_interval_score` of the rows, what does not change with the errors known before."""
        error = error_at(point)
        of_kind = kind_errors(error)
        always = error.stack_fraction**2 + error.base_fraction**2
        total = 0.0
        for weight, (shares, unknown, residual) in zip(weights, known, strict=True):
            parts = sum((share * of_kind[kind]) ** 2 for kind, share in shares.items())
            half_width = NORMAL_80 * sqrt(always + parts + unknown**2)
            total += weight * interval_score(half_width=half_width, log_residual=residual)
        return float(total / sum(weights))

    def search(begin: float) -> tuple[float, StepError]:
        found = minimize(
            score,
            [log(begin)] * len(names),
            method="Nelder-Mead",
            options={"maxiter": 3000, "xatol": 1e-2, "fatol": 1e-6},
        )
        return float(found.fun), error_at(found.x)

    _, best = min((search(begin) for begin in STARTS), key=lambda one: one[0])
    return _rounded(best)


def _rounded(error: StepError) -> StepError:
    return StepError(**{name: float(f"{value:.3g}") for name, value in asdict(error).items()})


def fit_errors(
    rows: Sequence[HeldOutRow], runs: Sequence[MeasuredRun]
) -> dict[Evidence, StepError]:
    """Errors for each kind of evidence."""
    stack = max(OUTSIDE_SPREAD, predicted_spread(rows))
    fitted = fit_error(rows, evidence="fitted", stack_fraction=stack)
    datasheet = fit_error(rows, evidence="datasheet", stack_fraction=stack, least=fitted)
    halves = {name: MEASURED_SHARE * value for name, value in asdict(fitted).items()}
    halves["stack_fraction"] = stack  # a measured machine says nothing of the software
    found: dict[Evidence, StepError] = {
        "measured": StepError(**halves),
        "fitted": fitted,
        "datasheet": datasheet,
    }
    rounded = {
        kind: replace(_rounded(error), own_stack_fraction=OWN_SPREAD)
        for kind, error in found.items()
    }
    layout = fit_layout_error(layout_pairs(rows, runs), rounded)
    return {kind: replace(error, layout_fraction=layout) for kind, error in rounded.items()}


def stack_spread(rows: Sequence[HeldOutRow]) -> float:
    """How far projects lie apart in log time: what all steps of an unknown one are off by.

        1.48 median over projects of |median(residuals)|

    A standard deviation, robust: two of twenty are of softwares that wait where the others overlap
    (ZeRO-3 of DeepSpeed), and are off by half.
    """
    by_project: dict[str, list[float]] = {}
    for row in rows:
        by_project.setdefault(row.project, []).append(log_residual(row))
    return MAD * median(abs(median(residuals)) for residuals in by_project.values())


def predicted_spread(rows: Sequence[HeldOutRow]) -> float:
    """The same for the next project, of which the 80 % band should hold four in five.

        spread * sqrt(1 + 1 / n) * t(0.9, n) / 1.2816

    n projects tell their spread no better than so: Student's t in place of the normal distribution.
    """
    from scipy.stats import t as student  # a development dependency

    number = len({row.project for row in rows})
    wider = float(student.ppf(0.9, number)) / NORMAL_80
    return stack_spread(rows) * sqrt(1 + 1 / number) * wider


def half_width_log(row: HeldOutRow, errors: Mapping[Evidence, StepError]) -> float:
    """Half of the row's 80 % band in log time."""
    own = log_error(row.time, errors[row.evidence])
    return NORMAL_80 * sqrt(own**2 + row.unknown_log_error**2)


def project_coverage(rows: Sequence[HeldOutRow], errors: Mapping[Evidence, StepError]) -> float:
    """Share of a project's rows inside, in the mean over projects."""
    inside: dict[str, list[bool]] = {}
    for row in rows:
        inside.setdefault(row.project, []).append(is_inside(row, errors))
    return mean(mean(map(float, some)) for some in inside.values())


def band_rows(rows: Sequence[HeldOutRow], runs: Sequence[MeasuredRun]) -> tuple[HeldOutRow, ...]:
    """Rows of strangers whose residual tells of the model and not of an unnamed GPU, of waiting
    code, or of a script that did not run in the format that it names."""
    apart = (POORLY_TUNED, HALF_AUTOCAST, OWN)
    return tuple(
        row for row in rows if row.project not in apart and tells_of_hardware(runs[row.row])
    )


def half_width_fraction(row: HeldOutRow, errors: Mapping[Evidence, StepError]) -> float:
    """Half of the row's band over its expected time."""
    band = widened(step_interval(row.time, errors[row.evidence]), row.unknown_log_error)
    return (band.upper - band.lower) / 2 / band.expected


def is_inside(row: HeldOutRow, errors: Mapping[Evidence, StepError]) -> bool:
    """Whether the measured time lies in the row's band."""
    return abs(log_residual(row)) <= half_width_log(row, errors)


def how_fitted(
    rows: Sequence[HeldOutRow],
    errors: Mapping[Evidence, StepError],
    runs: Sequence[MeasuredRun],
) -> str:
    """A sentence on the fit."""
    pairs = coverage(layout_pairs(rows, runs), errors)
    inside = mean(is_inside(row, errors) for row in rows)
    width = median(half_width_fraction(row, errors) for row in rows if row.evidence == "fitted")
    projects = len({row.project for row in rows})
    return (
        f"by fsdpplan.validate.fit.bands: least mean interval score over {len(rows)} rows of "
        f"{projects} held-out projects, which lie {100 * stack_spread(rows):.1f} % apart: "
        f"{100 * inside:.0f} % inside, {100 * project_coverage(rows, errors):.0f} % as a mean over "
        f"projects, median half-width "
        f"{100 * width:.1f} % on devices with rows, score {mean_interval_score(rows, errors):.3f}; "
        f"{pairs.inside} of {pairs.pairs} pairs of layouts of one job differ by no more than the "
        f"error of their ratio: {100 * pairs.fraction:.0f} %, or "
        f"{100 * pairs.weighted_fraction:.0f} % where n pairs of a project count as sqrt(n)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print, and write the profile or compare with it."""
    parser = argparse.ArgumentParser(description="Fit the band's errors to held-out residuals.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if they differ")
    parser.add_argument("--table", type=Path, help="table of runs; the repository's if not given")
    parser.add_argument("--date", help="date to write beside the numbers; kept if not given")
    options = parser.parse_args(arguments)
    runs = read_runs(options.table) if options.table else known_runs()
    folder = (options.table or bundled_runs()).parent
    rows = band_rows(read_held_out(folder / HELD_OUT).rows, runs)
    errors = fit_errors(rows, runs)
    how = how_fitted(rows, errors, runs)
    text = profile_text(PHYSICS)
    for kind, error in errors.items():
        print(kind, *(f"{name} {value:.3g}" for name, value in asdict(error).items()), sep="\n  ")
        text = with_numbers(text, asdict(error), table=f"error.{kind}")
    print(how)
    words = {"how": how, "from": f"tests/golden/bench/{HELD_OUT}"}
    text = with_source(text, "held_out", words | ({"date": options.date} if options.date else {}))
    if options.check:
        print("stale" if text != profile_text(PHYSICS) else "as in the profile")
        return int(text != profile_text(PHYSICS))
    path = profiles_folder() / f"{PHYSICS}.toml"
    write_text_atomically(path, text, advice="the profiles of a checkout are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())

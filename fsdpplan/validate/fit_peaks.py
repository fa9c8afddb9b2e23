"""Peaks: how far predicted peaks of memory are off, for the band and the chance to fit.

    log(measured / predicted) = stack, of all rows of a project alike + base, of each row

`stack` is the root mean square of the projects' medians, each project counting once. Two of the
four have a fitted constant each (`fit_memory`), so that their medians say little. The other two are
fitted to by nothing, but their tables do not say what was counted: each is taken as the kind that
lies nearest, at least so far off. `base` is fitted after it, as errors of parts are in `fit_bands`:
the least that makes the mean interval score least over rows whose kind is known, n of a project
counting as sqrt(n). Rows of a script of which it is not known what ran in half precision
(`projects`) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import mean, median

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.files.runs import MeasuredRun, MemoryKind
from fsdpplan.validate.fit_bands import LEAST_ERROR, interval_score
from fsdpplan.validate.predict import Fits, peak_bytes, predicted_memory
from fsdpplan.validate.projects import HALF_AUTOCAST, project_of
from fsdpplan.validate.skipped import Skipped

KINDS: tuple[MemoryKind, ...] = ("alloc", "reserved", "nvidia-smi")

STEP_FRACTION = 0.001
MOST_FRACTION = 0.3
"""Between `LEAST_ERROR` and this, in these steps, `base` is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """How far the predicted peak of a row is off, in log."""

    project: str
    kind: MemoryKind
    log_residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakErrors:
    """Standard deviations of the log of a peak."""

    stack_fraction: float
    base_fraction: float

    @property
    def half_width_log(self) -> float:
        """Half of the 80 % band."""
        return NORMAL_80 * sqrt(self.stack_fraction**2 + self.base_fraction**2)


def peaks_of(runs: Sequence[MeasuredRun], constants: Mapping[str, float]) -> tuple[Peak, ...]:
    """Rows that ran and have a peak, priced with `constants`; a project whose kind is not known by
    the kind that lies nearest."""
    unknown: dict[str, dict[MemoryKind, list[float]]] = {}
    known: list[Peak] = []
    for run in runs:
        project = project_of(run.source_id)
        if not run.peak_memory_bytes or run.outcome != "n" or project == HALF_AUTOCAST:
            continue
        memory = predicted_memory(run, Fits(physics=constants))
        if isinstance(memory, Skipped):
            continue
        for kind in KINDS:
            off = log(run.peak_memory_bytes / (peak_bytes(memory, kind) or 1))
            if run.memory_kind == kind:
                known.append(Peak(project=project, kind=kind, log_residual=off))
            elif run.memory_kind == "unknown":
                unknown.setdefault(project, {}).setdefault(kind, []).append(off)
    for project, by_kind in unknown.items():
        nearest = min(by_kind, key=lambda kind: abs(median(by_kind[kind])))
        known += [
            Peak(project=project, kind="unknown", log_residual=off) for off in by_kind[nearest]
        ]
    return tuple(known)


def by_project(peaks: Sequence[Peak]) -> dict[str, list[float]]:
    """Residuals of each project."""
    found: dict[str, list[float]] = {}
    for peak in peaks:
        found.setdefault(peak.project, []).append(peak.log_residual)
    return found


def fit_peak_errors(peaks: Sequence[Peak]) -> PeakErrors:
    """The spread between projects, then what is left within those of known kind."""
    medians = [median(residuals) for residuals in by_project(peaks).values()]
    stack = sqrt(mean(one**2 for one in medians))
    known = [peak for peak in peaks if peak.kind != "unknown"]
    counts = Counter(peak.project for peak in known)

    def score(base: float) -> float:
        half = PeakErrors(stack_fraction=stack, base_fraction=base).half_width_log
        return sum(
            interval_score(half_width=half, log_residual=peak.log_residual)
            / sqrt(counts[peak.project])
            for peak in known
        )

    number = round((MOST_FRACTION - LEAST_ERROR) / STEP_FRACTION)
    tried = [round(LEAST_ERROR + step * STEP_FRACTION, 3) for step in range(number + 1)]
    base = min(tried, key=score) if known else LEAST_ERROR
    return PeakErrors(stack_fraction=float(f"{stack:.3g}"), base_fraction=base)


def coverage(peaks: Sequence[Peak], errors: PeakErrors) -> dict[str, float]:
    """Share of each project's rows of known kind inside of the band."""
    known = [peak for peak in peaks if peak.kind != "unknown"]
    return {
        project: mean(float(abs(one) <= errors.half_width_log) for one in residuals)
        for project, residuals in by_project(known).items()
    }


def how_fitted(peaks: Sequence[Peak], errors: PeakErrors) -> str:
    """A sentence on the fit."""
    inside = coverage(peaks, errors)
    known = [peak for peak in peaks if peak.kind != "unknown"]
    number = len(by_project(peaks))
    return (
        f"by fsdpplan.validate.fit_memory: root mean square of the medians of {number} projects, "
        f"those whose kind is not said by the nearest, then least mean interval score over "
        f"{len(known)} rows of known kind: {100 * mean(inside.values()):.0f} % inside as a mean "
        f"over {len(inside)} projects"
    )

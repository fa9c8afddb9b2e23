"""Peaks: how far predicted peaks of memory are off, for the band and the chance to fit.

    log(measured / predicted) = stack, of all rows of a project alike + base, of each row

`base` is what a row is off by once its stack is known: the one of least mean interval score of rows
whose kind is known after 1, 3 and 10 others of their project, by what `learn/peaks.py` makes of
them; projects count alike. `stack` is the root mean square of the projects' medians, each project
counting once. Two of the four have a fitted constant each (`memory`), so that their medians say
little. The other two are fitted to by nothing, but their tables do not say what was counted: each
is taken as the kind that lies nearest, at least so far off. What is guessed so does not widen the
band beyond what rows of known kind need: where more than `MOST_INSIDE` of them lie inside, as a
mean over projects, `stack` is made smaller until they do not. Rows of a script of which it is not
known what ran in half precision (`projects`) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import mean, median
from typing import TYPE_CHECKING

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.files.runs.table import MeasuredRun, MemoryKind
from fsdpplan.validate.compare.predict import Fits, peak_bytes, predicted_memory
from fsdpplan.validate.fit.bands import LEAST_ERROR, MISS_COST
from fsdpplan.validate.learn.surprise import shuffled
from fsdpplan.validate.runs.projects import HALF_AUTOCAST, project_of
from fsdpplan.validate.runs.skipped import Skipped

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

KINDS: tuple[MemoryKind, ...] = ("alloc", "reserved", "nvidia-smi")

STEP_FRACTION = 0.001
MOST_FRACTION = 0.3
"""Between `LEAST_ERROR` and this, in these steps, `base` is looked for."""
MOST_INSIDE = 0.9
"""Of the rows of known kind, as a mean over projects."""
AFTER = (1, 3, 10)
"""Rows of a project that are known, when the others are predicted."""
LEAST_TESTS = 4
"""Rows that must be left to predict."""
DRAWS = 12
"""Repeats with other known rows."""


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
    """What is left within projects of known kind, and the spread between projects."""
    medians = [median(residuals) for residuals in by_project(peaks).values()]
    stack = float(f"{sqrt(mean(one**2 for one in medians)):.3g}")
    known = [peak for peak in peaks if peak.kind != "unknown"]
    draws = list(_draws(known))

    def score(base: float) -> float:
        return sum(
            draw.score(PeakErrors(stack_fraction=stack, base_fraction=base)) for draw in draws
        )

    number = round((MOST_FRACTION - LEAST_ERROR) / STEP_FRACTION)
    tried = [round(LEAST_ERROR + step * STEP_FRACTION, 3) for step in range(number + 1)]
    base = min(tried, key=score) if draws else LEAST_ERROR
    found = PeakErrors(stack_fraction=stack, base_fraction=base)
    while known and stack > STEP_FRACTION and _inside(known, found) > MOST_INSIDE:
        stack = round(stack - STEP_FRACTION, 4)
        found = PeakErrors(stack_fraction=stack, base_fraction=base)
    return found


def _inside(known: Sequence[Peak], errors: PeakErrors) -> float:
    return mean(coverage(known, errors).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """Rows of one project after some others of it, several times over."""

    known: int
    means: Numbers
    """Of the known rows, by draw."""
    tests: Numbers
    """The others, by draw."""

    def score(self, errors: PeakErrors) -> float:
        """Mean interval score after learning."""
        import numpy as np

        stack, base = errors.stack_fraction**2, errors.base_fraction**2
        share = stack / (stack + base / self.known)
        half = NORMAL_80 * sqrt(stack * (1 - share) + base)
        left = np.abs(self.tests - share * self.means[:, None])
        return float((2 * half + MISS_COST * np.maximum(0.0, left - half)).mean())


def _draws(known: Sequence[Peak]) -> Iterator[_Draw]:
    import numpy as np

    for residuals in by_project(known).values():
        orders = [shuffled(len(residuals), draw) for draw in range(DRAWS)]
        rows = np.array([[residuals[place] for place in order] for order in orders])
        for some in AFTER:
            if len(residuals) >= some + LEAST_TESTS:
                yield _Draw(known=some, means=rows[:, :some].mean(axis=1), tests=rows[:, some:])


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
        f"by fsdpplan.validate.fit.memory: base by the least mean interval score of {len(known)} "
        f"rows of known kind after 1, 3 and 10 of their project; stack, the root mean square of "
        f"the medians of {number} projects, those whose kind is not said by the nearest, at most "
        f"so large that 90 % of the rows of known kind are inside: "
        f"{100 * mean(inside.values()):.0f} % as a mean over {len(inside)} projects"
    )

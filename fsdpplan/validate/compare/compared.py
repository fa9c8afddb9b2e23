"""Compared: one row's prediction beside what was measured.

error = predicted / measured - 1
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.files.runs.table import MeasuredRun, MemoryKind
from fsdpplan.spec.plan import Interval
from fsdpplan.validate.compare.predict import Fits, Prediction, predict_row
from fsdpplan.validate.runs.skipped import Skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One row."""

    run: MeasuredRun
    outcome: Prediction | Skipped

    @property
    def prediction(self) -> Prediction | None:
        """What is predicted; None where the row was skipped."""
        return None if isinstance(self.outcome, Skipped) else self.outcome

    @property
    def error_fraction(self) -> float | None:
        """Predicted over measured step time, less 1; None where the row has none to compare."""
        measured = self.run.measured_step_seconds
        if self.prediction is None or not self.run.is_timed or measured is None:
            return None
        return self.prediction.step_seconds.expected / measured - 1

    @property
    def is_covered(self) -> bool:
        """Whether the measured step time lies in the band."""
        measured, prediction = self.run.measured_step_seconds, self.prediction
        if prediction is None or measured is None:
            return False
        return prediction.step_seconds.lower <= measured <= prediction.step_seconds.upper

    @property
    def memory_kind(self) -> MemoryKind | None:
        """What the row's memory figure counts."""
        return self.run.memory_kind

    @property
    def predicted_peak_memory_bytes(self) -> int | None:
        """The predicted peak in the row's own way of counting, as known runs say."""
        if self.prediction is None:
            return None
        peak, memory = self.prediction.peak_memory_bytes(self.memory_kind), self.prediction.memory
        return None if peak is None else round(peak * memory.expected_over_predicted)

    @property
    def memory_error_fraction(self) -> float | None:
        """Predicted over measured peak, less 1; None where there is none of one kind."""
        predicted, measured = self.predicted_peak_memory_bytes, self.run.peak_memory_bytes
        if predicted is None or not measured or self.run.outcome != "n":
            return None
        return predicted / measured - 1

    @property
    def peak_memory_band_bytes(self) -> Interval | None:
        """The predicted peak with its 80 % band, in the row's own way of counting; None where it
        or its error is not known."""
        peak = self.predicted_peak_memory_bytes
        band = None if self.prediction is None else self.prediction.memory.peak_device_band_bytes
        if peak is None or band is None:
            return None
        factor = band.upper / band.expected
        return Interval(lower=peak / factor, expected=float(peak), upper=peak * factor)

    @property
    def is_memory_covered(self) -> bool | None:
        """Whether the measured peak lies in the band; None where there is none to compare."""
        band, measured = self.peak_memory_band_bytes, self.run.peak_memory_bytes
        if band is None or measured is None or self.memory_error_fraction is None:
            return None
        return band.lower <= measured <= band.upper

    @property
    def fits(self) -> bool | None:
        """The prediction's."""
        return None if self.prediction is None else self.prediction.fits


def compare(run: MeasuredRun, fits: Fits | None = None) -> ComparedRun:
    """The prediction for `run` beside it."""
    return ComparedRun(run=run, outcome=predict_row(run, fits))

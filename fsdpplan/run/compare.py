"""Measured against predicted: one row a quantity, ready for a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.run.follow.metrics import Measured
from fsdpplan.spec.plan import Estimate

RESIDENT_NOTE = "memory is the growth of the process since torch was loaded: a CPU has no allocator"
"""Where the trainer reports resident memory; there is nothing reserved to compare then."""

Unit = Literal["seconds", "tokens_per_second", "fraction", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity, predicted and measured."""

    quantity: str
    """Its name in JSON."""
    unit: Unit
    predicted: float
    lower: float | None
    """Lower end of the predicted 80 % band; None where there is none."""
    upper: float | None
    measured: float | None
    """None: the run did not report it."""
    note: str | None = None
    """What stands between the two numbers, if anything does."""

    @property
    def error_fraction(self) -> float | None:
        """(predicted - measured) / measured: above 0 where the prediction was too high."""
        if not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured

    @property
    def inside_band(self) -> bool | None:
        """Whether the measured value lies in the band; None where that cannot be said."""
        if self.measured is None or self.lower is None or self.upper is None:
            return None
        return self.lower <= self.measured <= self.upper


def compare(*, estimate: Estimate, measured: Measured) -> tuple[Comparison, ...]:
    """Rows in the order of the answer: time, rates, memory."""
    step, summary, memory = estimate.step_seconds, measured.summary, estimate.memory
    seconds = summary.step_seconds if summary else measured.median("step_seconds")
    tokens = summary.tokens_per_second if summary else measured.median("tokens_per_second")
    mfu = summary.mfu_fraction if summary else measured.median("mfu_fraction")
    allocated = summary.peak_allocated_bytes if summary else measured.peak("allocated_bytes")
    reserved = summary.peak_reserved_bytes if summary else measured.peak("reserved_bytes")
    resident = summary is not None and summary.memory_kind == "resident"
    # Rates are inversely proportional to the step, so its band turns into theirs.
    slowest, fastest = step.expected / step.upper, step.expected / step.lower
    return (
        Comparison(
            quantity="step_seconds",
            unit="seconds",
            predicted=step.expected,
            lower=step.lower,
            upper=step.upper,
            measured=seconds,
        ),
        Comparison(
            quantity="tokens_per_second",
            unit="tokens_per_second",
            predicted=estimate.tokens_per_second,
            lower=estimate.tokens_per_second * slowest,
            upper=estimate.tokens_per_second * fastest,
            measured=tokens,
        ),
        Comparison(
            quantity="mfu_fraction",
            unit="fraction",
            predicted=estimate.mfu_fraction,
            lower=estimate.mfu_fraction * slowest,
            upper=min(1.0, estimate.mfu_fraction * fastest),
            measured=mfu,
        ),
        *(
            [_bytes("peak_allocated_bytes", memory.peak_allocated_bytes, allocated, RESIDENT_NOTE)]
            if resident
            else [
                _bytes("peak_allocated_bytes", memory.peak_allocated_bytes, allocated, None),
                _bytes("peak_reserved_bytes", memory.peak_reserved_bytes, reserved, None),
            ]
        ),
    )


def _bytes(quantity: str, predicted: int, measured: int | None, note: str | None) -> Comparison:
    return Comparison(
        quantity=quantity,
        unit="bytes",
        predicted=predicted,
        lower=None,
        upper=None,
        measured=measured,
        note=note,
    )

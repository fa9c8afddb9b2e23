"""Measured against predicted: one row a quantity, or a collective, ready for a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fsdpplan.run.follow.metric_events import Communication
from fsdpplan.run.follow.metrics import Measured
from fsdpplan.spec.plan import CollectiveCost, Estimate, Interval

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
    def band_ratio(self) -> Interval:
        """The band over what was predicted, which is not 0; of no width where there is none."""
        ends = (self.lower or self.predicted, self.predicted, self.upper or self.predicted)
        lower, expected, upper = (end / self.predicted for end in ends)
        return Interval(lower=lower, expected=expected, upper=upper)

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
    rate, useful = step.inverse(estimate.tokens_per_second), step.inverse(estimate.mfu_fraction)
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
            predicted=rate.expected,
            lower=rate.lower,
            upper=rate.upper,
            measured=tokens,
        ),
        Comparison(
            quantity="mfu_fraction",
            unit="fraction",
            predicted=useful.expected,
            lower=useful.lower,
            upper=min(1.0, useful.upper),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisComparison:
    """One collective on one mesh axis: a step's prediction beside what the profiler saw."""

    axis: str
    collective: str
    predicted_seconds: float | None
    """None: the plan has no such collective."""
    predicted_exposed_seconds: float | None
    measured: Communication | None
    """None: the profiler saw none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much of communication other work hides."""

    predicted_fraction: float | None
    """None: the plan has none of what was seen."""
    measured_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What a step waits for the collectives of one axis."""

    axis: str
    predicted_seconds: float | None
    measured_seconds: float | None


def collectives(*, estimate: Estimate, measured: Measured) -> tuple[AxisComparison, ...]:
    """The collectives of one step, those of the plan first; nothing where none were reported."""
    seen = {(one.axis, one.collective): one for one in measured.communication}
    if not seen:
        return ()
    planned: dict[tuple[str, str], list[CollectiveCost]] = {}
    for cost in estimate.communication:
        planned.setdefault((cost.axis, cost.collective), []).append(cost)
    return tuple(
        AxisComparison(
            axis=key[0],
            collective=key[1],
            predicted_seconds=_sum(costs := planned.get(key), "seconds"),
            predicted_exposed_seconds=_sum(costs, "exposed_seconds"),
            measured=seen.get(key),
        )
        for key in dict.fromkeys((*planned, *seen))
    )


def _sum(costs: list[CollectiveCost] | None, name: str) -> float | None:
    return None if costs is None else sum(getattr(cost, name) for cost in costs)


def overlap(rows: Sequence[AxisComparison]) -> Overlap | None:
    """The share of communication that is hidden, as predicted of all and as measured where the
    trace says what hid it; None where it nowhere does.

        overlap = 1 - exposed / all
    """
    seen = [(row.measured.seconds, row.measured.exposed_seconds) for row in rows if row.measured]
    known = [(whole, exposed) for whole, exposed in seen if exposed is not None]
    planned = [(row.predicted_seconds, row.predicted_exposed_seconds) for row in rows]
    priced = [(whole, exposed or 0.0) for whole, exposed in planned if whole is not None]
    measured = _hidden_fraction(known)
    if measured is None:
        return None
    return Overlap(predicted_fraction=_hidden_fraction(priced), measured_fraction=measured)


def _hidden_fraction(pairs: Sequence[tuple[float, float]]) -> float | None:
    whole = sum(seconds for seconds, _ in pairs)
    return 1 - sum(exposed for _, exposed in pairs) / whole if whole else None


def waits(rows: Sequence[AxisComparison]) -> tuple[Waits, ...]:
    """Exposed seconds of a step, axis by axis; longest first."""
    found = []
    for axis in dict.fromkeys(row.axis for row in rows):
        its = [row for row in rows if row.axis == axis]
        predicted = [row.predicted_exposed_seconds for row in its]
        measured = [None if row.measured is None else row.measured.exposed_seconds for row in its]
        one = Waits(
            axis=axis,
            predicted_seconds=_known_sum(predicted),
            measured_seconds=_known_sum(measured),
        )
        if (one.predicted_seconds, one.measured_seconds) != (None, None):
            found.append(one)
    return tuple(sorted(found, key=_longest, reverse=True))


def _longest(one: Waits) -> float:
    return max(one.measured_seconds or 0.0, one.predicted_seconds or 0.0)


def _known_sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

"""Latency, bandwidth and ramp of one collective on one group, for showing.

    T = α + (V + h V / (V + h)) / β

V bytes that each rank sends, α what a call costs without any, β the bandwidth of a long one, h the
ramp: a transfer of as many bytes gets two thirds of β, a much shorter one half. It is how one hop
of `fsdpplan.cost.network.collectives` fills its channels, without protocols and levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.spec.measurement import GroupKind, MeasuredCall
from fsdpplan.spec.plan import Collective
from fsdpplan.validate.calibrate.levels import middle_calls
from fsdpplan.validate.fit.robust import Numbers, Sought, robust_fit

WIDE = 2.3
"""Log spread of what is expected: a factor of ten either way, so that rows decide."""
TELLING = 3
"""Least number of sizes: as many as there are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBeta:
    """How long a call takes by its bytes."""

    latency_seconds: float
    """α."""
    bandwidth_bytes_per_second: float
    """β, of what each rank sends: the bus bandwidth of a ring."""
    ramp_bytes: float
    """h."""
    error_fraction: float
    """Root mean square of the log residuals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFit:
    """One collective on groups of one shape."""

    group: GroupKind
    axis: str | None
    collective: Collective
    ranks: int
    stride: int
    rows: int
    fit: AlphaBeta


def alpha_beta_seconds(*, sent_bytes: float, fit: AlphaBeta) -> float:
    """Time of a call in which each rank sends `sent_bytes`: the formula above."""
    ramp = fit.ramp_bytes
    filled_bytes = sent_bytes + ramp * sent_bytes / (sent_bytes + ramp)
    return fit.latency_seconds + filled_bytes / fit.bandwidth_bytes_per_second


def alpha_beta(sent_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """The three numbers for which the log times of these calls err least."""

    def made(numbers: Numbers, error: float = 0.0) -> AlphaBeta:
        return AlphaBeta(
            latency_seconds=numbers["latency"],
            bandwidth_bytes_per_second=numbers["bandwidth"],
            ramp_bytes=numbers["ramp"],
            error_fraction=error,
        )

    largest = max(sent_bytes)
    sought = {
        "latency": Sought(expected=min(seconds), spread=WIDE, lowest=1e-9, highest=1e3),
        "bandwidth": Sought(
            expected=max(one / s for one, s in zip(sent_bytes, seconds, strict=True)),
            spread=WIDE,
            lowest=1.0,
            highest=1e16,
        ),
        "ramp": Sought(
            expected=largest / 1e3,
            spread=WIDE,
            lowest=1.0,
            highest=largest,
            starts=(largest / 1e2, largest / 1e4),
        ),
    }
    found = robust_fit(
        lambda numbers: [
            alpha_beta_seconds(sent_bytes=one, fit=made(numbers)) for one in sent_bytes
        ],
        seconds,
        sought,
    )
    values = {name: one.value for name, one in found.numbers.items()}
    return made(values, found.residual_fraction)


def call_fits(calls: Sequence[MeasuredCall]) -> tuple[CallFit, ...]:
    """One fit for each (group, collective) with enough sizes, in the order of the log; pairs of
    ranks are left out, for each has few."""
    by_kind: dict[MeasuredCall, list[MeasuredCall]] = {}
    for call in middle_calls(call for call in calls if call.group != "pair" and call.ranks > 1):
        by_kind.setdefault(replace(call, gathered_bytes=0, seconds=()), []).append(call)
    return tuple(
        _call_fit(rows)
        for rows in by_kind.values()
        if len({row.gathered_bytes for row in rows}) >= TELLING
    )


def _call_fit(rows: Sequence[MeasuredCall]) -> CallFit:
    first = rows[0]
    sent = [
        wire_bytes(collective=row.collective, gathered_bytes=row.gathered_bytes, ranks=row.ranks)
        for row in rows
    ]
    return CallFit(
        group=first.group,
        axis=first.axis,
        collective=first.collective,
        ranks=first.ranks,
        stride=first.stride,
        rows=len(rows),
        fit=alpha_beta(sent, [median(row.seconds) for row in rows]),
    )

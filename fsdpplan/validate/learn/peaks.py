"""Peaks: what measured peaks of memory say of those of the same stack.

    log(measured / predicted) = [what the stack's share] + base, of each job

What runs of a stack share is normal with the `stack` of the peak's band, a third of its variance
each for what is allocated, what the allocator reserves beyond, and what lies outside of it: a
measured `alloc` tells the first, `reserved` the first two, `nvidia-smi` all. The peak of device
memory is asked for, so that the last two stay open as far as nobody has measured them. Jobs that
are far off by themselves weigh less, and runs that all are widen the band, by a Student t as in
`process`. Another number format or device tells by its correlation, another software nothing.

A run that filled its device says only that it needed no less: its allocator gave back what lay
idle. So does one that ran out of memory. Such runs raise what is expected, where they lie above it,
and never narrow the band.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median
from typing import TypeAlias

from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.errors import FsdpPlanError, SpecError
from fsdpplan.files.runs.table import MemoryKind, run_of_cells
from fsdpplan.spec.cluster import Cluster, DeviceFit, LearnedPeaks
from fsdpplan.spec.ledger import LedgerRow, Observed, Widths
from fsdpplan.spec.plan import Case, MemoryBreakdown
from fsdpplan.validate.compare.predict import (
    Prediction,
    peak_bytes,
    predict,
    unknown_peak_log_error,
)
from fsdpplan.validate.learn.evidence import MeasuredRow, stack_of
from fsdpplan.validate.learn.features import Stack, numbers_of
from fsdpplan.validate.learn.known import MOST_RUNS, machines_of
from fsdpplan.validate.learn.process import OUTLIER_DEGREES
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.fabric import load_request

KNOWS: dict[MemoryKind, tuple[float, float, float]] = {
    "alloc": (1.0, 0.0, 0.0),
    "reserved": (1.0, 1.0, 0.0),
    "nvidia-smi": (1.0, 1.0, 1.0),
}
"""What a peak so counted is made of: allocated, reserved beyond that, outside of the allocator."""
SHARE = 1 / 3
"""Of the variance, for each. Held: no stack of the published runs was counted in two ways."""
FULL_FRACTION = 0.95
"""Of a device's memory: above it the allocator may have given back what it held idle."""
MOST_ROUNDS = 20
STILL = 1e-3
"""Change of the weights below which they are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldPeak:
    """One run that tells of memory, before it is priced."""

    source: LedgerRow | Expressed
    stack: Stack
    counted: tuple[tuple[MemoryKind, int], ...]
    """(what was counted, bytes), what tells most first; empty: it ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPeak:
    """One job's peak beside its prediction."""

    stack: Stack
    kind: MemoryKind
    log_ratio: float
    """log(measured / predicted)."""
    is_least: bool = False
    """The job needed no less, and may have needed more."""
    unknown_log_error: float = 0.0
    """Standard deviation of it for what the row leaves open."""
    runs: int = 1


JobPeak: TypeAlias = tuple[Hashable, KnownPeak]
"""(Which job it was, its peak.)"""


def told_peaks(rows: Iterable[MeasuredRow]) -> list[ToldPeak]:
    """The rows that tell of memory, in their order."""
    found = (_told(row) for row in rows)
    return [one for one in found if one is not None]


def _told(row: MeasuredRow) -> ToldPeak | None:
    if isinstance(row, LedgerRow) and not row.cells:
        counted = _counted(row.observed)
        if not counted and row.observed.failure != "out_of_memory":
            return None
        training, device = row.job.training, row.machines.device
        ours = Stack.of(software=row.software, training=training, device=device)
        return ToldPeak(source=row, stack=ours, counted=counted)
    run = run_of_cells(row.cells) if isinstance(row, LedgerRow) else row
    kind, measured = run.memory_kind, run.peak_memory_bytes
    is_measured = kind in KNOWS and run.outcome == "n"
    expressed = express(run) if is_measured or run.outcome == "y" else None
    if not isinstance(expressed, Expressed):
        return None
    stack = stack_of(run, expressed)
    if stack is None:
        return None
    peaks = ((kind, measured),) if is_measured and kind and measured else ()
    return ToldPeak(source=expressed, stack=stack, counted=peaks)


def _counted(seen: Observed) -> tuple[tuple[MemoryKind, int], ...]:
    """The peaks of a run of ours that ended well, and not on CPUs."""
    if seen.failure is not None or seen.memory_kind == "resident":
        return ()
    counts: tuple[tuple[MemoryKind, int | None], ...] = (
        ("reserved", seen.peak_reserved_bytes),
        ("alloc", seen.peak_allocated_bytes),
    )
    return tuple((kind, count) for kind, count in counts if count)


def known_peaks(told: Sequence[ToldPeak], asked: Stack, cluster: Cluster | None) -> list[KnownPeak]:
    """Those of `asked`'s software beside their predictions, the newest of the nearest stacks."""
    own = [one for one in told if one.stack.is_program_of(asked)]
    near = sorted(reversed(own), key=lambda one: one.stack != asked)[:MOST_RUNS]
    return peaks_among(peak for one in near for peak in priced_peaks(one, cluster))


def peaks_among(priced: Iterable[JobPeak]) -> list[KnownPeak]:
    """Runs of one job as one, by their median."""
    alike: dict[Hashable, list[KnownPeak]] = {}
    for job, peak in priced:
        alike.setdefault((job, peak.stack, peak.kind, peak.is_least), []).append(peak)
    return [_joined(same) for same in alike.values()]


def _joined(same: Sequence[KnownPeak]) -> KnownPeak:
    first = same[0]
    return KnownPeak(
        stack=first.stack,
        kind=first.kind,
        log_ratio=median(one.log_ratio for one in same),
        is_least=first.is_least,
        unknown_log_error=first.unknown_log_error,
        runs=len(same),
    )


def priced_peaks(told: ToldPeak, cluster: Cluster | None = None) -> list[JobPeak]:
    """A run beside its prediction: by the count that tells most, or, where that filled the device,
    as no less than that, and by the next."""
    try:
        priced = (
            _row_priced(told.source, cluster)
            if isinstance(told.source, LedgerRow)
            else _table_priced(told.source)
        )
    except FsdpPlanError:
        return []
    device_bytes, memory, found = priced.device_bytes, priced.memory, []
    if not told.counted:
        ratio = log(device_bytes / memory.least_device_bytes)
        found.append(_known(told, priced, kind="nvidia-smi", log_ratio=ratio, is_least=True))
    for kind, measured in told.counted:
        predicted = peak_bytes(memory, kind) or 1
        outside = 0 if kind == "alloc" else memory.peak_device_bytes - predicted
        is_full = measured + outside > FULL_FRACTION * device_bytes
        ratio = log(measured / predicted)
        found.append(_known(told, priced, kind=kind, log_ratio=ratio, is_least=is_full))
        if not is_full:
            break
    return [(priced.job, one) for one in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    job: Hashable
    memory: MemoryBreakdown
    device_bytes: int
    unknown_log_error: float = 0.0


def _known(
    told: ToldPeak, priced: _Priced, *, kind: MemoryKind, log_ratio: float, is_least: bool
) -> KnownPeak:
    return KnownPeak(
        stack=told.stack,
        kind=kind,
        log_ratio=log_ratio,
        is_least=is_least,
        unknown_log_error=priced.unknown_log_error,
    )


def _row_priced(row: LedgerRow, cluster: Cluster | None) -> _Priced:
    job, here = row.job, machines_of(row, cluster)
    memory = rank_memory(
        Case(model=job.model, cluster=here, training=job.training, layout=job.layout)
    )
    return _Priced(
        job=(job.model, numbers_of(job.training), job.layout),
        memory=memory,
        device_bytes=here.device.memory_bytes,
    )


def _table_priced(expressed: Expressed) -> _Priced:
    predicted = predict(expressed)
    if not isinstance(predicted, Prediction):
        raise SpecError(predicted.sentence)
    return _Priced(
        job=(expressed.model, numbers_of(expressed.training), predicted.layout),
        memory=predicted.memory,
        device_bytes=load_request(expressed.cluster_request).device.memory_bytes,
        unknown_log_error=unknown_peak_log_error(expressed),
    )


def learned_peaks(
    known: Sequence[KnownPeak],
    asked: Stack,
    *,
    fit: DeviceFit,
    widths: Widths,
    kind: MemoryKind = "nvidia-smi",
) -> LearnedPeaks | None:
    """What `known` say of peaks of `asked`, counted as `kind`; None where they say nothing."""
    variance = SHARE * fit.peak_memory_stack_fraction**2
    if not known or not variance or not fit.peak_memory_base_fraction:
        return None
    said = [_said(one, known, asked, fit, widths) for one in known]
    measured = [one for one in said if not one.is_least]
    state, surprise = _posterior(measured, variance)
    start = widths.degrees_of_freedom - 2
    wider = max(1.0, (start + surprise) / (start + len(measured)))
    asked_for, base = KNOWS[kind], fit.peak_memory_base_fraction**2
    spread = wider * (state.variance_of(asked_for) + base) - base
    for one in sorted((one for one in said if one.is_least), key=lambda one: -one.log_ratio):
        left = one.log_ratio - state.mean_of(one.tells)
        if left > 0:
            weight = _weight(left, one.noise)
            state = state.given(one, weight, narrows=False)
    return LearnedPeaks(
        runs=sum(one.runs for one in known),
        shift_log=max(-3.0, min(3.0, state.mean_of(asked_for))),
        stack_fraction=sqrt(spread),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What one job says: `tells` · (what the asked stack shares) + noise."""

    tells: tuple[float, ...]
    log_ratio: float
    noise: float
    """Variance."""
    is_least: bool


def _said(
    one: KnownPeak, known: Sequence[KnownPeak], asked: Stack, fit: DeviceFit, widths: Widths
) -> _Said:
    """Jobs of one other stack have what sets it apart in common: together they say no more of the
    asked one than their correlation."""
    rho = 1.0
    if one.stack.precision != asked.precision:
        rho *= widths.other_precision
    if one.stack.device != asked.device:
        rho *= widths.other_device
    alike = sum(other.stack == one.stack for other in known)
    apart = (1 - rho**2) * SHARE * sum(KNOWS[one.kind]) * fit.peak_memory_stack_fraction**2
    return _Said(
        tells=tuple(rho * share for share in KNOWS[one.kind]),
        log_ratio=one.log_ratio,
        noise=fit.peak_memory_base_fraction**2 + one.unknown_log_error**2 + alike * apart,
        is_least=one.is_least,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """A normal over what runs of the asked stack share."""

    mean: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]

    def mean_of(self, tells: Sequence[float]) -> float:
        return _dot(tells, self.mean)

    def variance_of(self, tells: Sequence[float]) -> float:
        return _dot(tells, [_dot(row, tells) for row in self.covariance])

    def given(self, said: _Said, weight: float, *, narrows: bool = True) -> _State:
        """After one more job (a step of a Kalman filter)."""
        crossed = [_dot(row, said.tells) for row in self.covariance]
        total = _dot(said.tells, crossed) + said.noise / weight
        left = said.log_ratio - self.mean_of(said.tells)
        mean = tuple(
            one + cross / total * left for one, cross in zip(self.mean, crossed, strict=True)
        )
        if not narrows:
            return _State(mean=mean, covariance=self.covariance)
        covariance = tuple(
            tuple(value - a * b / total for value, b in zip(row, crossed, strict=True))
            for row, a in zip(self.covariance, crossed, strict=True)
        )
        return _State(mean=mean, covariance=covariance)


def _posterior(said: Sequence[_Said], variance: float) -> tuple[_State, float]:
    """(After all of them, how surprising they were: a mean of 1 for each is as expected); the
    weights of those that are far off are found in turns."""
    places = range(len(KNOWS))
    before = _State(
        mean=(0.0,) * len(places),
        covariance=tuple(tuple(variance * (a == b) for b in places) for a in places),
    )
    weights, state, surprise = [1.0] * len(said), before, 0.0
    for _ in range(MOST_ROUNDS):
        state, surprise = before, 0.0
        for one, weight in zip(said, weights, strict=True):
            left = one.log_ratio - state.mean_of(one.tells)
            surprise += left**2 / (state.variance_of(one.tells) + one.noise / weight)
            state = state.given(one, weight)
        found = [_weight(one.log_ratio - state.mean_of(one.tells), one.noise) for one in said]
        still = all(abs(a - b) < STILL for a, b in zip(found, weights, strict=True))
        weights = found
        if still:
            break
    return state, surprise


def _weight(left: float, noise: float) -> float:
    return min(1.0, (OUTLIER_DEGREES + 1) / (OUTLIER_DEGREES + left**2 / noise))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))

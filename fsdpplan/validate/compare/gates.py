"""Gates: one comparison of measured times each, with its noise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Literal

from fsdpplan.validate.fit.robust import robust_scale

GateKind = Literal["rank", "device", "pair", "group", "level"]
"""One rank's device; the devices of all; the link of two neighbouring ranks; the links of a group
among several; a level of links."""
Against = Literal["profile", "equals"]

SURE = 3.0
"""Standard errors by which a part must be past the limit: of a thousand comparisons of healthy
parts, each as slow as the limit allows, one fails."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, where errors are normal."""
QUARTILE_ERROR = 1.3626
"""The same of a quartile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What one part of the machine took, over what was expected of it."""

    kind: GateKind
    where: str
    """Such as `rank 5 on host n02`, `link n01-n03, ranks 7-15`, `level infiniband`."""
    what: str
    """What was timed, such as `matmul` or `bandwidth`."""
    level: int | None
    """Of links: index of the outermost level that they are of."""
    factor: float
    """Measured over expected time; above 1: slower."""
    limit: float
    """Past this it is slow: 1, the tolerance, and the noise."""
    rows: int

    @property
    def against(self) -> Against:
        """Whose time is expected: the profile's, or that of its healthy equals."""
        return "profile" if self.kind in ("device", "level") else "equals"

    @property
    def passed(self) -> bool:
        """Whether it is as fast as it should be."""
        return self.factor <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One row beside what is expected of it."""

    log_factor: float
    """log(measured / expected)."""
    log_error: float
    """Standard error of the measured time's logarithm, from its repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSubject:
    """What a gate is about."""

    kind: GateKind
    where: str
    what: str
    level: int | None = None


def timed(seconds: Sequence[float], expected_seconds: float) -> Timed:
    """A row with these repeats."""
    logs = [log(one) for one in seconds]
    scatter = robust_scale(logs) if len(logs) > 1 else 0.0
    return Timed(
        log_factor=log(undisturbed(seconds)) - log(expected_seconds),
        log_error=QUARTILE_ERROR * scatter / sqrt(len(logs)),
    )


def undisturbed(seconds: Sequence[float]) -> float:
    """The repeat that three quarters of the others are no faster than.

    What disturbs a repeat makes it longer, and of three repeats two may well be disturbed; a part
    that is slow is slow in all of them.
    """
    ordered = sorted(seconds)
    return ordered[(len(ordered) - 1) // 4]


def noise(rows: Sequence[Timed]) -> float:
    """How far the median of `rows` may be off by chance, in log time: `SURE` standard errors.

    From how the rows scatter, and from how the repeats of each do.
    """
    own = fmean(row.log_error**2 for row in rows)
    between = robust_scale([row.log_factor for row in rows]) if len(rows) > 1 else 0.0
    return SURE * MEDIAN_ERROR * sqrt((own + between**2) / len(rows))


def gate(
    part: GateSubject, rows: Sequence[Timed], *, tolerance: float, allowance: float = 0.0
) -> Gate:
    """The gate of one part. `allowance`: how far the expected times themselves may be off, in log
    time."""
    return Gate(
        kind=part.kind,
        where=part.where,
        what=part.what,
        level=part.level,
        factor=exp(median(row.log_factor for row in rows)),
        limit=(1 + tolerance) * exp(noise(rows) + allowance),
        rows=len(rows),
    )


def middle(equals: Iterable[Sequence[float]]) -> Sequence[float]:
    """The repeats of the one in the middle of several equals; of two, of the faster one."""
    ordered = sorted(equals, key=undisturbed)
    return ordered[(len(ordered) - 1) // 2]


def healthy(equals: Iterable[Sequence[float]]) -> Sequence[float]:
    """The repeats of the one that three quarters of its equals are no faster than: where one host
    of four is slow, so are most links between hosts."""
    ordered = sorted(equals, key=undisturbed)
    return ordered[(len(ordered) - 1) // 4]

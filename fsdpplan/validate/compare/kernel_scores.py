"""Kernel scores: tables of timed matmuls and collectives against what the cost model says.

error = predicted / measured - 1. Matmuls are grouped by GPU, format and size, collectives by GPU,
fabric and whether they span nodes; those below a MiB, too short to matter in training, are
predicted and not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import load_device, load_node
from fsdpplan.files.runs.kernels import (
    UNNAMED,
    TimedCollective,
    TimedMatmul,
    read_timed_collectives,
    read_timed_matmuls,
)
from fsdpplan.validate.compare.errors import percentile
from fsdpplan.validate.compare.kernels import (
    COLLECTIVES,
    MOST_GPUS,
    NODES,
    collective_row,
    matmul_row,
    predicted_collective_seconds,
    predicted_matmul_seconds,
)
from fsdpplan.validate.runs.fabric import load_request, node_gpus, request_for
from fsdpplan.validate.runs.skipped import NotExpressed, Skipped

FROM_BYTES = 2**20

WITH_CAST = "aiconfigurator"
"""Of this collector, fp8 rows include the cast of their input (`CAST_BYTES_PER_ELEMENT`)."""

SIZE_CLASSES = ((0.05e12, "< 0.05"), (0.5e12, "0.05-0.5"), (5e12, "0.5-5"), (float("inf"), "> 5"))
"""FLOPs up to which a product is of a class, in TFLOP."""

KernelKind = Literal["matmul", "collective"]
Timed = TypeVar("Timed", TimedMatmul, TimedCollective)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredKernel:
    """One row."""

    row: int
    group: tuple[str, ...]
    measured_seconds: float | None
    predicted_seconds: float | None
    """None where it is skipped."""
    skipped: Skipped | None
    counts: bool
    """Whether the errors are over it."""

    @property
    def error_fraction(self) -> float | None:
        """Predicted over measured, less 1."""
        if self.predicted_seconds is None or self.measured_seconds is None:
            return None
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelErrors:
    """The rows of one group."""

    group: tuple[str, ...]
    rows: int
    median_abs_error_fraction: float
    p90_abs_error_fraction: float
    bias_fraction: float
    """Median of the signed errors: above 0 is predicted too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """A whole table."""

    kind: KernelKind
    group_names: tuple[str, ...]
    rows: tuple[ScoredKernel, ...]
    groups: tuple[KernelErrors, ...]
    """In the order of their first row."""


def matmul_report(path: Path) -> KernelReport:
    """Every product of the table at `path`, by GPU, format and size."""
    return _report(
        "matmul",
        ("gpu", "dtype", "tflop"),
        [_scored(one, _matmul) for one in read_timed_matmuls(path)],
    )


def collective_report(path: Path) -> KernelReport:
    """Every collective of the table at `path`, by GPU, fabric and span."""
    return _report(
        "collective",
        ("gpu", "fabric", "span"),
        [_scored(one, _collective) for one in read_timed_collectives(path)],
    )


def size_class(flops: float) -> str:
    """TFLOP of one product, as a range."""
    return next(words for most, words in SIZE_CLASSES if flops <= most)


def _matmul(timed: TimedMatmul, scored: ScoredKernel) -> ScoredKernel:
    flops = 2.0 * timed.m * timed.n * timed.k
    scored = replace(
        scored,
        group=(timed.gpu, timed.dtype, size_class(flops)),
        measured_seconds=flops / timed.flops_per_second,
    )
    try:
        name = load_node(request_for(timed.gpu).profile).device
        device = load_device(name).device
        row = matmul_row(timed, name)
        seconds = predicted_matmul_seconds(
            row, device=device, with_cast=WITH_CAST in timed.source_url
        )
    except (SpecError, KeyError) as error:
        reason = "this number format is not priced" if isinstance(error, KeyError) else str(error)
        return replace(scored, skipped=Skipped(reason=reason, detail=timed.dtype))
    return replace(scored, predicted_seconds=seconds, counts=True)


def _collective(timed: TimedCollective, scored: ScoredKernel) -> ScoredKernel:
    span = "one node" if timed.nodes == 1 else "across nodes"
    fabric = timed.fabric or "not said"
    scored = replace(scored, group=(timed.gpu, fabric, span), measured_seconds=timed.seconds)
    if timed.gpu == UNNAMED:
        return replace(
            scored, skipped=Skipped(reason="its lines '# Rank 0 ... GPU' are missing", detail="")
        )
    if timed.collective not in COLLECTIVES:
        return replace(
            scored,
            skipped=Skipped(reason="this collective is not priced", detail=timed.collective),
        )
    known = NODES.get(timed.node_type)
    request = request_for(
        timed.gpu if known is None else "",
        network=timed.fabric,
        gpus=timed.gpus,
        gpus_per_node=timed.gpus // timed.nodes,
        profile=known,
    )
    if timed.gpus > MOST_GPUS.get(timed.node_type, timed.gpus):
        raise NotExpressed("the links between these GPUs are not in the profile", timed.node_type)
    row = collective_row(timed, request.profile)
    if timed.gpus // timed.nodes > node_gpus(request.profile):
        raise NotExpressed("more GPUs a node than its profile has", request.profile)
    return replace(
        scored,
        measured_seconds=row.seconds,
        predicted_seconds=predicted_collective_seconds(row, cluster=load_request(request)),
        counts=timed.bytes >= FROM_BYTES,
    )


def _scored(timed: Timed, score: Callable[[Timed, ScoredKernel], ScoredKernel]) -> ScoredKernel:
    blank = ScoredKernel(
        row=timed.row,
        group=(timed.gpu,),
        measured_seconds=None,
        predicted_seconds=None,
        skipped=None,
        counts=False,
    )
    try:
        return score(timed, blank)
    except NotExpressed as error:
        return replace(blank, skipped=error.skipped)
    except SpecError as error:
        return replace(
            blank, skipped=Skipped(reason="the cost model does not take it", detail=str(error))
        )


def _report(kind: KernelKind, names: tuple[str, ...], rows: Sequence[ScoredKernel]) -> KernelReport:
    groups: dict[Hashable, list[ScoredKernel]] = {}
    for row in rows:
        if row.counts:
            groups.setdefault(row.group, []).append(row)
    return KernelReport(
        kind=kind,
        group_names=names,
        rows=tuple(rows),
        groups=tuple(map(_errors, groups.values())),
    )


def _errors(rows: Sequence[ScoredKernel]) -> KernelErrors:
    signed = [row.error_fraction or 0.0 for row in rows]
    sizes = [abs(one) for one in signed]
    return KernelErrors(
        group=rows[0].group,
        rows=len(rows),
        median_abs_error_fraction=median(sizes),
        p90_abs_error_fraction=percentile(sizes, 0.9),
        bias_fraction=median(signed),
    )

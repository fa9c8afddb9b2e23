"""The table of `single_gpu.py`: predicted beside measured, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from single_gpu_cases import Trial

from fsdpplan.run.compare import Comparison
from fsdpplan.units import format_gib, format_seconds

STEP, MEMORY = "step_seconds", "peak_allocated_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A case after it was run, or why it was not."""

    case: Trial
    comparison: tuple[Comparison, ...] = ()
    device: str = ""
    """What it ran on, and by which torch."""
    why: str | None = None
    """None: it ran to its end."""

    def row(self, quantity: str) -> Comparison:
        """One quantity, predicted and measured."""
        return next(row for row in self.comparison if row.quantity == quantity)


def table(results: Sequence[Result], *, profile: str) -> str:
    """All cases that ran, what the errors come to, and why the others did not run."""
    ran = [result for result in results if result.why is None]
    devices = "; ".join(dict.fromkeys(result.device for result in ran)) or "nothing yet"
    lines = [
        f"Measured on {devices}; predicted before that with {profile}.",
        "A batch is sequences x tokens; an error is `predicted / measured - 1`.",
        "",
        "| model | batch | kernels | checkpointing | step: predicted | measured | error "
        "| peak memory: predicted | measured | error |",
        "|---|---:|---|---|---:|---:|---:|---:|---:|---:|",
        *map(_line, ran),
        "",
        *_errors([result.row(STEP) for result in ran], "step"),
        *_errors([result.row(MEMORY) for result in ran], "peak memory"),
        *(f"- not run: {result.case.name}: {result.why}" for result in results if result.why),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _line(result: Result) -> str:
    case = result.case
    cells = (
        case.model.name,
        case.batch,
        case.kernels,
        case.checkpointing,
        *_cells(result.row(STEP), format_seconds),
        *_cells(result.row(MEMORY), format_gib),
    )
    return f"| {' | '.join(cells)} |"


def _cells(row: Comparison, shown: Callable[[float], str]) -> tuple[str, str, str]:
    error = _error(row)
    return (
        shown(row.predicted),
        "unknown" if row.measured is None else shown(row.measured),
        "" if error is None else f"{100 * error:+.1f} %",
    )


def _error(row: Comparison) -> float | None:
    """None, too, where a note says that the two numbers are not of one kind."""
    return None if row.note else row.error_fraction


def _errors(rows: Sequence[Comparison], words: str) -> Iterator[str]:
    errors = [abs(error) for row in rows if (error := _error(row)) is not None]
    if errors:
        median, most = 100 * statistics.median(errors), 100 * max(errors)
        yield f"- {words}: median error {median:.1f} %, largest {most:.1f} %"
    banded = [row.inside_band for row in rows if row.inside_band is not None]
    if banded:
        yield f"- {words}: {sum(banded)} of {len(banded)} inside the 80 % band"
    yield from (f"- {note}" for note in dict.fromkeys(row.note for row in rows) if note)

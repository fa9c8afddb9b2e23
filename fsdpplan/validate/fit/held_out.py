"""Predict each project from constants fitted without it.

    python -m fsdpplan.validate.fit.held_out [--table RUNS.csv] [--date YYYY-MM-DD]

An error on rows that were fitted to says how well a model can bend; an error on a project that it
has never seen says how well it predicts. Matmul and collective rows are not held back: they are
measured on their own. A device that only the project has keeps what it takes from its relatives.

Writes the predictions beside the table (`held_out.json`); `bands` makes the band of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.table import MeasuredRun, bundled_runs, known_runs, read_runs
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.cluster import Evidence
from fsdpplan.spec.plan import TimeBreakdown
from fsdpplan.validate.compare.predict import Prediction, predict_row
from fsdpplan.validate.fit.steps import (
    Slopes,
    Values,
    fits_of,
    profile_values,
    refitted,
    slopes_at,
    usable_rows,
)
from fsdpplan.validate.runs.projects import project_of, projects_of

HELD_OUT = "held_out.json"
"""Name of the file, beside the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRow:
    """One row predicted without its project."""

    row: int
    project: str
    measured_step_seconds: float
    evidence: Evidence
    """Of the device: `fitted` or `datasheet`."""
    time: TimeBreakdown
    unknown_log_error: float
    """For what the row leaves open (`predict.unknown_log_error`)."""

    @property
    def predicted_step_seconds(self) -> float:
        """The expected step time."""
        return self.time.total_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """All rows, each predicted without its project, and the constants of each project's turn."""

    constants: Mapping[str, Values]
    """Fitted without the project of that name."""
    rows: tuple[HeldOutRow, ...]


def held_out_rows(
    runs: Sequence[MeasuredRun], project: str, *, values: Values
) -> tuple[HeldOutRow, ...]:
    """The timed rows of `project` with constants `values`, which must not come from them."""
    rows = []
    fits = fits_of(values)
    for run in runs:
        if project_of(run.source_id) != project or not run.is_timed:
            continue
        outcome = predict_row(run, fits)
        measured = run.measured_step_seconds
        if isinstance(outcome, Prediction) and measured is not None:
            rows.append(
                HeldOutRow(
                    row=run.row,
                    project=project,
                    measured_step_seconds=measured,
                    evidence=outcome.evidence,
                    time=outcome.time,
                    unknown_log_error=float(f"{outcome.unknown_log_error:.4g}"),
                )
            )
    return tuple(rows)


def hold_out(
    runs: Sequence[MeasuredRun], project: str, *, slopes: Slopes
) -> tuple[dict[str, float], tuple[HeldOutRow, ...]]:
    """Constants fitted without `project`, and its rows predicted with them.

    `slopes`, of all rows about the constants that are fitted to all, are straight as far as the fit
    moves without one project: a fit from them differs from a fresh one by less than a digit in a
    hundred.
    """
    values = refitted(slopes.without(project))
    return values, held_out_rows(runs, project, values=values)


def written(held_out: HeldOut) -> str:
    """As JSON, a line a row."""
    lines = ",\n".join(
        json.dumps({**asdict(row), "time": _short(row.time)}) for row in held_out.rows
    )
    constants = json.dumps(held_out.constants, indent=1, sort_keys=True)
    return f'{{"constants": {constants},\n"rows": [\n{lines}\n]}}\n'


def _short(time: TimeBreakdown) -> dict[str, float]:
    """Parts of a step to six digits; its passes are priced again where they are asked for."""
    parts = [part.name for part in fields(time) if part.name != "passes"]
    return {name: float(f"{getattr(time, name):.6g}") for name in parts}


def read_held_out(path: Path) -> HeldOut:
    """What `written` wrote to `path`."""
    try:
        document = json.loads(path.read_text())
        rows = tuple(
            HeldOutRow(**{**row, "time": TimeBreakdown(**row["time"])}) for row in document["rows"]
        )
        return HeldOut(constants=document["constants"], rows=rows)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SpecError(
            f"{path.name} does not hold predictions of held-out projects ({error}): write it again "
            "with python -m fsdpplan.validate.fit.held_out"
        ) from error


def projects_to_hold_out(runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """Every project with a timed row."""
    return projects_of(run for run in runs if run.is_timed)


def hold_out_all(runs: Sequence[MeasuredRun]) -> HeldOut:
    """Every project in its turn."""
    slopes = slopes_at(usable_rows(runs), profile_values())
    turns = {
        project: hold_out(runs, project, slopes=slopes) for project in projects_to_hold_out(runs)
    }
    return HeldOut(
        constants={project: values for project, (values, _) in turns.items()},
        rows=tuple(row for _, rows in turns.values() for row in rows),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold out each project, and write the predictions."""
    parser = argparse.ArgumentParser(description="Predict each project without its own rows.")
    parser.add_argument("--table", type=Path, help="table of runs; the repository's if not given")
    options = parser.parse_args(arguments)
    runs = read_runs(options.table) if options.table else known_runs()
    held_out = hold_out_all(runs)
    path = (options.table or bundled_runs()).parent / HELD_OUT
    write_text_atomically(path, written(held_out), advice="a checkout's tables are written to")
    print(f"wrote {path.name}: {len(held_out.rows)} rows of {len(held_out.constants)} projects")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Results: the published runs predicted, what was predicted of them held back, and the record.

What must not grow is in `tests/golden/validation.toml`, with the reasons behind what did and behind
the rows that are furthest off.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpplan.files.profiles.catalogue import load_profile
from fsdpplan.files.profiles.devices import PHYSICS, PhysicsProfile
from fsdpplan.files.runs.table import read_runs
from fsdpplan.spec.cluster import Evidence, StepError
from fsdpplan.validate.compare.compared import ComparedRun
from fsdpplan.validate.compare.errors import Errors, errors_over
from fsdpplan.validate.compare.pairs import LayoutPair, layout_pairs
from fsdpplan.validate.compare.report import Report, report
from fsdpplan.validate.fit.bands import band_rows
from fsdpplan.validate.fit.held_out import read_held_out
from fsdpplan.validate.runs.projects import is_tuned, project_of

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "tests" / "golden" / "bench" / "train_runs.csv"
HELD_OUT = ROOT / "tests" / "golden" / "bench" / "held_out.json"
RECORDED = ROOT / "tests" / "golden" / "validation.toml"

GREW = 0.0015
"""Errors are recorded to a tenth of a percent: less than this more is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that the page tells."""

    plain: Report
    held_out: Mapping[int, ComparedRun]
    """By row, predicted with constants fitted without its project."""
    pairs: tuple[LayoutPair, ...]
    """Layouts of one job, likewise."""
    errors: Mapping[Evidence, StepError]
    """Those of the profiles, by evidence."""


def results() -> Results:
    """The published runs predicted, and what was predicted of them held back."""
    runs = read_runs(RUNS)
    plain = report(runs)
    held = read_held_out(HELD_OUT).rows if HELD_OUT.is_file() else ()
    expected = {row.row: row.predicted_step_seconds for row in held}
    rows = {row.run.row: row for row in plain.rows}
    # those of the other tables that constants are fitted to are no rows of the page
    moved = {n: _moved(rows[n], seconds) for n, seconds in expected.items() if n in rows}
    physics = load_profile(PHYSICS)
    assert isinstance(physics, PhysicsProfile)
    return Results(
        plain=plain,
        held_out={n: row for n, row in moved.items() if row is not None},
        pairs=layout_pairs(band_rows([row for row in held if row.row in rows], runs), runs),
        errors=dict(physics.errors),
    )


def _moved(row: ComparedRun, seconds: float) -> ComparedRun | None:
    """`row` with another expected time, in a band of the same width."""
    prediction = row.prediction
    if prediction is None:
        return None
    band = prediction.step_seconds
    scale = seconds / band.expected
    moved = replace(band, lower=band.lower * scale, expected=seconds, upper=band.upper * scale)
    return replace(row, outcome=replace(prediction, step_seconds=moved))


RECORDED_ERRORS: Mapping[str, Callable[[Errors], float]] = {
    "median": lambda errors: errors.median_abs_error_fraction,
    "p90": lambda errors: errors.p90_abs_error_fraction,
}


def reached(found: Results) -> dict[str, dict[str, float]]:
    """The errors that must not grow, by what they are over."""
    out: dict[str, dict[str, float]] = {}
    for source in found.plain.sources:
        if source.errors is not None:
            out[source.source_id] = {
                name: round(value(source.errors), 3) for name, value in RECORDED_ERRORS.items()
            }
    for one in found.plain.memory:
        key = f"memory of {one.source_id}, {one.kind}"
        out[key] = {"median": round(one.median_abs_error_fraction, 3)}
    held = list(found.held_out.values())
    for project in dict.fromkeys(project_of(row.run.source_id) for row in held):
        errors = errors_over(
            [row for row in held if project_of(row.run.source_id) == project and is_tuned(row.run)]
        )
        if errors is not None:
            out[f"{project} held out"] = {
                name: round(value(errors), 3) for name, value in RECORDED_ERRORS.items()
            }
    return out


def read_recorded() -> dict[str, object]:
    """The recorded errors, and the reasons behind rows."""
    return tomllib.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {}


def reason_for(row: int, recorded: Mapping[str, object]) -> str | None:
    """Why that row is far off, as written by hand."""
    for entry in recorded.get("reason", ()):  # type: ignore[attr-defined]
        for first, last in entry["rows"]:
            if first <= row <= last:
                return str(entry["why"])
    return None


def grown(now: Mapping[str, Mapping[str, float]], recorded: Mapping[str, object]) -> list[str]:
    """A sentence for each error that is higher than recorded."""
    before: Mapping[str, Mapping[str, float]] = recorded.get("errors", {})  # type: ignore[assignment]
    return [
        f"{name}: {number} error {before[name][number]:.1%} grew to {value:.1%}"
        for name, numbers in now.items()
        for number, value in numbers.items()
        if name in before and value > before[name].get(number, value) + GREW
    ]


def record(found: Results, because: str | None) -> None:
    """Write what is reached; what grew needs a reason."""
    now, recorded = reached(found), read_recorded()
    higher = grown(now, recorded)
    if higher and not because:
        raise SystemExit("\n".join([*higher, 'give --because "REASON" to record them']))
    log = list(recorded.get("log", ()))  # type: ignore[call-overload]
    log += [{"grew": higher, "because": because}] if higher else []
    lines = [RECORDED_HEAD]
    for name, numbers in now.items():
        values = ", ".join(f"{key} = {value}" for key, value in numbers.items())
        lines.append(f'"{name}" = {{ {values} }}')
    for entry in log:
        lines += ["", "[[log]]", f"grew = {_toml(entry['grew'])}"]
        lines += [f"because = {_toml(entry['because'])}"]
    for entry in recorded.get("reason", ()):  # type: ignore[attr-defined]
        lines += ["", "[[reason]]", f"rows = {entry['rows']}", f"why = {_toml(entry['why'])}"]
    RECORDED.write_text("\n".join(lines) + "\n", encoding="utf-8")


RECORDED_HEAD = """# What the cost model reaches on the published runs, as shares of the measured
# value; `python docs/validation.py --record` writes it. An error may grow only with a reason, which
# stays here under [[log]]. [[reason]] tells by hand why rows (first and last) are far off.

[errors]"""


def _toml(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'

"""`fsdpplan status`: how the runs of this folder stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypedDict

import typer

from fsdpplan.cli.options.files import Json
from fsdpplan.cli.views.render import blocks, columns, table, tell, wrapped
from fsdpplan.run.follow.jobs import runs_of, unreadable_runs
from fsdpplan.run.follow.status import Standing, standing
from fsdpplan.units import format_percent, format_seconds

MOST_ENDED = 10
"""Runs that have ended and are shown on a screen."""


def status(*, json: Json = False) -> None:
    """Show how the runs of this folder stand."""
    found = [standing(run) for run in runs_of(Path.cwd())]
    for text in unreadable_runs(Path.cwd()):
        tell(f"warning: {text}")
    typer.echo(standings_json(found) if json else standings_screen(found, width=columns()))


class StatusJson(TypedDict):
    """What `status --json` prints."""

    runs: list[Annotated[dict[str, Any], Standing]]


def standings_json(found: Sequence[Standing]) -> str:
    """What `status --json` prints."""
    document: StatusJson = {"runs": [asdict(each) for each in found]}
    return json.dumps(document, indent=2)


def standings_screen(found: Sequence[Standing], *, width: int) -> str:
    """A row a run, and why those wait that do."""
    if not found:
        nothing = "Nothing was launched from this folder: type fsdpplan run first."
        return wrapped(nothing, width=width)
    going = [each for each in found if not each.ended]
    ended = [each for each in found if each.ended]
    shown = sorted([*going, *ended[:MOST_ENDED]], key=found.index)
    rows = table(
        [_row(each) for each in shown],
        headers=("run", "state", "step", "MFU", "plan", "left"),
        align=("left", "left", "right", "right", "right", "right"),
        width=width,
    )
    more = len(found) - len(shown)
    return blocks(
        rows,
        *(wrapped(text, width=width) for each in shown if (text := _remark(each))),
        wrapped(f"{more} older runs: fsdpplan status --json lists all.", width=width)
        if more
        else "",
    )


def _row(run: Standing) -> tuple[str, ...]:
    code = f" ({run.exit_code})" if run.exit_code else ""
    step = "" if not run.step and run.steps is None else str(run.step)
    return (
        run.run_id,
        f"{run.state}{code}",
        step if run.steps is None else f"{step}/{run.steps}",
        "" if run.mfu_fraction is None else format_percent(run.mfu_fraction),
        "" if run.planned_mfu_fraction is None else format_percent(run.planned_mfu_fraction),
        "" if run.left_seconds is None else format_seconds(run.left_seconds),
    )


def _remark(run: Standing) -> str:
    """Where a run is, or why it is not; nothing for one that has ended well."""
    start = f", expected to start {run.expected_start}" if run.expected_start else ""
    again = f", started again {run.restarts}x" if run.restarts else ""
    if run.words == run.state and not start and not again:
        return ""
    return f"{run.run_id}: {run.words}{start}{again}"

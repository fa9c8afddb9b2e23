"""How the runs of a folder stand, each in one row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fsdpplan.emit.slurm.header import MAX_SCRIPT_BYTES
from fsdpplan.errors import LaunchError
from fsdpplan.files.table import text_of
from fsdpplan.run.follow.jobs import RecordedRun, state_of
from fsdpplan.run.script_plan import plan_text

UNKNOWN = "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One run. None: not known, or not reported."""

    run_id: str
    engine: str
    jobs: tuple[str, ...]
    state: str
    """In the engine's word."""
    words: str
    """The state with nodes or reason."""
    ended: bool | None
    exit_code: int | None
    """None as long as it goes on."""
    expected_start: str | None
    restarts: int
    step: int
    steps: int | None
    loss: float | None
    step_seconds: float | None
    mfu_fraction: float | None
    planned_mfu_fraction: float | None
    left_seconds: float | None
    submitted_at: str
    run_folder: str


def standing(run: RecordedRun) -> Standing:
    """How a run stands now."""
    try:
        state, unknown = state_of(run), "no answer now"
    except LaunchError as error:
        state, unknown = None, str(error)
    measured = run.measured
    last = measured.steps[-1] if measured.steps else None
    goes_on = state is not None and not state.ended
    return Standing(
        run_id=run.shown_id,
        engine=run.record.engine,
        jobs=run.record.jobs,
        state=UNKNOWN if state is None else state.state,
        words=f"{UNKNOWN} ({unknown})" if state is None else state.words,
        ended=None if state is None else state.ended,
        exit_code=state.shell_code if state is not None and state.ended else None,
        expected_start=None if state is None else state.expected_start or None,
        restarts=0 if state is None else state.restarts,
        step=measured.last_step,
        steps=None if measured.start is None else measured.start.steps,
        loss=None if last is None else last.loss,
        step_seconds=measured.median("step_seconds"),
        mfu_fraction=measured.median("mfu_fraction"),
        planned_mfu_fraction=_planned_mfu_fraction(Path(run.record.script)),
        left_seconds=measured.left_seconds if goes_on else None,
        submitted_at=run.record.submitted_at,
        run_folder=str(run.run_folder),
    )


def _planned_mfu_fraction(script: Path) -> float | None:
    """Read straight from the plan in the script: to check all of it takes longer than the rest."""
    try:
        text = text_of(script, limit_bytes=MAX_SCRIPT_BYTES)
        plan = json.loads(plan_text(text, script) or "")
        return float(plan["estimate"]["mfu_fraction"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None

"""Two jobs must not train on one folder of checkpoints: each would go on from the other's."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.emit.slurm.header import MAX_SCRIPT_BYTES
from fsdpplan.errors import LaunchError
from fsdpplan.files.table import text_of
from fsdpplan.run.engines.engine import JobState
from fsdpplan.run.follow.jobs import RecordedRun, runs_of, state_of
from fsdpplan.run.launch import Launch, checkpoints_word


def require_alone(launch: Launch, *, folder: Path, but: RecordedRun | None = None) -> None:
    """Raises LaunchError where a run of `folder`, other than `but`, goes on and saves where
    `launch` would. One that nobody can ask about now is taken for ended."""
    word = checkpoints_word(launch.script)
    for run in runs_of(folder) if word is not None else ():
        if but is not None and run.run_folder == but.run_folder:
            continue
        if _checkpoints_of(run) != word:
            continue
        state = _state(run)
        if state is not None and not state.ended:
            raise LaunchError(
                f"run {run.shown_id} of this folder is {state.words} and saves to the same "
                f"--checkpoint-dir: follow it by fsdpplan run --attach --job {run.shown_id}, end "
                f"it by fsdpplan cancel --job {run.shown_id}, or emit this one with another "
                "--checkpoint-dir"
            )


def _checkpoints_of(run: RecordedRun) -> str | None:
    if run.record.ending is not None:
        return None
    return checkpoints_word(text_of(Path(run.record.script), limit_bytes=MAX_SCRIPT_BYTES))


def _state(run: RecordedRun) -> JobState | None:
    try:
        return state_of(run)
    except LaunchError:
        return None

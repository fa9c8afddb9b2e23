"""One run from a script to its outcome: started, resumed, or come back to."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fsdpplan.emit.slurm.header import (
    MAX_SCRIPT_BYTES,
    PLAN_NAME,
    read_metrics_path,
    read_trained,
    script_digest,
)
from fsdpplan.errors import FsdpPlanError, LaunchError
from fsdpplan.files.job_records import EngineName, RunRecord, read_record
from fsdpplan.files.table import text_of
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.run.engines.engine import JobState
from fsdpplan.run.engines.machine import Target
from fsdpplan.run.follow.jobs import METRICS_NAME, RUNS_FOLDER, RecordedRun, runs_of, state_of
from fsdpplan.run.follow.show import Display
from fsdpplan.run.follow.under_way import UnderWay
from fsdpplan.run.launch import Launch, checkpoints_word
from fsdpplan.run.outcome import Manner, Outcome


def require_alone(launch: Launch, *, folder: Path, but: RecordedRun | None = None) -> None:
    """Raises LaunchError where a run of `folder`, other than `but`, goes on and saves where
    `launch` would: each would go on from the other's. One that nobody can ask about now is taken
    for ended."""
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


INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_ENGINES: Mapping[Target, EngineName] = {
    "here": "here",
    "allocation": "here",
    "slurm": "slurm",
    "kubernetes": "kubernetes",
}


def command_words(target: Target, script: Path) -> tuple[str, ...]:
    """The command that starts `script`, for `--dry-run`."""
    match target:
        case "slurm":
            return "sbatch", str(script)
        case "kubernetes":
            return "kubectl", "apply", "-f", str(script)
        case _:
            return "bash", str(script)


def run_launch(
    launch: Launch,
    *,
    folder: Path,
    target: Target,
    display: Display,
    manner: Manner | None = None,
) -> Outcome:
    """Run `launch` from `folder` and follow it to its end.

    It is ended early where NCCL goes over sockets between nodes that have RDMA adapters, unless
    that is allowed.
    """
    require_alone(launch, folder=folder)
    run_folder = _new_run_folder(folder)
    script = run_folder / launch.file_name
    own_metrics = read_metrics_path(launch.script)
    metrics = run_folder / METRICS_NAME if own_metrics is None else folder.resolve() / own_metrics
    record = RunRecord(
        engine=_ENGINES[target],
        jobs=(),
        folder=str(folder.resolve()),
        script=str(script),
        plan_sha256=script_digest(launch.script),
        metrics=str(metrics),
        submitted_at=_now(),
        host=socket.gethostname(),
    )
    run = RecordedRun(run_folder=run_folder, record=record)
    try:
        write_text_atomically(script, launch.script)
        if launch.plan_file is not None:
            # The job folder may be moved or cleared away; what the run was, stays.
            write_text_atomically(run_folder / PLAN_NAME, launch.plan_file)
        return UnderWay(run, launch, display, manner or Manner()).start(
            f"{launch.origin}: {_does(launch)}log and metrics in {run_folder}", target
        )
    except FsdpPlanError:
        # What never became a job leaves nothing behind.
        if read_record(run_folder) is None:
            shutil.rmtree(run_folder, ignore_errors=True)
        raise


def resume(
    run: RecordedRun, launch: Launch, *, target: Target, display: Display, manner: Manner
) -> Outcome:
    """Start the script of a run that has ended again, in its folder: it goes on from its newest
    checkpoint."""
    if run.run_folder.stat().st_uid not in (os.getuid(), 0):
        raise LaunchError(
            f"run {run.shown_id} was started by somebody else, whose script would run as you: copy "
            "the plan, and type fsdpplan run in a folder of your own"
        )
    state = state_of(run)
    if state is None or not state.ended:
        how = "nobody knows whether it has ended" if state is None else f"it is {state.words}"
        raise LaunchError(
            f"run {run.shown_id} cannot be resumed, since {how}: type fsdpplan run --attach to "
            "follow it, or fsdpplan cancel first"
        )
    if state.succeeded and run.measured.is_complete:
        raise LaunchError(
            f"run {run.shown_id} has trained all of its {run.measured.last_step} steps: fsdpplan "
            "run --attach shows what it came to; to train on, emit a script with more --steps and "
            "the same --checkpoint-dir"
        )
    require_alone(launch, folder=Path(run.record.folder), but=run)
    record = replace(
        run.record,
        earlier=(*run.record.earlier, *run.record.jobs),
        jobs=(),
        ending=None,
        is_cancelled=False,
        # What finds all steps done trains none, and the ledger has those already.
        in_ledger=run.record.in_ledger and run.measured.is_complete,
        log="",
        submitted_at=_now(),
        host=socket.gethostname(),
        engine=_ENGINES[target],
    )
    again = RecordedRun(run_folder=run.run_folder, record=record)
    return UnderWay(again, launch, display, manner).start(
        f"resuming {run.shown_id}: {_does(launch)}log and metrics in {run.run_folder}", target
    )


def attach(run: RecordedRun, launch: Launch, *, display: Display, manner: Manner) -> Outcome:
    """Follow a run that was started before; one that has ended is only looked at."""
    return UnderWay(run, launch, display, replace(manner, allow_sockets=True)).attach()


def _does(launch: Launch) -> str:
    """What the job is about to do, before more words."""
    does = read_trained(launch.script)
    return "" if does is None else f"{does}; "


def _new_run_folder(folder: Path) -> Path:
    """A fresh folder: what a run reports is never mixed with another run's."""
    _require_own_link(folder / RUNS_FOLDER)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        path = folder / RUNS_FOLDER / (f"{stamp}-{number}" if number else stamp)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise LaunchError(
                f"cannot make the run's folder {path}: {error.strerror}: run it from a folder "
                "that you may write to"
            ) from error
        return path.resolve()
    raise LaunchError(f"{folder / RUNS_FOLDER} holds too many runs of this second: try again")


def _require_own_link(path: Path) -> None:
    """Where others may write, a link of theirs would have this run write where they please."""
    if path.is_symlink() and path.lstat().st_uid not in (os.getuid(), 0):
        raise LaunchError(
            f"{path} is a link that somebody else made: remove it, or run from a folder of your own"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")

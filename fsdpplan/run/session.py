"""One run from a script to its outcome."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.header import read_metrics_path
from fsdpplan.errors import LaunchError
from fsdpplan.files.table import write_text_atomically
from fsdpplan.run import slurm
from fsdpplan.run.follow import Follower
from fsdpplan.run.launch import Launch
from fsdpplan.run.local import run_here
from fsdpplan.run.machine import Target
from fsdpplan.run.metrics import Measured
from fsdpplan.run.nccl_watch import NcclWatch, nccl_variables, uses_nccl
from fsdpplan.run.show import Display
from fsdpplan.topology.nccl_report import NcclReport

RUNS_FOLDER = "fsdpplan-runs"
"""Beside the plan: one folder a run, with the script, its log and its metrics."""

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    """The job's own, 130 after Ctrl-C, or 5 where it was stopped."""
    job_id: str | None
    """Slurm's id; None for a run on this host."""
    ended: bool
    """False when the person left before the job did."""
    seconds: float
    """From start or submission to the end."""
    run_folder: Path
    """Where its script, log and metrics are."""
    measured: Measured
    nccl: NcclReport | None = None
    """What NCCL did; None where it said nothing or there was nothing for it to do."""
    warnings: tuple[str, ...] = ()
    """What NCCL did not do as planned."""
    stopped: str | None = None
    """Why the job was ended before it trained."""
    complaint: str | None = None
    """Why the training program ended early, in its words; None where it did not say."""
    log: Path | None = None
    """The job's log; None where Slurm has not said where it is."""


def command_words(target: Target, script: Path) -> tuple[str, ...]:
    """The command that starts `script`, for `--dry-run`."""
    return ("sbatch", str(script)) if target == "slurm" else ("bash", str(script))


def run_launch(
    launch: Launch,
    *,
    folder: Path,
    target: Target,
    display: Display,
    allow_sockets: bool = False,
) -> Outcome:
    """Run `launch` from `folder` and follow it to its end.

    It is ended early where NCCL goes over sockets between nodes that have RDMA adapters, unless
    `allow_sockets`.
    """
    run_folder = _new_run_folder(folder)
    script = run_folder / SCRIPT_NAME
    write_text_atomically(script, launch.script)
    own_metrics = read_metrics_path(launch.script)
    metrics = run_folder / "metrics.jsonl" if own_metrics is None else folder / own_metrics
    environment = _environment(target, metrics)
    watch = None
    if uses_nccl(launch.plan):
        watch = NcclWatch(folder=run_folder, plan=launch.plan, allow_sockets=allow_sockets)
        environment |= nccl_variables(
            script=launch.script, environment=environment, folder=run_folder
        )
    follower = Follower(metrics=metrics, display=display, nccl=watch)
    began, job_id, ended = time.monotonic(), None, True
    with display:
        display.state(f"{launch.origin}: log and metrics in {run_folder}")
        if target == "slurm":
            job_id = slurm.submit(script=script, folder=folder, environment=environment)
            exit_code, ended = _followed(
                job_id, environment=environment, follower=follower, display=display
            )
        else:
            log = run_folder / "job.log"
            log.touch()
            follower.follow_log(log)
            exit_code = run_here(
                script=script,
                log=log,
                folder=folder,
                environment=environment,
                follower=follower,
                display=display,
            )
    stopped = follower.verdict if ended else None
    return Outcome(
        exit_code=exit_code if stopped is None else LaunchError.exit_code,
        job_id=job_id,
        ended=ended,
        seconds=time.monotonic() - began,
        run_folder=run_folder,
        measured=follower.measured,
        nccl=None if watch is None else watch.report,
        warnings=() if watch is None else watch.warnings,
        stopped=stopped,
        complaint=follower.complaint,
        log=follower.log,
    )


def _followed(
    job_id: str, *, environment: Mapping[str, str], follower: Follower, display: Display
) -> tuple[int, bool]:
    """(exit code, whether the job has ended: it goes on after Ctrl-C)."""
    display.state(f"submitted as job {job_id}")
    try:
        code = slurm.follow_job(job_id, environment=environment, follower=follower, display=display)
    except slurm.Detached:
        display.state(f"job {job_id} goes on without you; scancel {job_id} ends it")
        return INTERRUPTED, False
    return code, True


def _new_run_folder(folder: Path) -> Path:
    """A fresh folder: what a run reports is never mixed with another run's."""
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


def _environment(target: Target, metrics: Path) -> dict[str, str]:
    """This process's own; without an allocation's variables for a run on this host alone."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if target != "here" or not name.startswith("SLURM_")
    }
    return {**kept, "FSDPPLAN_METRICS": str(metrics)}

"""Aftermath: all that a run left behind, for whoever looks at it afterwards.

`verify` compares; this reads what else is in the folder, too: its earlier starts and why they
ended, what NCCL did, nodes that failed. A run that failed, or goes on, is looked at as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdpplan.files.job_records import Ending, read_bad_nodes, read_record
from fsdpplan.files.table import read_text
from fsdpplan.run.follow.attempts import AttemptsTail, StartedOn, StartEnded
from fsdpplan.run.follow.metric_events import Start, Step, parse_event
from fsdpplan.run.follow.nccl_watch import NcclWatch, uses_nccl
from fsdpplan.run.verify import MAX_METRICS_BYTES, FinishedRun, newest_run, run_so_far
from fsdpplan.topology.read.nccl_report import NcclReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What a run left."""

    run: FinishedRun
    folder: Path
    """That its metrics lie in, or that was named."""
    steps: tuple[Step, ...]
    """Of all its starts; of a step that was done again, the last time."""
    resumed_at: tuple[int, ...]
    """Steps from which it was started again."""
    starts: tuple[StartedOn | StartEnded, ...]
    """What the job's script said of its starts."""
    ending: Ending | None
    """How it ended; None: nobody has written it down."""
    bad_nodes: Mapping[str, str]
    """Nodes that it must not have again, and why."""
    nccl: NcclReport | None
    """None: NCCL left no log, as on CPUs."""
    nccl_warnings: tuple[str, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what stands between the numbers."""
        steps = len(self.run.measured.steps)
        if self.run.measured.start is not None and self.run.measured.summary is None:
            what = "was ended" if self.ending is not None else "has not ended, or was killed,"
            return (*self.run.notes, f"it {what} after {steps} steps: what follows is of these")
        return self.run.notes


def aftermath(place: Path | None, *, plan_file: Path | None, folder: Path) -> Aftermath:
    """All that the run at `place` left, or the newest of `folder`; which run and which plan are
    those of `verify`."""
    place = newest_run(folder) if place is None else place
    run = run_so_far(place, plan_file=plan_file, folder=folder)
    run_folder = place if place.is_dir() else run.metrics.parent
    record = read_record(run_folder)
    steps, resumed_at = _history(run.metrics)
    report, warnings = _nccl(run, run_folder)
    return Aftermath(
        run=run,
        folder=run_folder,
        steps=steps,
        resumed_at=resumed_at,
        starts=tuple(AttemptsTail(run_folder).poll()),
        ending=None if record is None else record.ending,
        bad_nodes=read_bad_nodes(run_folder),
        nccl=report,
        nccl_warnings=warnings,
    )


def _history(metrics: Path) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """The steps of all starts, and where these went on from others."""
    text = read_text(metrics, limit_bytes=MAX_METRICS_BYTES, what="metrics file")
    steps: dict[int, Step] = {}
    resumed: list[int] = []
    for line in text.splitlines():
        event = parse_event(line)
        if isinstance(event, Step):
            steps[event.step] = event
        elif isinstance(event, Start) and not event.is_done and event.first_step > 0:
            resumed.append(event.first_step)
    return tuple(steps[number] for number in sorted(steps)), tuple(resumed)


def _nccl(run: FinishedRun, folder: Path) -> tuple[NcclReport | None, tuple[str, ...]]:
    """What NCCL's files in `folder` say, as `run` reads them while a job goes on."""
    if not uses_nccl(run.plan):
        return None, ()
    watch = NcclWatch(folder=folder, plan=run.plan, allow_sockets=True)
    watch.poll(steps=len(run.measured.steps), ended=True)
    return watch.report, watch.warnings

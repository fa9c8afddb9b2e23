"""Follow a job by the files that it writes: its log, its metrics, its starts, what NCCL says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from fsdpplan.files.table import text_of
from fsdpplan.run.follow.attempts import AttemptsTail, StartEnded
from fsdpplan.run.follow.metric_events import Start
from fsdpplan.run.follow.metrics import Measured, MetricsTail
from fsdpplan.run.follow.nccl_watch import NcclWatch
from fsdpplan.run.follow.show import Display
from fsdpplan.run.follow.tail import FileTail
from fsdpplan.units import format_seconds

_BEGIN = re.compile(r"Root Cause \(first observed failure\):")
_FIELD = re.compile(r"\s*(host|rank|exitcode)\s+: (-?[\w.-]+)(?:.*\((SIG[A-Z0-9]+)\))?")


class RootCause:
    """Hears the lines of a log, and knows the end of torchrun's report when it comes.

    Source of the format: torch.distributed.elastic.multiprocessing.errors, ChildFailedError.
    """

    def __init__(self) -> None:
        self._fields: dict[str, str] | None = None

    def hear(self, line: str) -> str | None:
        """One line, without the label of its node: the sentence, once its last field is there."""
        if _BEGIN.search(line):
            self._fields = {}
        if self._fields is None or not (found := _FIELD.match(line)):
            return None
        self._fields[found[1]] = found[2]
        if found[1] != "exitcode":
            return None
        rank, host = self._fields.get("rank", "?"), self._fields.get("host", "?")
        self._fields = None
        how = f"was ended by {found[3]}" if found[3] else f"ended with exit code {found[2]}"
        return f"rank {rank} on {host} {how}"


PREFLIGHT_NAME = "preflight.json"
MAX_PREFLIGHT_BYTES = 2**20

_LABEL = re.compile(r" *(\d+): ")
"""srun's, before the lines of each task."""
_COMPLAINT = re.compile(
    r"(?! *(?:srun|slurmstepd)\S*: )(?: *\S+: )?(?:\[rank [^\]]*\] )?error: (.+)"
)
"""The trainer's own line where it ends early, perhaps behind srun's label, which says less."""
_EVENT = '{"event": '


class Follower:
    """Passes what the files gain to a display, and gathers what was measured."""

    def __init__(
        self,
        *,
        metrics: Path,
        display: Display,
        nccl: NcclWatch | None = None,
        run_folder: Path | None = None,
        from_start: bool = False,
        collects: bool = False,
    ) -> None:
        """`run_folder` is where the job's script says how its starts went; `from_start`: what was
        measured until now counts; `collects`: the metrics come in the job's output, from its first
        line on, and are gathered in `metrics`."""
        self._collected = metrics if collects else None
        if collects:
            metrics.write_text("", encoding="utf-8")
        self._metrics = MetricsTail(metrics, from_start=from_start)
        self._attempts = (
            None if run_folder is None else AttemptsTail(run_folder, from_start=from_start)
        )
        self._preflight = None if run_folder is None else _Preflight(run_folder / PREFLIGHT_NAME)
        self._why_again = ""
        self._log: FileTail | None = None
        self._log_path: Path | None = None
        self._display = display
        self._nccl = nccl
        self._told: set[str] = set()
        self._first_step: int | None = None
        self.hosts: tuple[str, ...] = ()
        """Names of the tasks whose numbers srun puts before their lines; empty: not known."""
        self.measured = Measured()
        """What the run has reported so far."""
        self._root_cause = RootCause()
        self.complaint: str | None = None
        """Why the trainer ended early, as its last start said first."""

    @property
    def verdict(self) -> str | None:
        """Why the job has to end; None as long as it may go on."""
        return None if self._nccl is None else self._nccl.verdict

    @property
    def log(self) -> Path | None:
        """The job's log; None as long as nobody said where it is."""
        return self._log_path

    @property
    def steps_done(self) -> int:
        """Steps that the run has trained, over all of its starts."""
        if self._first_step is None:
            return len(self.measured.steps)
        return max(0, self.measured.last_step - self._first_step)

    def follow_log(self, path: Path, *, from_start: bool = False) -> None:
        """Show what is added to `path`; Slurm says only after a while where that is."""
        if path != self._log_path:
            self._log, self._log_path = FileTail(path, from_start=from_start), path

    def hear_log(self, path: Path) -> None:
        """Listen to what `path` holds already, without showing it; what is added is shown."""
        if path != self._log_path:
            self._log, self._log_path = FileTail(path, from_start=True), path
            for line in self._log.poll():
                self._hear(line)

    def poll(self, *, ended: bool = False) -> None:
        """Show what is new; `ended`: nobody writes any more."""
        self._look_at_starts()
        events = self._metrics.poll()
        if events:
            self._first_step = _first_step(events, self._first_step)
            self.measured = self.measured.plus_all(events)
            self._display.progress(self.measured)
        if self._log is not None:
            self.show(self._log.rest() if ended else self._log.poll())
        if self._nccl is not None:
            self._nccl.poll(steps=len(self.measured.steps), ended=ended)
            for text in self._nccl.warnings:
                self._warn(text)

    def show(self, lines: Iterable[str]) -> None:
        """Show lines of the job."""
        for line in lines:
            if not self._measure(line):
                self._display.output(with_host(line, self.hosts))
            self._hear(line)

    def _hear(self, line: str) -> None:
        found = _COMPLAINT.match(line)
        body = line[label.end() :] if (label := _LABEL.match(line)) else line
        said = found[1] if found else self._root_cause.hear(body)
        if said is not None and self.complaint is None:
            self.complaint = said
        if self._nccl is not None:
            self._nccl.feed(line)

    def _measure(self, line: str) -> bool:
        """Gather an event of the job's output."""
        body = line[match.end() :] if (match := _LABEL.match(line)) else line
        if self._collected is None or not body.startswith(_EVENT):
            return False
        with self._collected.open("a", encoding="utf-8") as file:
            file.write(body + "\n")
        return True

    def _look_at_starts(self) -> None:
        for event in () if self._attempts is None else self._attempts.poll():
            if isinstance(event, StartEnded):
                self._why_again = event.reason
                if event.exit_code:
                    self._display.state(event.words)
                continue
            why = f": {self._why_again}" if self._why_again else ""
            self._display.state(f"{event.words}{why}")
            self.complaint = None
            self.hosts = event.nodes if len(event.nodes) > 1 else ()
        if self._preflight is not None and (news := self._preflight.news()):
            self._display.state(news)

    def _warn(self, text: str) -> None:
        """Once, although the numbers in it may grow."""
        kind = text.partition(" although ")[2]
        if kind not in self._told:
            self._told.add(kind)
            self._display.state(f"warning: {text}")


def with_host(line: str, hosts: tuple[str, ...]) -> str:
    """A line of srun's with its task's host before it in place of the task's number."""
    match = _LABEL.match(line)
    if match is None or int(match[1]) >= len(hosts):
        return line
    return f"{hosts[int(match[1])]}: {line[match.end() :]}"


def _first_step(events: Iterable[object], known: int | None) -> int | None:
    """Steps that were done before the run first started."""
    if known is not None:
        return known
    return next((event.first_step for event in events if isinstance(event, Start)), None)


class _Preflight:
    """The newest result of the preflight in the ranks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _changed(path)

    def news(self) -> str | None:
        """Its sentence, where there is a new one."""
        changed = _changed(self._path)
        if changed == self._seen:
            return None
        self._seen = changed
        return preflight_words(self._path)


def preflight_words(path: Path) -> str | None:
    """What the preflight came to, in one line; None where it says nothing."""
    try:
        record = json.loads(text_of(path, limit_bytes=MAX_PREFLIGHT_BYTES))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("passed"), bool):
        return None
    if not record["passed"]:
        return f"preflight failed: {' '.join(str(record.get('problem')).split())}"
    seconds, warnings = record.get("seconds"), record.get("warnings")
    took = f" in {format_seconds(seconds)}" if isinstance(seconds, int | float) else ""
    remarks = len(warnings) if isinstance(warnings, list) else 0
    return f"preflight passed{took}" + (f", with {remarks} warnings in the log" if remarks else "")


def _changed(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns

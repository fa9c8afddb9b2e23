"""Follow a job by the files that it writes: its log, its metrics and what NCCL says."""

from __future__ import annotations

import re
from pathlib import Path

from fsdpplan.run.metrics import Measured, MetricsTail
from fsdpplan.run.nccl_watch import NcclWatch
from fsdpplan.run.show import Display
from fsdpplan.run.tail import FileTail

_COMPLAINT = re.compile(r"(?:\d+: )?(?:\[rank [^\]]*\] )?error: (.+)")
"""The trainer's own line where it ends early, perhaps behind srun's label."""


class Follower:
    """Passes what the files gain to a display, and gathers what was measured."""

    def __init__(self, *, metrics: Path, display: Display, nccl: NcclWatch | None = None) -> None:
        self._metrics = MetricsTail(metrics)
        self._log: FileTail | None = None
        self._log_path: Path | None = None
        self._display = display
        self._nccl = nccl
        self._told: set[str] = set()
        self.measured = Measured()
        """What the run has reported so far."""
        self.complaint: str | None = None
        """Why the trainer ended early, as it said first."""

    @property
    def verdict(self) -> str | None:
        """Why the job has to end; None as long as it may go on."""
        return None if self._nccl is None else self._nccl.verdict

    @property
    def log(self) -> Path | None:
        """The job's log; None as long as nobody said where it is."""
        return self._log_path

    def follow_log(self, path: Path) -> None:
        """Show what is added to `path`; Slurm says only after a while where that is."""
        if path != self._log_path:
            self._log, self._log_path = FileTail(path), path

    def poll(self, *, ended: bool = False) -> None:
        """Show what is new; `ended`: nobody writes any more."""
        for event in self._metrics.poll():
            self.measured = self.measured.plus(event)
            self._display.progress(self.measured)
        if self._log is not None:
            for line in self._log.rest() if ended else self._log.poll():
                self._display.output(line)
                self._hear(line)
                if self._nccl is not None:
                    self._nccl.feed(line)
        if self._nccl is not None:
            self._nccl.poll(steps=len(self.measured.steps), ended=ended)
            for text in self._nccl.warnings:
                self._warn(text)

    def _hear(self, line: str) -> None:
        found = _COMPLAINT.match(line)
        if found is not None and self.complaint is None:
            self.complaint = found[1]

    def _warn(self, text: str) -> None:
        """Once, although the numbers in it may grow."""
        kind = text.partition(" although ")[2]
        if kind not in self._told:
            self._told.add(kind)
            self._display.state(f"warning: {text}")

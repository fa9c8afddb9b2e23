"""Follow a job by the two files that it writes: its log and its metrics."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.run.metrics import Measured, MetricsTail
from fsdpplan.run.show import Display
from fsdpplan.run.tail import FileTail


class Follower:
    """Passes what the files gain to a display, and gathers what was measured."""

    def __init__(self, *, metrics: Path, display: Display) -> None:
        self._metrics = MetricsTail(metrics)
        self._log: FileTail | None = None
        self._log_path: Path | None = None
        self._display = display
        self.measured = Measured()
        """What the run has reported so far."""

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

"""Look at what NCCL does while a job starts, and say when it does not do what was planned.

NCCL writes one file a process into the run's folder: the variables reach all ranks as
FSDPPLAN_METRICS does, since bash inherits them, `sbatch` gets SBATCH_EXPORT=ALL, and the script's
own `srun` says --export=ALL. A script for several nodes sets the same ones itself. Where the user
has set NCCL's log himself nothing is set, and what comes into the job's own log is read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from fsdpplan.run.follow.nccl_verdict import host_memory_warning, socket_sentence
from fsdpplan.run.follow.tail import FileTail
from fsdpplan.spec.plan import Plan
from fsdpplan.topology.read.nccl_log import NcclLogReader
from fsdpplan.topology.read.nccl_report import NcclReport

ALLOWS_SOCKETS = "FSDPPLAN_ALLOW_SOCKETS"
"""Variable by which the job itself does not end over sockets."""
SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET"
"""Adapters, communicators and the transport of each channel, the variables that NCCL took, and
whether adapters reach device memory. Unknown names (BOOTSTRAP before 2.23) are passed over."""
LOOK_SECONDS = 1.0
"""Between looks at the files: there may be hundreds, on a shared file system."""
STEPS_WATCHED = 2
"""Communicators connect when they are first used; by the second step all have been."""

_SET_BY_USER = re.compile(r"(?<!\w)NCCL_DEBUG(?:_FILE|_SUBSYS)?=")


class NcclWatch:
    """Follows NCCL's files of one run."""

    def __init__(self, *, folder: Path, plan: Plan, allow_sockets: bool = False) -> None:
        self._folder = folder
        self._plan = plan
        self._allow_sockets = allow_sockets
        self._reader = NcclLogReader()
        self._tails: dict[Path, FileTail] = {}
        self._next_look = 0.0
        self._news = self._spoken = self._settled = False
        self.verdict: str | None = None
        """Why the job has to end; None as long as nothing speaks against it."""
        self.warnings: tuple[str, ...] = ()
        """What is not as planned, but no reason to end the job."""

    @property
    def report(self) -> NcclReport | None:
        """What NCCL has said so far; None: nothing."""
        return self._reader.report() if self._spoken else None

    def feed(self, line: str) -> None:
        """A line of the job's own log."""
        self._news = self._reader.feed(line) or self._news

    def poll(self, *, steps: int, ended: bool = False) -> None:
        """Look at what is new, now and then; `steps`: how many the job has reported."""
        if not ended and (self._settled or time.monotonic() < self._next_look):
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._settled = steps >= STEPS_WATCHED
        for path in self._folder.glob("nccl.*.log"):
            tail = self._tails.setdefault(path, FileTail(path, from_start=True))
            # An unfinished last line may say less than NCCL meant: it is left out.
            for line in tail.poll():
                self.feed(line)
        self._spoken = self._spoken or self._news
        if self.verdict is None and (self._news or self._settled or ended):
            self._judge(ended=ended, connected=steps > 0 or ended)
        self._news = False

    def _judge(self, *, ended: bool, connected: bool) -> None:
        report = self.report
        if report is None:
            return
        sockets = socket_sentence(report, plan=self._plan, folder=self._folder)
        if sockets is not None and not self._allow_sockets and not ended:
            self.verdict = f"{sockets}; type fsdpplan run --allow-sockets to run it anyway"
            return
        slow = host_memory_warning(report, plan=self._plan) if connected else None
        self.warnings = tuple(text for text in (sockets, slow) if text is not None)


def uses_nccl(plan: Plan) -> bool:
    """Whether there is anything for NCCL to carry."""
    return plan.cluster.device.kind == "cuda" and plan.cluster.gpus > 1


def nccl_variables(
    *, script: str, environment: Mapping[str, str], folder: Path
) -> Mapping[str, str]:
    """What makes NCCL write its log into `folder`; nothing where the user has a log of his own."""
    lines = (line for line in script.splitlines() if not line.startswith("#"))
    own = any(name.startswith("NCCL_DEBUG") for name in environment)
    if own or any(map(_SET_BY_USER.search, lines)):
        return {}
    # %h and %p are the host and the process; a percent sign of the path is doubled.
    pattern = str(folder).replace("%", "%%") + "/nccl.%h.%p.log"
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": SUBSYSTEMS,
        "NCCL_DEBUG_FILE": pattern,
    }

"""How a run is started and followed, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsdpplan.run.follow.metrics import Measured
from fsdpplan.topology.read.nccl_report import NcclReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a run is started and followed."""

    allow_sockets: bool = False
    """Train on where NCCL goes over sockets between nodes that have RDMA adapters."""
    chain: int = 1
    """Jobs, each of which goes on where the one before it ended."""
    cancel_on_exit: bool = False
    """Ctrl-C and TERM end the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    """The job's own, 128 + n after signal n, or 5 where it was stopped."""
    job_id: str | None
    """The engine's id of the job that was followed last; None for a run on this host."""
    ended: bool
    """False when the person left before the job did."""
    seconds: float | None
    """From start or submission to the end; None for a run that had ended before."""
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
    """The job's log; None where the engine has not said where it is."""
    steps: int | None = None
    """Steps that the run trained, over all of its starts; None: as many as were measured."""

    @property
    def steps_done(self) -> int:
        """Steps that the run trained."""
        return len(self.measured.steps) if self.steps is None else self.steps

"""What `run`, `status`, `logs` and `cancel` need of whatever runs jobs: Slurm, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fsdpplan.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What an engine says of a job."""

    state: str
    """In the engine's own word: PENDING, RUNNING, COMPLETED; Running, Succeeded."""
    ended: bool
    succeeded: bool
    reason: str
    """Why it waits or ended, in words; empty where there is nothing to say."""
    exit_code: int
    """As a shell would give it: 128 + n for an end by signal n."""
    nodes: str
    """Where it runs, as the engine writes it; empty: nowhere."""
    log: Path | None = None
    """File that its output goes to, where there is one."""
    restarts: int = 0
    """How often it was started again."""
    expected_start: str = ""
    """When a job that waits is expected to start; empty: nobody knows."""

    @property
    def words(self) -> str:
        """For a person: RUNNING on node[1-2], PENDING (Resources: waiting for nodes ...)."""
        if self.nodes and not self.ended:
            return f"{self.state} on {self.nodes}"
        return f"{self.state} ({self.reason})" if self.reason else self.state

    @property
    def shell_code(self) -> int:
        """Its exit code, never 0 for a job that did not succeed, whatever its last program said."""
        return 0 if self.succeeded else self.exit_code or 1


class Forgotten(LaunchError):
    """The engine knows nothing of a job any more."""


class Engine(Protocol):
    """Starts jobs and answers for them; each call is one question to it."""

    @property
    def name(self) -> str:
        """`slurm` or `kubernetes`."""

    def submit(
        self,
        *,
        script: Path,
        folder: Path,
        environment: Mapping[str, str],
        after: str | None = None,
    ) -> str:
        """Submit a file from `folder`, to start when job `after` has ended; the job's id.
        Raises LaunchError with one sentence."""

    def state(self, job_id: str) -> JobState | None:
        """None: no answer now. Raises Forgotten where there will be none."""

    def log_lines(self, job_id: str) -> list[str]:
        """Lines that the job has printed since the last call, of all nodes, for engines whose
        output is no file."""

    def save_and_leave(self, job_id: str) -> None:
        """Pass on SIGUSR1: the trainer saves and leaves."""

    def cancel(self, job_id: str) -> bool:
        """End the job; whether the engine took it."""

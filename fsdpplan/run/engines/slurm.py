"""Slurm as an engine: submit, ask, signal and cancel by its commands; accounting or none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fsdpplan.emit.slurm.header import MAX_SCRIPT_BYTES
from fsdpplan.errors import LaunchError, SpecError
from fsdpplan.files.job_records import read_bad_nodes
from fsdpplan.files.table import read_text
from fsdpplan.run.engines.engine import Forgotten, JobState
from fsdpplan.run.engines.slurm_text import (
    RETRIES,
    SACCT_COMPLETION_FIELDS,
    SACCT_FIELDS,
    parse_accounting,
    parse_completion,
    parse_job,
    refusal,
)

COMMAND_SECONDS = 60.0
"""No Slurm command should take longer; a busy controller takes seconds."""
LOOK_SECONDS = 0.1
"""Between looks at what sbatch says."""
_MOST_BYTES = 2**16

_EXCLUDE = re.compile(r"^#SBATCH (?:--exclude|-x)[= ](['\"]?)(?P<nodes>\S+)\1$", re.MULTILINE)
_ARRAY = re.compile(r"^#SBATCH (?:--array\b|-a\b|hetjob\b)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """Slurm's commands, as this environment finds them."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def name(self) -> str:
        """As a run's record has it."""
        return "slurm"

    def submit(
        self,
        *,
        script: Path,
        folder: Path,
        environment: Mapping[str, str],
        after: str | None = None,
    ) -> str:
        """Submit `script` from `folder`, to start when job `after` has ended; the job's id."""
        text = read_text(script, limit_bytes=MAX_SCRIPT_BYTES, what="job script")
        if _ARRAY.search(text) or environment.get("SBATCH_ARRAY_INX"):
            raise LaunchError(
                "a plan is one job, and this script asks for an array or a heterogeneous job, "
                "whose parts would train on the same checkpoint: leave --array and hetjob out, and "
                "SBATCH_ARRAY_INX unset"
            )
        # The environment carries where the metrics go, so it must reach the job whatever the site
        # says.
        given = {**environment, "SBATCH_EXPORT": "ALL"}
        options = ["--parsable"]
        if after is not None:
            options.append(f"--dependency=afterany:{after}")
        # An option replaces the script's own line.
        bad = read_bad_nodes(environment.get("FSDPPLAN_RUN_FOLDER"))
        if bad:
            excluded = [match["nodes"] for match in _EXCLUDE.finditer(text)]
            options.append(f"--exclude={','.join([*excluded, *bad])}")
        said = _submission(["sbatch", *options, str(script)], folder=folder, environment=given)
        return said.strip().rpartition("\n")[2].partition(";")[0]

    def state(self, job_id: str) -> JobState | None:
        """What the controller says of the job, or, where it has forgotten it, the accounting."""
        done = self._answer("scontrol", "show", "job", job_id)
        if done is None:
            return None
        if done.returncode == 0:
            return parse_job(done.stdout)
        if "invalid job id" not in done.stderr.lower():
            return None
        return self._accounted(job_id)

    def log_lines(self, job_id: str) -> list[str]:
        """None: Slurm writes a file."""
        return []

    def save_and_leave(self, job_id: str) -> None:
        """USR1 to the batch script, which passes it on to the ranks."""
        self._answer("scancel", "--batch", "--signal=USR1", job_id)

    def cancel(self, job_id: str) -> bool:
        """End this one job; whether the controller took it."""
        done = self._answer("scancel", job_id)
        return done is not None and done.returncode == 0

    def _accounted(self, job_id: str) -> JobState:
        """What the accounting database says, else the job completion log."""
        if shutil.which("sacct", path=self.environment.get("PATH")):
            asked = ("sacct", "-j", job_id, "-n", "-P")
            done = self._answer(*asked, "-X", "-o", SACCT_FIELDS)
            state = None if done is None or done.returncode else parse_accounting(done.stdout)
            if state is None:
                done = self._answer(*asked, "-c", "-o", SACCT_COMPLETION_FIELDS)
                state = None if done is None or done.returncode else parse_completion(done.stdout)
            if state is not None:
                return state
        raise Forgotten(
            f"the Slurm controller has forgotten job {job_id}, and there is no accounting to ask: "
            "fsdpplan logs and fsdpplan verify show what the run left"
        )

    def _answer(self, *command: str) -> subprocess.CompletedProcess[str] | None:
        """What a command said; None where it gave no answer. Raises LaunchError where there is no
        such command."""
        try:
            return subprocess.run(
                command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=COMMAND_SECONDS,
                check=False,
                # Ctrl-C is for fsdpplan: it must not stop scancel half-way.
                process_group=0,
            )
        except FileNotFoundError:
            raise _absent(command[0]) from None
        except (subprocess.TimeoutExpired, OSError):
            return None


def require_plain_id(text: str) -> str:
    """A job's id as sbatch gives it; parts of arrays and heterogeneous jobs are refused."""
    if re.fullmatch(r"[0-9]+[_+].*", text):
        raise SpecError(
            f"{text} is a part of a job array or of a heterogeneous job, and fsdpplan runs "
            "neither: name a job as fsdpplan status lists it"
        )
    return text


def _submission(command: list[str], *, folder: Path, environment: Mapping[str, str]) -> str:
    """What sbatch prints where it takes the job. Raises LaunchError where it does not."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # Ctrl-C must not end it between the controller's yes and our knowing of it.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise _absent(command[0]) from None
        except OSError as error:
            raise LaunchError(
                f"sbatch cannot be started: {error.strerror or error}; see to that, or type "
                "fsdpplan run --target here"
            ) from None
        deadline = time.monotonic() + COMMAND_SECONDS
        while process.poll() is None:
            if RETRIES.search(_read(err)) or time.monotonic() > deadline:
                process.terminate()
                process.wait()
                said = _read(err) or f"no answer in {COMMAND_SECONDS:.0f} s"
                raise LaunchError(refusal(said))
            time.sleep(LOOK_SECONDS)
        if process.returncode:
            raise LaunchError(refusal(_read(err)))
        return _read(out)


def _read(file: IO[bytes]) -> str:
    """What is in it; its position, which the writer shares, stays."""
    return os.pread(file.fileno(), _MOST_BYTES, 0).decode(errors="replace")


def _absent(command: str) -> LaunchError:
    return LaunchError(f"{command} is not on PATH: go to a node of the cluster")

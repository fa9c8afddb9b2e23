"""Whose a folder of checkpoints is: the run that began in it last writes itself down there.

    n1 4711 9f0c... began=81234 job=123 step=0

Two runs in one folder would each go on from the other's checkpoints. A run that still goes on is
found at the start of the next one, before anything of it is touched. Where nobody can be asked, on
another host without Slurm, it is found at the next save of the one that began earlier.

A run that has saved notes that outside of the folder, too, in its own one: where the folder's disk
is not mounted, an empty one in its place would have the run begin anew, and nobody be told.

    {"checkpoint": "step-00000100", "folder": "/shared/saved"}
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import TrainerError
from .whole_file import read_small, sync, write_durably

OWNER = ".run"
"""Names the run that began last in this folder."""
OWNER_BYTES = 400
ASK_SECONDS = 20.0
"""Slurm's controller may be busy; no answer is none against anybody."""

SAVES = "saves.jsonl"
"""In the run's own folder: what it has saved, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process of a run: its first rank."""

    host: str
    pid: int
    began: str
    """When it began, as Linux counts; "" where it does not say."""
    job: str
    """The Slurm job, and its step; "" outside of Slurm."""
    step: str

    @property
    def words(self) -> str:
        """Which one it is, and how it ends."""
        process = f"process {self.pid} on {self.host}"
        return f"job {self.job}, {process}" if self.job else process

    @property
    def end_words(self) -> str:
        """What ends it."""
        return f"scancel {self.job}" if self.job else f"kill {self.pid} on {self.host}"


def take_folder(folder: Path) -> str:
    """Write down that this run has begun in `folder`; what says so."""
    me = os.getpid()
    owner = (
        f"{socket.gethostname()} {me} {os.urandom(8).hex()} began={_began(me)} "
        f"job={os.environ.get('SLURM_JOB_ID', '')} step={os.environ.get('SLURM_STEP_ID', '')}"
    )
    write_durably(folder / OWNER, owner + "\n")
    return owner


def leave_folder(folder: Path, owner: str) -> None:
    """Take that back at the end of the run, where nobody else has come since."""
    try:
        if read_small(folder / OWNER, limit_bytes=OWNER_BYTES).strip() == owner:
            (folder / OWNER).unlink(missing_ok=True)
    except (OSError, ValueError):
        return  # who comes next asks whether this process lives


def require_free(folder: Path) -> None:
    """Raise TrainerError where another run is known to go on in `folder`."""
    try:
        found = parsed(read_small(folder / OWNER, limit_bytes=OWNER_BYTES))
    except (OSError, ValueError):
        return
    if found is not None and goes_on(found):
        raise TrainerError(
            f"another run saves to {folder} and goes on ({found.words}): let it end, end it by "
            f"{found.end_words}, or give this one another --checkpoint-dir; follow it by fsdpplan "
            "status"
        )


def note_saved(run_folder: Path | None, path: Path) -> None:
    """Note in the run's own folder, where it has one, that it has the checkpoint `path`. It is no
    reason to end where that cannot be written: the checkpoint is whole."""
    if run_folder is None or not run_folder.is_dir():
        return
    line = {"checkpoint": path.name, "folder": os.path.abspath(path.parent)}
    try:
        # Never a new file in the old one's place: other nodes see at once what is added to one.
        with (run_folder / SAVES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            sync(file)
    except OSError:
        return


def require_kept(run_folder: Path | None, folder: Path) -> None:
    """Raise TrainerError where `folder`, which has no checkpoint, is one in which this run has
    saved: it would begin anew in the place of what it has trained."""
    name = "" if run_folder is None else _last_saved(run_folder / SAVES, os.path.abspath(folder))
    if name and run_folder is not None:
        raise TrainerError(
            f"this run has saved {name} in {folder}, where no checkpoint is now: its disk is not "
            "mounted here, or it was deleted; put it back and start the run again, or, to begin "
            f"anew, remove {run_folder / SAVES}"
        )


def _last_saved(saves: Path, folder: str) -> str:
    """The name of what a run saved last in `folder`; "" where it has saved nothing there."""
    last = ""
    try:
        lines = read_small(saves).splitlines()
    except (OSError, ValueError):
        return last
    for line in lines:
        try:
            said = json.loads(line)
            last = str(said["checkpoint"]) if said["folder"] == folder else last
        except (ValueError, TypeError, KeyError, RecursionError):
            continue  # cut short by a full disk
    return last


def parsed(text: str) -> Owner | None:
    """The owner that a file names; None where it does not, or was written by an older trainer."""
    words = text.split()
    named = dict(word.partition("=")[::2] for word in words[3:])
    if len(words) < 3 or not words[1].isdecimal() or "began" not in named:
        return None
    return Owner(
        host=words[0],
        pid=int(words[1]),
        began=named["began"],
        job=named.get("job", ""),
        step=named.get("step", ""),
    )


def goes_on(owner: Owner, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the run is known to go on. An earlier attempt of this very job is not: its script has
    waited for its end."""
    if owner.job and owner.job == environment.get("SLURM_JOB_ID"):
        return False
    if owner.host == socket.gethostname():
        return owner.pid != os.getpid() and bool(owner.began) and _began(owner.pid) == owner.began
    return bool(owner.job) and _slurm_runs(owner)


def _began(pid: int) -> str:
    """When a process began, in ticks since the start of Linux; "" where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *rest = text.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def _slurm_runs(owner: Owner) -> bool:
    """Whether Slurm says that the job, or its step, is running. A cluster's other end may be
    another Slurm's: a job that it does not know is none."""
    which = f"--steps={owner.job}.{owner.step}" if owner.step else f"--jobs={owner.job}"
    states = [] if owner.step else ["--states=RUNNING,SUSPENDED"]
    try:
        done = subprocess.run(
            ["squeue", "--noheader", which, *states],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())

"""Measure this machine: start the measuring program, follow it, keep its log whatever happens."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fsdpplan.errors import LaunchError
from fsdpplan.run.calibrate.plan import settings_for_plan as settings_for_plan
from fsdpplan.run.calibrate.script import Ranks as Ranks
from fsdpplan.run.calibrate.script import measuring_script
from fsdpplan.run.calibrate.show import measuring_display, reason_in
from fsdpplan.run.engines.local import run_here
from fsdpplan.run.follow.follow import Follower
from fsdpplan.run.follow.show import Display
from fsdpplan.topology.measure.settings import Settings as Settings
from fsdpplan.topology.measure.settings import words

INTERRUPTED, TERMINATED = 130, 143
_NEXT_TO_NOTHING_BYTES = 2**16


def measure(
    settings: Settings,
    *,
    ranks: Ranks,
    out: Path,
    environment: Mapping[str, str] | None = None,
    display: Display | None = None,
) -> Path:
    """Measure on `ranks` and return `out`, the log; what the program prints is beside it.

    `environment` is added to this process's own. Raises LaunchError where the program could not
    start or failed, KeyboardInterrupt after Ctrl-C; the rows up to there are in the log.
    """
    _require_allocation(ranks)
    out = out.absolute()
    console = out.with_suffix(".log")
    _make_empty(out, console)
    script = measuring_script(
        ranks, python=sys.executable, arguments=("--out", str(out), *words(settings))
    )
    shown = display or measuring_display(sys.stderr)
    with shown, tempfile.TemporaryDirectory(prefix="fsdpplan-") as folder:
        follower = Follower(metrics=Path(folder, "none"), display=shown)
        follower.follow_log(console)
        path = Path(folder, "measure.sh")
        path.write_text(script, encoding="utf-8")
        code = run_here(
            script=path,
            log=console,
            folder=Path.cwd(),
            environment={**_own_environment(ranks), **(environment or {})},
            follower=follower,
            display=shown,
        )
        if code in (INTERRUPTED, TERMINATED):
            shown.state(_measured_until_now(out))
    _require_done(code, out=out, console=console)
    return out


def _require_allocation(ranks: Ranks) -> None:
    allocated = os.environ.get("SLURM_JOB_NUM_NODES")
    if ranks.nodes > 1 and allocated != str(ranks.nodes):
        there = f"this one has {allocated}" if allocated else "this is none"
        raise LaunchError(
            f"measuring {ranks.nodes} nodes needs a Slurm allocation of as many, and {there}: type "
            f"salloc --nodes={ranks.nodes}, then fsdpplan calibrate again"
        )


def _full_disk(out: Path) -> str | None:
    """The reason that a program cannot write down itself."""
    if shutil.disk_usage(out.parent).free >= _NEXT_TO_NOTHING_BYTES:
        return None
    return f"the disk that {out} is on is full: choose another one by --save"


def _make_empty(*files: Path) -> None:
    """An earlier log must not pass for this one's."""
    for path in files:
        try:
            path.write_text("", encoding="utf-8")
        except OSError as error:
            raise LaunchError(
                f"the log {path} cannot be written: {error.strerror}: choose another place by "
                "--save"
            ) from error


def _own_environment(ranks: Ranks) -> dict[str, str]:
    """This process's own; without an allocation's variables for a run on this host alone."""
    return {
        name: value
        for name, value in os.environ.items()
        if ranks.nodes > 1 or not name.startswith("SLURM_")
    }


def _measured_until_now(out: Path) -> str:
    """After an interruption: where the rows are, and what to do with them. The first line says what
    was measured on."""
    if out.read_bytes().count(b"\n") < 2:
        return "nothing was measured yet"
    return (
        f"what was measured until now is in {out}; fsdpplan calibrate --from "
        f"{shlex.quote(str(out))} fits it"
    )


def _require_done(code: int, *, out: Path, console: Path) -> None:
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == TERMINATED:
        raise SystemExit(TERMINATED)
    if code:
        reason = _full_disk(out) or reason_in(console.read_text("utf-8", errors="replace"))
        said = f": {reason}" if reason else ""
        raise LaunchError(
            f"measuring failed with exit code {code}{said}; see all that it printed in {console}"
        )
    if not out.stat().st_size:
        raise LaunchError(
            f"the first node wrote its log to a {out} of its own: choose by --save a folder that "
            "this host and the nodes share"
        )

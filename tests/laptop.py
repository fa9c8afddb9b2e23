"""Plans as on a laptop, each command in this one process: what `tests.packages` and test_package.py
run with the Python that has an installed fsdpplan. It imports fsdpplan and nothing of the tests.

    python -P tests/laptop.py FOLDER [--without torch] [--mac] [--slow]

Prints JSON: of each command its words, exit code, output and errors.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib.abc
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MODEL = ("--model", "llama-3.2-1b", "--hardware", "dgx-h100", "--seq-len", "1024")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("--version",),
    ("models",),
    ("models", "llama-3.2-1b"),
    ("profiles",),
    ("profiles", "dgx-h100"),
    ("recommend", *MODEL, "--gpus", "2"),
    ("recommend", *MODEL, "--gpus", "1", "--torch", "2.9", "--save", "other.json"),
    ("estimate", *MODEL, "--gpus", "2", "--dp-shard", "2"),
    ("explain",),
    ("explain", "--rules"),
    ("explain", "--nccl"),
    ("what-if", "--precision", "fp8"),
    ("compare", "fsdpplan.json", "other.json"),
    ("diff", "fsdpplan.json", "other.json"),
    ("sweep", *MODEL, "--gpus", "1,2"),
    ("replan", "other.json", "--gpus", "2"),
    ("check", "--assert", "mfu >= 0.01"),
    ("check", "--lock", "plan.lock", "--write-lock"),
    ("check", "--lock", "plan.lock"),
    ("emit-launch", "--torch", "2.9"),
    ("emit-launch", "--target", "kubernetes", "--image", "team/train:1"),
    ("emit-launch", "--out", "job"),
    ("detect",),
    ("status",),
    ("report", "--out", "report.html"),
    ("trace", "--out", "plan.trace.json"),
    ("bug-report", "--out", "report.md"),
)
"""Need no torch. One that this version does not have is left out."""

SLOW: tuple[tuple[str, ...], ...] = (
    ("explain", "--why", "tp 2"),
    ("what-if", "--sensitivities"),
)
"""With --slow only."""

NEED_TORCH: tuple[tuple[str, ...], ...] = (
    ("run", "--smoke"),
    ("calibrate", "--hardware", "cpu", "--processes", "2"),
    ("export", "--checkpoint-dir", "saved", "--out", "model"),
    ("replan", "other.json", "--gpus", "2", "--checkpoint-dir", "saved"),
)
"""Say in one line that they do, and end with exit code 5."""


class Blocked(importlib.abc.MetaPathFinder):
    """Modules that are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Nothing, or what Python says where there is no such module."""
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without(names: Sequence[str]) -> None:
    """Have these modules missing, also for those who only ask whether they are there."""
    import importlib.util

    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in names else found(name, package)

    importlib.util.find_spec = find_spec
    sys.meta_path.insert(0, Blocked(names))


def as_a_mac() -> None:
    """Take away what Linux alone has: its modules, calls, files and commands."""
    sysconfig.get_config_vars()  # Python's own, which a Mac's Python has under another name
    sys.platform = "darwin"
    os.uname = lambda: os.uname_result(("Darwin", "laptop.local", "24.6.0", "Darwin", "arm64"))
    for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd"):
        if hasattr(os, name):
            delattr(os, name)
    for name in ("O_TMPFILE", "O_PATH", "O_DIRECT"):
        if hasattr(os, name):
            delattr(os, name)
    for module, names in {
        os: ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access"),
        io: ("open",),
        builtins: ("open",),
    }.items():
        for name in names:
            setattr(module, name, _elsewhere(getattr(module, name), fails=name != "access"))
    started = subprocess.Popen.__init__

    def start(self: Any, words: Any, *rest: Any, **named: Any) -> None:
        name = os.path.basename(words.split()[0] if isinstance(words, str) else str(words[0]))
        if name in ("nvidia-smi", "lspci", "ip", "numactl", "scontrol", "sinfo", "ibstat", "lscpu"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        started(self, words, *rest, **named)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


def _elsewhere(function: Callable[..., Any], *, fails: bool) -> Callable[..., Any]:
    """`function`, for which /proc and /sys are not there."""

    def asked(path: Any = ".", *rest: Any, **named: Any) -> Any:
        text = path if isinstance(path, str) else ""
        if isinstance(path, os.PathLike):
            text = os.fsdecode(os.fspath(path))
        if text.startswith(("/proc", "/sys/", "/dev/shm")) or text == "/sys":
            if not fails:
                return False
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
        return function(path, *rest, **named)

    return asked


def said(words: Sequence[str]) -> dict[str, Any]:
    """One command: what it came to."""
    from fsdpplan.cli.app import exit_code_of

    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = exit_code_of(list(words))
        except BaseException:
            code = -1
            traceback.print_exc()
    return {
        "words": list(words),
        "code": code,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "seconds": time.process_time() - began,
    }


def checkpoint(folder: Path) -> None:
    """What looks like one, for those who would read it by torch."""
    (folder / "step-00000001").mkdir(parents=True)
    (folder / "step-00000001/trainer.json").write_text("{}")
    (folder / "latest").write_text("step-00000001\n")


def main(arguments: Sequence[str]) -> None:
    """Run all in a folder of its own."""
    folder, rest = Path(arguments[0]), list(arguments[1:])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    os.environ |= {"HOME": str(folder / "home"), "XDG_STATE_HOME": str(folder / "state")}
    gone = rest[rest.index("--without") + 1].split(",") if "--without" in rest else []
    without(gone)
    if "--mac" in rest:
        as_a_mac()
    checkpoint(folder / "saved")
    from fsdpplan.cli.commands import SUMMARIES

    wanted = (*COMMANDS, *(SLOW if "--slow" in rest else ()))
    known = [words for words in wanted if words[0] in SUMMARIES or words[0].startswith("-")]
    ends = [said(words) for words in (*known, *(NEED_TORCH if "torch" in gone else ()))]
    imported = sorted({"torch", "fsdpplan.trainer"} & set(sys.modules))
    json.dump({"python": sys.version, "imported": imported, "commands": ends}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])

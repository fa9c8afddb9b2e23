"""Stand-ins for Slurm's commands, first on PATH, and what the real ones once printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"


def recorded(name: str) -> str:
    """What `scontrol show job` printed of a job that was `name`."""
    text = (RECORDINGS / f"scontrol_show_job_{name}.txt").read_text()
    return text.partition("\n")[2]


class Commands:
    """A folder of stand-ins; one that writes to `$0.args` can be asked what it was given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def make(self, name: str, body: str) -> None:
        """A command by bash."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def arguments(self, name: str) -> list[str]:
        """All arguments that a command has been given so far."""
        path = self.folder / f"{name}.args"
        return path.read_text().splitlines() if path.exists() else []

    def answers(self, *texts: str) -> None:
        """Have `scontrol` print `texts` in turn, and the last one ever after."""
        said = self.folder.parent / "said"
        said.mkdir(exist_ok=True)
        for number, text in enumerate(texts, 1):
            (said / str(number)).write_text(text)
        (said / "asked").unlink(missing_ok=True)
        self.make(
            "scontrol",
            f"cd {said}; n=$(cat asked 2>/dev/null || echo 0); n=$((n + 1)); echo $n >asked\n"
            "while [ $n -gt 1 ] && [ ! -e $n ]; do n=$((n - 1)); done\ncat $n",
        )

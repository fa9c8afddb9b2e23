"""A folder with a plan and its script, on a machine where Slurm's commands are stand-ins."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import write_plan
from fsdpplan.run.follow import watch
from tests.cli.small import on_a_machine_without_gpus, words
from tests.emit.plans import make_plan
from tests.run.commands import Commands, recorded


class OnSlurm:
    """`sbatch` takes every job, from number 77 on; `scancel` cancels all."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        on_a_machine_without_gpus(monkeypatch)
        for name in ("FIRST_ASK_SECONDS", "LAST_ASK_SECONDS", "LOOK_SECONDS"):
            monkeypatch.setattr(watch, name, 0.01)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
        self.folder = folder
        self.commands = Commands(folder, monkeypatch)
        self.commands.make(
            "sbatch",
            '[ "$1" != --version ] || exit 0\nprintf "%s\\n" "$@" >>"$0.args"\n'
            'n=$(cat "$0.next" 2>/dev/null || echo 77); echo $((n + 1)) >"$0.next"; echo $n',
        )
        self.commands.make("scancel", 'printf "%s\\n" "$@" >>"$0.args"')
        monkeypatch.chdir(folder)
        write_plan(make_plan("cpu", nodes=2), folder / "fsdpplan.json")

    def emit(self, capsys: pytest.CaptureFixture[str], *options: str) -> None:
        """Write job.sbatch."""
        assert exit_code_of(["emit-launch", *options]) == 0
        (self.folder / "job.sbatch").write_text(capsys.readouterr().out)

    def play(self, *names: str) -> None:
        """Have the controller say in turn what it once said of such jobs."""
        self.commands.answers(*(self.recorded(name) for name in names))

    def recorded(self, name: str) -> str:
        """As the controller said it, with the log in this folder."""
        return re.sub("StdOut=.*", f"StdOut={self.log}", recorded(name))

    @property
    def log(self) -> Path:
        """What the job prints."""
        return self.folder / "fsdpplan-77.out"

    def run(self, options: str = "") -> int:
        """`fsdpplan run --target slurm`."""
        return exit_code_of(words(f"run --target slurm --no-ledger {options}"))

    @property
    def run_folder(self) -> Path:
        """The only run's."""
        (found,) = (self.folder / "fsdpplan-runs").iterdir()
        return found

    def report(self, *, steps: int, of: int) -> None:
        """What the trainer would have written."""
        start = {"event": "start", "step": 0, "steps": of}
        lines = [
            start,
            *(
                {"step": n, "step_seconds": 0.5, "loss": 2.0, "mfu_fraction": 0.4}
                for n in range(1, steps + 1)
            ),
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.run_folder / "metrics.jsonl").write_text(text)

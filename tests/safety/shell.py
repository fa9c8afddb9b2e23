"""Run an emitted script among stand-ins for torch and srun that write down what they get."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HOSTS = ("n1", "n2")
ALLOCATION = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}

PYTHON = """\
#!/bin/bash
case " $* " in *" torch.distributed.run "* | *" accelerate.commands.launch "*) ;; *) exit 0 ;; esac
out=$(mktemp "$RECORDS/XXXXXXXX")
printf '%s\\0' "$@" >"$out"
env -0 >"$out.env"
"""
"""Any other program that the script asks it to run is content."""
SRUN = """\
#!/bin/bash
out=$(mktemp "$RECORDS/srunXXXXXXXX.step")
while [[ $1 == -* ]]; do printf '%s\\0' "$1" >>"$out"; shift; done
for node in n1 n2; do SLURMD_NODENAME=$node "$@" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = "#!/bin/bash\nprintf '%s\\n' n1 n2\n"


@dataclass(frozen=True)
class Ran:
    """What came out of a script."""

    said: str
    words: list[list[str]]
    """Arguments of each torchrun."""
    environments: list[dict[str, str]]
    """And its environment."""
    steps: list[list[str]]
    """Options of each srun."""


class Bench:
    """A folder with the stand-ins, and whatever the script makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = folder / "records"
        (folder / "bin").mkdir()
        # tail would look once a second whether the job has ended.
        stand_ins = {"srun": SRUN, "scontrol": SCONTROL, "tail": "#!/bin/sh\n"}
        for name in ("python3", "python", "torchrun", "apptainer"):
            stand_ins[name] = PYTHON
        for name, text in stand_ins.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    @property
    def intruders(self) -> list[Path]:
        """What the hostile strings made, had one of them been run."""
        return list(self.folder.rglob("owned*"))

    def run(self, script: str, *words: str, **values: str) -> Ran:
        """Give `script` to bash, with these words after it."""
        self.records.mkdir()
        path = self.folder / "job.sbatch"
        path.write_bytes(script.encode())
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FSDPPLAN"))}
        places = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "RECORDS": str(self.records)}
        done = subprocess.run(
            ["bash", str(path), *words],
            cwd=self.folder,
            env={**clean, **places, **values},
            capture_output=True,
            timeout=120,
            check=False,
        )
        started = sorted(path for path in self.records.iterdir() if not path.suffix)
        ran = Ran(
            said=(done.stdout + done.stderr).decode(errors="replace"),
            words=[_split(path) for path in started],
            environments=[_variables(path.with_suffix(".env")) for path in started],
            steps=[_split(path) for path in self.records.glob("*.step")],
        )
        for path in self.records.iterdir():
            path.unlink()
        self.records.rmdir()
        return ran


def _split(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1]


def _variables(path: Path) -> dict[str, str]:
    pairs = (line.partition("=") for line in _split(path))
    return {name: value for name, _, value in pairs}


def contains(words: Sequence[str], part: Sequence[str]) -> bool:
    """Whether `part` stands in `words`, one word after the other."""
    many = len(part)
    return any([*words[i : i + many]] == [*part] for i in range(len(words) - many + 1))

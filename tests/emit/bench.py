"""A stand-in for a cluster: what a job script starts and asks for is written down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fsdpplan.emit.folder import job_folder_files
from fsdpplan.emit.job import Job
from fsdpplan.emit.packed import packed_lines, unpacked
from fsdpplan.emit.slurm.script import render_launch
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan

PLANS = {
    "one cpu": make_plan("cpu", per_node=1),
    "cpu node": make_plan("cpu", per_node=2),
    "cpu nodes": make_plan("cpu", nodes=2),
    "gpu node": make_plan("cuda", per_node=8),
    "gpu nodes": make_plan("cuda", nodes=16, per_node=4),
}
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
HOSTILE = st.one_of(
    WORDS,
    st.sampled_from(
        ["$(touch x)", "`id`", "'", '"', "\\", "a\\", "-x", "--", "#", ";", "&", "*", "~", "!", " "]
    ),
    st.sampled_from(["\n#SBATCH --nodes=99", "FSDPPLAN_PLAN_END", "\r\n", "\u2019", "\u00a0", "}"]),
)


def emit(plan: Plan, job: Job | None = None, *, version: str = "1.2.3") -> str:
    return render_launch(plan=plan, plan_json=plan_json(plan), job=job or Job(), version=version)


def with_parts(script: str, said: str, changed: str) -> str:
    """`script`, with other words in the parts that it carries."""
    parts = unpacked(script)
    assert parts is not None
    assert said in parts
    head, _, rest = script.partition("\npacked() {")
    _, end, tail = rest.partition('\neval "$parts"')
    other = "\n".join(packed_lines(parts.replace(said, changed), contents=[])).removesuffix(end)
    return f"{head}\n{other}{end}{tail}"


def folder_texts(plan: Plan, job: Job | None, folder: str) -> dict[str, str]:
    return job_folder_files(
        plan=plan, plan_json=plan_json(plan), job=job or Job(), version="1.2.3", folder=folder
    )


def folder_script(plan: Plan, job: Job | None = None) -> str:
    """The script of a job folder that is nowhere."""
    return folder_texts(plan, job, f"/{JOB_FOLDER}")["job.sbatch"]


def emit_folder(bench: Path, plan: Plan, job: Job | None = None) -> str:
    """The script of a job folder, which is written beside; its trainer is empty."""
    folder = bench / JOB_FOLDER
    texts = folder_texts(plan, job, str(folder))
    for name, text in {**texts, "trainer/__main__.py": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return texts["job.sbatch"]


def shellcheck(script: str) -> str:
    command = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([command, "-"], input=script, text=True, capture_output=True, check=False)
    return done.stdout + done.stderr


def bash_objects(script: str) -> str:
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    return done.stderr


@dataclass(frozen=True)
class Ran:
    """What a script did."""

    code: int
    said: str
    torchrun: list[list[str]]
    """Arguments of each torchrun that was started."""
    plans: list[str]
    """The plan that each was given."""
    environments: list[dict[str, str]]
    """The environment of each."""
    srun: list[str]
    """Arguments of srun before the command."""
    asked: list[str]
    """What Slurm's controller was asked to do."""
    notes: list[dict[str, Any]]
    """What the job wrote of its starts."""


def make_bench(tmp_path: Path) -> Path:
    """A folder of stand-ins: `python3` writes down its arguments, `srun` starts the command once a
    node, as Slurm would."""
    folder = tmp_path / "bin"
    folder.mkdir()
    recorder = f"""#!/bin/bash
case "$1 ${{2:-}}" in
  */"near.py "* | "-c "*"near its GPU"*) exit "${{NEAR:-1}}" ;;
esac
case "$1" in
  -c) echo "ready ${{*:3}}"; exit "${{CHECK:-0}}" ;;
  */node_check.py) echo "ready ${{*:2}}"; exit "${{CHECK:-0}}" ;;
esac
out=$(mktemp {tmp_path}/torchrun.XXXXXX)
env -0 >"$out.env"
printf '%s\\0' "$@" >"$out"
printf '%s' "$FSDPPLAN_PLAN" >"$out.plan"
[ -z "${{LINGER:-}}" ] || {{ sleep 120 & wait; }}
eval "${{DO:-}}"
exit "${{CODE:-0}}"
"""
    slurm = f"""#!/bin/bash
case " $* " in *" --output=none "*) exit ;; esac
while [ "$1" != bash ]; do
  printf '%s\\0' "$1" >>{tmp_path}/srun
  case "$1" in --nodelist=*) nodes=${{1#*=}} ;; esac
  shift
done
id=0
for node in ${{nodes//,/ }}; do
  case " ${{DEAD:-}} " in *" $node "*) code=1; continue ;; esac
  SLURMD_NODENAME=$node SLURM_NODEID=$id "$@" || code=$?
  id=$((id + 1))
done
exit "${{code:-0}}"
"""
    controller = f"""#!/bin/bash
case "$1 $2" in
  "show hostnames") case "$3" in *"["*) set -- x x "$NODES" ;; esac; printf '%s\\n' ${{3//,/ }} ;;
  "show job") echo "${{JOB:-}}" ;;
  *) echo "$*" >>{tmp_path}/asked ;;
esac
"""
    queue = '#!/bin/bash\necho "${LEFT:-}"\n'
    stand_ins = {"python3": recorder, "srun": slurm, "scontrol": controller, "squeue": queue}
    for name, text in stand_ins.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return tmp_path


def environment(bench: Path, **values: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    clean["FSDPPLAN_RUN_FOLDER"] = str(bench / "run")
    return {**clean, "PATH": f"{bench}/bin:{os.environ['PATH']}", **values}


def run(bench: Path, script: str, **values: str) -> Ran:
    path = bench / "job.sbatch"
    path.write_bytes(script.encode())
    done = subprocess.run(
        ["bash", str(path)],
        cwd=bench,
        env=environment(bench, **values),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    records = sorted(p for p in bench.glob("torchrun.*") if p.suffix not in (".plan", ".env"))
    srun = bench / "srun"
    ran = Ran(
        code=done.returncode,
        said=done.stdout + done.stderr,
        torchrun=[path.read_bytes().decode().split("\0")[:-1] for path in records],
        plans=[path.with_name(path.name + ".plan").read_text() for path in records],
        environments=[exported(path.with_name(path.name + ".env")) for path in records],
        srun=srun.read_text().split("\0")[:-1] if srun.exists() else [],
        asked=lines_of(bench / "asked"),
        notes=[json.loads(line) for line in lines_of(bench / "run/attempts.jsonl")],
    )
    for path in (*bench.glob("torchrun.*"), srun, bench / "asked"):
        path.unlink(missing_ok=True)
    return ran


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def exported(path: Path) -> dict[str, str]:
    """Variables as `env -0` writes them."""
    pairs = (line.partition("=") for line in path.read_text().split("\0")[:-1])
    return {name: value for name, _, value in pairs}


def wait_for(happened: Any, *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


JOB_FOLDER = "it's my $job"

ALLOCATION = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "96(x1),48",
    "NODES": "n1 n2",
}

"""A real Slurm reads hostile names from an emitted script as they were given."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.run.launch import emit_script
from tests.emit.plans import make_plan
from tests.safety.hostile import PIECES
from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

NAMES = (
    *("a$(touch owned)b", "`touch owned`", "'; touch owned; '", '" --nodes=99 "', "a\\", "\\'\"#"),
    *("#", " # --nodes=99", "--nodes=99", "-x", "%j %x %%", "!", "~", "*", "a=b", "a,b", "a|b;c&d"),
    *(
        "\u00e9\u2019\u2026",
        "\U0001f525",
        "\u05d0\u05d1",
        "\u200dx",
        "x" * 300,
        "$'a\\n'",
        "\\n",
        " x ",
    ),
    "".join(piece for piece in PIECES if piece.isprintable()),
)


def test_names_and_comments_are_what_was_asked_for(slurm: SlurmCluster, tmp_path: Path) -> None:
    plan = make_plan("cpu", per_node=1)
    names = [name for name in NAMES if name.isprintable()]
    assert len(names) >= 24
    for number, name in enumerate(names):
        job = Job(job_name=name, sbatch=(f"--comment={name}",), output=f"out-{number}-%j")
        (tmp_path / f"{number}.sbatch").write_text(emit_script(plan, job))
    submit = "for script in *.sbatch; do sbatch --hold --parsable $script || exit; done"
    # In one shell: what each costs is the way into the namespace.
    done = slurm.run("sh", "-c", submit, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    jobs = dict(zip(sorted(tmp_path.glob("*.sbatch")), done.stdout.split(), strict=True))
    said = slurm.run("squeue", "--noheader", "--format=%A %D %j\t%k", cwd=tmp_path).stdout
    slurm.run("scancel", *jobs.values(), cwd=tmp_path)
    found = dict(line.split(" ", 1) for line in said.splitlines())
    for number, name in enumerate(names):
        assert found[jobs[tmp_path / f"{number}.sbatch"]] == f"1 {name}\t{name}"
    assert not list(tmp_path.glob("owned*"))

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpplan.emit.container import Container, prefix_words
from fsdpplan.emit.job import Job
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from tests.emit.bench import ALLOCATION, PLANS, bash_objects, emit, run, shellcheck
from tests.emit.plans import make_plan

IMAGE = "it's $HOME.sif"


def test_pyxis_gets_image_mounts_and_folder_on_each_step(bench: Path) -> None:
    job = Job(container=Container(image=IMAGE, mounts=("/a b:/data:ro", "/c")))
    script = emit(make_plan("cuda", nodes=2), job)
    ran = run(bench, script, **ALLOCATION)
    assert ran.code == 0, ran.said
    assert ran.srun.count(f"--container-image={IMAGE}") == 2
    mounts = f"/a b:/data:ro,/c:/c,{bench}:{bench},{bench}/run:{bench}/run"
    assert ran.srun.count(f"--container-mounts={mounts}") == 2
    assert ran.srun.count(f"--container-workdir={bench}") == 2
    # An image takes its time on each node.
    assert "--wait=900" in ran.srun
    assert {one["FSDPPLAN_JOIN_SECONDS"] for one in ran.environments} == {"600"}
    assert shellcheck(script) + bash_objects(script) == ""


def test_pyxis_outside_of_slurm_is_refused_in_one_line(bench: Path) -> None:
    ran = run(bench, emit(PLANS["cpu node"], Job(container=Container(image="i"))))
    assert ran.code == 5
    assert "sbatch" in ran.said
    assert ran.torchrun == []


def test_apptainer_is_told_whose_gpus_the_ranks_need() -> None:
    container = Container(image="i.sif", runtime="apptainer")
    device = PLANS["gpu node"].cluster.device
    assert "--nv " in prefix_words(container, device=device, folder=None)
    amd = prefix_words(container, device=replace(device, vendor="amd"), folder=None)
    assert "--rocm " in amd
    assert "--nv" not in amd


@pytest.mark.parametrize("name", ["cpu node", "gpu node"])
def test_apptainer_stands_before_the_python_of_check_and_ranks(bench: Path, name: str) -> None:
    (bench / "bin/apptainer").write_text(
        '#!/bin/bash\nprintf "%s\\0" "$@" >>apptainer.said\n'
        'while [ "$1" != python3 ]; do shift; done\nexec "$@"\n'
    )
    (bench / "bin/apptainer").chmod(0o755)
    container = Container(image=IMAGE, runtime="apptainer", mounts=("/a b:/data",))
    script = emit(PLANS[name], Job(program=Trainer(steps=3), container=container))
    ran = run(bench, script)
    assert ran.code == 0, ran.said
    said = (bench / "apptainer.said").read_text().split("\0")
    # The check, the question of the cores near GPUs, the ranks.
    starts = 3 if name == "gpu node" else 2
    assert said.count(IMAGE) == said.count("--bind=/a b:/data") == starts
    assert said.count("--nv") == (starts if name == "gpu node" else 0)
    assert ran.plans[0]
    assert "--steps=3" in ran.torchrun[0]
    assert shellcheck(script) == ""


def test_a_slurm_without_pyxis_is_said_in_one_line(bench: Path) -> None:
    srun = bench / "bin/srun"
    srun.write_text(
        '#!/bin/bash\n[ "$1" != --help ] || { echo --nodes; exit 0; }\n'
        'echo "srun: unrecognized option" >&2\nexit 255\n'
    )
    script = emit(make_plan("cuda", nodes=2), Job(container=Container(image="i")))
    ran = run(bench, script, **ALLOCATION)
    assert ran.code == 5
    assert "so pyxis is missing" in ran.said
    assert "srun has no" in (bench / "run/attempts.jsonl").read_text()


def test_a_node_without_apptainer_says_so(bench: Path) -> None:
    container = Container(image="i", runtime="apptainer")
    script = emit(PLANS["cpu node"], Job(container=container))
    ran = run(bench, script)
    assert ran.code == 5
    assert "apptainer is not on PATH" in ran.said
    assert ran.torchrun == []
    assert shellcheck(script) == ""


@pytest.mark.parametrize("mount", ["", "a:b:c:d", "a,b", ":b"])
def test_an_impossible_mount_is_refused(mount: str) -> None:
    with pytest.raises(SpecError, match="SOURCE:TARGET"):
        Container(image="i", mounts=(mount,))

"""`detect --nodes` inside an allocation of a real Slurm, whose two nodes are this host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slurm

DETECT = (sys.executable, "-m", "fsdpplan", "detect", "--nodes")
ROOT = Path(__file__).resolve().parents[2]


def test_every_node_is_read_under_slurm_s_name(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = slurm.run(
        "salloc",
        "--nodes=2",
        "--nodelist=node[1-2]",
        "--exclusive",
        *DETECT,
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    machines = [host["machine"] for host in document["hosts"]]
    assert [machine["host"]["name"] for machine in machines] == ["node1", "node2"]
    assert all(machine["slurm"]["nodes"] == ["node1", "node2"] for machine in machines)
    assert machines[0]["host"]["cpu"] == machines[1]["host"]["cpu"]


def test_the_claimed_gpus_that_are_not_there_are_missed_on_both(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    given = ("--exclusive", "--gres=gpu:8", "--nodes=2", "--nodelist=node[1-2]")
    done = slurm.run("salloc", *given, *DETECT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "2 nodes: node[1-2]" in words
    assert "No profile: no GPU was found on node1" in words


def test_a_profile_of_nodes_without_gpus_is_not_saved(slurm: SlurmCluster, tmp_path: Path) -> None:
    done = slurm.run(
        "salloc", "--nodes=2", "--nodelist=node[1-2]", *DETECT, "--save", "mine", cwd=tmp_path
    )
    assert done.returncode == 4
    assert "2 nodes: node[1-2]" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_node_on_which_the_program_fails_is_named(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A module of Python that only one node cannot load."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.environ.get('SLURMD_NODENAME') == 'node2' and 'SLURM_PROCID' in os.environ:\n"
        "    sys.exit(1)\n"
    )
    shell = f"PYTHONPATH={tmp_path} {' '.join(DETECT)} --json"
    done = slurm.run("salloc", "--nodes=2", "--nodelist=node[1-2]", "sh", "-c", shell, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [host["machine"]["host"]["name"] for host in document["hosts"]] == ["node1"]
    (found,) = [each for each in document["findings"] if each["kind"] == "node_unread"]
    assert found["host"] == "node2"
    assert "node2: task 1: Exited with exit code" in found["text"]


def test_labels_that_the_user_has_switched_on_do_not_stand_in_the_way(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    shell = f"SLURM_LABELIO=1 {' '.join(DETECT)} --json"
    done = slurm.run("salloc", "--nodes=2", "--nodelist=node[1-2]", "sh", "-c", shell, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["hosts"]) == 2


def test_inside_a_step_all_nodes_are_read_too(slurm: SlurmCluster, tmp_path: Path) -> None:
    given = ("--nodes=2", "--nodelist=node[1-2]", "--exclusive", "srun", "--nodes=1", "--ntasks=1")
    done = slurm.run("salloc", *given, *DETECT, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["hosts"]) == 2


def test_outside_of_an_allocation_one_sentence_says_how_to_get_one(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    done = slurm.run(*DETECT, cwd=tmp_path)
    assert done.returncode == 4
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "salloc" in done.stderr

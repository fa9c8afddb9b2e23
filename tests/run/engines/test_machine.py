from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from fsdpplan.errors import LaunchError
from fsdpplan.run.engines.machine import Machine, choose_target, this_machine
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan

CPU_NODES = make_plan("cpu", nodes=2)
GPU_NODE = make_plan("cuda", per_node=8)
GPU_NODES = make_plan("cuda", nodes=8, per_node=8)


def machine(gpus: int = 0, *, sbatch: bool = False, allocation: int = 0) -> Machine:
    return Machine(gpus=gpus, has_sbatch=sbatch, allocation_nodes=allocation)


def test_cpu_processes_run_here_unless_slurm_is_asked_for() -> None:
    assert choose_target(plan=CPU_NODES, machine=machine()) == "here"
    assert choose_target(plan=CPU_NODES, machine=machine(sbatch=True)) == "here"
    assert choose_target(plan=CPU_NODES, machine=machine(sbatch=True), asked="slurm") == "slurm"


def test_gpus_run_where_they_are() -> None:
    assert choose_target(plan=GPU_NODE, machine=machine(8)) == "here"
    assert choose_target(plan=GPU_NODE, machine=machine(8, sbatch=True)) == "here"
    assert choose_target(plan=GPU_NODE, machine=machine(4, sbatch=True)) == "slurm"
    assert choose_target(plan=GPU_NODES, machine=machine(8, sbatch=True)) == "slurm"


def test_an_allocation_of_the_right_size_is_used() -> None:
    assert choose_target(plan=GPU_NODES, machine=machine(allocation=8)) == "allocation"
    assert choose_target(plan=CPU_NODES, machine=machine(allocation=2)) == "allocation"
    assert choose_target(plan=CPU_NODES, machine=machine(allocation=2), asked="here") == "here"
    assert choose_target(plan=CPU_NODES, machine=machine(allocation=1)) == "here"


@pytest.mark.parametrize("plan", [CPU_NODES, GPU_NODE, GPU_NODES])
@pytest.mark.parametrize("asked", [None, "here", "slurm"])
@pytest.mark.parametrize("where", [machine(), machine(1), machine(allocation=3)])
def test_what_is_only_shown_needs_nothing_here(
    plan: Plan, where: Machine, asked: Literal["here", "slurm"] | None
) -> None:
    shown = choose_target(plan=plan, machine=where, asked=asked, starts=False)
    assert shown == (asked or ("here" if plan is CPU_NODES else "slurm"))


@pytest.mark.parametrize(
    ("plan", "where", "asked", "says"),
    [
        (GPU_NODES, machine(), None, "64 GPUs on 8 nodes, this machine has no GPU: .*--smoke"),
        (GPU_NODES, machine(), None, "sbatch job.sbatch"),
        (GPU_NODE, machine(1), None, "8 GPUs on 1 node, this machine has 1 GPU"),
        (GPU_NODES, machine(8, sbatch=True), "here", "--target slurm"),
        (GPU_NODES, machine(allocation=4), None, "this allocation has 4"),
        (CPU_NODES, machine(), "slurm", "no sbatch here that knows a cluster"),
    ],
)
def test_a_plan_that_can_run_nowhere_is_refused_with_a_way_out(
    plan: object, where: Machine, asked: object, says: str
) -> None:
    with pytest.raises(LaunchError, match=says) as refused:
        choose_target(plan=plan, machine=where, asked=asked)  # type: ignore[arg-type]
    assert refused.value.exit_code == 5
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("code", "works"), [(0, True), (1, False)])
def test_an_sbatch_without_a_cluster_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, works: bool
) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    seen = this_machine()
    assert (seen.has_sbatch, seen.allocation_nodes) == (works, 2)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    seen = this_machine()
    assert (seen.has_sbatch, seen.allocation_nodes) == (False, 0)

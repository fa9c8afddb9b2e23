"""Where a plan can run: on this host, in the allocation at hand, or by sbatch; or why nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from fsdpplan.errors import LaunchError
from fsdpplan.spec.plan import Plan

Target = Literal["here", "allocation", "slurm", "kubernetes"]
"""On this host alone; by srun in the allocation that this process is in; by sbatch; by kubectl."""

ANSWER_SECONDS = 20.0
"""sbatch looks for its cluster by DNS, too, which may take its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this host offers to a job."""

    gpus: int
    """GPUs that this process may use."""
    has_sbatch: bool
    """Jobs can be submitted from here."""
    allocation_nodes: int
    """Nodes of the Slurm allocation that this process is in; 0: in none."""
    is_array_task: bool = False
    """This process is one of a job array's tasks."""


def this_machine() -> Machine:
    """Look around."""
    from fsdpplan.topology.probe import visible_gpus

    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    inside = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
    return Machine(
        gpus=len(visible_gpus()),
        has_sbatch=_sbatch_works(),
        allocation_nodes=int(nodes) if inside and nodes.isdecimal() else 0,
        is_array_task="SLURM_ARRAY_TASK_ID" in os.environ,
    )


def _sbatch_works() -> bool:
    """Whether sbatch is here and knows of a cluster: where only the package is installed, even
    `sbatch --version` fails for want of a slurm.conf."""
    if shutil.which("sbatch") is None:
        return False
    try:
        done = subprocess.run(
            ["sbatch", "--version"], capture_output=True, timeout=ANSWER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def choose_target(
    *,
    plan: Plan,
    machine: Machine,
    asked: Literal["here", "slurm"] | None = None,
    starts: bool = True,
) -> Target:
    """Where to run `plan`. Raises LaunchError when it can run nowhere from here; of one that is
    shown and not started (`starts` False), nothing has to be here."""
    if not starts:
        return asked or _would_run(plan, machine)
    if machine.is_array_task:
        raise LaunchError(
            "this is a task of a job array, whose tasks would all train the same plan on the same "
            "checkpoint: run it in a job of its own, or unset SLURM_ARRAY_TASK_ID"
        )
    if asked == "slurm":
        _require_sbatch(machine)
        return "slurm"
    if asked is None and machine.allocation_nodes:
        return _in_allocation(plan, machine)
    if _fits_here(plan, machine):
        return "here"
    if asked is None and machine.has_sbatch:
        return "slurm"
    raise LaunchError(f"{_needs(plan)}, this machine has {_gpus(machine)}: {_ways_out(machine)}")


def _would_run(plan: Plan, machine: Machine) -> Target:
    if machine.allocation_nodes == plan.cluster.nodes:
        return "allocation"
    return "here" if _fits_here(plan, machine) else "slurm"


def _in_allocation(plan: Plan, machine: Machine) -> Target:
    if machine.allocation_nodes == plan.cluster.nodes:
        return "allocation"
    if plan.cluster.device.kind == "cpu":
        return "here"
    raise LaunchError(
        f"{_needs(plan)}, this allocation has {machine.allocation_nodes}: take as many nodes, "
        "plan again for these, or type fsdpplan run --smoke"
    )


def _fits_here(plan: Plan, machine: Machine) -> bool:
    """GPUs must be here, on one node. CPU processes stand for nodes, and are submitted only when
    that is asked for."""
    cluster = plan.cluster
    return cluster.device.kind == "cpu" or (cluster.nodes == 1 and machine.gpus >= cluster.gpus)


def _require_sbatch(machine: Machine) -> None:
    if not machine.has_sbatch:
        raise LaunchError(
            "there is no sbatch here that knows a cluster: go to a login node of one, or type "
            "fsdpplan run --target here"
        )


def _needs(plan: Plan) -> str:
    nodes = plan.cluster.nodes
    return f"the plan needs {plan.cluster.gpus} GPUs on {nodes} node{'s' if nodes > 1 else ''}"


def _gpus(machine: Machine) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(machine.gpus, f"{machine.gpus} GPUs")


def _ways_out(machine: Machine) -> str:
    smoke = "type fsdpplan run --smoke to train the same layout, shrunk, on CPU processes here"
    if machine.has_sbatch:
        return f"{smoke}, or fsdpplan run --target slurm to submit it"
    return f"{smoke}, or fsdpplan emit-launch > job.sbatch, and sbatch job.sbatch on the cluster"

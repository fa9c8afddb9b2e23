from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.emit.job import Job
from tests.emit.bench import ALLOCATION, PLANS, emit, run
from tests.emit.plans import make_plan


def test_in_an_allocation_each_node_joins_the_first_one(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda", nodes=2, per_node=8)), **ALLOCATION)
    assert ran.code == 0, ran.said
    step = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--nodelist=n1,n2"]
    step += ["--cpus-per-task=48", "--export=ALL", "--overlap", "--mem=0", "--label"]
    check = ["--kill-on-bad-exit=0", "--wait=300"]
    assert ran.srun == [*step, *check, *step, "--kill-on-bad-exit=1"]
    first, second = sorted(ran.torchrun, key=lambda words: "is_host=false" in " ".join(words))
    shared = ["--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=n1:22345", "--rdzv-id=12345.0.1"]
    assert set(shared) < set(first)
    assert set(shared) < set(second)
    assert {"--rdzv-conf=is_host=true,join_timeout=60,read_timeout=60", "--local-addr=n1"} < set(
        first
    )
    assert "--rdzv-conf=is_host=false,join_timeout=60,read_timeout=60" in second
    assert "ready n1 1.2.3 8 n1 n1,n2" in ran.said


def test_a_bare_sbatch_leaves_metrics_in_the_folder_of_its_run(bench: Path) -> None:
    script = emit(make_plan("cuda", nodes=2))
    own = f"--metrics={bench}/run/metrics.jsonl"
    assert all(own in words for words in run(bench, script, **ALLOCATION).torchrun)
    assert (bench / "run/job.sbatch").read_text() == script
    given = run(bench, script, **ALLOCATION, FSDPPLAN_METRICS="mine").torchrun[0]
    assert "--metrics=mine" in given
    # Without Slurm nobody looks there: the folder would be taken for that of a job.
    here = run(bench, emit(PLANS["cpu node"])).torchrun[0]
    assert not any(word.startswith("--metrics") for word in here)


def test_a_job_whose_folder_cannot_be_made_goes_on_without_metrics(bench: Path) -> None:
    (bench / "run").touch()
    ran = run(bench, emit(make_plan("cuda", nodes=2)), **ALLOCATION)
    assert ran.code == 0, ran.said
    assert not any("--metrics" in word for words in ran.torchrun for word in words)


def test_torch_numbers_the_nodes_in_the_order_of_slurm(bench: Path) -> None:
    # torch sorts what --local-addr says: torch/distributed/elastic/rendezvous,
    # dynamic_rendezvous.py, _NodeDesc and _mark_rendezvous_complete.
    hosts = [f"n{number}" for number in (3, *range(10, 21))]
    nodes = {
        "SLURM_JOB_NUM_NODES": "12",
        "SLURM_JOB_NODELIST": "n[3,10-20]",
        "NODES": " ".join(hosts),
    }
    ran = run(bench, emit(make_plan("cuda", nodes=12)), **ALLOCATION | nodes)
    assert ran.code == 0, ran.said
    said = {
        environment["SLURMD_NODENAME"]: next(
            word.removeprefix("--local-addr=") for word in words if "--local-addr=" in word
        )
        for words, environment in zip(ran.torchrun, ran.environments, strict=True)
    }
    assert sorted(said, key=lambda host: said[host]) == hosts
    # Where the ranks meet is an address.
    assert said["n3"] == "n3"
    assert all("--rdzv-endpoint=n3:22345" in words for words in ran.torchrun)


def test_a_port_can_be_fixed(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda", nodes=2), Job(port=29500)), **ALLOCATION)
    assert "--rdzv-endpoint=n1:29500" in ran.torchrun[0]


def test_inside_a_step_srun_overlaps(bench: Path) -> None:
    ran = run(bench, emit(make_plan("cuda", nodes=2)), **ALLOCATION, SLURM_STEP_ID="0")
    assert "--overlap" in ran.srun


def test_steps_do_not_take_over_where_an_interactive_step_is_bound(bench: Path) -> None:
    bound = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1"}
    ran = run(bench, emit(make_plan("cuda", nodes=2)), **ALLOCATION, **bound)
    assert not any(name.startswith("SLURM_CPU_BIND") for name in ran.environments[0])


@pytest.mark.parametrize("name", ["gpu node", "gpu nodes", "cpu node"])
def test_an_allocation_of_another_size_is_refused(bench: Path, name: str) -> None:
    ran = run(bench, emit(PLANS[name]), **ALLOCATION)
    assert ran.code == 5
    assert f"the plan needs {PLANS[name].cluster.nodes} node(s)" in ran.said
    assert ran.torchrun == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_allocation_with_an_excluded_node_is_refused(bench: Path, nodes: int) -> None:
    job = Job(exclude=("n[7-9]", "n1"))
    plan = make_plan("cuda", nodes=nodes)
    allocation = {**ALLOCATION, "SLURM_JOB_NUM_NODES": str(nodes)}
    if nodes == 1:
        allocation |= {"SLURM_JOB_NODELIST": "n1", "NODES": "n1"}
    ran = run(bench, emit(plan, job), **allocation)
    assert ran.code == 5
    assert len(ran.said.strip().splitlines()) == 1
    assert "n1, which this job excludes" in ran.said
    assert ran.torchrun == []
    assert run(bench, emit(plan, Job(exclude=("n[7-9]",))), **allocation).code == 0

"""Orders to render as manifests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from fsdpplan.emit.job import Job
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.targets import Target, render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one of libyaml, which is in most wheels, is far faster."""

TARGETS: tuple[Target, ...] = ("kubernetes", "pytorchjob", "jobset", "volcano")
PLANS = {
    "cpu pods": make_plan("cpu", nodes=2),
    "gpu pod": make_plan("cuda", per_node=8),
    "gpu pods": make_plan("cuda", nodes=16, per_node=4),
}
IMAGE = "registry.example/team/train:1"
FULL_JOB = Job(
    program=Trainer(steps=5, data="/data/a b.bin", checkpoint_dir="/ckpt/run", checkpoint_every=2),
    job_name="llama-8b",
    cpus_per_task=64,
    exclude=("n03,n[17-19]",),
    env_setup=("source '/opt/it''s/activate'",),
    env=(("A", "$(HOME) $$ 'x'"), ("B", "no"), ("A", "again $(PATH)")),
    python="/opt/python3",
    port=29511,
    metrics="/ckpt/m.jsonl",
    survival=Survival(retries=5),
)
FULL_PODS = Pods(
    image=IMAGE,
    namespace="team-a",
    queue="gpus",
    volumes=("checkpoints:/ckpt", "data-sets:/data:ro", "/opt/gib:/usr/local/gib"),
    rdma=("rdma/ib=8", "vpc.amazonaws.com/efa=32"),
    topology="example.com/rack",
    topology_mode="preferred",
    secret_env=("HF_TOKEN=hub:token",),
    memory="512Gi",
    shm_size="64Gi",
    service_account="trainer",
    priority_class="high",
    pull_secret=("registry",),
    node_selector=("example.com/gpu=h100",),
    toleration=("nvidia.com/gpu", "team=a:NoSchedule"),
    annotation=("k8s.v1.cni.cncf.io/networks=rdma-a, rdma-b",),
    host_network=True,
    grace_seconds=300,
)


def order(plan: Plan | None = None, *, job: Job | None = None, pods: Pods | None = None) -> Order:
    chosen = plan or PLANS["gpu pods"]
    return Order(
        plan=chosen,
        plan_json=plan_json(chosen),
        job=job or Job(),
        pods=pods or Pods(image=IMAGE),
        version="1.2.3",
    )


def full_order(target: Target) -> Order:
    """Everything that a target has a word for."""
    if target == "volcano":
        return order(job=FULL_JOB, pods=replace(FULL_PODS, topology="2"))
    return order(job=replace(FULL_JOB, time="2-12"), pods=FULL_PODS)


def documents(target: Target, given: Order) -> list[dict[str, Any]]:
    return list(yaml.load_all(render(target, given), Loader=_LOADER))


def pod_templates(target: Target, given: Order) -> list[dict[str, Any]]:
    """Of the job that a manifest makes."""
    *_, above, job = documents(target, given)
    spec = job["spec"]
    match target:
        case "pytorchjob":
            return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]
        case "volcano":
            return [task["template"] for task in spec["tasks"]]
        case "kubernetes":
            spec = above["spec"]["template"]["spec"]
    return [spec["replicatedJobs"][0]["template"]["spec"]["template"]]

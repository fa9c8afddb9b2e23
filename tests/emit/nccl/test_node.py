from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.environment import environment, left_unset
from fsdpplan.files.profiles.catalogue import load_device
from fsdpplan.spec.plan import CollectiveCost, Plan
from fsdpplan.spec.runtime import RuntimeName
from tests.emit.plans import make_plan

NODE = make_plan("cuda", per_node=8)
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def values(plan: Plan, job: Job | None = None) -> dict[str, str]:
    return {v.name: v.value for v in environment(plan=plan, job=job or Job())}


def tensor_parallel(runtime: RuntimeName, name: str = "h100-sxm-80g", **layout: Any) -> Plan:
    """Eight ranks with tensor parallelism in that software, on that device."""
    degrees = {"dp_shard": 1, "dp_replicate": 2, "tp": 4, "sharding": "ddp"}
    plan = make_plan("cuda", per_node=8, **{**degrees, **layout})
    vendor = "amd" if name.startswith("mi") else "nvidia"
    known = None if vendor == "amd" else load_device(name).device.compute_capability
    device = replace(plan.cluster.device, name=name, vendor=vendor, compute_capability=known)
    cluster = replace(plan.cluster, device=device)
    return replace(plan, cluster=cluster, training=replace(plan.training, runtime=runtime))


def test_of_an_architecture_that_is_not_known_the_queues_stay() -> None:
    plan = tensor_parallel("megatron")
    device = replace(plan.cluster.device, compute_capability=None)
    unknown = replace(plan, cluster=replace(plan.cluster, device=device))
    assert QUEUES not in values(unknown)


def test_one_queue_where_reductions_run_beside_weights_gradients() -> None:
    assert values(tensor_parallel("megatron"))[QUEUES] == "1"


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (NODE, "tp 1"),
        (tensor_parallel("fsdp2"), "waits for"),
        (tensor_parallel("megatron", dp_shard=2, dp_replicate=1, sharding="fsdp"), "gathers"),
        (tensor_parallel("megatron", async_tp=True, sequence_parallel=True), "several queues"),
        (tensor_parallel("megatron", "b200-sxm-180g"), "Blackwell"),
        (tensor_parallel("megatron", "gb300-288g"), "Blackwell"),
        (tensor_parallel("megatron", "mi300x-192g"), "CUDA's"),
        (make_plan("cpu"), "CUDA's"),
    ],
)
def test_otherwise_the_queues_stay(plan: Plan, says: str) -> None:
    assert QUEUES not in values(plan)
    (item,) = [i for i in left_unset(plan=plan, job=Job()) if QUEUES in i.names]
    assert says in item.why


@pytest.mark.parametrize(("calls", "kept"), [(0, 2000), (300, 2000), (4000, 8000)])
def test_the_record_holds_two_steps_at_least(calls: int, kept: int) -> None:
    cost = CollectiveCost(
        collective="all_gather",
        axis="dp_shard",
        ranks=8,
        level="nvlink",
        dtype="bf16",
        count=calls,
        bytes=1,
        seconds=0.1,
        exposed_seconds=0.0,
    )
    communication = (cost,) if calls else ()
    plan = replace(NODE, estimate=replace(NODE.estimate, communication=communication))
    assert values(plan)["TORCH_FR_BUFFER_SIZE"] == str(kept)


def test_one_rank_records_nothing() -> None:
    assert not any(
        "FR_" in name or "DUMP" in name for name in values(make_plan("cuda", per_node=1))
    )


def test_the_log_of_nccl_is_set_when_asked_for() -> None:
    assert values(NODE, Job(nccl_debug="INFO"))["NCCL_DEBUG"] == "INFO"
    assert "NCCL_DEBUG" not in values(NODE)


def test_a_cpu_rank_has_one_thread_and_a_gpus_rank_its_share() -> None:
    assert values(make_plan("cpu"))["OMP_NUM_THREADS"] == "1"
    assert values(NODE)["OMP_NUM_THREADS"] == "$(nproc) / 8"


@pytest.mark.parametrize(
    ("torch", "names"),
    [
        (None, {NEW, OLD}),
        ("2.8", {OLD}),
        ("2.9", {OLD}),
        ("2.10", {NEW}),
        ("2.15", {NEW}),
    ],
)
def test_the_allocator_is_set_by_the_name_that_the_release_reads(
    torch: str | None, names: set[str]
) -> None:
    plan = replace(NODE, training=replace(NODE.training, torch=torch))
    known = replace(plan, sources=(*plan.sources, ("training.torch", "flag --torch")))
    found = values(known if torch else plan)
    assert set(found) & {NEW, OLD} == names
    for name in names:
        assert "expandable_segments:True" in found[name] or found[name] == f"${NEW}"
    (left,) = [i for i in left_unset(plan=known, job=Job()) if {NEW, OLD} & {*i.names}] or [None]
    assert (left is None) == (len(names) == 2)


def test_a_release_that_is_only_assumed_gets_both_names() -> None:
    plan = replace(NODE, training=replace(NODE.training, torch="2.13"))
    assert {NEW, OLD} <= set(values(plan))

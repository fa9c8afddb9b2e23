"""Nodes that NVLink joins are asked for together, or the launcher says that it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.segments import CLIQUE_LABEL
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.targets import OTHER_TRAINERS, Target, render
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.plan import Plan
from tests.emit.bench import shellcheck
from tests.emit.kubernetes.orders import IMAGE, documents, order, pod_templates
from tests.emit.plans import make_plan

KUEUE = "kueue.x-k8s.io"
KUBERNETES: tuple[Target, ...] = ("kubernetes", "jobset", "pytorchjob", "volcano")
QUEUED = Pods(image=IMAGE, queue="gpus")


def racks(gpus: int, **flags: int) -> Plan:
    """A plan for GB200 NVL72, sharded over the GPUs of a node."""
    cluster = load_cluster("gb200-nvl72", gpus=gpus, **flags).cluster
    plan = make_plan("cuda", nodes=cluster.nodes, per_node=cluster.gpus_per_node)
    return replace(plan, cluster=cluster)


def script(plan: Plan, job: Job | None = None) -> str:
    return render("slurm", ordered(plan, job))


def ordered(plan: Plan, job: Job | None = None, pods: Pods | None = None) -> Order:
    return Order(
        plan=plan,
        plan_json=plan_json(plan),
        job=job or Job(),
        version="0.1.0",
        pods=pods or Pods(),
    )


def segments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#SBATCH --segment")]


@pytest.mark.parametrize(
    ("gpus", "flags", "nodes"),
    [
        (512, {}, 16),
        (64, {}, 16),
        (144, {}, 18),
        (96, {}, 12),
        (64, {"domain_gpus": 32}, 8),
    ],
)
def test_slurm_is_asked_for_segments_of_nodes(gpus: int, flags: dict[str, int], nodes: int) -> None:
    text = script(racks(gpus, **flags))
    assert segments(text) == [f"#SBATCH --segment={nodes}"]
    said = " ".join(line.removeprefix("# ") for line in text.splitlines())
    assert "topology/block" in said
    assert "--no-segment" in said
    assert shellcheck(text) == ""


@pytest.mark.parametrize(
    ("plan", "job"),
    [
        (racks(512), Job(segment=False)),
        (racks(148), Job()),
        (racks(4), Job()),
        (make_plan("cuda", nodes=4, per_node=8), Job()),
        (make_plan("cpu", nodes=2), Job()),
    ],
)
def test_nothing_is_asked_for_where_nothing_must_stay_together(plan: Plan, job: Job) -> None:
    assert segments(script(plan, job)) == []


def test_spare_nodes_are_whole_segments() -> None:
    with pytest.raises(SpecError, match="--spares 16, or --no-segment"):
        script(racks(512), Job(survival=Survival(spares=1)))
    assert segments(script(racks(512), Job(survival=Survival(spares=16))))
    within = script(racks(64), Job(survival=Survival(spares=1)))
    assert segments(within) == ["#SBATCH --segment=17"]


def test_segment_is_refused_where_it_means_nothing_and_not_added_by_hand() -> None:
    with pytest.raises(SpecError, match="--segment has no meaning here"):
        script(make_plan("cuda", nodes=4, per_node=8), Job(segment=True))
    with pytest.raises(SpecError, match="--no-segment"):
        Job(sbatch=("--segment=8",))


def annotations(target: Target, plan: Plan, pods: Pods, job: Job | None = None) -> dict[str, str]:
    templates = pod_templates(target, order(plan, job=job or Job(), pods=pods))
    (found,) = {str(one["metadata"].get("annotations", {})): one for one in templates}.values()
    metadata: dict[str, Any] = found["metadata"]
    return dict(metadata.get("annotations", {}))


@pytest.mark.parametrize("target", ["kubernetes", "jobset"])
def test_kueue_is_asked_for_slices_of_pods(target: Target) -> None:
    found = annotations(target, racks(512), QUEUED)
    assert found == {
        f"{KUEUE}/podset-slice-required-topology": CLIQUE_LABEL,
        f"{KUEUE}/podset-slice-size": "16",
    }
    within = replace(QUEUED, topology="example.com/hall", nvlink_label="example.com/rack")
    assert annotations(target, racks(64), within) == {
        f"{KUEUE}/podset-required-topology": "example.com/hall",
        f"{KUEUE}/podset-slice-required-topology": "example.com/rack",
        f"{KUEUE}/podset-slice-size": "16",
    }
    assert annotations(target, racks(512), QUEUED, Job(segment=False)) == {}


@pytest.mark.parametrize("target", ["kubernetes", "jobset", "pytorchjob"])
def test_kueue_is_asked_for_one_domain(target: Target) -> None:
    found = annotations(target, racks(64), QUEUED)
    assert found.pop(f"{KUEUE}/podset-required-topology") == CLIQUE_LABEL
    assert set(found) <= {f"{KUEUE}/podset-group-name"}


@pytest.mark.parametrize("target", KUBERNETES)
def test_without_kueue_pods_of_one_domain_seek_each_other(target: Target) -> None:
    given = order(racks(64), pods=Pods(image=IMAGE), job=Job(job_name="me", exclude=("n3",)))
    for template in pod_templates(target, given):
        affinity = template["spec"]["affinity"]
        (term,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == CLIQUE_LABEL
        wanted = term["labelSelector"]["matchLabels"].items()
        assert wanted <= template["metadata"]["labels"].items()
        assert "nodeAffinity" in affinity
    assert documents(target, given)


def words(text: str) -> str:
    return " ".join(line.removeprefix("# ") for line in text.splitlines())


@pytest.mark.parametrize("target", KUBERNETES)
@pytest.mark.parametrize("pods", [Pods(image=IMAGE), QUEUED])
@pytest.mark.parametrize("gpus", [64, 512])
def test_a_manifest_says_what_it_asks_for_or_that_it_cannot(
    target: Target, pods: Pods, gpus: int
) -> None:
    text = words(render(target, order(racks(gpus), pods=pods)))
    assert "The plan counts on NVLink between" in text
    asks = CLIQUE_LABEL in text
    assert asks or "nothing here asks for that" in text or "no word for" in text
    assert asks or gpus == 512


@pytest.mark.parametrize("target", sorted(set(get_args(Target)) - {"slurm", *KUBERNETES}))
def test_other_launchers_say_that_they_cannot(target: Target) -> None:
    plan = racks(512)
    device = replace(plan.cluster.device, skypilot_name="GB200")
    plan = replace(plan, cluster=replace(plan.cluster, device=device))
    if target in OTHER_TRAINERS:
        layout = replace(plan.layout, gradient_sync="every", compile=True)
        training = replace(plan.training, precision="bf16", reduce_dtype="fp32")
        if target != "torchtitan":
            training = replace(training, reduce_dtype="bf16")
        if target == "megatron":
            layout = replace(layout, dp_replicate=1, dp_shard=512)
        plan = replace(plan, layout=layout, training=training)
    text = words(render(target, ordered(plan)))
    assert "The plan counts on NVLink between each 16 nodes in order" in text
    assert "domain" in text.partition("far slower. ")[2]

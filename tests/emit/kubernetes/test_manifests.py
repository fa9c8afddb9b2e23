from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.kubernetes.adapters import adapter_words
from fsdpplan.emit.kubernetes.manifest import Named, read_manifest_job
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.slurm.header import plan_digest, read_header, read_plan_json
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.targets import Target, render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.plan import Plan
from tests.emit.kubernetes.api_fields import PYTORCH_JOB, VOLCANO_JOB, unknown_fields
from tests.emit.kubernetes.orders import (
    FULL_PODS,
    IMAGE,
    PLANS,
    TARGETS,
    documents,
    full_order,
    order,
    pod_templates,
)
from tests.emit.networks import INFINIBAND, on
from tests.emit.plans import make_plan

MODELS = {
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "JobSet": "JobsetV1alpha2JobSet",
}
"""Kinds and their published models, whose import takes long."""
TABLES = {"PyTorchJob": PYTORCH_JOB, "Job": VOLCANO_JOB}

ORDERS = [
    pytest.param(target, each, id=f"{target}-{name}")
    for target in TARGETS
    for name, each in (
        *((name, order(plan)) for name, plan in PLANS.items()),
        ("everything", full_order(target)),
    )
]


def through(model: str, value: dict[str, Any]) -> Any:
    """What a published model keeps of a value: it drops the fields that it does not know."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    return getattr(models, model).from_dict(value).to_dict()


@pytest.mark.parametrize(("target", "given"), ORDERS)
def test_every_field_is_one_of_the_published_api(target: Target, given: Order) -> None:
    for document in documents(target, given):
        kind = document["kind"]
        if kind in MODELS:
            assert through(MODELS[kind], document) == document
        else:
            assert unknown_fields(document, TABLES[kind]) == []
            meta = document["metadata"]
            assert through("IoK8sApimachineryPkgApisMetaV1ObjectMeta", meta) == meta
    for template in pod_templates(target, given):
        assert through("IoK8sApiCoreV1PodTemplateSpec", template) == template


@pytest.mark.parametrize("target", TARGETS)
def test_a_field_that_the_api_does_not_have_would_be_seen(target: Target) -> None:
    *_, job = documents(target, order())
    job["spec"]["nodes"] = 2
    if job["kind"] in MODELS:
        assert through(MODELS[job["kind"]], job) != job
    else:
        assert unknown_fields(job, TABLES[job["kind"]]) == [".spec.nodes"]


@pytest.mark.parametrize("target", TARGETS)
def test_kustomize_reads_it(target: Target, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: kustomize has not looked at the manifests")
    (tmp_path / "job.yaml").write_text(render(target, full_order(target)))
    (tmp_path / "kustomization.yaml").write_text("resources: [job.yaml]\nnamePrefix: a-\n")
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    written = documents(target, full_order(target))
    assert sorted(one["kind"] for one in built) == sorted(one["kind"] for one in written)
    config_map = next(one for one in built if one["kind"] == "ConfigMap")
    assert config_map["data"] == written[0]["data"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("namespace", [None, "team-a", "1e3"])
def test_the_plan_and_the_job_are_read_back(target: Target, namespace: str | None) -> None:
    given = order(pods=Pods(image=IMAGE, namespace=namespace), job=Job(job_name="no"))
    text = render(target, given)
    header = read_header(text)
    assert header is not None
    assert header.digest == plan_digest(given.plan_json)
    assert read_plan_json(text) == given.plan_json.rstrip("\n")
    job = read_manifest_job(text)
    assert job is not None
    assert (job.name, job.namespace) == ("no", namespace)
    assert job.kind == documents(target, given)[-1]["kind"]


def test_other_texts_are_no_manifests() -> None:
    assert read_plan_json("kind: ConfigMap\n") is None
    assert read_manifest_job("kind: Pod\nmetadata:\n  name: a\n") is None


@pytest.mark.parametrize("text", ["", "- a", "a: [", "a: 2026-99-99", "[" * 9999, "kind: JobSet"])
def test_what_is_no_job_is_none(text: str) -> None:
    assert read_manifest_job(text) is None


def test_a_job_written_otherwise_is_the_same_job() -> None:
    text = "{metadata: {labels: {a: b}, namespace: 'no', name: \"a\"}, kind: JobSet} # by hand\n"
    assert read_manifest_job(text) == Named(kind="JobSet", name="a", namespace="no")


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_job_asks_for_is_in_its_pods(target: Target) -> None:
    templates = pod_templates(target, full_order(target))
    for template in templates:
        spec = template["spec"]
        (container,) = spec["containers"]
        assert container["image"] == IMAGE
        assert container["resources"] == {
            "requests": {"cpu": "64", "memory": "512Gi"},
            "limits": {
                "nvidia.com/gpu": "4",
                "rdma/ib": "8",
                "vpc.amazonaws.com/efa": "32",
                "hugepages-2Mi": "5120Mi",
                "memory": "512Gi",
            },
        }
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        sources = {volume["name"]: volume for volume in spec["volumes"]}
        assert sources[mounted["/dev/shm"]["name"]]["emptyDir"] == {
            "medium": "Memory",
            "sizeLimit": "64Gi",
        }
        claim = sources[mounted["/ckpt"]["name"]]["persistentVolumeClaim"]
        assert claim == {"claimName": "checkpoints"}
        assert mounted["/data"]["readOnly"]
        assert sources[mounted["/usr/local/gib"]["name"]]["hostPath"] == {"path": "/opt/gib"}
        assert spec["nodeSelector"] == {"example.com/gpu": "h100"}
        assert spec["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"},
        ]
        assert spec["terminationGracePeriodSeconds"] == 300
        assert spec["serviceAccountName"] == "trainer"
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
        assert spec["hostNetwork"]
        (term,) = spec["affinity"]["nodeAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]["nodeSelectorTerms"]
        assert term["matchExpressions"][0]["values"] == ["n03", "n17", "n18", "n19"]
        networks_wanted = template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
        assert networks_wanted == "rdma-a, rdma-b"


@pytest.mark.parametrize("target", TARGETS)
def test_variables_are_literal_and_each_is_there_once(target: Target) -> None:
    config_map = documents(target, full_order(target))[0]
    for template in pod_templates(target, full_order(target)):
        variables = template["spec"]["containers"][0]["env"]
        assert variables == [
            {
                "name": "FSDPPLAN_PLAN",
                "valueFrom": {
                    "configMapKeyRef": {
                        "name": config_map["metadata"]["name"],
                        "key": "plan.json",
                    }
                },
            },
            {"name": "A", "value": "again $$(PATH)"},
            {"name": "B", "value": "no"},
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
            },
        ]


def test_kueue_gets_the_queue_and_the_place() -> None:
    for target in ("kubernetes", "pytorchjob", "jobset"):
        job = documents(target, full_order(target))[-1]
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
        for template in pod_templates(target, full_order(target)):
            annotations = template["metadata"]["annotations"]
            key = "kueue.x-k8s.io/podset-preferred-topology"
            assert annotations[key] == "example.com/rack"
    one = pod_templates("pytorchjob", full_order("pytorchjob"))
    groups = {each["metadata"]["annotations"]["kueue.x-k8s.io/podset-group-name"] for each in one}
    assert (len(one), len(groups)) == (2, 1)


def test_volcano_gets_the_queue_and_the_tier() -> None:
    spec = documents("volcano", full_order("volcano"))[-1]["spec"]
    assert spec["queue"] == "gpus"
    assert spec["networkTopology"] == {"mode": "soft", "highestTierAllowed": 2}
    assert spec["minAvailable"] == sum(task["replicas"] for task in spec["tasks"]) == 16
    assert {"svc", "env", "pytorch"} <= spec["plugins"].keys()


@pytest.mark.parametrize("retries", [0, 2])
def test_restarts_are_bounded(retries: int) -> None:
    given = order(job=Job(survival=Survival(retries=retries)))
    runtime = documents("kubernetes", given)[1]
    assert runtime["spec"]["template"]["spec"]["failurePolicy"] == {"maxRestarts": retries}
    assert documents("jobset", given)[-1]["spec"]["failurePolicy"] == {"maxRestarts": retries}
    assert documents("volcano", given)[-1]["spec"]["maxRetry"] == retries + 1
    pytorch = documents("pytorchjob", given)[-1]["spec"]
    policies = {one["restartPolicy"] for one in pytorch["pytorchReplicaSpecs"].values()}
    assert policies == ({"OnFailure"} if retries else {"Never"})
    # All 16 containers start again each time.
    assert pytorch["runPolicy"]["backoffLimit"] == (33 if retries else 0)


@pytest.mark.parametrize(
    ("plan", "preflight", "tries"),
    [
        ("gpu pods", None, True),
        ("gpu pods", False, False),
        ("gpu pod", None, False),
        ("gpu pod", True, True),
    ],
)
def test_ranks_and_links_are_tried_first_where_there_are_several_pods(
    plan: str, preflight: bool | None, tries: bool
) -> None:
    given = order(PLANS[plan], job=Job(survival=Survival(preflight=preflight)))
    script = documents("jobset", given)[0]["data"]["start.sh"]
    assert (" --preflight " in script) == tries


def test_a_time_limit_ends_the_job_for_good() -> None:
    given = order(job=Job(time="1:00:00"))
    assert documents("kubernetes", given)[-1]["spec"]["activeDeadlineSeconds"] == 3600
    assert documents("pytorchjob", given)[-1]["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3600
    spec = documents("jobset", given)[-1]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert job["activeDeadlineSeconds"] == 3600
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["DeadlineExceeded"])


def test_another_plan_is_another_config_map() -> None:
    names = {documents("jobset", order(plan))[0]["metadata"]["name"] for plan in PLANS.values()}
    assert len(names) == len(PLANS)
    assert documents("jobset", order())[0]["immutable"]


def test_a_network_that_nothing_asks_for_is_mentioned() -> None:
    plan = on(INFINIBAND, PLANS["gpu pods"])
    assert "no --rdma asks for its adapters" in render("jobset", order(plan))
    asked = Pods(image=IMAGE, rdma=("rdma/ib=4",))
    assert "no --rdma asks" not in render("jobset", order(plan, pods=asked))


AWS = {
    "p4d-24xlarge": 4,
    "p4de-24xlarge": 4,
    "p5-48xlarge": 32,
    "p5en-48xlarge": 16,
    "p6-b200-48xlarge": 8,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "adapters"), list(AWS.items()))
def test_pods_ask_for_the_adapters_of_their_machine(
    target: Target, name: str, adapters: int
) -> None:
    plan = on_machine(name)
    (container, *_) = (pod["spec"]["containers"][0] for pod in pod_templates(target, order(plan)))
    assert container["resources"] == {
        "requests": {"cpu": "8"},  # huge pages come with cores or memory only
        "limits": {
            "nvidia.com/gpu": "8",
            "vpc.amazonaws.com/efa": str(adapters),
            "hugepages-2Mi": "5120Mi",
        },
    }
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    head = " ".join(render(target, order(plan)).replace("\n#", "").split())
    assert f"asks for vpc.amazonaws.com/efa={adapters} and hugepages-2Mi=5120Mi" in head
    memory = Pods(image=IMAGE, memory="64Gi", rdma=("vpc.amazonaws.com/efa=1",))
    (container, *_) = (
        pod["spec"]["containers"][0] for pod in pod_templates(target, order(plan, pods=memory))
    )
    assert container["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"
    assert container["resources"]["requests"] == {"memory": "64Gi"}


def test_pods_of_one_node_or_on_its_network_ask_for_no_adapters() -> None:
    alone = on_machine("p5-48xlarge", nodes=1)
    for one in (
        order(alone),
        order(on_machine("p5-48xlarge"), pods=Pods(image=IMAGE, host_network=True)),
    ):
        (container,) = pod_templates("jobset", one)[0]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("azure-nd-h100-v5", "on AKS add --rdma rdma/ib=8"),
        ("gcp-a3-ultragpu-8g", "what Google's guide to this machine type says"),
        ("coreweave-hgx-h100", "add --rdma RESOURCE=N as kubectl describe node names them"),
        ("oci-bm-gpu-h100-8", "add --rdma RESOURCE=N"),
    ],
)
def test_where_the_cluster_names_its_adapters_it_is_said_what_to_type(name: str, says: str) -> None:
    plan = on_machine(name)
    assert says in (adapter_words(plan, Pods(image=IMAGE)) or "")
    assert adapter_words(plan, Pods(image=IMAGE, rdma=("rdma/ib=8",))) is None
    assert adapter_words(on_machine("gcp-a2-highgpu-8g"), Pods(image=IMAGE)) is None  # ethernet


def on_machine(name: str, *, nodes: int = 2) -> Plan:
    plan = make_plan("cuda", nodes=nodes, per_node=8)
    return replace(plan, cluster=load_cluster(name, gpus=8 * nodes).cluster)


def checkpoints(path: str) -> Job:
    return Job(program=Trainer(checkpoint_dir=path))


THEIRS_TRIED = Job(program=UserProgram(script="t.py"), survival=Survival(preflight=True))
VOLUME = Pods(image=IMAGE, volumes=("ckpt:/ckpt", "old:/ckpt/old:ro"))


@pytest.mark.parametrize(
    ("target", "job", "pods", "said"),
    [
        ("kubernetes", Job(), Pods(), "name it by --image"),
        ("jobset", Job(partition="gpu"), None, "--partition has no meaning for --target jobset"),
        ("jobset", Job(qos="a", account="b"), None, "--account, --qos have no meaning"),
        ("jobset", Job(sbatch=("--comment=x",)), None, "--sbatch has no meaning"),
        ("volcano", Job(time="10"), None, "--time has no meaning for --target volcano"),
        ("jobset", Job(survival=Survival(spares=1)), None, "--spares has no meaning"),
        ("jobset", Job(survival=Survival(requeue=False)), None, "--requeue has no meaning"),
        ("jobset", THEIRS_TRIED, None, "--preflight is the reference trainer's"),
        ("jobset", Job(job_name="My Run_1"), None, "type --job-name my-run-1"),
        ("jobset", Job(job_name="8b"), None, "type --job-name job-8b"),
        ("jobset", Job(job_name="a" * 46), None, "at most 45 characters"),
        ("jobset", checkpoints("/ckpt/a"), None, "--volumes CLAIM:/ckpt"),
        ("jobset", checkpoints("/ckpts"), VOLUME, "under no volume"),
        ("jobset", checkpoints("ckpt"), VOLUME, "under no volume"),
        ("jobset", checkpoints("/ckpt/../tmp"), VOLUME, "under no volume"),
        ("jobset", checkpoints("/ckpt/old/a"), VOLUME, "reading alone"),
        ("jobset", Job(metrics="/m.jsonl"), VOLUME, "--metrics /m.jsonl is under no volume"),
        ("jobset", Job(env=(("PET_NNODES", "1"),)), None, "PET_NNODES is set by"),
        ("jobset", Job(env=(("A", "1"),)), replace(VOLUME, secret_env=("A=b:c",)), "given twice"),
        ("jobset", Job(), Pods(image=IMAGE, topology="rack"), "LocalQueue by --queue"),
        ("volcano", Job(), Pods(image=IMAGE, topology="rack"), "must be a number"),
    ],
)
def test_what_a_target_cannot_say_is_refused(
    target: Target, job: Job, pods: Pods | None, said: str
) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        render(target, order(job=job, pods=pods))


def test_a_checkpoint_on_a_volume_is_taken() -> None:
    render("jobset", order(job=checkpoints("/ckpt"), pods=VOLUME))
    render("jobset", order(job=checkpoints("/ckpt/a/b"), pods=VOLUME))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@settings(deadline=None, max_examples=30)
@given(value=TEXT, argument=TEXT, target=st.sampled_from(TARGETS))
def test_hostile_texts_come_out_as_they_went_in(value: str, argument: str, target: Target) -> None:
    job = Job(
        program=UserProgram(script="train.py", args=(argument,)),
        env=(("A", value),),
    )
    pods = replace(FULL_PODS, topology=None, topology_mode="required", annotation=(f"a={value}",))
    given_order = order(job=job, pods=pods)
    text = render(target, given_order)
    assert read_plan_json(text) == given_order.plan_json.rstrip("\n")
    found = read_manifest_job(text)
    assert found is not None
    assert found.name == "fsdpplan"
    for template in pod_templates(target, given_order):
        container = template["spec"]["containers"][0]
        assert container["env"][1] == {"name": "A", "value": value.replace("$", "$$")}
        assert container["command"] == ["bash", "/etc/fsdpplan/start.sh"]
        assert template["metadata"]["annotations"]["a"] == value

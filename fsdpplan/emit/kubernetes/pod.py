"""The pod of a job, the same for every operator: what runs in it, what it gets, where it may go.

Source: kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1; kueue ff69552e79
apis/kueue/v1beta1/topology_types.go for the annotations of topology-aware scheduling.
"""

from __future__ import annotations

import re

from fsdpplan.emit.job import excluded_hosts
from fsdpplan.emit.kubernetes.adapters import adapter_resources, beside_adapters
from fsdpplan.emit.kubernetes.names import require_key
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import (
    DEFAULT_GRACE_SECONDS,
    Mount,
    Pods,
    Toleration,
    mounts,
    pod_annotations,
    secret_variables,
    selected_labels,
    tolerations,
)
from fsdpplan.emit.safe_text import paragraph
from fsdpplan.emit.segments import segment_nodes, segment_reason
from fsdpplan.emit.slurm.header import PLAN_KEY
from fsdpplan.emit.yaml_text import YamlValue
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

FOLDER = "/etc/fsdpplan"
"""Where the ConfigMap is seen in the pods."""
SCRIPT_KEY = "start.sh"
"""Where the ConfigMap has the pods' program."""

KUEUE = "kueue.x-k8s.io"
HOST_NAME_LABEL = "kubernetes.io/hostname"

_SET_BY_OPERATORS = re.compile(
    r"FSDPPLAN_PLAN|PET_.*|MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|JOB_COMPLETION_INDEX|VC_.*"
)

Labels = dict[str, str]


def pod_template(
    order: Order,
    *,
    config_map: str,
    labels: Labels,
    container: str,
    restart_policy: str | None = "Never",
    annotations: Labels | None = None,
    queue_is_kueues: bool = True,
) -> dict[str, YamlValue]:
    """A PodTemplateSpec whose container is called `container`, as the operator wants it."""
    pods, nodes = order.pods, order.plan.cluster.nodes
    given = pod_annotations(pods) | (annotations or {})
    placed = pods.queue is not None and queue_is_kueues
    gathers = not placed and segment_nodes(order.plan, order.job) == nodes
    metadata: dict[str, YamlValue] = {"labels": dict(labels)}
    if given:
        metadata["annotations"] = dict(given)
    return {
        "metadata": metadata,
        "spec": {
            **_if_given("restartPolicy", restart_policy),
            "terminationGracePeriodSeconds": pods.grace_seconds or DEFAULT_GRACE_SECONDS,
            **_where(order, labels, gathers),
            "containers": [
                {
                    "name": container,
                    "image": _image(pods),
                    "command": ["bash", f"{FOLDER}/{SCRIPT_KEY}"],
                    "env": _variables(order, config_map),
                    "resources": _resources(order),
                    **_if_given("securityContext", _security(order)),
                    "volumeMounts": _volume_mounts(pods),
                }
            ],
            "volumes": _volumes(pods, config_map),
        },
    }


def kueue_annotations(pods: Pods, *, group: str | None = None) -> Labels:
    """Annotations by which Kueue places all pods close together; `group` joins several sets of
    pods."""
    if pods.topology is None:
        return {}
    if pods.queue is None:
        raise SpecError(
            f"--topology {pods.topology!r} is Kueue's to keep: give its LocalQueue by --queue too"
        )
    require_key("--topology", pods.topology)
    found = {f"kueue.x-k8s.io/podset-{pods.topology_mode}-topology": pods.topology}
    return found if group is None else {**found, "kueue.x-k8s.io/podset-group-name": group}


def segment_annotations(order: Order, *, group: str | None = None) -> Labels:
    """Annotations by which Kueue gives nodes of one NVLink domain together, in the order of ranks:
    to all pods, which may be several sets of one `group`, or to each slice of one set."""
    segment, pods = segment_nodes(order.plan, order.job), order.pods
    if segment is None or pods.queue is None:
        return {}
    if segment == order.plan.cluster.nodes and pods.topology is None:
        found = {f"{KUEUE}/podset-required-topology": pods.nvlink_label}
        return found if group is None else {**found, f"{KUEUE}/podset-group-name": group}
    if group is not None:
        return {}
    return {
        f"{KUEUE}/podset-slice-required-topology": pods.nvlink_label,
        f"{KUEUE}/podset-slice-size": str(segment),
    }


def segment_lines(
    order: Order, *, unsaid: str | None = None, asks_by_affinity: bool = False
) -> list[str]:
    """Comment lines on nodes that NVLink joins: what asks for them, or that nothing does; `unsaid`
    where the job has no word for several domains, `asks_by_affinity` where no queue places pods."""
    segment = segment_nodes(order.plan, order.job)
    if segment is None:
        return []
    why, label = segment_reason(order.plan), order.pods.nvlink_label
    one = segment == order.plan.cluster.nodes
    if unsaid is not None and not one:
        return paragraph(f"{why}. {unsaid}")
    if order.pods.queue is not None and not asks_by_affinity:
        return paragraph(
            f"{why}. Kueue gives them together if its Topology has the level {label} "
            "(--nvlink-label names another, --no-segment leaves it out); slices of pods need Kueue "
            "0.13 or later."
        )
    if one:
        return paragraph(
            f"{why}. The pods go where the label {label} has one value (--nvlink-label names "
            "another, --no-segment leaves it out)."
        )
    return paragraph(
        f"{why}. Without Kueue (--queue) nothing here asks for that: give it a queue, or place the "
        "pods by hand."
    )


def kueue_labels(pods: Pods) -> Labels:
    """Label by which a job goes through a queue of Kueue's."""
    return {} if pods.queue is None else {"kueue.x-k8s.io/queue-name": pods.queue}


def _if_given(key: str, value: YamlValue) -> dict[str, YamlValue]:
    return {} if value is None else {key: value}


def _image(pods: Pods) -> str:
    if pods.image is None:
        raise SpecError(
            "pods need an image with bash, torch and, for the reference trainer, fsdpplan: name it "
            "by --image"
        )
    return pods.image


def _variables(order: Order, config_map: str) -> list[YamlValue]:
    """The environment; each name once, as the API server wants it."""
    secrets = secret_variables(order.pods)
    plain = dict(order.job.env)
    for name in [*plain, *(secret.name for secret in secrets)]:
        if _SET_BY_OPERATORS.fullmatch(name):
            raise SpecError(f"{name} is set by the manifest or the operator: leave it out of --env")
    for secret in secrets:
        if secret.name in plain or [one.name for one in secrets].count(secret.name) > 1:
            raise SpecError(f"{secret.name} is given twice, by --secret-env and before: leave one")
    plan: YamlValue = {
        "name": "FSDPPLAN_PLAN",
        "valueFrom": {"configMapKeyRef": {"name": config_map, "key": PLAN_KEY}},
    }
    found = [plan]
    # Kubernetes expands $(NAME) in values; two dollars are one.
    found += [{"name": name, "value": value.replace("$", "$$")} for name, value in plain.items()]
    for secret in secrets:
        reference: YamlValue = {"name": secret.secret, "key": secret.key}
        found.append({"name": secret.name, "valueFrom": {"secretKeyRef": reference}})
    return found


def _resources(order: Order) -> dict[str, YamlValue]:
    plan, job, pods = order.plan, order.job, order.pods
    adapters = adapter_resources(order.plan, order.pods)
    limits, requests = adapters | beside_adapters(adapters), {}
    cores = job.cpus_per_task
    if plan.cluster.device.kind == "cuda":
        limits = {_gpu_resource(plan): str(plan.cluster.gpus_per_node), **limits}
    if cores is None and (plan.cluster.device.kind == "cpu" or _needs_more(limits, pods)):
        cores = plan.cluster.gpus_per_node
    if cores is not None:
        requests["cpu"] = str(cores)
    if pods.memory is not None:
        requests["memory"] = limits["memory"] = pods.memory
    found: dict[str, YamlValue] = {}
    if requests:
        found["requests"] = dict(requests)
    if limits:
        found["limits"] = dict(limits)
    return found


def _gpu_resource(plan: Plan) -> str:
    vendor = plan.cluster.device.vendor
    if vendor not in ("nvidia", "amd"):
        raise SpecError(
            f"{plan.cluster.device.name} is of {vendor}, whose resource in Kubernetes is not known "
            "here: use --target slurm"
        )
    return f"{vendor}.com/gpu"


def _needs_more(limits: dict[str, str], pods: Pods) -> bool:
    """Whether the API server would refuse these: huge pages come with cores or memory only."""
    return pods.memory is None and any(name.startswith("hugepages-") for name in limits)


def _security(order: Order) -> YamlValue:
    """Adapters that read device memory pin it, for which a pod needs leave."""
    if not adapter_resources(order.plan, order.pods) and not order.pods.host_network:
        return None
    return {"capabilities": {"add": ["IPC_LOCK"]}}


def _where(order: Order, labels: Labels, gathers: bool) -> dict[str, YamlValue]:
    """Whose pods they are, and on which nodes; `gathers`: on those of one NVLink domain."""
    pods, affinity = order.pods, dict[str, YamlValue]()
    found: dict[str, YamlValue] = {
        **_if_given("serviceAccountName", pods.service_account),
        **_if_given("priorityClassName", pods.priority_class),
    }
    if pods.host_network:
        found |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if pods.pull_secret:
        found["imagePullSecrets"] = [{"name": name} for name in pods.pull_secret]
    if pods.node_selector:
        found["nodeSelector"] = dict(selected_labels(pods))
    if pods.toleration:
        found["tolerations"] = [_toleration(one) for one in tolerations(pods)]
    if order.job.exclude:
        affinity["nodeAffinity"] = _away_from(excluded_hosts(order.job))
    if gathers:
        affinity["podAffinity"] = _together(pods.nvlink_label, labels)
    return {**found, "affinity": affinity} if affinity else found


def _together(key: str, labels: Labels) -> YamlValue:
    term: YamlValue = {"topologyKey": key, "labelSelector": {"matchLabels": dict(labels)}}
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _toleration(one: Toleration) -> dict[str, YamlValue]:
    return {
        "key": one.key,
        "operator": "Exists" if one.value is None else "Equal",
        **_if_given("value", one.value),
        **_if_given("effect", one.effect),
    }


def _away_from(hosts: tuple[str, ...]) -> YamlValue:
    expression: YamlValue = {"key": HOST_NAME_LABEL, "operator": "NotIn", "values": list(hosts)}
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [expression]}]
        }
    }


def _volume_mounts(pods: Pods) -> list[YamlValue]:
    found: list[YamlValue] = [
        {"name": "plan", "mountPath": FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for number, mount in enumerate(mounts(pods)):
        found.append({"name": f"volume-{number}", "mountPath": mount.path, **_read_only(mount)})
    return found


def _volumes(pods: Pods, config_map: str) -> list[YamlValue]:
    # Ranks of a pod and NCCL share memory; a container's own /dev/shm has 64 MiB.
    shared: dict[str, YamlValue] = {"medium": "Memory", **_if_given("sizeLimit", pods.shm_size)}
    found: list[YamlValue] = [
        {"name": "plan", "configMap": {"name": config_map}},
        {"name": "shared-memory", "emptyDir": shared},
    ]
    for number, mount in enumerate(mounts(pods)):
        found.append({"name": f"volume-{number}", **_source(mount)})
    return found


def _source(mount: Mount) -> dict[str, YamlValue]:
    if mount.claim is None:
        return {"hostPath": {"path": mount.folder}}
    return {
        "persistentVolumeClaim": {
            "claimName": mount.claim,
            **_read_only(mount),
        }
    }


def _read_only(mount: Mount) -> dict[str, YamlValue]:
    return {"readOnly": True} if mount.read_only else {}

"""A PyTorchJob of Kubeflow's Training Operator v1.

Its pods are started again one by one: by the kubelet where a container fails, by the operator where
a pod does. The others fail for want of the one that is gone, and all meet again.

Source: kubeflow/trainer v1.9.4 pkg/apis/kubeflow.org/v1 (pytorch_types.go, common_types.go),
pkg/controller.v1/pytorch/envvar.go (MASTER_ADDR, RANK), pkg/controller.v1/common (pod.go, job.go)
and pkg/core/job.go (how restarts are counted), pkg/webhooks/pytorch/pytorchjob_webhook.go.
"""

from __future__ import annotations

from fsdpplan.emit.job import later_starts
from fsdpplan.emit.kubernetes.manifest import active_seconds, manifest, parts
from fsdpplan.emit.kubernetes.pod import (
    kueue_annotations,
    kueue_labels,
    pod_template,
    segment_annotations,
)
from fsdpplan.emit.kubernetes.start import Meeting
from fsdpplan.emit.order import Order
from fsdpplan.emit.yaml_text import YamlValue

CONTAINER = "pytorch"
"""The operator sets its variables in the container of this name alone."""
MEETING = Meeting(head="${MASTER_ADDR:-}", index="${RANK:-}", port="${MASTER_PORT:-}")


def render(order: Order) -> str:
    """The manifest of an order."""
    found = parts(order, MEETING, target="pytorchjob")
    nodes, retries = order.plan.cluster.nodes, later_starts(order.job)
    template = pod_template(
        order,
        config_map=found.config_map,
        labels=found.labels,
        container=CONTAINER,
        restart_policy=None,
        annotations=kueue_annotations(order.pods, group=found.name)
        | segment_annotations(order, group=found.name),
    )

    def replicas(number: int) -> YamlValue:
        return {
            "replicas": number,
            "restartPolicy": "OnFailure" if retries else "Never",
            "template": template,
        }

    run_policy: dict[str, YamlValue] = {
        "cleanPodPolicy": "Running",
        # Restarts of all containers are summed up, and the limit itself is one too many.
        "backoffLimit": retries * nodes + 1 if retries else 0,
    }
    seconds = active_seconds(order.job)
    if seconds is not None:
        run_policy["activeDeadlineSeconds"] = seconds
    specs = {"Master": replicas(1)} | ({"Worker": replicas(nodes - 1)} if nodes > 1 else {})
    job: dict[str, YamlValue] = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": found.metadata(labels=kueue_labels(order.pods)),
        "spec": {
            "nprocPerNode": str(order.plan.cluster.gpus_per_node),
            "runPolicy": run_policy,
            "pytorchReplicaSpecs": specs,
        },
    }
    return manifest(
        found,
        [job],
        needs="Kubeflow Training Operator 1.7 to 1.9",
        unsaid="A PyTorchJob, whose first pod is a set of its own, has no word for it: use "
        "--target kubernetes or jobset with Kueue's --queue.",
    )

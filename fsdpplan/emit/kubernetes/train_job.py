"""A TrainJob of Kubeflow Trainer v2, with a TrainingRuntime of its own.

A TrainJob cannot say how often it is started again, and how it says volumes has changed from one
release to the next (podTemplateOverrides, runtimePatches); a TrainingRuntime has said all of it
since 2.0, in JobSet's words. So the cluster's `torch-distributed` is left as it is.

Source: kubeflow/trainer 8c0f5059bd pkg/apis/trainer/v1alpha1 (trainjob_types.go,
trainingruntime_types.go), pkg/runtime/framework/plugins/torch/torch.go (which variables tell
torchrun of the others, and that they need spec.trainer), pkg/webhooks/trainingruntime_webhook.go
(names of the trainer's job and container); CHANGELOG.md for the releases.
"""

from __future__ import annotations

from fsdpplan.emit.kubernetes.job_set import job_set_spec
from fsdpplan.emit.kubernetes.manifest import active_seconds, manifest, parts
from fsdpplan.emit.kubernetes.pod import kueue_labels
from fsdpplan.emit.kubernetes.start import Meeting
from fsdpplan.emit.order import Order
from fsdpplan.emit.yaml_text import YamlValue

API_VERSION = "trainer.kubeflow.org/v1alpha1"
MEETING = Meeting(
    head="${PET_MASTER_ADDR:-}", index="${PET_NODE_RANK:-}", port="${PET_MASTER_PORT:-}"
)


def render(order: Order) -> str:
    """The manifest of an order."""
    found = parts(order, MEETING, target="kubernetes")
    nodes, seconds = order.plan.cluster.nodes, active_seconds(order.job)
    runtime: dict[str, YamlValue] = {
        "apiVersion": API_VERSION,
        "kind": "TrainingRuntime",
        "metadata": found.metadata(labels={"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {
                "spec": job_set_spec(
                    found,
                    job_labels={"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"},
                    limits_time=False,
                )
            },
        },
    }
    spec: dict[str, YamlValue] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": found.name,
        },
        "trainer": {"numNodes": nodes, "numProcPerNode": order.plan.cluster.gpus_per_node},
    }
    if seconds is not None:
        spec["activeDeadlineSeconds"] = seconds
    train_job: dict[str, YamlValue] = {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": found.metadata(labels=kueue_labels(order.pods)),
        "spec": spec,
    }
    release = "2.0" if seconds is None else "2.2 (for the time limit)"
    return manifest(found, [runtime, train_job], needs=f"Kubeflow Trainer {release} or later")

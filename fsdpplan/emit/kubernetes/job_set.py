"""A JobSet: one indexed Job whose pods know each other by name, started again as a whole.

Source: kubernetes-sigs/jobset 08dfbdfd68 api/jobset/v1alpha2/jobset_types.go and
pkg/webhooks/jobset_webhook.go; rules of a failure policy need JobSet 0.6.
"""

from __future__ import annotations

from fsdpplan.emit.job import later_starts
from fsdpplan.emit.kubernetes.manifest import Parts, active_seconds, manifest, parts
from fsdpplan.emit.kubernetes.pod import (
    kueue_annotations,
    kueue_labels,
    pod_template,
    segment_annotations,
)
from fsdpplan.emit.kubernetes.start import Meeting
from fsdpplan.emit.order import Order
from fsdpplan.emit.yaml_text import YamlValue

NODE = "node"
"""Name of the replicated job and of its container."""
PORT = "29500"


def render(order: Order) -> str:
    """The manifest of an order."""
    name = order.job.job_name
    # The Job's controller tells each pod its index; JobSet's service gives it this name.
    meeting = Meeting(
        head=f"{name}-{NODE}-0-0.{name}", index="${JOB_COMPLETION_INDEX:-}", port=PORT
    )
    found = parts(order, meeting, target="jobset")
    job_set: dict[str, YamlValue] = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": found.metadata(labels=kueue_labels(order.pods)),
        "spec": job_set_spec(found),
    }
    return manifest(found, [job_set], needs="JobSet 0.6 or later")


def job_set_spec(
    found: Parts, *, job_labels: dict[str, str] | None = None, limits_time: bool = True
) -> dict[str, YamlValue]:
    """Its spec; `limits_time` where nothing above it does."""
    order = found.order
    nodes, seconds = order.plan.cluster.nodes, active_seconds(order.job)
    template = pod_template(
        order,
        config_map=found.config_map,
        labels=found.labels,
        container=NODE,
        annotations=kueue_annotations(order.pods) | segment_annotations(order),
    )
    limited: dict[str, YamlValue] = {}
    policy: dict[str, YamlValue] = {"maxRestarts": later_starts(order.job)}
    if seconds is not None and limits_time:
        limited = {"activeDeadlineSeconds": seconds}
        policy["rules"] = [
            {
                "name": "deadline",
                "action": "FailJobSet",
                "onJobFailureReasons": ["DeadlineExceeded"],
            }
        ]
    metadata: dict[str, YamlValue] = (
        {} if job_labels is None else {"metadata": {"labels": dict(job_labels)}}
    )
    return {
        # Pods of one start cannot join those of another: all start again, or none.
        "failurePolicy": policy,
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "replicatedJobs": [
            {
                "name": NODE,
                "replicas": 1,
                "template": {
                    **metadata,
                    "spec": {
                        "parallelism": nodes,
                        "completions": nodes,
                        "completionMode": "Indexed",
                        "backoffLimit": 0,
                        **limited,
                        "template": template,
                    },
                },
            }
        ],
    }

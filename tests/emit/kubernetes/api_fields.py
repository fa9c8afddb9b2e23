"""Fields of the kinds whose models are on no package index of Python, as far as ours use them.

Sources: kubeflow/trainer v1.9.4 pkg/apis/kubeflow.org/v1/pytorch_types.go and common_types.go;
volcano-sh/volcano ed72c7c815 staging/src/volcano.sh/apis/pkg/apis/batch/v1alpha1/job.go. A type
says what a field holds, a dict what is in it, a list of one what is in each item; "*" is any key.
"""

from __future__ import annotations

from typing import Any

POD_TEMPLATE = "PodTemplateSpec"
OBJECT_META = "ObjectMeta"

PYTORCH_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": OBJECT_META,
    "spec": {
        "runPolicy": {
            "cleanPodPolicy": str,
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "schedulingPolicy": {"minAvailable": int, "queue": str, "priorityClass": str},
            "suspend": bool,
            "managedBy": str,
        },
        "elasticPolicy": {"minReplicas": int, "maxReplicas": int, "maxRestarts": int},
        "pytorchReplicaSpecs": {
            "*": {"replicas": int, "restartPolicy": str, "template": POD_TEMPLATE}
        },
        "nprocPerNode": str,
    },
}
VOLCANO_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": OBJECT_META,
    "spec": {
        "schedulerName": str,
        "minAvailable": int,
        "volumes": [{"mountPath": str, "volumeClaimName": str}],
        "tasks": [
            {
                "name": str,
                "replicas": int,
                "minAvailable": int,
                "template": POD_TEMPLATE,
                "policies": [{"action": str, "event": str, "events": [str], "exitCode": int}],
                "topologyPolicy": str,
                "maxRetry": int,
            }
        ],
        "policies": [{"action": str, "event": str, "events": [str], "exitCode": int}],
        "plugins": {"*": [str]},
        "queue": str,
        "maxRetry": int,
        "ttlSecondsAfterFinished": int,
        "priorityClassName": str,
        "minSuccess": int,
        "networkTopology": {"mode": str, "highestTierAllowed": int, "highestTierName": str},
    },
}


def unknown_fields(value: Any, fields: Any, where: str = "") -> list[str]:
    """What `fields` does not have or is of another type."""
    match fields:
        case str():
            return [] if isinstance(value, dict) else [where]
        case type():
            return [] if type(value) is fields else [where]
        case [item]:
            if not isinstance(value, list):
                return [where]
            return [
                bad
                for i, one in enumerate(value)
                for bad in unknown_fields(one, item, f"{where}[{i}]")
            ]
    if not isinstance(value, dict):
        return [where]
    found = []
    for key, one in value.items():
        inner = fields.get(key, fields.get("*"))
        found += (
            [f"{where}.{key}"] if inner is None else unknown_fields(one, inner, f"{where}.{key}")
        )
    return found

"""A Job of Volcano's: a gang of pods, all or none.

Source: volcano-sh/volcano ed72c7c815 staging/src/volcano.sh/apis/pkg/apis/batch/v1alpha1/job.go,
pkg/controllers/job/plugins/distributed-framework/pytorch/pytorch.go (MASTER_ADDR, RANK by the names
of the tasks), pkg/controllers/job/state/restarting.go (how restarts are counted).
"""

from __future__ import annotations

from fsdpplan.emit.job import later_starts
from fsdpplan.emit.kubernetes.manifest import manifest, parts
from fsdpplan.emit.kubernetes.pod import pod_template
from fsdpplan.emit.kubernetes.start import Meeting
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.yaml_text import YamlValue
from fsdpplan.errors import SpecError

CONTAINER = "node"
PORT = 23456
MEETING = Meeting(head="${MASTER_ADDR:-}", index="${RANK:-}", port="${MASTER_PORT:-}")


def render(order: Order) -> str:
    """The manifest of an order."""
    if order.job.time is not None:
        raise SpecError(
            "--time has no meaning for --target volcano, whose jobs have no limit: leave it out, "
            "or type --target jobset"
        )
    found = parts(order, MEETING, target="volcano")
    nodes, pods = order.plan.cluster.nodes, order.pods
    template = pod_template(
        order,
        config_map=found.config_map,
        labels=found.labels,
        container=CONTAINER,
        queue_is_kueues=False,
    )
    spec: dict[str, YamlValue] = {
        "schedulerName": "volcano",
        "minAvailable": nodes,
        # The first failure counts too.
        "maxRetry": later_starts(order.job) + 1,
        **({} if pods.queue is None else {"queue": pods.queue}),
        **({} if pods.priority_class is None else {"priorityClassName": pods.priority_class}),
        **_topology(pods),
        "plugins": {
            "env": [],
            "svc": ["--publish-not-ready-addresses=true"],
            "pytorch": ["--master=master", "--worker=worker", f"--port={PORT}"],
        },
        "policies": [{"events": ["PodEvicted", "PodFailed"], "action": "RestartJob"}],
        "tasks": [
            _task("master", 1, template),
            *([_task("worker", nodes - 1, template)] if nodes > 1 else []),
        ],
    }
    job: dict[str, YamlValue] = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": found.metadata(),
        "spec": spec,
    }
    return manifest(
        found,
        [job],
        needs=f"Volcano {'1.7' if pods.topology is None else '1.11'} or later",
        unsaid="A job of Volcano's has one place for all its pods (--topology) and no word for "
        "parts of it: use --target kubernetes or jobset with Kueue's --queue.",
        asks_by_affinity=True,
    )


def _task(name: str, replicas: int, template: dict[str, YamlValue]) -> YamlValue:
    return {"name": name, "replicas": replicas, "template": template}


def _topology(pods: Pods) -> dict[str, YamlValue]:
    """Tiers of Volcano's HyperNodes are numbers; Kueue's levels are labels."""
    if pods.topology is None:
        return {}
    if not pods.topology.isascii() or not pods.topology.isdigit():
        raise SpecError(
            f"--topology {pods.topology!r} must be a number for --target volcano: the highest tier "
            "of HyperNodes that the job may cross, such as 1"
        )
    mode = "hard" if pods.topology_mode == "required" else "soft"
    return {"networkTopology": {"mode": mode, "highestTierAllowed": int(pods.topology)}}

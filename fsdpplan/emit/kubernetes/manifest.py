"""A manifest: its head, the plan and the pods' program as ConfigMap, the job. Written and read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdpplan.emit.job import Job, time_limit_seconds
from fsdpplan.emit.kubernetes.adapters import adapter_words
from fsdpplan.emit.kubernetes.names import require_job_name
from fsdpplan.emit.kubernetes.pod import SCRIPT_KEY, Labels, segment_lines
from fsdpplan.emit.kubernetes.start import Meeting, start_script
from fsdpplan.emit.nccl.variables import require_debug_meaning
from fsdpplan.emit.order import Order, differing, refuse_others
from fsdpplan.emit.pods import Pods, mounts
from fsdpplan.emit.safe_text import comment, paragraph
from fsdpplan.emit.slurm.header import MAX_PLAN_BYTES, PLAN_KEY, header_lines
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.emit.yaml_text import YamlValue, yaml_text
from fsdpplan.errors import SpecError

INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGER_LABEL = "app.kubernetes.io/managed-by"
"""Labels of all that a manifest makes: `instance` is the job's name."""

KINDS = ("TrainJob", "PyTorchJob", "JobSet", "Job")
"""Of a manifest's job, which is its last document."""

_JOB_FIELDS = frozenset(
    {
        "program", "job_name", "time", "cpus_per_task", "exclude", "env_setup", "env", "python",
        "port", "nccl_debug", "metrics", "survival", "segment",
    }
)  # fmt: skip
_POD_FIELDS = frozenset(
    {
        "image", "namespace", "queue", "volumes", "rdma", "topology", "topology_mode", "secret_env",
        "memory", "shm_size", "service_account", "priority_class", "pull_secret", "node_selector",
        "toleration", "annotation", "host_network", "grace_seconds", "nvlink_label",
    }
)  # fmt: skip

_SURVIVAL_FIELDS = frozenset({"retries", "preflight"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The job that a manifest makes."""

    kind: str
    name: str
    namespace: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What every kind of manifest is made of."""

    order: Order
    name: str
    config_map: str
    data: dict[str, str] = field(repr=False)
    """The ConfigMap's."""

    @property
    def labels(self) -> Labels:
        """Of everything in the manifest."""
        return {INSTANCE_LABEL: self.name, MANAGER_LABEL: "fsdpplan"}

    def metadata(
        self, name: str | None = None, *, labels: Labels | None = None
    ) -> dict[str, YamlValue]:
        """Of one document."""
        found: dict[str, YamlValue] = {"name": self.name if name is None else name}
        if self.order.pods.namespace is not None:
            found["namespace"] = self.order.pods.namespace
        return {**found, "labels": {**self.labels, **(labels or {})}}


def parts(order: Order, meeting: Meeting, *, target: str) -> Parts:
    """The parts of the manifest of an order. Raises SpecError for what `target` cannot express."""
    refuse_others(order, target=target, job=_JOB_FIELDS, pods=_POD_FIELDS)
    _refuse(order, target)
    require_job_name(order.job.job_name)
    plan_text = order.plan_json.rstrip("\n") + "\n"
    if len(plan_text.encode()) > MAX_PLAN_BYTES:
        raise SpecError(
            f"the plan is {len(plan_text.encode()):,} bytes of JSON; a variable can pass on "
            f"{MAX_PLAN_BYTES:,}: drop its alternatives"
        )
    data = {PLAN_KEY: plan_text, SCRIPT_KEY: start_script(order, meeting)}
    digest = hashlib.sha256("\0".join(data.values()).encode()).hexdigest()
    return Parts(
        order=order,
        name=order.job.job_name,
        # Another plan or program is another map: pods that start again get the one they had.
        config_map=f"{order.job.job_name}-{digest[:8]}",
        data=data,
    )


def manifest(
    found: Parts,
    documents: Sequence[dict[str, YamlValue]],
    *,
    needs: str,
    unsaid: str | None = None,
    asks_by_affinity: bool = False,
) -> str:
    """The text: the ConfigMap first, the job last. `needs` says what must be installed; the others
    how the job asks for nodes that NVLink joins (`segment_lines`)."""
    order = found.order
    head = [
        *header_lines(
            plan=order.plan, plan_json=order.plan_json, version=order.version, job=order.job
        ),
        "#",
        comment(f"Needs {needs}."),
        *_adapters(order),
        *segment_lines(order, unsaid=unsaid, asks_by_affinity=asks_by_affinity),
        "#",
        "# Run it:     fsdpplan run THIS_FILE",
        "# Submit it:  kubectl apply -f THIS_FILE",
        "# Remove it:  kubectl delete -f THIS_FILE",
    ]
    config_map: dict[str, YamlValue] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": found.metadata(found.config_map),
        "immutable": True,
        "data": dict(found.data),
    }
    texts = [yaml_text(document) for document in (config_map, *documents)]
    return "\n".join(head) + "\n---\n" + "---\n".join(texts)


def active_seconds(job: Job) -> int | None:
    """The time limit, which Kubernetes counts from the start."""
    return None if job.time is None else time_limit_seconds(job.time)


def read_manifest_job(text: str) -> Named | None:
    """The job that a manifest makes, or None when it makes none of ours."""
    import yaml

    try:
        last = yaml.safe_load(text.rpartition("\n---\n")[2])
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    match last:
        case {"kind": str(kind), "metadata": {"name": str(name), "namespace": str(namespace)}}:
            found = Named(kind=kind, name=name, namespace=namespace)
        case {"kind": str(kind), "metadata": {"name": str(name)}}:
            found = Named(kind=kind, name=name, namespace=None)
        case _:
            return None
    return found if found.kind in KINDS else None


def _refuse(order: Order, target: str) -> None:
    for name in differing(order.job.survival, Survival()):
        if name not in _SURVIVAL_FIELDS:
            raise SpecError(
                f"--{name.replace('_', '-')} has no meaning for --target {target}, where the "
                "cluster's scheduler puts a failed pod on another node and --retries bounds how "
                "often: leave it out"
            )
    require_debug_meaning(plan=order.plan, job=order.job)
    if order.job.port is not None and order.plan.cluster.nodes == 1:
        raise SpecError(
            "port has no meaning here: the ranks of one node meet on a free port; leave it out"
        )
    if order.job.survival.preflight and not isinstance(order.job.program, Trainer):
        raise SpecError(
            f"--preflight is the reference trainer's for --target {target}: leave it out with "
            "--script"
        )
    _require_volume("--metrics", order.job.metrics, order.pods)
    if isinstance(order.job.program, Trainer):
        _require_volume("--checkpoint-dir", order.job.program.checkpoint_dir, order.pods)
        _require_volume("--prometheus", order.job.program.prometheus, order.pods)
        _require_volume("--tensorboard", order.job.program.tensorboard, order.pods)


def _require_volume(option: str, path: str | None, pods: Pods) -> None:
    """Refuse a place for what has to outlive the pod that is not on a volume."""
    if path is None:
        return
    above = [mount for mount in mounts(pods) if f"{path}/".startswith(f"{mount.path}/")]
    if "/../" in f"{path}/" or not above:
        raise SpecError(
            f"{option} {path} is under no volume, so it would be gone with its pod: mount one by "
            f"--volumes CLAIM:{'/ckpt' if '/' not in path[1:] else path.rpartition('/')[0]}, or "
            "choose a path under one that is"
        )
    if max(above, key=lambda mount: len(mount.path)).read_only:
        raise SpecError(
            f"{option} {path} is on a volume that is mounted for reading alone: leave :ro out of "
            "its --volumes, or choose a path under another"
        )


def _adapters(order: Order) -> list[str]:
    said = adapter_words(order.plan, order.pods)
    return [] if said is None else paragraph(f"{said[0].upper()}{said[1:]}.")

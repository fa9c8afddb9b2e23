"""What a job asks of Kubernetes beside what the plan says."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import Literal, get_args

from fsdpplan.emit.kubernetes.names import (
    pair,
    require_key,
    require_label,
    require_label_value,
    require_name,
    require_quantity,
)
from fsdpplan.emit.safe_text import require_no_tokens
from fsdpplan.errors import SpecError
from fsdpplan.spec.values import require_choice, require_positive_int

TopologyMode = Literal["required", "preferred"]
TolerationEffect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]

SHORTEST_GRACE_SECONDS = 10
DEFAULT_GRACE_SECONDS = 120
"""Of a program that saves nothing, or where nobody knows."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[-._A-Za-z0-9]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """How the pods of a job look."""

    image: str | None = None
    """Container image with torch and, for the reference trainer, fsdpplan."""
    namespace: str | None = None
    """None: that of whoever applies the manifest."""
    queue: str | None = None
    """Kueue's LocalQueue, or Volcano's queue."""
    volumes: tuple[str, ...] = ()
    """What is mounted where: `CLAIM:PATH` for a persistent volume claim, `/FOLDER:PATH` for a
    folder of the node; `:ro` behind it for reading alone."""
    rdma: tuple[str, ...] = ()
    """Extended resources of RDMA adapters a pod: `rdma/ib=8`."""
    topology: str | None = None
    """Level within which all pods are wanted: a node label of Kueue's topology, or the number of
    a tier of Volcano's."""
    nvlink_label: str = "nvidia.com/gpu.clique"
    """Label of nodes that names their NVLink domain; a level of Kueue's topology, where one places
    the pods."""
    topology_mode: TopologyMode = "required"
    """Whether the job waits for such a place, or takes what there is."""
    secret_env: tuple[str, ...] = ()
    """Variables whose value a Secret of the cluster holds, as `NAME=SECRET:KEY`; the manifest names
    the Secret (`valueFrom.secretKeyRef`) and never holds the value."""
    memory: str | None = None
    """Host memory a pod: `512Gi`. None: whatever the namespace gives."""
    shm_size: str | None = None
    """Most that /dev/shm may take: `64Gi`. None: as much as the pod may have."""
    service_account: str | None = None
    priority_class: str | None = None
    pull_secret: tuple[str, ...] = ()
    """Secrets with which images are pulled."""
    node_selector: tuple[str, ...] = ()
    """Labels that nodes must have: `KEY=VALUE`."""
    toleration: tuple[str, ...] = ()
    """Taints that the pods bear: `KEY`, `KEY=VALUE`, either with `:EFFECT`."""
    annotation: tuple[str, ...] = ()
    """Annotations of the pods: `KEY=VALUE`, such as Multus' networks."""
    host_network: bool = False
    """Whether pods use their node's network, where adapters are no resource of the cluster."""
    grace_seconds: int | None = None
    """Between the word to end and the end: the trainer saves in that time. None: what steps and
    saves of its plan take (`run/time_limit.py`), or 120 where it saves nothing."""

    def __post_init__(self) -> None:
        if self.image is not None and not re.fullmatch(r"[!-~]+", self.image):
            raise SpecError(
                f"--image: {self.image!r} is no name of an image; type one such as "
                "nvcr.io/nvidia/pytorch:25.08-py3"
            )
        if self.namespace is not None:
            require_label("--namespace", self.namespace)
        for option, name in (
            ("--queue", self.queue),
            ("--service-account", self.service_account),
            ("--priority-class", self.priority_class),
            *(("--pull-secret", name) for name in self.pull_secret),
        ):
            if name is not None:
                require_name(option, name)
        for option, amount in (("--memory", self.memory), ("--shm-size", self.shm_size)):
            if amount is not None:
                require_quantity(option, amount)
        require_choice("topology_mode", self.topology_mode, get_args(TopologyMode))
        if self.topology is None and self.topology_mode != "required":
            raise SpecError("topology_mode says how a place is wanted: give --topology too")
        require_key("--nvlink-label", self.nvlink_label)
        if self.grace_seconds is not None:
            require_positive_int(grace_seconds=self.grace_seconds)
        if self.grace_seconds is not None and self.grace_seconds < SHORTEST_GRACE_SECONDS:
            raise SpecError(
                f"grace_seconds {self.grace_seconds} is too short to finish a step and save: give "
                f"at least {SHORTEST_GRACE_SECONDS}"
            )
        require_no_tokens(self)
        # Each is read once here, so that what is wrong with it is said at once.
        mounts(self)
        rdma_resources(self)
        secret_variables(self)
        selected_labels(self)
        tolerations(self)
        pod_annotations(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """Something that is seen in the pods at `path`."""

    claim: str | None
    """A persistent volume claim; None: a folder of the node."""
    folder: str | None
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretVariable:
    """A variable whose value is in a Secret."""

    name: str
    secret: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint that a pod bears. None: any value, any effect."""

    key: str
    value: str | None
    effect: str | None


def mounts(pods: Pods) -> tuple[Mount, ...]:
    """What is mounted. Raises SpecError for two at one place."""
    found = tuple(_mount(text) for text in pods.volumes)
    paths = [mount.path for mount in found]
    for path in paths:
        if paths.count(path) > 1:
            raise SpecError(f"--volumes: two are mounted at {path}: give each its own path")
    return found


def _mount(text: str) -> Mount:
    source, _, rest = text.partition(":")
    path, colon, mode = rest.partition(":")
    example = "such as checkpoints:/ckpt, or datasets:/data:ro"
    if not source or not path.startswith("/") or (colon and mode != "ro"):
        raise SpecError(f"--volumes: {text!r} must be CLAIM:PATH with an absolute path, {example}")
    for one in (path, *([source] if source.startswith("/") else [])):
        if posixpath.normpath(one) != one or one == "/" or not one.isprintable():
            raise SpecError(
                f"--volumes: {one!r} in {text!r} is no plain absolute path: write one {example}"
            )
    if path in ("/dev/shm", "/etc/fsdpplan"):
        raise SpecError(f"--volumes: {path} is taken by the manifest itself: choose another path")
    if not source.startswith("/"):
        require_name("--volumes", source)
        return Mount(claim=source, folder=None, path=path, read_only=bool(colon))
    return Mount(claim=None, folder=source, path=path, read_only=bool(colon))


def rdma_resources(pods: Pods) -> dict[str, str]:
    """Resource -> how many a pod."""
    resources = {}
    for text in pods.rdma:
        name, count = pair("--rdma", text, example="rdma/ib=8")
        require_key("--rdma", name)
        if "/" not in name or not re.fullmatch("[1-9][0-9]{0,3}", count):
            raise SpecError(
                f"--rdma: {text!r} must be RESOURCE=COUNT as kubectl describe node shows them, "
                "such as rdma/ib=8 or vpc.amazonaws.com/efa=32"
            )
        resources[name] = count
    return resources


def secret_variables(pods: Pods) -> tuple[SecretVariable, ...]:
    """Variables that come from Secrets."""
    return tuple(_secret_variable(text) for text in pods.secret_env)


def _secret_variable(text: str) -> SecretVariable:
    name, _, where = text.partition("=")
    secret, _, key = where.partition(":")
    if not _VARIABLE.fullmatch(name) or not _SECRET_KEY.fullmatch(key):
        # What was typed is not shown: it may be the secret itself.
        raise SpecError(
            "--secret-env must be NAME=SECRET:KEY, a variable and the Secret and key that hold its "
            "value, such as HF_TOKEN=hub:token"
        )
    require_name("--secret-env", secret)
    return SecretVariable(name=name, secret=secret, key=key)


def selected_labels(pods: Pods) -> dict[str, str]:
    """Labels that nodes must have."""
    labels = {}
    for text in pods.node_selector:
        key, value = pair("--node-selector", text, example="gpu=h100")
        require_key("--node-selector", key)
        require_label_value("--node-selector", value)
        labels[key] = value
    return labels


def pod_annotations(pods: Pods) -> dict[str, str]:
    """Annotations of the pods."""
    found = {}
    for text in pods.annotation:
        key, value = pair("--annotation", text, example="k8s.v1.cni.cncf.io/networks=rdma")
        require_key("--annotation", key)
        found[key] = value
    return found


def tolerations(pods: Pods) -> tuple[Toleration, ...]:
    """Taints that the pods bear."""
    return tuple(_toleration(text) for text in pods.toleration)


def _toleration(text: str) -> Toleration:
    taint, colon, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    require_key("--toleration", key)
    require_label_value("--toleration", value)
    if colon:
        require_choice("toleration", effect, get_args(TolerationEffect))
    return Toleration(key=key, value=value if equals else None, effect=effect if colon else None)

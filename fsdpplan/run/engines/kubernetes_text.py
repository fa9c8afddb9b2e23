"""What kubectl says of a job and its pods, in words.

Sources: kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle (phases, conditions, reasons of
waiting containers); kubeflow/trainer 8c0f5059bd pkg/apis/trainer/v1alpha1/trainjob_types.go and
v1.9.4 pkg/apis/kubeflow.org/v1/common_types.go, kubernetes-sigs/jobset 08dfbdfd68
api/jobset/v1alpha2/jobset_types.go, volcano-sh/volcano ed72c7c815
staging/src/volcano.sh/apis/pkg/apis/batch/v1alpha1/job.go (states of a job); what kubectl 1.32
prints, from a server without a kind, and without a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fsdpplan.run.engines.engine import JobState

Object: TypeAlias = Mapping[str, object]

KINDS_IN_FULL = {
    "TrainJob": "Kubeflow Trainer (version 2)",
    "TrainingRuntime": "Kubeflow Trainer (version 2)",
    "PyTorchJob": "Kubeflow's Training Operator (version 1)",
    "JobSet": "JobSet",
    "Job": "Volcano",
}
"""Kind -> what has to be installed for it."""

SUCCEEDED = frozenset({"Complete", "Completed", "Succeeded"})
FAILED = frozenset({"Failed", "Aborted", "Terminated"})

_RESTART_LABEL = "jobset.sigs.k8s.io/restart-attempt"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
_INDEXED = re.compile(r"-node-0-(\d+)-[a-z0-9]+$")
_REPLICA = re.compile(r"-(master|worker)-(\d+)$")
_NO_KIND = re.compile(
    r'no matches for kind "(?P<kind>\w+)" in version|'
    r'the server doesn\'t have a resource type "(?P<resource>\w+)"'
)
_NOT_REACHED = re.compile(
    r"The connection to the server (\S+) was refused|Unable to connect to the server: (.+)|"
    r'Get "(https?://[^/"]+)[^"]*": dial tcp'
)
_DENIED = re.compile(r'admission webhook "[^"]+" denied the request: (.+)')


def pod_index(name: str) -> int | None:
    """Which of the job's pods has this name."""
    if match := _INDEXED.search(name):
        return int(match[1])
    if match := _REPLICA.search(name):
        return 0 if match[1] == "master" else int(match[2]) + 1
    return None


def job_state(job: Object, pods: Iterable[Object]) -> JobState:
    """How the job and its pods stand."""
    newest = newest_pods(pods)
    state, reason = _phase(job), _message(job)
    succeeded, failed = state in SUCCEEDED, state in FAILED
    running = [pod for pod in newest if _text(pod, "status", "phase") == "Running"]
    if not succeeded and not failed:
        if state != "Suspended":
            everywhere = bool(newest) and len(running) == len(newest)
            state = "Running" if everywhere else "Pending"
        reason = "" if state == "Running" else _why_waiting(job, newest)
    nodes = (_text(pod, "spec", "nodeName") for pod in newest)
    ended = sorted(filter(None, map(_why_ended, newest)))
    if failed and ended:
        reason = ended[0].words
    return JobState(
        state=state,
        ended=succeeded or failed,
        succeeded=succeeded,
        reason=reason,
        exit_code=(ended[0].exit_code if ended else 1) if failed else 0,
        nodes=",".join(filter(None, nodes)) if state == "Running" else "",
        restarts=_restarts(job, newest),
    )


def newest_pods(pods: Iterable[Object]) -> list[Object]:
    """The newest pod of each index, in their order: a job that starts again makes new ones."""
    found: dict[int, Object] = {}
    for pod in sorted(pods, key=lambda pod: _text(pod, "metadata", "creationTimestamp")):
        index = pod_index(_text(pod, "metadata", "name"))
        if index is not None:
            found[index] = pod
    return [found[index] for index in sorted(found)]


def refusal(said: str, *, kind: str = "") -> str:
    """One sentence on why kubectl did not do what it was told, from what it printed."""
    text = " ".join(said.split())
    if match := _NO_KIND.search(text):
        missing = match["kind"] or kind
        return (
            f"the cluster knows no {missing}: install {KINDS_IN_FULL.get(missing, missing)} there, "
            "or emit for another --target that it has"
        )
    if match := _NOT_REACHED.search(text):
        where = next(filter(None, match.groups()))
        return (
            f"kubectl reaches no cluster ({where}): look at kubectl config current-context, and "
            "log in to the cluster"
        )
    if match := _DENIED.search(text):
        return (
            f"the cluster refused the job: {match[1][:400]}; change what it names, and emit again"
        )
    if "(Forbidden)" in text:
        return (
            f"you may not do that there: {text[:400]}: ask for the right, or choose another "
            "--namespace"
        )
    return f"kubectl refused: {text[:400] or 'no reason given'}; see kubectl cluster-info"


def _phase(job: Object) -> str:
    """The job's own word."""
    phase = _text(job, "status", "state", "phase")
    if phase:
        return phase
    standing = {str(each.get("type")) for each in _conditions(job) if each.get("status") == "True"}
    ends = [word for word in standing if word in SUCCEEDED | FAILED]
    return ends[0] if ends else "Suspended" if "Suspended" in standing else "Running"


def _message(job: Object) -> str:
    """What the job says of its end."""
    said = [
        str(each.get("message") or each.get("reason") or "")
        for each in _conditions(job)
        if each.get("status") == "True" and each.get("type") in FAILED
    ]
    message = said[0] if said else _text(job, "status", "state", "message")
    if any(each.get("reason") == "DeadlineExceeded" for each in _conditions(job)):
        return f"its --time is over: {message}"
    return message


def _why_waiting(job: Object, pods: list[Object]) -> str:
    for reason in (_why_pod_waits(pod) for pod in pods):
        if reason:
            return reason
    queue = _text(job, "metadata", "labels", _QUEUE_LABEL)
    if _phase(job) == "Suspended":
        if queue:
            return f"waits in queue {queue} of Kueue's: kubectl get workloads says what for"
        return "suspended: something sets its spec.suspend"
    return "" if pods else "no pods yet"


def _why_pod_waits(pod: Object) -> str:
    name = _text(pod, "metadata", "name")
    for condition in _conditions(pod):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            message = str(condition.get("message") or condition.get("reason") or "")
            return f"no node for {name}: {message.partition(' preemption:')[0]}"
    for status in _containers(pod):
        waiting = _part(status, "state", "waiting")
        reason, message = str(waiting.get("reason", "")), str(waiting.get("message", ""))
        if reason in _IMAGE_REASONS:
            image = status.get("image") or _image(pod)
            return f"{name} cannot pull {image} ({reason}): {message or 'no reason given'}"
        if reason == "ContainerCreating":
            return f"{name} is being made: its image is pulled, its volumes are mounted"
        if reason:
            return f"{name}: {reason}: {message}".rstrip(": ")
    return ""


@dataclass(frozen=True, slots=True, order=True)
class _Ended:
    """A pod that did not end well."""

    at: str
    """When, as RFC 3339 in UTC; empty: not known."""
    exit_code: int
    words: str


def _why_ended(pod: Object) -> _Ended | None:
    name = _text(pod, "metadata", "name")
    here = f"{name} on {_text(pod, 'spec', 'nodeName') or 'no node'}"
    for terminated in _terminated(pod):
        code, reason = terminated.get("exitCode"), terminated.get("reason")
        if not isinstance(code, int) or not code:
            continue
        words = f"{here} ended with exit code {code}"
        if reason == "OOMKilled":
            words = f"{here} ran out of host memory (OOMKilled): give more --memory"
        return _Ended(at=_text(terminated, "finishedAt"), exit_code=code, words=words)
    if reason := _text(pod, "status", "reason"):
        message = _text(pod, "status", "message") or "no reason given"
        return _Ended(at="", exit_code=1, words=f"{here}: {reason}: {message}")
    return None


def pod_count(job: Object) -> int | None:
    """How many pods the job has, as its manifest says."""
    spec = _part(job, "spec")
    replicas = _part(spec, "pytorchReplicaSpecs")
    if replicas:
        numbers = [_part(replicas, each).get("replicas") for each in replicas]
        return sum(number for number in numbers if isinstance(number, int))
    jobs = _objects(spec.get("replicatedJobs"))
    completions = _part(jobs[0], "template", "spec").get("completions") if jobs else None
    for number in (completions, spec.get("minAvailable"), _part(spec, "trainer").get("numNodes")):
        if isinstance(number, int):
            return number
    return None


def _restarts(job: Object, pods: list[Object]) -> int:
    status = _part(job, "status")
    counts = [status.get("restarts"), status.get("retryCount")]
    counts += [_text(pod, "metadata", "labels", _RESTART_LABEL) for pod in pods]
    counts += [each.get("restartCount") for pod in pods for each in _containers(pod)]
    return max((int(str(count)) for count in counts if str(count).isdecimal()), default=0)


def _terminated(pod: Object) -> list[Object]:
    found = []
    for status in _containers(pod):
        for when in ("state", "lastState"):
            found.append(_part(status, when, "terminated"))
    return found


def _image(pod: Object) -> str:
    containers = _part(pod, "spec").get("containers")
    first = containers[0] if isinstance(containers, list) and containers else {}
    return str(first.get("image", "its image")) if isinstance(first, Mapping) else "its image"


def _containers(pod: Object) -> list[Object]:
    return _objects(_part(pod, "status").get("containerStatuses"))


def _conditions(thing: Object) -> list[Object]:
    return _objects(_part(thing, "status").get("conditions"))


def _objects(value: object) -> list[Object]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _part(thing: Object, *path: str) -> Object:
    for key in path:
        inner = thing.get(key)
        if not isinstance(inner, Mapping):
            return {}
        thing = inner
    return thing


def _text(thing: Object, *path: str) -> str:
    value = _part(thing, *path[:-1]).get(path[-1])
    return value if isinstance(value, str) else ""

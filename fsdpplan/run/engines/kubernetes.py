"""Kubernetes as an engine, by kubectl: apply a manifest, ask after its job and pods, read their
logs, delete all that the manifest made.

A job's id is what kubectl calls it, perhaps behind its namespace: `trainjob/llama`,
`team-a/jobset/llama`.

Lines of a job's pods, each once, as `kubectl logs` gives them again and again.

Source: what kubectl 1.32 prints for `logs --prefix --timestamps`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from fsdpplan.emit.kubernetes.manifest import (
    INSTANCE_LABEL,
    MANAGER_LABEL,
    Named,
    read_manifest_job,
)
from fsdpplan.emit.slurm.header import MAX_SCRIPT_BYTES
from fsdpplan.errors import LaunchError
from fsdpplan.files.table import read_text
from fsdpplan.run.engines.engine import Forgotten, JobState
from fsdpplan.run.engines.kubernetes_text import (
    Object,
    job_state,
    newest_pods,
    pod_count,
    pod_index,
    refusal,
)

_LOG_LINE = re.compile(r"\[pod/(?P<pod>[^/\]]+)/[^\]]+\] (?P<time>\S+)(?: (?P<text>.*))?")


@dataclass(slots=True)
class Seen:
    """How far the logs of one job have been read."""

    newest: datetime | None = None
    """Of any pod, when they were last read."""
    pods: dict[str, tuple[datetime, int]] = field(default_factory=dict)
    """Pod -> the time of its last line, and how many lines it has of that time."""
    is_single: bool = False
    """The job has one pod, whose lines need no number."""


def new_lines(lines: Sequence[str], seen: Seen) -> list[str]:
    """Lines of `kubectl logs --prefix --timestamps` that were not `seen` yet, as `NUMBER: TEXT`
    with the pod's number, where there are several; `seen` then knows them."""
    found, counted = [], dict[str, tuple[datetime, int]]()
    for line in lines:
        match = _LOG_LINE.fullmatch(line)
        when = None if match is None else _time(match["time"])
        index = None if match is None else pod_index(match["pod"])
        if match is None or when is None or index is None:
            continue
        pod = match["pod"]
        before = counted.get(pod)
        number = before[1] + 1 if before is not None and before[0] == when else 1
        counted[pod] = (when, number)
        if (when, number) > seen.pods.get(pod, (when, 0)):
            seen.pods[pod] = (when, number)
            label = "" if seen.is_single else f"{index}: "
            found.append((when, label + (match["text"] or "")))
        if seen.newest is None or when > seen.newest:
            seen.newest = when
    return [text for _, text in sorted(found, key=lambda each: each[0])]


def _time(text: str) -> datetime | None:
    """With the zone of the node, to the microsecond."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else None


COMMAND_SECONDS = 60.0
"""No question should take longer."""
DELETE_SECONDS = 600.0
"""Pods may take their grace period to go."""
LOOK_BACK = timedelta(seconds=60)
"""Lines of pods whose clocks or logs are behind by so much are not missed."""
RUNTIME_SECONDS = 2.0
"""A cluster that has just been told of a TrainingRuntime may not know it yet."""
RUNTIME_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One kind of job."""

    kind: str
    name: str
    """In full, as kubectl takes it: other groups have a `jobs`, too."""
    also: tuple[str, ...] = ()
    """What else a manifest of this kind makes, beside the ConfigMap."""


RESOURCES = {
    "trainjob": Resource(
        kind="TrainJob",
        name="trainjobs.trainer.kubeflow.org",
        also=("trainingruntimes.trainer.kubeflow.org",),
    ),
    "pytorchjob": Resource(kind="PyTorchJob", name="pytorchjobs.kubeflow.org"),
    "jobset": Resource(kind="JobSet", name="jobsets.jobset.x-k8s.io"),
    "vcjob": Resource(kind="Job", name="jobs.batch.volcano.sh"),
}
"""The word of a job's id -> what it is."""

_ID = re.compile(r"(?:(?P<namespace>[a-z0-9-]+)/)?(?P<word>[a-z]+)/(?P<name>[a-z0-9-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A job's id, read."""

    resource: Resource
    name: str
    namespace: str | None

    @property
    def selector(self) -> str:
        """Labels of all that its manifest has made."""
        return f"{INSTANCE_LABEL}={self.name},{MANAGER_LABEL}=fsdpplan"

    @property
    def where(self) -> tuple[str, ...]:
        """kubectl's options for its namespace."""
        return () if self.namespace is None else ("--namespace", self.namespace)


class Kubernetes:
    """kubectl, as this environment finds it."""

    name = "kubernetes"

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._seen: dict[str, Seen] = {}
        self._cancelled: set[str] = set()

    def submit(
        self,
        *,
        script: Path,
        folder: Path,
        environment: Mapping[str, str],
        after: str | None = None,
    ) -> str:
        """Apply the manifest `script`; a job of its name that has ended makes room for it."""
        if after is not None:
            raise LaunchError(
                "--chain is Slurm's: on Kubernetes a job waits for no other one; leave it out, "
                "and say by --retries how often it starts again"
            )
        named = read_manifest_job(read_text(script, limit_bytes=MAX_SCRIPT_BYTES, what="manifest"))
        if named is None:
            raise LaunchError(
                f"{script} makes no job that fsdpplan knows: type fsdpplan emit-launch --target "
                "kubernetes to write one"
            )
        asked = _of(named)
        self._make_room(asked)
        self._apply(asked, script)
        self._cancelled.discard(_id(asked))
        return _id(asked)

    def state(self, job_id: str) -> JobState | None:
        """What the cluster says of the job; None where it says nothing now."""
        asked = _read(job_id)
        found = self._objects(asked)
        if found is None:
            return None
        job, pods = found
        if job is not None:
            self._seen.setdefault(job_id, Seen()).is_single = pod_count(job) == 1
            return job_state(job, pods)
        if job_id not in self._cancelled:
            raise Forgotten(
                f"there is no {job_id} any more: it was deleted; fsdpplan logs and fsdpplan "
                "verify show what the run left"
            )
        return JobState(
            state="Terminating" if pods else "Deleted",
            ended=not pods,
            succeeded=False,
            reason=f"{len(pods)} pods save and leave" if pods else "cancelled",
            exit_code=143,
            nodes="",
        )

    def log_lines(self, job_id: str) -> list[str]:
        """What the pods have printed since the last call, each line with its pod's number."""
        asked, seen = _read(job_id), self._seen.setdefault(job_id, Seen())
        since: tuple[str, ...] = ()
        if seen.newest is not None:
            since = (f"--since-time={(seen.newest - LOOK_BACK).isoformat(timespec='seconds')}",)
        done = self._kubectl(
            "logs",
            *asked.where,
            f"--selector={asked.selector}",
            "--prefix",
            "--timestamps",
            "--tail=-1",
            # Pods that have not started yet have no log.
            "--ignore-errors",
            *since,
        )
        if done is None or done.returncode:
            return []
        return new_lines(done.stdout.splitlines(), seen)

    def save_and_leave(self, job_id: str) -> None:
        """USR1 to the program of the first pod, which passes it on to its ranks; all agree."""
        asked = _read(job_id)
        found = self._objects(asked)
        if found is None:
            return
        for pod in newest_pods(found[1])[:1]:
            name = _name(pod)
            self._kubectl("exec", *asked.where, name, "--", "bash", "-c", "kill -USR1 1")

    def cancel(self, job_id: str) -> bool:
        """Delete the job and all that its manifest made; its pods save and leave."""
        asked = _read(job_id)
        done = self._delete(asked, "--wait=false")
        if done is None or done.returncode:
            return False
        self._cancelled.add(job_id)
        return True

    def _make_room(self, asked: Asked) -> None:
        """Delete a job of that name that has ended. Raises LaunchError for one that has not."""
        job = self._required_job(asked)
        if job is None:
            return
        state = job_state(job, ())
        if not state.ended:
            raise LaunchError(
                f"{_id(asked)} is there already, and has not ended: fsdpplan cancel ends it, or "
                "emit this one with another --job-name"
            )
        done = self._delete(asked, f"--timeout={DELETE_SECONDS:.0f}s")
        if done is None or done.returncode:
            why = "it takes too long" if done is None else refusal(done.stderr)
            raise LaunchError(
                f"an older {_id(asked)} could not be deleted: {why}; delete it by kubectl, or emit "
                "this one with another --job-name"
            )

    def _required_job(self, asked: Asked) -> Object | None:
        """The job, or None where there is none. Raises LaunchError where nobody can say."""
        done = self._get(asked, asked.resource.name)
        if done is None:
            raise LaunchError(
                f"kubectl gave no answer in {COMMAND_SECONDS:.0f} s: look at kubectl cluster-info"
            )
        if done.returncode:
            raise LaunchError(refusal(done.stderr, kind=asked.resource.kind))
        return next(iter(_items(done.stdout)), None)

    def _apply(self, asked: Asked, script: Path) -> None:
        for tries in range(1, RUNTIME_TRIES + 1):
            done = self._kubectl("apply", *asked.where, "-f", str(script))
            if done is not None and done.returncode == 0:
                return
            why = "" if done is None else done.stderr
            if "specified trainingRuntime must be created" not in why or tries == RUNTIME_TRIES:
                break
            time.sleep(RUNTIME_SECONDS)
        # What there is of it would only be in the way.
        self._delete(asked, "--wait=false")
        raise LaunchError(refusal(why, kind=asked.resource.kind))

    def _objects(self, asked: Asked) -> tuple[Object | None, list[Object]] | None:
        """The job, if there is one, and its pods; None: no answer."""
        done = self._get(asked, f"{asked.resource.name},pods")
        if done is None or done.returncode:
            return None
        items = _items(done.stdout)
        jobs = [item for item in items if item.get("kind") == asked.resource.kind]
        pods = [item for item in items if item.get("kind") == "Pod"]
        return (jobs[0] if jobs else None), pods

    def _get(self, asked: Asked, resources: str) -> subprocess.CompletedProcess[str] | None:
        return self._kubectl(
            "get", *asked.where, resources, f"--selector={asked.selector}", "--output=json"
        )

    def _delete(self, asked: Asked, *options: str) -> subprocess.CompletedProcess[str] | None:
        resources = ",".join((asked.resource.name, *asked.resource.also, "configmaps"))
        return self._kubectl(
            "delete", *asked.where, resources, f"--selector={asked.selector}", *options,
            seconds=DELETE_SECONDS + COMMAND_SECONDS,
        )  # fmt: skip

    def _kubectl(
        self, *arguments: str, seconds: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str] | None:
        """What kubectl said; None where it gave no answer. Raises LaunchError where there is none
        to ask."""
        try:
            return subprocess.run(
                ("kubectl", *arguments),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except FileNotFoundError:
            raise LaunchError(
                "kubectl is not on PATH: install it, or take the manifest to a machine that has it "
                "and type kubectl apply -f there"
            ) from None
        except subprocess.TimeoutExpired:
            return None


def _of(named: Named) -> Asked:
    resource = next(each for each in RESOURCES.values() if each.kind == named.kind)
    return Asked(resource=resource, name=named.name, namespace=named.namespace)


def _id(asked: Asked) -> str:
    word = next(word for word, each in RESOURCES.items() if each == asked.resource)
    space = "" if asked.namespace is None else f"{asked.namespace}/"
    return f"{space}{word}/{asked.name}"


def _read(job_id: str) -> Asked:
    match = _ID.fullmatch(job_id)
    if match is None or match["word"] not in RESOURCES:
        raise LaunchError(
            f"{job_id!r} is no job on Kubernetes: fsdpplan status lists them, such as "
            "trainjob/llama"
        )
    return Asked(
        resource=RESOURCES[match["word"]], name=match["name"], namespace=match["namespace"]
    )


def _items(text: str) -> list[Object]:
    try:
        found = json.loads(text).get("items", [])
    except (ValueError, AttributeError):
        return []
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _name(pod: Object) -> str:
    metadata = pod.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""

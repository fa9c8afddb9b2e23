from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.emit.job import Job
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target, render
from fsdpplan.errors import LaunchError
from fsdpplan.run.engines.engine import Engine, Forgotten
from fsdpplan.run.engines.kubernetes import Kubernetes
from fsdpplan.run.engines.kubernetes_text import job_state, pod_count, pod_index, refusal
from tests.emit.kubernetes.orders import IMAGE, PLANS, TARGETS, documents, order

FAKE = """\
#!/bin/bash
cd "$FAKE_KUBECTL" || exit 9
printf '%s\\n' "$*" >>calls
[ ! -e "$1.err" ] || { cat "$1.err" >&2; exit 1; }
[ ! -e "$1.out" ] || cat "$1.out"
"""
NO_SERVER = (
    'E1122 11:13:28.970085   11566 memcache.go:265] "Unhandled Error" err="couldn\'t get current '
    'server API group list: Get \\"http://localhost:8080/api?timeout=32s\\": dial tcp '
    '127.0.0.1:8080: connect: connection refused"\n'
    "The connection to the server localhost:8080 was refused - did you specify the right host or "
    "port?\n"
)
"""kubectl 1.32 without a cluster."""
NO_KIND = 'error: the server doesn\'t have a resource type "trainjobs"\n'
NO_KIND_TO_APPLY = (
    'resource mapping not found for name: "llama" namespace: "" from "job.yaml": no matches for '
    'kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\nensure CRDs are installed first\n'
)
"""kubectl 1.32 with a server that has no such kind."""
NO_ROOM = (
    "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available: "
    "4 No preemption victims found for incoming pod."
)


@dataclass(frozen=True)
class Fake:
    """A kubectl that says what the test has put down."""

    folder: Path
    engine: Kubernetes

    def says(self, verb: str, text: str) -> None:
        (self.folder / f"{verb}.out").write_text(text)

    def refuses(self, verb: str, text: str) -> None:
        (self.folder / f"{verb}.err").write_text(text)

    def has(self, *objects: dict[str, Any]) -> None:
        self.says("get", json.dumps({"kind": "List", "items": list(objects)}))

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "kubectl").write_text(FAKE)
    (folder / "kubectl").chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "FAKE_KUBECTL": str(folder)}
    return Fake(folder, Kubernetes(environment))


def manifest(folder: Path, target: Target = "kubernetes", **pods: Any) -> Path:
    path = folder / "job.yaml"
    given = order(job=Job(job_name="llama"), pods=Pods(image=IMAGE, **pods))
    path.write_text(render(target, given))
    return path


def submitted(fake: Fake, script: Path, *, after: str | None = None) -> str:
    return fake.engine.submit(script=script, folder=script.parent, environment={}, after=after)


def job(kind: str = "TrainJob", *conditions: str, **status: Any) -> dict[str, Any]:
    """A job with conditions that are true."""
    found = [{"type": word, "status": "True", "message": f"it is {word}"} for word in conditions]
    return {"kind": kind, "status": {"conditions": found, **status}}


def pod(index: int, phase: str = "Running", **more: Any) -> dict[str, Any]:
    status = {"phase": phase, **more}
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"llama-node-0-{index}-x7k2p",
            "creationTimestamp": "2026-11-22T10:00:00Z",
        },
        "spec": {"nodeName": f"n{index}", "containers": [{"image": IMAGE}]},
        "status": status,
    }


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "node", "image": IMAGE, "state": state}]}


def terminated(code: int, *, at: str = "", reason: str = "Error") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": at}}
    return {"containerStatuses": [{"name": "node", "restartCount": 2, "state": state}]}


def test_it_is_an_engine(fake: Fake) -> None:
    engine: Engine = fake.engine
    assert engine.name == "kubernetes"


@pytest.mark.parametrize(
    ("target", "namespace", "job_id"),
    [
        ("kubernetes", None, "trainjob/llama"),
        ("pytorchjob", "team-a", "team-a/pytorchjob/llama"),
        ("jobset", None, "jobset/llama"),
        ("volcano", None, "vcjob/llama"),
    ],
)
def test_a_manifest_is_applied_and_its_job_has_an_id(
    target: Target, namespace: str | None, job_id: str, fake: Fake, tmp_path: Path
) -> None:
    script = manifest(tmp_path, target, namespace=namespace)
    assert submitted(fake, script) == job_id
    where = f"--namespace {namespace} " if namespace else ""
    assert fake.calls[-1] == f"apply {where}-f {script}"


def test_a_job_that_goes_on_is_not_replaced(fake: Fake, tmp_path: Path) -> None:
    fake.has(job("JobSet"))
    with pytest.raises(LaunchError, match="jobset/llama is there already, and has not ended"):
        submitted(fake, manifest(tmp_path, "jobset"))
    assert [call.split()[0] for call in fake.calls] == ["get"]


def test_a_job_that_has_ended_makes_room(fake: Fake, tmp_path: Path) -> None:
    fake.has(job("JobSet", "Failed"))
    submitted(fake, manifest(tmp_path, "jobset"))
    assert [call.split()[0] for call in fake.calls] == ["get", "delete", "apply"]
    assert "app.kubernetes.io/instance=llama,app.kubernetes.io/managed-by=fsdpplan" in fake.calls[1]


@pytest.mark.parametrize(
    ("verb", "said", "words"),
    [
        ("get", NO_SERVER, "reaches no cluster (localhost:8080)"),
        ("get", NO_KIND, "the cluster knows no TrainJob: install Kubeflow Trainer (version 2)"),
        ("apply", NO_KIND_TO_APPLY, "the cluster knows no JobSet: install JobSet there"),
        (
            "apply",
            'Error from server (Forbidden): error when creating "job.yaml": jobsets is forbidden',
            "you may not do that there",
        ),
        (
            "apply",
            'Error from server: error when creating "j": admission webhook "v.x" denied the '
            "request: spec.trainer: must not have reserved envs",
            "refused the job: spec.trainer: must not have reserved envs",
        ),
        ("apply", "", "kubectl refused: no reason given"),
    ],
)
def test_why_a_job_was_not_taken(
    verb: str, said: str, words: str, fake: Fake, tmp_path: Path
) -> None:
    fake.refuses(verb, said)
    with pytest.raises(LaunchError) as refused:
        submitted(fake, manifest(tmp_path))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_kubectl_it_says_what_is_missing(tmp_path: Path) -> None:
    engine = Kubernetes({"PATH": str(tmp_path)})
    with pytest.raises(LaunchError, match="kubectl is not on PATH"):
        engine.submit(script=manifest(tmp_path), folder=tmp_path, environment={})


def test_other_files_and_chains_are_refused(fake: Fake, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("kind: Pod\n")
    with pytest.raises(LaunchError, match="makes no job that fsdpplan knows"):
        submitted(fake, other)
    with pytest.raises(LaunchError, match="--chain is Slurm's"):
        submitted(fake, manifest(tmp_path), after="trainjob/a")
    with pytest.raises(LaunchError, match="is no job on Kubernetes"):
        fake.engine.state("123")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([job(), pod(0), pod(1)], "Running on n0,n1"),
        ([job(), pod(1), pod(0)], "Running on n0,n1"),
        ([job()], "Pending (no pods yet)"),
        ([job("TrainJob", "Complete"), pod(0, "Succeeded")], "Complete"),
        ([job("PyTorchJob", "Created", "Running", "Succeeded")], "Succeeded"),
        ([job("JobSet", "Suspended")], "Suspended (suspended: something sets its spec.suspend)"),
        (
            [
                job("JobSet", "Suspended")
                | {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}
            ],
            "Suspended (waits in queue gpus of Kueue's: kubectl get workloads says what for)",
        ),
        (
            [
                job(),
                pod(
                    0,
                    "Pending",
                    conditions=[{"type": "PodScheduled", "status": "False", "message": NO_ROOM}],
                ),
            ],
            "Pending (no node for llama-node-0-0-x7k2p: 0/4 nodes are available: 4 Insufficient "
            "nvidia.com/gpu.)",
        ),
        (
            [job(), pod(0), pod(1, "Pending", **waiting("ImagePullBackOff", "not found"))],
            f"Pending (llama-node-0-1-x7k2p cannot pull {IMAGE} (ImagePullBackOff): not found)",
        ),
        (
            [job(), pod(0, "Pending", **waiting("ErrImagePull", "not found"))],
            f"Pending (llama-node-0-0-x7k2p cannot pull {IMAGE} (ErrImagePull): not found)",
        ),
        (
            [job(), pod(0, "Pending", **waiting("ContainerCreating"))],
            "Pending (llama-node-0-0-x7k2p is being made: its image is pulled, its volumes are "
            "mounted)",
        ),
        (
            [
                job(),
                pod(
                    0, "Pending", **waiting("CreateContainerConfigError", 'secret "hub" not found')
                ),
            ],
            'Pending (llama-node-0-0-x7k2p: CreateContainerConfigError: secret "hub" not found)',
        ),
        (
            [job("Job", state={"phase": "Completed"})],
            "Completed",
        ),
        (
            [job("Job", state={"phase": "Failed", "message": "too many"})],
            "Failed (too many)",
        ),
    ],
)
def test_how_a_job_stands_in_words(found: list[dict[str, Any]], words: str) -> None:
    assert job_state(found[0], found[1:]).words == words


def test_the_pod_that_failed_first_is_named() -> None:
    state = job_state(
        job("JobSet", "Failed", restarts=3),
        [
            pod(0, "Failed", **terminated(143, at="2026-11-22T10:05:00Z")),
            pod(1, "Failed", **terminated(7, at="2026-11-22T10:04:00Z")),
        ],
    )
    assert (state.ended, state.succeeded, state.shell_code, state.restarts) == (True, False, 7, 3)
    assert state.reason == "llama-node-0-1-x7k2p on n1 ended with exit code 7"


def test_what_killed_a_pod_is_said() -> None:
    failed = job("TrainJob", "Failed")
    killed = job_state(failed, [pod(0, "Failed", **terminated(137, reason="OOMKilled"))])
    assert (killed.shell_code, "give more --memory" in killed.reason) == (137, True)
    evicted = job_state(failed, [pod(0, "Failed", reason="Evicted", message="The node was low")])
    assert evicted.reason == "llama-node-0-0-x7k2p on n0: Evicted: The node was low"
    late = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "late"}
    over = job_state({"kind": "TrainJob", "status": {"conditions": [late]}}, [])
    assert (over.reason, over.shell_code) == ("its --time is over: late", 1)


@pytest.mark.parametrize("target", TARGETS)
def test_pods_are_counted_as_the_manifest_has_them(target: Target) -> None:
    counts = [pod_count(documents(target, order(plan))[-1]) for plan in PLANS.values()]
    assert counts == [plan.cluster.nodes for plan in PLANS.values()]


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("llama-node-0-11-x7k2p", 11),
        ("llama-master-0", 0),
        ("llama-worker-0", 1),
        ("llama-worker-14", 15),
        ("another", None),
    ],
)
def test_pods_have_numbers(name: str, index: int | None) -> None:
    assert pod_index(name) == index


def log(index: int, seconds: str, text: str) -> str:
    return f"[pod/llama-node-0-{index}-x7k2p/node] 2026-11-22T10:00:{seconds}Z {text}"


def test_the_logs_of_all_pods_come_once_and_in_their_order(fake: Fake) -> None:
    first = [log(0, "01.000000001", "a"), log(0, "03.000000000", "c"), log(1, "02.500000000", "b")]
    fake.says("logs", "\n".join(first) + "\n")
    assert fake.engine.log_lines("jobset/llama") == ["0: a", "1: b", "0: c"]
    assert "--since-time" not in fake.calls[-1]
    more = [*first, log(0, "03.000000000", "d"), log(0, "04.000000000", '{"event": "step"}')]
    fake.says("logs", "error: container is waiting\n" + "\n".join([*more, log(1, "05.0", "")]))
    assert fake.engine.log_lines("jobset/llama") == ["0: d", '0: {"event": "step"}', "1: "]
    assert "--since-time=2026-11-22T09:59:03+00:00" in fake.calls[-1]
    assert fake.engine.log_lines("jobset/llama") == []


def test_the_lines_of_a_single_pod_have_no_number(fake: Fake) -> None:
    fake.has({"kind": "TrainJob", "spec": {"trainer": {"numNodes": 1}}}, pod(0))
    fake.engine.state("trainjob/llama")
    fake.says("logs", log(0, "01.5", "a"))
    assert fake.engine.log_lines("trainjob/llama") == ["a"]


def test_no_answer_is_no_news(fake: Fake) -> None:
    for verb in ("get", "logs", "delete"):
        fake.refuses(verb, NO_SERVER)
    assert fake.engine.state("trainjob/llama") is None
    assert fake.engine.log_lines("trainjob/llama") == []
    assert not fake.engine.cancel("trainjob/llama")


def test_a_job_that_somebody_deleted_is_forgotten(fake: Fake) -> None:
    fake.has()
    with pytest.raises(Forgotten, match="there is no trainjob/llama any more"):
        fake.engine.state("trainjob/llama")


def test_a_cancelled_job_is_gone_when_its_pods_are(fake: Fake) -> None:
    assert fake.engine.cancel("team-a/trainjob/llama")
    (call,) = fake.calls
    for word in (
        "--namespace team-a",
        "trainjobs.trainer.kubeflow.org,trainingruntimes.trainer.kubeflow.org,configmaps",
        "--wait=false",
    ):
        assert word in call
    fake.has(pod(0), pod(1))
    state = fake.engine.state("team-a/trainjob/llama")
    assert state is not None
    assert state.words == "Terminating (2 pods save and leave)"
    assert not state.ended
    fake.has()
    state = fake.engine.state("team-a/trainjob/llama")
    assert state is not None
    assert (state.ended, state.shell_code) == (True, 143)


def test_save_and_leave_reaches_the_program_of_the_first_pod(fake: Fake) -> None:
    fake.has(job(), pod(1), pod(0))
    fake.engine.save_and_leave("trainjob/llama")
    assert fake.calls[-1] == "exec llama-node-0-0-x7k2p -- bash -c kill -USR1 1"


def test_a_refusal_is_one_line() -> None:
    assert "\n" not in refusal("a\nb\n" * 1000)
    assert len(refusal("x" * 10_000)) < 500

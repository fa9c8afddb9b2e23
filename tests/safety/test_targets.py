"""Each target's own reader finds what was asked for, whatever the strings are."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fsdpplan.emit.alerts import alert_rules
from fsdpplan.emit.job import Job, UserProgram
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import Target, render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.plan import Plan
from tests.emit.plans import make_plan
from tests.safety.hostile import PIECES, WORDS
from tests.safety.reading import document, every_document
from tests.safety.shell import ALLOCATION, Bench, contains

PODS = Pods(image="registry/image:tag")
NODES = 2
FEW_RUNS = settings(
    max_examples=3,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Started:
    """What one node's torchrun got."""

    words: list[str]
    environment: dict[str, str]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "train.py").touch()
    return Bench(tmp_path)


def on_slurm(text: str, bench: Bench) -> list[Started]:
    ran = bench.run(text, **ALLOCATION)
    assert ran.words, ran.said
    return [Started(*pair) for pair in zip(ran.words, ran.environments, strict=True)]


def in_pods(text: str, bench: Bench) -> list[Started]:
    """The container's variables as the kubelet makes them, and its program."""
    documents = every_document(text)
    program = next(each["data"] for each in documents if each["kind"] == "ConfigMap")
    places = {"index": "1", "head": "pod-0", "port": "29500"}
    names = {"PET_NODE_RANK": "index", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "port"}
    names |= {"RANK": "index", "JOB_COMPLETION_INDEX": "index"}
    names |= {"MASTER_ADDR": "head", "MASTER_PORT": "port"}
    told = {name: places[place] for name, place in names.items()}
    started, found = [], list(containers(documents))
    for number, container in enumerate(found):
        if container in found[:number]:
            continue
        given = {one["name"]: expanded(one["value"]) for one in container["env"] if "value" in one}
        # What is the pod's own in a pod stays in the test's folder.
        script = program["start.sh"].replace("/tmp/fsdpplan", f"{bench.folder}/pod")
        ran = bench.run(script, **told, **given, FSDPPLAN_PLAN=program["plan.json"])
        assert len(ran.words) == 1, ran.said
        started.append(Started(ran.words[0], ran.environments[0]))
    assert started
    return started


def containers(node: Any) -> Iterator[dict[str, Any]]:
    """Every container of a manifest."""
    if isinstance(node, dict):
        yield from node.get("containers", [])
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict | list):
            yield from containers(child)


def expanded(value: str) -> str:
    """As Kubernetes reads a variable's value: two dollars are one, $(NAME) another variable.

    Source: kubernetes.io, "Define Dependent Environment Variables".
    """
    assert "$(" not in value.replace("$$", "")
    return re.sub(r"\$\$", "$", value)


def on_hosts(text: str, bench: Bench) -> list[Started]:
    ran = bench.run(text, "--on", "n2", "n1", "n2")
    assert len(ran.words) == 1, ran.said
    return [Started(ran.words[0], ran.environments[0])]


def on_a_cloud(text: str, bench: Bench) -> list[Started]:
    nodes = {"SKYPILOT_NODE_IPS": "n1\nn2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    ran = bench.run(document(text)["run"], **nodes)
    assert len(ran.words) == 1, ran.said
    return [Started(ran.words[0], ran.environments[0])]


def in_python(text: str, bench: Bench) -> list[Started]:
    """The constants of a script for Ray, which no shell ever sees."""
    tree = ast.parse(text)
    values = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
    }
    settings = values["SETTINGS"]
    assert isinstance(settings, ast.Dict)
    pairs = zip(settings.keys, settings.values, strict=True)
    environment = {
        name.value: value.value
        for name, value in pairs
        if isinstance(name, ast.Constant) and isinstance(value, ast.Constant)
    }
    script = next(
        ast.literal_eval(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "runpy.run_path"
    )
    plan = ast.literal_eval(values["PLAN"])
    words = [script, *ast.literal_eval(values["ARGUMENTS"])]
    return [Started(words, {**environment, "FSDPPLAN_PLAN": plan})]


def as_typed(text: str, bench: Bench) -> list[Started]:
    """What a person would type: the commented lines of a file for another program."""
    if not text.lstrip("#").startswith(" fsdpplan"):
        raise AssertionError("it does not begin with the header")
    lines = re.findall(r"^#   ((?:export |eval |\S.* -m ).*)$", text, re.MULTILINE)
    places = {"NODE_RANK": "1", "HEAD_NODE": "n1", "PORT": "29500"}
    ran = bench.run("\n".join(lines), **places)
    assert len(ran.words) == 1, ran.said
    return [Started(ran.words[0], ran.environments[0])]


def as_configuration(text: str, bench: Bench) -> list[Started]:
    assert document(text)["num_machines"] == NODES
    return as_typed(text, bench)


def as_module(text: str, bench: Bench) -> list[Started]:
    """A configuration in Python: its folder of checkpoints is among the words."""
    folders = [
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword) and node.arg == "folder"
    ]
    (started,) = as_typed(text, bench)
    return [Started([*started.words, *folders], started.environment)]


def as_arguments(text: str, bench: Bench) -> list[Started]:
    ran = bench.run(text, NODE_RANK="1", HEAD_NODE="n1")
    assert len(ran.words) == 1, ran.said
    saves = [word.removeprefix("--save=") for word in ran.words[0]]
    return [Started(saves, ran.environments[0])]


READERS: dict[Target, Callable[[str, Bench], list[Started]]] = {
    "slurm": on_slurm,
    "kubernetes": in_pods,
    "pytorchjob": in_pods,
    "jobset": in_pods,
    "volcano": in_pods,
    "ssh": on_hosts,
    "skypilot": on_a_cloud,
    "ray": in_python,
    "accelerate": as_configuration,
    "torchtitan": as_module,
    "megatron": as_arguments,
}
"""How the text of each target is read."""
FOR_GPUS = ("accelerate", "torchtitan", "megatron")
OWN_PROGRAM = ("torchtitan", "megatron")
"""They run no program of the user's: their folder of checkpoints stands for its arguments."""


def plan_of(target: Target) -> Plan:
    if target in FOR_GPUS:
        return make_plan("cuda", nodes=NODES, dp_replicate=1, dp_shard=2 * NODES)
    return make_plan("cpu", nodes=NODES)


def text_of(target: Target, job: Job, plan: Plan | None = None) -> str:
    plan = plan_of(target) if plan is None else plan
    pods = PODS if READERS.get(target) is in_pods else Pods()
    order = Order(plan=plan, plan_json=plan_json(plan), job=job, version="1.2.3", pods=pods)
    return render(target, order)


def require_untouched(target: Target, job: Job, bench: Bench, args: list[str]) -> None:
    words = [*filter(None, args[:1])] if target in OWN_PROGRAM else ["train.py", *args]
    for started in READERS[target](text_of(target, job), bench):
        assert contains(started.words, words)
        assert {name: started.environment.get(name) for name, _ in job.env} == dict(job.env)
    assert not bench.intruders


def job_of(target: Target, args: list[str], values: list[str]) -> Job:
    program: Trainer | UserProgram = UserProgram(script="train.py", args=tuple(args))
    if target in OWN_PROGRAM:
        program = Trainer(checkpoint_dir="".join(args[:1]) or None)
    return Job(
        program=program,
        env=tuple((f"HOSTILE_{number}", value) for number, value in enumerate(values)),
    )


@pytest.mark.parametrize("target", READERS)
@FEW_RUNS
@given(
    args=st.lists(WORDS, min_size=1, max_size=30), values=st.lists(WORDS, min_size=1, max_size=30)
)
def test_arguments_and_variables(
    target: Target, bench: Bench, args: list[str], values: list[str]
) -> None:
    require_untouched(target, job_of(target, args, values), bench, args)


@pytest.mark.parametrize("target", READERS)
def test_each_piece_alone_and_between_letters(target: Target, bench: Bench) -> None:
    args = [text for piece in PIECES for text in (piece, f"a{piece}b")]
    require_untouched(target, job_of(target, args, args), bench, args)


def hostile(plan: Plan, name: str) -> Plan:
    """A plan from somebody else's files."""
    return replace(
        plan,
        model=replace(plan.model, name=name),
        cluster=replace(plan.cluster, name=name),
        sources=(("model", name),),
        warnings=(name,),
    )


@pytest.mark.parametrize("target", READERS)
@FEW_RUNS
@given(name=st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join))
def test_names_in_a_plan(target: Target, bench: Bench, name: str) -> None:
    plan = hostile(plan_of(target), name)
    for started in READERS[target](text_of(target, job_of(target, [], []), plan), bench):
        carried = started.environment.get("FSDPPLAN_PLAN", plan_json(plan))
        assert carried.rstrip("\n") == plan_json(plan).rstrip("\n")
    assert not bench.intruders


@given(name=WORDS)
def test_names_in_alert_rules(name: str) -> None:
    rules = document(alert_rules(hostile(make_plan("cpu"), name), digest="0" * 64))
    assert set(rules) == {"groups"}
    for rule in rules["groups"][0]["rules"]:
        assert rule["annotations"]["summary"].startswith(name.replace("{{", "{ {"))

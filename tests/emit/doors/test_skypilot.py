"""SkyPilot's task, read by SkyPilot's own loader where it is installed."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
import yaml

from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.targets import render
from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import load_device, profile_names
from fsdpplan.spec.plan import Plan
from tests.emit.bench import shellcheck
from tests.emit.doors.orders import make_order
from tests.emit.plans import make_plan


def h100s(**layout: int) -> Plan:
    plan = make_plan("cuda", nodes=2, per_node=8, **layout)
    device = replace(plan.cluster.device, name="h100-sxm-80g", skypilot_name="H100")
    return replace(plan, cluster=replace(plan.cluster, device=device))


def test_the_task_asks_for_the_plans_nodes() -> None:
    pods = Pods(image="nvcr.io/nvidia/pytorch:25.08-py3")
    found = yaml.safe_load(render("skypilot", make_order(h100s(), pods=pods, job_name="a-b.c")))
    assert found["name"] == "a-b.c"
    assert found["num_nodes"] == 2
    assert found["resources"] == {
        "accelerators": "H100:8",
        "image_id": "docker:nvcr.io/nvidia/pytorch:25.08-py3",
    }
    assert set(found) == {"name", "num_nodes", "resources", "run"}


def test_the_run_is_a_script_of_every_node() -> None:
    order = make_order(h100s(), env=(("A", "$(b)'\n"),))
    run = yaml.safe_load(render("skypilot", order))["run"]
    assert '--nnodes=2 --nproc-per-node=8 --node-rank="$NODE_RANK"' in run
    assert 'HEAD_NODE=$(sed -n 1p <<<"$SKYPILOT_NODE_IPS")' in run
    assert "export A=$'$(b)\\'\\n'" in run
    assert order.plan_json in run
    assert shellcheck(f"#!/bin/bash\n{run}") == ""


def test_a_node_too_few_is_refused_where_it_runs() -> None:
    run = yaml.safe_load(render("skypilot", make_order(h100s())))["run"]
    done = subprocess.run(
        ["bash", "-s"],
        input=run,
        env={
            "PATH": "/usr/bin:/bin",
            "SKYPILOT_NODE_IPS": "10.0.0.1",
            "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NUM_NODES": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "the plan is for 2 node(s), and SkyPilot gave 1" in done.stderr


def test_every_name_is_of_one_device_profile() -> None:
    devices = [load_device(name).device for name in profile_names("device")]
    names = [device.skypilot_name for device in devices if device.skypilot_name is not None]
    assert {"H100", "A100-80GB", "B200"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (make_order(), "no name for the device some-cuda-device"),
        (make_order(h100s(), job_name="a b"), "job_name 'a b' is none that SkyPilot takes"),
        (make_order(h100s(), partition="gpu"), "--partition has no meaning"),
        (make_order(h100s(), pods=Pods(namespace="n")), "--namespace has no meaning"),
    ],
)
def test_what_it_has_no_word_for_is_refused(order: Order, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        render("skypilot", order)


@pytest.mark.parametrize("plan", [h100s(), make_plan("cpu", nodes=2, per_node=3)])
def test_its_own_loader_takes_the_task(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    config = yaml.safe_load(render("skypilot", make_order(plan)))
    task = sky.Task.from_yaml_config(config)
    assert task.num_nodes == 2
    assert task.run == config["run"]
    with pytest.raises(ValueError, match="bogus"):
        sky.Task.from_yaml_config({**config, "bogus": 1})

"""Ray Train's script: Python that uses Ray's names, and trains where Ray is installed."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.emit.job import UserProgram
from fsdpplan.emit.slurm.survival import Survival
from fsdpplan.emit.targets import render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from tests.emit.doors.orders import make_order, plan_of
from tests.emit.plans import make_plan

CALLS = {
    "ray.init": "runtime_env",
    "TorchTrainer": "torch_config scaling_config run_config",
    "TorchConfig": "backend",
    "ScalingConfig": "num_workers use_gpu resources_per_worker placement_strategy",
    "RunConfig": "name failure_config",
    "FailureConfig": "max_failures",
    "runpy.run_path": "run_name",
}
"""Names of ray 2.60 and of the standard library with arguments that the script uses."""


def calls(text: str) -> dict[str, dict[str, Any]]:
    """Function -> the arguments by name, those that are constants."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.keywords:
            values = {}
            for keyword in node.keywords:
                try:
                    values[keyword.arg or ""] = ast.literal_eval(keyword.value)
                except ValueError:
                    values[keyword.arg or ""] = None
            found[ast.unparse(node.func)] = values
    return found


def constants(text: str) -> list[Any]:
    return [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_it_uses_only_names_of_ray(kind: Any) -> None:
    text = render("ray", make_order(make_plan(kind, nodes=2, per_node=4)))
    found = calls(text)
    for function, values in found.items():
        assert set(values) <= set(CALLS[function].split()), function
    assert found["TorchConfig"]["backend"] == ("nccl" if kind == "cuda" else "gloo")
    assert found["ScalingConfig"]["use_gpu"] == (kind == "cuda")


def test_the_plan_travels_in_the_script() -> None:
    order = make_order()
    assert order.plan_json.rstrip("\n") in constants(render("ray", order))


def test_ranks_stay_with_their_node() -> None:
    one = calls(render("ray", make_order(make_plan("cuda"))))
    two = calls(render("ray", make_order()))
    assert one["ScalingConfig"]["placement_strategy"] == "STRICT_PACK"
    assert two["ScalingConfig"]["placement_strategy"] == "PACK"


def test_cores_of_a_node_are_shared_by_its_ranks() -> None:
    found = calls(render("ray", make_order(cpus_per_task=9)))
    assert found["ScalingConfig"]["resources_per_worker"] == {"CPU": 2, "GPU": 1}


def test_offloaded_gradients_have_a_group_of_their_own() -> None:
    found = calls(render("ray", make_order(plan_of(Layout(dp_shard=2, offload="cpu")))))
    assert found["TorchConfig"]["backend"] == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("program", "failures"),
    [(Trainer(), 0), (Trainer(checkpoint_dir="/c"), 2), (UserProgram(script="t.py"), 0)],
)
def test_it_starts_again_where_there_is_a_checkpoint(program: Any, failures: int) -> None:
    text = render("ray", make_order(program=program, survival=Survival(retries=2)))
    assert calls(text)["FailureConfig"]["max_failures"] == failures


def test_strings_of_a_person_stay_strings() -> None:
    hostile = "x'''\"\"\"\n#{}\\$(y)"
    program = UserProgram(script=hostile, args=(hostile,))
    order = make_order(program=program, env=(("A", hostile),), job_name=hostile)
    assert constants(render("ray", order)).count(hostile) == 5


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"python": "/opt/python"}, "--python has no meaning"),
        ({"survival": Survival(spares=1)}, "--spares is Slurm's"),
        ({"env_setup": ("module load x",)}, "--env-setup has no meaning"),
    ],
)
def test_options_without_a_meaning_are_refused(job: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        render("ray", make_order(**job))


def test_ray_has_the_names() -> None:
    pytest.importorskip("ray.train", reason="ray is not installed")
    for node in ast.walk(ast.parse(render("ray", make_order()))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, name.name) for name in node.names)


def test_two_workers_train(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="ray is not installed")
    metrics = tmp_path / "metrics.jsonl"
    order = make_order(
        make_plan("cpu", nodes=1, per_node=2),
        program=Trainer(steps=2),
        metrics=str(metrics),
    )
    script = tmp_path / "job.py"
    script.write_text(render("ray", order))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2]

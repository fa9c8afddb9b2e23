"""What TensorBoard, Weights & Biases and MLflow are told, by modules that stand in for them."""

from __future__ import annotations

import ast
import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.trainer import train
from fsdpplan.trainer.config import PLAN_VARIABLE
from fsdpplan.trainer.watch import dashboards
from tests.trainer import jobs, plans

pytestmark = pytest.mark.gloo

STAND_INS = Path(__file__).resolve().parents[2] / "stand_ins"
TRAINED = {"train/loss", "train/step_seconds", "train/grad_norm", "train/learning_rate"}


def told(folder: Path) -> None:
    """A job that tells stand-ins."""
    sys.path.insert(0, str(STAND_INS))
    sys.modules["torch.utils.tensorboard"] = import_module("tensorboard")
    dashboards.CLOSE_SECONDS = 1.0
    train.main(json.loads((folder / "options.json").read_text()))


def run(folder: Path, *options: str, world: int = 2, **environment: str) -> tuple[str, list[Any]]:
    """The output of such a job, and what the stand-ins were called with."""
    metrics, calls = folder / "metrics.jsonl", folder / "calls.jsonl"
    calls.write_text("")
    words = [f"--metrics={metrics}", f"--checkpoint-dir={folder / 'saved'}", "--no-numbers"]
    (folder / "options.json").write_text(json.dumps([*words, *options]))
    process = jobs.forks.start(
        str(world),
        "tests.trainer.watch.test_dashboards:told",
        str(folder),
        FSDPPLAN_TESTS_CALLS=str(calls),
        **{PLAN_VARIABLE: plans.plan_text(dp_shard=world)},
        **environment,
    )
    out = jobs.finish(process)
    return out, [json.loads(line) for line in calls.read_text().splitlines()]


def calls_of(library: str, calls: list[Any], *names: str) -> list[Any]:
    return [
        each
        for each in calls
        if each["library"] == library and (not names or each["call"] in names)
    ]


def test_a_resumed_run_goes_on_in_the_dashboards_own_run(tmp_path: Path) -> None:
    board = tmp_path / "board"
    options = (f"--tensorboard={board}", "--wandb=llamas", "--mlflow=herd", "--log-every=2")
    _, first = run(tmp_path, *options, "--steps=4")
    losses = {line["step"]: line["loss"] for line in jobs.lines(tmp_path, "step")}

    (begun,) = calls_of("wandb", first, "init")
    assert (begun["project"], begun["resume"]) == ("llamas", "allow")
    assert begun["config"]["layout.dp_shard"] == 2
    logged = [each["data"] for each in calls_of("wandb", first, "log")]
    assert {each["step"]: each["train/loss"] for each in logged if "train/loss" in each} == losses
    assert all(set(each) >= TRAINED for each in logged if "train/loss" in each)
    assert [each["call"] for each in calls_of("wandb", first)][-1] == "finish"

    (writer,) = calls_of("tensorboard", first, "SummaryWriter")
    assert (writer["log_dir"], writer["purge_step"]) == (str(board), None)
    scalars = calls_of("tensorboard", first, "add_scalar")
    assert {s["step"]: s["value"] for s in scalars if s["tag"] == "train/loss"} == losses

    (experiment,) = calls_of("mlflow", first, "set_experiment")
    assert experiment["name"] == "herd"
    (settings,) = calls_of("mlflow", first, "log_params")
    assert settings["params"]["options.steps"] == 4

    _, second = run(tmp_path, *options, "--steps=6", "--allow-changes")
    (again,) = calls_of("wandb", second, "init")
    assert (again["id"], again["resume"]) == (begun["id"], "allow")
    assert calls_of("mlflow", second, "start_run")[0]["run_id"] == "given-by-the-server"
    assert not calls_of("mlflow", second, "log_params")
    assert calls_of("tensorboard", second, "SummaryWriter")[0]["purge_step"] == 5


@pytest.mark.parametrize("how", ["FSDPPLAN_TESTS_BROKEN", "FSDPPLAN_TESTS_SLOW"])
def test_a_dashboard_that_fails_stops_nothing_and_is_said_once(tmp_path: Path, how: str) -> None:
    """Nor does one that takes longer for a line than the run for all its steps."""
    out, calls = run(tmp_path, "--mlflow=herd", "--steps=3", world=1, **{how: "mlflow"})
    assert calls
    assert [line["step"] for line in jobs.lines(tmp_path, "step")] == [1, 2, 3]
    assert out.count("--mlflow ") == 1
    assert "training goes on" in out


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed here")
def test_what_is_not_installed_is_said_before_anything_begins(tmp_path: Path) -> None:
    out = jobs.train(tmp_path, 1, "--wandb=llamas", exit_code=2)
    assert out.count("error: --wandb needs the Python package wandb") == 1
    assert not (tmp_path / "metrics.jsonl").exists()


def test_the_stand_in_takes_what_torchs_writer_takes() -> None:
    """Of torch's own source, since its module cannot be imported without tensorboard."""
    spec = find_spec("torch.utils")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("tensorboard") / "writer.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    (real,) = (
        each
        for each in tree.body
        if isinstance(each, ast.ClassDef) and each.name == "SummaryWriter"
    )
    methods = {each.name: each for each in real.body if isinstance(each, ast.FunctionDef)}
    stand_in = ast.parse((STAND_INS / "tensorboard.py").read_text(encoding="utf-8"))
    (ours,) = (each for each in stand_in.body if isinstance(each, ast.ClassDef))
    for method in ours.body:
        if isinstance(method, ast.FunctionDef):
            mine = [argument.arg for argument in method.args.args]
            assert mine == [argument.arg for argument in methods[method.name].args.args]

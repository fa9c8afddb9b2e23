"""The public names: all there, none more, and they do what the commands do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fsdpplan
from tests.cli.small import answer

QUESTION = ("--model", "llama-3.1-8b", "--gpus", "16", "--hardware", "dgx-h100")


@pytest.fixture(scope="module")
def plan() -> fsdpplan.Plan:
    return fsdpplan.recommend(
        fsdpplan.load_model("llama-3.1-8b"),
        fsdpplan.load_cluster("dgx-h100", gpus=16),
        fsdpplan.Training(seq_len=4096, global_batch=256),
        tp=1,
    )


def test_every_public_name_is_there_and_no_other() -> None:
    assert sorted(fsdpplan.__all__) == fsdpplan.__all__
    for name in fsdpplan.__all__:
        assert getattr(fsdpplan, name).__doc__, name
    assert set(dir(fsdpplan)) == {*fsdpplan.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'torch'"):
        fsdpplan.torch  # noqa: B018


def test_importing_it_imports_nothing() -> None:
    asks = (
        "import sys; before = set(sys.modules); import fsdpplan; print(set(sys.modules) - before)"
    )
    told = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert told.stdout == "{'fsdpplan'}\n"


def test_it_recommends_what_the_command_recommends(
    plan: fsdpplan.Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = ("--seq-len", "4096", "--global-batch", "256", "--tp", "1", "--torch", "2.13")
    first = answer(capsys, "recommend", *QUESTION, *batch, "--no-ledger", "--no-save")["plans"][0]
    assert first["layout"]["dp_shard"] == plan.layout.dp_shard
    assert first["layout"]["micro_batch"] == plan.layout.micro_batch
    assert first["estimate"]["step_seconds"]["expected"] == plan.estimate.step_seconds.expected


def test_a_plan_is_estimated_saved_read_and_emitted(plan: fsdpplan.Plan, tmp_path: Path) -> None:
    again = fsdpplan.estimate(plan.model, plan.cluster, plan.training, plan.layout)
    assert again == plan.estimate
    path = tmp_path / "fsdpplan.json"
    fsdpplan.save_plan(plan, path)
    assert fsdpplan.load_plan(path) == plan
    assert fsdpplan.emit_launch(plan, job=fsdpplan.Job(job_name="mine")).startswith("#!/bin/bash")
    pods = fsdpplan.Pods(image="pytorch/pytorch:2.13.0")
    assert "kind: TrainJob" in fsdpplan.emit_launch(plan, "kubernetes", pods=pods)


def test_what_cannot_be_is_an_error_of_one_line() -> None:
    cluster = fsdpplan.load_cluster("dgx-h100", gpus=1)
    training = fsdpplan.Training(seq_len=4096, global_batch=8)
    with pytest.raises(fsdpplan.NoFeasibleLayout, match=r"no layout of llama-3\.1-8b"):
        fsdpplan.recommend(fsdpplan.load_model("llama-3.1-8b"), cluster, training)
    with pytest.raises(fsdpplan.SpecError, match="no model is called"):
        fsdpplan.load_model("lama-9")

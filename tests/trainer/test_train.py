"""Real jobs: resuming, stopping, being killed, and saying what is wrong."""

from __future__ import annotations

import json
import math
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainingDiverged
from fsdpplan.trainer.model.flops import flops_per_token
from fsdpplan.trainer.pace import StepRead
from fsdpplan.trainer.report import layout_words
from fsdpplan.trainer.train import require_numbers
from tests.trainer import jobs, plans

pytestmark = pytest.mark.gloo

STEPS = "30"
HSDP = {"dp_replicate": 2, "dp_shard": 2}
LOSS_TOLERANCE = 2e-5
"""Over ten steps, of rounding that Adam spreads; the same layout resumes to the bit."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on 2 ranks that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    jobs.train(folder, 2, "--steps", STEPS, dp_shard=2)
    return folder


def test_the_loss_falls_and_every_step_is_reported(uninterrupted: Path) -> None:
    steps = jobs.lines(uninterrupted, "step")
    assert [line["step"] for line in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    plan = parse_plan((uninterrupted / "plan.json").read_text())
    for line in steps:
        assert line["tokens_per_second"] == pytest.approx(8 * 24 / line["step_seconds"])
        flops = 8 * 24 * flops_per_token(plan.model, seq_len=24)
        assert line["mfu_fraction"] == pytest.approx(flops / line["step_seconds"] / 2e11)
        assert 0 < line["allocated_bytes"] < line["reserved_bytes"]


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "said"),
    [
        (math.nan, 1.0, None, "the loss is nan in step 7"),
        (math.nan, math.nan, 2.0, "the loss is nan in step 7"),
        (1.0, math.inf, None, "the gradient norm is inf in step 7"),
        (1.0, math.inf, 2.0, None),
        (1.0, 1.0, 2.0**-15, "fp16 gradients overflow at every loss scale up to step 7"),
    ],
)
def test_a_run_ends_before_it_saves_what_is_no_number(
    loss: float, norm: float, scale: float | None, said: str | None
) -> None:
    read = StepRead(
        step=7,
        loss=loss,
        grad_norm=norm,
        learning_rate=1e-3,
        data_seconds=0.0,
        expert_imbalance=None,
        router_aux_loss=None,
        scaler_state={} if scale is None else {"scale": scale},
    )
    with nullcontext() if said is None else pytest.raises(TrainingDiverged, match=said):
        require_numbers(read)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"sharding": "ddp"}, "ddp"),
        ({"dp_replicate": 2, "sharding": "ddp", "tp": 2}, "ddp, dp_replicate 2 x tp 2"),
        ({"pp": 2, "dp_shard": 4, "cp": 3, "ep": 2}, "fsdp, pp 2 x dp_shard 4 x cp 3, ep 2"),
    ],
)
def test_a_run_names_every_degree_above_one(layout: dict[str, Any], words: str) -> None:
    assert layout_words(parse_plan(plans.plan_text(**layout)).layout) == words


def test_the_summary_comes_last(uninterrupted: Path) -> None:
    text = (uninterrupted / "metrics.jsonl").read_text()
    summary = json.loads(text.splitlines()[-1])
    assert summary["event"] == "summary"
    assert summary["step"] == 30
    assert summary["world"] == 2
    assert summary["steps_skipped"] + summary["steps_measured"] == 30
    assert summary["step_seconds_least"] <= summary["step_seconds"] <= summary["step_seconds_most"]
    assert summary["stopped_by_signal"] is None


def test_four_ranks_save_and_two_resume(uninterrupted: Path, tmp_path: Path) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--steps", STEPS)
    process = jobs.start(tmp_path, 4, *checkpoints, **HSDP)
    jobs.wait_for_step(process, tmp_path, 8)
    process.send_signal(signal.SIGUSR1)
    stopped = jobs.finish(process)
    saved = jobs.lines(tmp_path, "summary")[0]["step"]
    assert 8 <= saved < 30, stopped
    assert jobs.lines(tmp_path, "summary")[0]["stopped_by_signal"] == signal.SIGUSR1

    assert f"resumed after step {saved}" in jobs.train(tmp_path, 2, *checkpoints, dp_shard=2)
    assert jobs.losses(tmp_path) == pytest.approx(jobs.losses(uninterrupted), abs=LOSS_TOLERANCE)


@pytest.mark.parametrize(
    ("saves", "resumes", "model"),
    [
        ({"dp_replicate": 2, "sharding": "ddp"}, {"dp_shard": 2}, {}),
        ({"dp_shard": 2}, {"dp_replicate": 2, "sharding": "ddp"}, plans.GPT2_STYLE),
    ],
    ids=["ddp_to_fsdp", "tied_fsdp_to_ddp"],
)
def test_one_layout_saves_for_another(
    tmp_path: Path, saves: dict[str, Any], resumes: dict[str, Any], model: dict[str, Any]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    arguments = ("--checkpoint-dir", str(checkpoints), "--checkpoint-every", "3", "--steps", "6")
    jobs.train(tmp_path, 2, *arguments, model=model, **saves)
    whole = jobs.losses(tmp_path)
    (checkpoints / "latest").write_text("step-00000003\n")
    assert "resumed after step 3" in jobs.train(tmp_path, 2, *arguments, model=model, **resumes)
    assert jobs.losses(tmp_path) == pytest.approx(whole, abs=LOSS_TOLERANCE)


def test_a_killed_run_resumes_on_the_same_curve(uninterrupted: Path, tmp_path: Path) -> None:
    arguments = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    process = jobs.start(tmp_path, 2, *arguments, "--steps", STEPS, dp_shard=2)
    pids = jobs.rank_pids(process)
    jobs.wait_for_step(process, tmp_path, 12)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    jobs.finish(process, exit_code=signal.SIGKILL)
    assert len(jobs.losses(tmp_path)) < 30

    output = jobs.train(tmp_path, 2, *arguments, "--steps", STEPS, dp_shard=2)
    assert "resumed after step" in output
    assert jobs.losses(tmp_path) == jobs.losses(uninterrupted)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000025", "step-00000030"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000030\n"


def test_a_rank_that_dies_takes_the_job_with_it(tmp_path: Path) -> None:
    process = jobs.start(tmp_path, 2, "--steps", "10000", dp_shard=2)
    pids = jobs.rank_pids(process)
    jobs.wait_for_step(process, tmp_path, 3)
    os.kill(pids[1], signal.SIGKILL)
    process.communicate(timeout=jobs.TIMEOUT_SECONDS)
    assert process.returncode != 0


def test_resuming_what_is_done_trains_no_step(tmp_path: Path) -> None:
    arguments = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--steps", "2")
    jobs.train(tmp_path, 1, *arguments)
    before = jobs.losses(tmp_path)
    assert "resumed after step 2" in jobs.train(tmp_path, 1, *arguments)
    assert jobs.losses(tmp_path) == before


def one_line_error(output: str) -> str:
    """The one error line of an output without traceback."""
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    return errors[0]


def test_the_wrong_number_of_processes_is_refused(tmp_path: Path) -> None:
    error = one_line_error(jobs.train(tmp_path, 2, exit_code=2, **HSDP))
    assert "plan is for 4 processes but 2 were started" in error
    assert "--nproc-per-node 4" in error


@pytest.mark.parametrize(
    ("arguments", "plan", "words"),
    [
        (["--data", "/nowhere/tokens.bin"], {}, "tokenize"),
        ([], {"sharding": "zero1"}, "sharding zero1"),
        ([], {"wrap_blocks": 5}, "wraps 5 blocks"),
        (["--learning-rate", "1e30", "--clip-norm", "inf"], {}, "--learning-rate"),
        (["--checkpoint-dir", "/nowhere", "--resume", "required"], {}, "no checkpoint"),
        (["--metrics", "/nowhere/metrics.jsonl"], {}, "metrics file"),
    ],
)
def test_what_cannot_run_is_one_line(
    tmp_path: Path, arguments: list[str], plan: dict[str, Any], words: str
) -> None:
    code = 1 if "1e30" in arguments else 2
    error = one_line_error(jobs.train(tmp_path, 1, *arguments, exit_code=code, **plan))
    assert words in error


def test_a_checkpoint_goes_on_only_with_its_own_data(tmp_path: Path) -> None:
    folder = ("--checkpoint-dir", str(tmp_path / "checkpoints"))
    jobs.train(tmp_path, 1, *folder, "--steps", "1")
    error = one_line_error(jobs.train(tmp_path, 1, *folder, "--seed", "1", exit_code=2))
    assert "--seed 0" in error
    error = one_line_error(jobs.train(tmp_path, 1, *folder, "--resume", "never", exit_code=2))
    assert "another --checkpoint-dir" in error
    other = {"model": {"hidden": 64}}
    error = one_line_error(jobs.train(tmp_path, 1, *folder, exit_code=2, **other))
    assert "does not hold this model" in error

"""What failures leave, as commands show it, and how often a job saves where nobody says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.resolve.failures import reliability_of
from fsdpplan.cost.goodput import goodput
from fsdpplan.emit.job import Job
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.files.failures import published_failures
from fsdpplan.files.ledger import append_row
from fsdpplan.files.plans import read_plan
from fsdpplan.run.known import with_best_interval
from tests.cli.small import DEMO, answer, on_a_machine_without_gpus, show, words
from tests.validate.learn.saves import a_row, with_saves

RECOMMEND = words(
    "recommend --model llama-3.2-1b --gpus 16 --hardware dgx-h100 --tp 1 --pp 1 --micro-batch 1 "
    "--mtbf-node 500h --requeue 5min"
)
PLAN = "fsdpplan.json"
LONG = words("--checkpoint-dir /shared/saved --steps 1000000 --data tokens.bin")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two nodes that fail often, searched for once."""
    path = tmp_path_factory.mktemp("plan") / PLAN
    with pytest.MonkeyPatch.context() as patch:
        on_a_machine_without_gpus(patch)
        assert exit_code_of([*RECOMMEND, "--save", str(path)]) == 0
    return path


@pytest.fixture(autouse=True)
def _beside_the_plan(
    plan_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FSDPPLAN_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.chdir(tmp_path)
    shutil.copy(plan_file, PLAN)
    capsys.readouterr()


def found(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    document: dict[str, Any] = answer(capsys, "explain", *more)["goodput"]
    return document


def test_a_plan_remembers_how_its_machines_fail(capsys: pytest.CaptureFixture[str]) -> None:
    failures = read_plan(PLAN).failures
    assert failures is not None
    assert failures.node_mtbf_seconds == 500 * 3600
    known = found(capsys)
    assert known["reliability"]["node_mtbf_seconds"] == 500 * 3600
    assert known["reliability"]["gpu_mtbf_seconds"] == published_failures().gpu_mtbf_seconds
    assert known["sources"]["mtbf"] == "flag --mtbf-node"
    assert known["spares"] is not None
    typed = found(capsys, "--mtbf-node", "50h")
    assert typed["fraction"]["expected"] < known["fraction"]["expected"]
    # ranks and options of a job do not carry what its options follow from
    assert "mtbf" not in show(capsys, "emit-launch")


def test_the_screen_says_it_beside_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    out = show(capsys, "explain", "--checkpoint-every", "40")
    assert "What failures leave" in out
    assert "each 40 steps" in out
    assert "as was asked" in out
    assert "published: Llama 3" not in out
    assert "restart: published: arXiv 2605.09370" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "What failures leave" not in show(capsys, *words("explain --nccl"))
    assert exit_code_of(words("explain --nccl --goodput")) == 2


def test_shares_add_up_and_the_band_is_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    known = found(capsys)
    assert sum(known["shares"].values()) == pytest.approx(1)
    band = known["fraction"]
    assert band["lower"] < band["expected"] < band["upper"] < 1
    assert not known["every_steps_given"]
    sync = found(capsys, "--no-checkpoint-async")
    assert sync["writing_seconds"] == 0
    assert sync["blocking_seconds"] > known["blocking_seconds"]


def test_own_runs_say_how_fast_checkpoints_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = found(capsys)
    append_row(tmp_path / "ledger.sqlite", with_saves(a_row(16), seconds=200.0, blocking=20.0))
    after = found(capsys)
    assert after["sources"]["storage"] == after["sources"]["save"] == "1 measured run in the ledger"
    assert after["blocking_seconds"] == pytest.approx(20.0, rel=0.05)
    assert after["writing_seconds"] > before["writing_seconds"]
    assert found(capsys, "--no-ledger") == before


def test_a_job_saves_as_often_as_keeps_most(capsys: pytest.CaptureFixture[str]) -> None:
    every = found(capsys)["every_steps"]
    assert exit_code_of(["emit-launch", *LONG]) == 0
    out, err = capsys.readouterr()
    assert f"--checkpoint-every={every}" in out
    assert f"saves each {every:,} steps" in " ".join(err.split())
    document = answer(capsys, "emit-launch", *LONG)
    assert document["checkpoint_every"] == every
    assert "one failure in" in document["checkpoint_every_reason"]


@pytest.mark.parametrize(
    "given",
    [
        "--checkpoint-every 123",  # who says so is obeyed
        "--steps 50",  # a run that has ended before
        "--script train.py",  # a program of which nobody knows how it saves
    ],
)
def test_an_interval_is_not_made_up(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("")
    more = words(given)
    asked = [*LONG, *more] if "--script" not in more else more
    assert exit_code_of(["emit-launch", *asked]) == 0
    out, err = capsys.readouterr()
    assert ("--checkpoint-every=123" in out) is ("123" in given)
    assert "saves each" not in err


def test_other_programs_that_stop_for_a_save_are_told_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    in_place = found(capsys, "--no-checkpoint-async")["every_steps"]
    job = Job(program=Trainer(checkpoint_dir="/shared/saved", steps=10**6))
    for target, every in (("torchtitan", in_place), ("megatron", in_place), ("accelerate", None)):
        settled, sentence = with_best_interval(job, read_plan(PLAN), target=target)
        assert isinstance(settled.program, Trainer)
        assert settled.program.checkpoint_every == every
        assert bool(sentence) is (every is not None)


def test_processes_on_cpus_need_to_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of([*DEMO, "--goodput", "--no-save"]) == 2
    assert "--mtbf-gpu" in capsys.readouterr().err
    given = words("--no-save --mtbf-gpu 1000h --mtbf-node 100h")
    known = answer(capsys, *DEMO, *given)["goodput"]
    assert known["mtbf_seconds"] == pytest.approx(3600 / (4 / 1000 + 2 / 100))
    assert exit_code_of([*DEMO]) == 0
    capsys.readouterr()
    assert exit_code_of(["emit-launch", *LONG]) == 0
    assert "--checkpoint-every" not in capsys.readouterr().out


def test_one_function_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """What ranks by goodput calls: the numbers of the screen are its own."""
    plan, known = read_plan(PLAN), found(capsys)
    reliability = reliability_of(plan.cluster, plan.failures).value
    own = goodput(plan.case, plan.estimate, reliability)
    assert json.loads(json.dumps(own.fraction.expected)) == known["fraction"]["expected"]
    assert own.every_steps == known["every_steps"]


def test_published_figures_are_those_of_the_sources() -> None:
    known = published_failures()
    # 54 days of 16,384 GPUs in nodes of 8: 268 failures of GPUs, 151 of other causes
    assert known.gpu_mtbf_seconds == pytest.approx(54 * 86400 * 16384 / 268)
    assert known.node_mtbf_seconds == pytest.approx(54 * 86400 * 2048 / 151)
    rate = 16384 / known.gpu_mtbf_seconds + 2048 / known.node_mtbf_seconds
    assert 1 / rate == pytest.approx(54 * 86400 / 419)
    assert 2 < known.mtbf_factor < 4

"""`--program`: planned for what trains, and refused before the queue where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import SHAPE, on_a_machine_without_gpus

SMALL = ("recommend", *SHAPE, *["--seq-len", "128", "--precision", "fp32", "--hardware", "cpu"])


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def planned(*words: str) -> None:
    assert exit_code_of([*SMALL, "--gpus", "4", "--global-batch", "16", *words]) == 0


@pytest.mark.parametrize("program", ["own", "hf"])
def test_a_plan_for_a_program_says_so_and_its_next_step_works(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planned("--program", program)
    out, err = capsys.readouterr()
    words = {"own": "for a model of your own", "hf": "for a Hugging Face model"}[program]
    assert words in " ".join(out.split())
    assert json.loads(Path("fsdpplan.json").read_text())["training"]["program"] == program
    _, _, step = err.strip().rpartition("next: fsdpplan ")
    assert step == "emit-launch --script train.py > job.sbatch"
    assert exit_code_of(step.removesuffix(" > job.sbatch").split()) == 2
    assert "train.py: there is no such file here" in capsys.readouterr().err
    Path("train.py").write_text("")
    assert exit_code_of(step.removesuffix(" > job.sbatch").split()) == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ("--tp 2 --sharding ddp --heads 4 --kv-heads 4", "sharding ddp with tp 2 is the reference"),
        ("--pp 2 --precision fp16", "pp 2 in fp16 needs a schedule that scales the loss"),
        ("--activation-checkpointing attention --tp 1", "recomputes the reference decoder's"),
    ],
)
@pytest.mark.parametrize("command", ["emit-launch", "emit-launch --target ssh", "run --dry-run"])
def test_a_script_with_a_plan_that_it_cannot_run_is_refused_at_once(
    pins: str, said: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(*pins.split())
    capsys.readouterr()
    Path("train.py").write_text("")
    assert exit_code_of([*command.split(), "--script", "train.py"]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "recommend with --program own, or with --program hf" in message
    # as said
    for program in ("own", "hf"):
        planned("--program", program)
        assert exit_code_of([*command.split(), "--script", "train.py"]) == 0


def test_a_pin_that_the_program_cannot_keep_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--gpus", "4", "--global-batch", "16", "--program", "own"]
    assert exit_code_of([*words, "--cp", "2", "--heads", "4", "--kv-heads", "4"]) == 3
    assert "use --cp 1, or --program hf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "pins", "said"),
    [
        (
            "own",
            "--tp 2 --heads 4 --kv-heads 4",
            "for tp 2 your program needs parallelize(..., tp_plan={...})",
        ),
        ("own", "--pp 2", "for pp 2 your program needs forward_backward for the step"),
        ("hf", "--pp 2", "for pp 2 your program needs forward_backward for the step"),
        ("own", "--loss-chunks 2", "for loss_chunks 2 your program needs token_loss"),
        ("hf", "--tp 2 --loss-chunks 2 --heads 4 --kv-heads 4", None),
    ],
)
def test_what_a_plan_asks_of_the_program_is_said_where_it_is_saved(
    program: str, pins: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    planned("--program", program, *pins.split())
    message = capsys.readouterr().err
    assert (said or "saved as") in message
    assert ("your program needs" in message) == (said is not None)

"""A padded vocabulary by default: said with its gain, left out on request, decided anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from tests.cli.small import on_a_machine_without_gpus, words

GPT2 = "estimate --model gpt2 --gpus 8 --hardware dgx-h100 --global-batch 64 --no-ledger"
SEARCHED = (
    "recommend --model gpt2 --gpus 2 --hardware dgx-h100 --global-batch 16 --no-ledger --pp 1 "
    "--cp 1 --tp 1 --micro-batch 1 --save plan.json --vocab-multiple 1"
)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], more: str = "") -> dict[str, Any]:
    assert exit_code_of(words(f"{GPT2} --json {more}")) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_gpt2_gets_rows_that_never_learn_and_says_what_they_gain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    padded = planned(capsys)
    assert padded["model"]["vocab_multiple"] == 64
    said = " ".join(padded["assumptions"])
    assert "--vocab-multiple 1: no padding" in said
    assert "padded from 50,257 to 50,304 rows" in said
    plain = planned(capsys, "--vocab-multiple 1")
    assert plain["model"]["vocab_multiple"] == 1
    assert padded["step_seconds"]["expected"] < plain["step_seconds"]["expected"]


@pytest.mark.parametrize("program", ["own", "hf", "accelerate"])
def test_programs_with_tables_of_their_own_are_not_padded(
    capsys: pytest.CaptureFixture[str], program: str
) -> None:
    reduced = "--reduce-dtype bf16" if program == "accelerate" else ""
    theirs = planned(capsys, f"--program {program} --dp-shard 8 {reduced}")
    assert theirs["model"]["vocab_multiple"] == 1


def test_a_plan_of_before_keeps_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words(SEARCHED)) == 0
    document = json.loads(Path("plan.json").read_text())
    del document["sources"]["model.vocab_multiple"]
    Path("plan.json").write_text(json.dumps(document))
    assert exit_code_of(words("replan plan.json --gpus 4 --no-ledger --save more.json")) == 0
    capsys.readouterr()
    assert read_plan(Path("more.json")).model.vocab_multiple == 1

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.files.test_configurations import FSDP_2, TITAN
from tests.files.test_configurations import ZERO_3 as ZERO_3_OF_TWO
from tests.schemas import obeys


def asked(
    capsys: pytest.CaptureFixture[str], folder: Path, text: str, *words: str, name: str = "c"
) -> dict[str, Any]:
    """The JSON of an estimate of the file."""
    place = folder / name
    place.write_text(text, encoding="utf-8")
    assert exit_code_of(("estimate", "--from", str(place), *words, "--json")) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    obeys("estimate", document)
    return document


MODEL = ("--model", "llama-3.1-8b")
ZERO_3 = {**ZERO_3_OF_TWO, "train_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("text", "words", "same"),
    [
        (
            json.dumps(ZERO_3),
            (*MODEL, "--gpus", "8"),
            "--gpus 8 --micro-batch 1 --precision bf16 --sharding fsdp --reduce-dtype bf16 "
            "--runtime fsdp2_others --global-batch 32 --no-compile",
        ),
        (
            FSDP_2,
            MODEL,
            "--gpus 16 --gpus-per-node 8 --program accelerate --reshard-after-forward never "
            "--sharding fsdp --activation-checkpointing full --no-compile",
        ),
        (
            TITAN.replace("70B", "8B"),
            ("--gpus", "16"),
            "--gpus 16 --program torchtitan --tp 8 --micro-batch 8 --seq-len 8192 --async-tp "
            "--compile --activation-checkpointing full --sharding fsdp --global-batch 16",
        ),
    ],
    ids=["deepspeed", "accelerate", "torchtitan"],
)
def test_a_file_is_priced_as_the_options_that_ask_for_the_same(
    text: str, words: tuple[str, ...], same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, tmp_path, text, *words)
    assert exit_code_of(("estimate", *MODEL, *same.split(), "--json")) == 0
    typed = json.loads(capsys.readouterr().out)
    said = ("sources", "assumptions", "configuration")
    for name in typed.keys() - said:
        assert found[name] == typed[name], name


def test_what_is_typed_goes_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, tmp_path, FSDP_2, *MODEL, "--gpus", "8", "--precision", "fp32")
    assert found["configuration"]["typed"] == ["precision", "gpus"]
    assert found["training"]["precision"] == "fp32"
    assert found["cluster"]["gpus"] == 8


def test_each_field_that_is_not_understood_is_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "ds.json"
    place.write_text(json.dumps({**ZERO_3, "curriculum_learning": {"enabled": True}}))
    assert exit_code_of(("estimate", "--from", str(place), *MODEL, "--gpus", "8")) == 0
    screen = capsys.readouterr().out
    assert "Not understood, left out" in screen
    assert "curriculum_learning.enabled = True" in screen
    assert "is of DeepSpeed" in " ".join(screen.split())


@pytest.mark.parametrize(
    ("more", "words", "message"),
    [
        ({}, (), "type --gpus"),
        ({"train_batch_size": 100}, ("--gpus", "8"), "a batch of 100 is not 1 sequences x 4"),
        ({}, ("--gpus", "9", "--tp", "2"), "does not divide 9 GPUs"),
    ],
)
def test_a_batch_that_does_not_add_up_is_refused(
    more: dict[str, Any],
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = tmp_path / "ds.json"
    place.write_text(json.dumps({**ZERO_3, **more}))
    assert exit_code_of(("estimate", "--from", str(place), *MODEL, *words)) == 2
    assert message in capsys.readouterr().err

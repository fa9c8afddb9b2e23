"""What is said of a fine-tuning before the queue: batch, rate, and how many steps an epoch is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.resolve import job as resolved_job
from fsdpplan.files.training_data import counted_data
from fsdpplan.trainer import report
from tests.cli.small import SHAPE, answer, on_a_machine_without_gpus, words

QUESTION = (*SHAPE, *words("--hardware cpu --gpus 2 --seq-len 128"))
CHATS = 1280
SFT = ("--sft", "--data", "c.jsonl", "--tokenizer", "tokenizer.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with chats and a tokenizer."""
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)
    chat = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    (tmp_path / "c.jsonl").write_text((json.dumps(chat) + "\n") * CHATS)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def plan(*more: str) -> None:
    assert exit_code_of(["recommend", *QUESTION, *more]) == 0


def said(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    """The script of `emit-launch`, and what it says beside."""
    capsys.readouterr()
    assert exit_code_of(["emit-launch", *more]) == 0
    out, err = capsys.readouterr()
    return out, " ".join(err.split())


@pytest.mark.parametrize(
    ("more", "batch"),
    [
        ((), 32_768),
        (("--fine-tune",), 64),
        (("--data", "c.jsonl"), 64),
        (("--fine-tune", "--global-batch", "16"), 16),
    ],
)
def test_a_fine_tuning_has_a_batch_of_its_own(
    more: tuple[str, ...], batch: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "recommend", *QUESTION, *more, "--no-save")
    assert found["training"]["global_batch"] == batch
    assert any("as fine-tunings have it" in line for line in found["assumptions"]) == (batch == 64)


def test_epochs_over_data_are_its_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: Any = answer(
        capsys, "recommend", *QUESTION, "--data", "c.jsonl", "--epochs", "3", "--no-save"
    )
    assert found["training"]["tokens"] == 3 * CHATS * 128


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--data", "none.jsonl"), "plan with --fine-tune"),
        (("--data", "c.jsonl", "--tokens", "1B"), "give one of them"),
    ],
)
def test_data_that_cannot_be_counted_is_refused(
    more: tuple[str, ...], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["recommend", *QUESTION, *more]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_epoch_is_said_and_too_short_a_one_is_warned_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan()
    _, err = said(capsys, *SFT, "--epochs", "2")
    assert "an epoch is 0.0391 steps of 32,768 sequences" in err
    assert "fsdpplan recommend --fine-tune --global-batch 64" in err
    plan("--fine-tune")
    script, err = said(capsys, *SFT, "--epochs", "2")
    assert "an epoch is 20 steps of 64 sequences, 2 are 40, at a learning rate of 2e-05" in err
    assert "too few" not in err
    assert "# Trains: 2 epochs on c.jsonl" in script
    assert "--epochs=2.0" in script or "--epochs=2" in script
    assert "--steps" not in script


def test_a_batch_of_pre_training_is_warned_of_where_nothing_can_be_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan()
    elsewhere = ("--sft", "--data", "/none/c.jsonl", "--tokenizer", "/none/tokenizer.json")
    _, err = said(capsys, *elsewhere, "--epochs", "1")
    assert "32,768 sequences a step, as pre-training does" in err
    plan("--fine-tune")
    assert "as pre-training does" not in said(capsys, *elsewhere, "--epochs", "1")[1]


def test_both_sides_call_the_same_epochs_short() -> None:
    assert resolved_job.LEAST_EPOCH_STEPS == report.LEAST_EPOCH_STEPS


@pytest.mark.parametrize(
    ("name", "text", "chats", "sequences"),
    [
        ("a.jsonl", '{"messages": []}\n\n{"messages": []}\n', True, 2),
        ("a.txt", "x" * 1000, False, 10),
        ("a.txt", "x" * 10, False, None),
        ("a.bin", "", False, None),
    ],
)
def test_data_is_counted_as_far_as_it_is_here(
    name: str, text: str, chats: bool, sequences: int | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    for packed in (False,) if chats else (False, True):
        found = counted_data(
            (tmp_path / name,), seq_len=100, chats=chats, packed=packed, tokenized=False
        )
        assert (None if found is None else found.sequences) == sequences
    missing = (tmp_path / name, tmp_path / "none")
    assert counted_data(missing, seq_len=9, chats=chats, packed=False, tokenized=False) is None


def test_a_token_file_says_how_much_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.tokens").write_bytes(b"")
    (tmp_path / "a.tokens.json").write_text('{"tokens": 1001}')
    found = counted_data(
        (tmp_path / "a.tokens",), seq_len=100, chats=False, packed=False, tokenized=True
    )
    assert found is not None
    assert (found.sequences, found.is_exact) == (10, True)


@pytest.mark.parametrize(
    ("first", "then", "batch", "tokens"),
    [
        (("--fine-tune",), (), 64, None),
        (("--fine-tune",), ("--precision", "fp32"), 64, None),
        ((), ("--fine-tune",), 64, None),
        ((), ("--data", "c.jsonl"), 64, CHATS * 128),
        (("--data", "c.jsonl", "--epochs", "3"), ("--precision", "fp32"), 64, 3 * CHATS * 128),
    ],
)
def test_a_plan_that_is_asked_again_is_still_a_fine_tuning(
    first: tuple[str, ...],
    then: tuple[str, ...],
    batch: int,
    tokens: int | None,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan(*first)
    capsys.readouterr()
    assert exit_code_of(["what-if", *then, "--save", "again.json"]) == 0, capsys.readouterr().err
    training = json.loads((folder / "again.json").read_text())["training"]
    assert (training["global_batch"], training["tokens"]) == (batch, tokens)

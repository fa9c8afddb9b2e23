"""Fine-tuning: what the trainer would refuse is said before the queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import DEMO, on_a_machine_without_gpus

CHAT = '{"messages": [{"role": "user", "content": "hi"}]}\n'
TEXTS = '{"prompt": "hi", "completion": "you"}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan and a tokenizer without a template."""
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(DEMO) == 0
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *others: str) -> str:
    """What `emit-launch` says of chats; the script where it has one."""
    words = [
        "emit-launch",
        "--steps",
        "9",
        "--sft",
        "--data",
        "c.jsonl",
        "--tokenizer",
        "tokenizer.json",
        *others,
    ]
    code = exit_code_of(words)
    out, err = capsys.readouterr()
    return out if code == 0 else " ".join(err.split())


@pytest.mark.parametrize(
    "beside",
    [
        {"chat_template.jinja": "{{ messages }}"},
        {"tokenizer_config.json": json.dumps({"chat_template": "{{ messages }}"})},
        {
            "tokenizer_config.json": json.dumps(
                {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}
            )
        },
    ],
)
def test_a_tokenizer_with_a_template_will_do(
    beside: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.jsonl").write_text(CHAT)
    assert "has no chat template" in said(capsys)
    for name, text in beside.items():
        (folder / name).write_text(text)
    assert "--sft" in said(capsys)


def test_a_template_may_be_given_and_is_for_chats_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.jsonl").write_text(CHAT)
    assert "--chat-template=own.jinja" in said(capsys, "--chat-template", "own.jinja")
    (folder / "c.jsonl").write_text(TEXTS)
    assert "--sft" in said(capsys)


@pytest.mark.parametrize("line", ["{}\n", "[1]\n", "hi\n", '{"text": "hi"}\n', '{"messages": 1}\n'])
def test_a_line_that_is_no_chat_is_named(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "c.jsonl").write_text(line)
    assert "the first line of c.jsonl is no chat" in said(capsys, "--chat-template", "own.jinja")
    (folder / "c.jsonl").write_text(CHAT)
    (folder / "held.jsonl").write_text(line)
    own = ("--chat-template", "own.jinja", "--eval-data", "held.jsonl")
    assert "the first line of held.jsonl is no chat" in said(capsys, *own)


def test_what_is_elsewhere_is_looked_at_when_the_job_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "tokenizer.json").unlink()
    assert "--sft" in said(capsys)


def test_run_says_it_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "c.txt").write_text(CHAT)
    words = [
        "run",
        "--dry-run",
        "--steps",
        "9",
        "--sft",
        "--data",
        "c.txt",
        "--tokenizer",
        "tokenizer.json",
    ]
    assert exit_code_of(words) == 2
    assert "--sft takes chats from .jsonl files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--sft"], "give --data chats.jsonl and --tokenizer too"),
        (["--chat-template", "x"], "--chat-template needs --sft: give --sft too"),
        (["--eval-every", "5"], "give --eval-data too"),
    ],
)
def test_options_that_go_together(
    words: list[str], why: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["emit-launch", *words]) == 2
    assert why in " ".join(capsys.readouterr().err.split())

"""Command lines that are quick to answer, and a machine that is the same everywhere."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of


def words(text: str) -> tuple[str, ...]:
    """`text` as a shell would split it."""
    return tuple(shlex.split(text))


SHAPE = words("--layers 8 --hidden 320 --ffn-hidden 864 --heads 5 --kv-heads 5 --vocab 256")
DEMO = words(
    f"recommend {shlex.join(SHAPE)} --seq-len 128 --global-batch 16 --precision fp32 "
    "--hardware cpu --gpus 4 --gpus-per-node 2 --dp-replicate 2 --dp-shard 2"
)
"""Four processes of this machine in two nodes, HSDP pinned."""


def on_a_machine_without_gpus(patch: pytest.MonkeyPatch) -> None:
    """Make detection find nothing, so that a test says the same on a machine with GPUs."""
    patch.setattr("fsdpplan.topology.probe.visible_gpus", lambda: ())
    patch.setattr("fsdpplan.topology.probe.may_have_other_accelerators", lambda: False)


def saved_plan(place: Path, question: str) -> Path:
    """What `recommend` answers to a question on a machine without GPUs, saved at `place`."""
    with pytest.MonkeyPatch.context() as patch:
        on_a_machine_without_gpus(patch)
        assert exit_code_of([*words(f"recommend {question} --save"), str(place)]) == 0
    return place


def answer(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    code = exit_code_of([*given, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def show(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """stdout of a command that succeeds."""
    assert exit_code_of(words) == 0
    return capsys.readouterr().out

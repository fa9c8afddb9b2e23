"""Which checkpoint a run resumes from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fsdpplan.trainer.checkpoint import Progress, latest_checkpoint, read_progress
from fsdpplan.trainer.errors import TrainerError

PROGRESS = Progress(
    step=5, sequences=40, seed=0, seq_len=24, steps=10, learning_rate=1e-3, warmup_steps=1
)


def checkpoint(folder: Path, name: str, *, whole: bool = True) -> Path:
    path = folder / name
    path.mkdir()
    (path / ".metadata").touch()
    if whole:
        (path / "trainer.json").write_text(json.dumps(asdict(PROGRESS)))
    return path


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "none") is None


def test_the_marker_decides_not_the_names(tmp_path: Path) -> None:
    named = checkpoint(tmp_path, "step-00000005")
    checkpoint(tmp_path, "step-00000010")
    (tmp_path / "latest").write_text("step-00000005\n")
    assert latest_checkpoint(tmp_path) == named
    assert read_progress(named) == PROGRESS


def test_what_a_killed_run_left_half_written_is_not_one(tmp_path: Path) -> None:
    checkpoint(tmp_path, ".step-00000005.partial")
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("marker", ["step-00000010", "", "step-00000099"])
def test_a_marker_of_what_is_not_whole_names_what_is(tmp_path: Path, marker: str) -> None:
    checkpoint(tmp_path, "step-00000005")
    checkpoint(tmp_path, "step-00000010", whole=False)
    (tmp_path / "latest").write_text(marker)
    with pytest.raises(TrainerError, match="write one of step-00000005 into it"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"step": 1}'])
def test_a_broken_progress_file_is_said(tmp_path: Path, text: str) -> None:
    path = checkpoint(tmp_path, "step-00000005")
    (path / "trainer.json").write_text(text)
    with pytest.raises(TrainerError, match="older checkpoint"):
        read_progress(path)

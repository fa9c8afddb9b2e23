"""The metrics file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch

from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.watch.metrics import append_line, as_line, driver_version, keep_steps_until
from fsdpplan.trainer.watch.prometheus import write_exposition


def test_a_resumed_run_drops_the_steps_it_trains_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = [as_line("start", {"step": 0}), *(as_line("step", {"step": s}) for s in (1, 2, 3))]
    path.write_text("\n".join(written) + '\n{"event": "step", "st', encoding="utf-8")
    keep_steps_until(path, 2)
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in kept] == [0, 1, 2]


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n", encoding="utf-8")
    keep_steps_until(path, 0)
    assert path.read_text(encoding="utf-8") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root")
def test_a_device_stays_one(tmp_path: Path) -> None:
    null = tmp_path / "null"
    try:
        os.mknod(null, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        null.open("wb").close()
    except PermissionError:
        pytest.skip("device nodes cannot be made or opened here")
    for step in (0, 5):
        keep_steps_until(null, step)
    write_exposition(null, "text")
    append_line(null, "step", {})
    assert stat.S_ISCHR(null.lstat().st_mode)
    assert os.listdir(tmp_path) == ["null"]


def test_a_link_keeps_pointing_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "metrics").symlink_to("there")
    for _ in range(2):
        keep_steps_until(tmp_path / "metrics", 0)
        append_line(tmp_path / "metrics", "step", {"step": 1})
        assert os.readlink(tmp_path / "metrics") == "there"
        assert (tmp_path / "there").read_text().count("\n") == 1


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="metrics file"):
        keep_steps_until(tmp_path / "none" / "metrics.jsonl", 0)


def test_what_json_cannot_say_becomes_null() -> None:
    assert json.loads(as_line("step", {"loss": float("nan")})) == {"event": "step", "loss": None}


@pytest.mark.parametrize(
    ("kind", "text", "version"),
    [
        ("cuda", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar", "550.54.15"),
        (
            "cuda",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  R",
            "570.86.10",
        ),
        ("cuda", "another", None),
        ("cpu", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar", None),
    ],
)
def test_the_driver_is_what_its_module_says(
    kind: str, text: str, version: str | None, tmp_path: Path
) -> None:
    place = tmp_path / "version"
    place.write_text(text, encoding="utf-8")
    assert driver_version(torch.device(kind), place) == version


def test_the_postmortem_of_an_earlier_attempt_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(as_line("oom", {"step": None}) + "\n" + as_line("step", {"step": 1}) + "\n")
    keep_steps_until(path, 1)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["step"]

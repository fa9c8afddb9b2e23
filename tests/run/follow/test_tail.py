from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdpplan.run.follow import tail as following
from fsdpplan.run.follow.tail import FileTail


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = FileTail(path)
    assert tail.poll() == []
    with path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert tail.poll() == ["one"]
        file.write(b"o\r\nthree")
        assert tail.poll() == ["two"]
    assert tail.rest() == ["three"]
    assert tail.rest() == []


def test_what_was_there_before_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = FileTail(path)
    with path.open("a") as file:
        file.write("new\n")
    assert tail.poll() == ["new"]


def test_a_file_may_be_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old\nnew")
    assert FileTail(path, from_start=True).poll() == ["old"]


def test_a_file_that_is_replaced_or_cut_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("an old run\n")
    tail = FileTail(path)
    (tmp_path / "other").write_text("a new run, longer than the old one\n")
    os.replace(tmp_path / "other", path)
    assert tail.poll() == ["a new run, longer than the old one"]
    path.write_text("cut\n")
    assert tail.poll() == ["cut"]


def test_bytes_that_are_no_text_do_not_stop_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = FileTail(path)
    path.write_bytes(b"\xff\xfe\n")
    assert tail.poll() == ["\ufffd\ufffd"]


def test_a_file_that_is_replaced_between_a_look_and_a_read_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = FileTail(path)
    with path.open("a") as file:
        file.write("more\n")

    def look_and_replace(of: Path) -> tuple[int, int]:
        found = look(of)
        (tmp_path / "other").write_text("new one\nnew two\n")
        (tmp_path / "other").replace(path)
        return found

    look = following._inode_and_size
    monkeypatch.setattr(following, "_inode_and_size", look_and_replace)
    assert tail.poll() == []
    monkeypatch.setattr(following, "_inode_and_size", look)
    assert tail.poll() == ["new one", "new two"]

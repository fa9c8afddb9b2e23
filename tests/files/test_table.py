"""Tables of documents: the field is named, the value is shown, and nothing is half-written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.table import Table, parse_json_object, read_text, short
from fsdpplan.files.writing import write_text_atomically
from tests.refusals import check_one_line


def table(**values: Any) -> Table:
    return Table(where="a.toml", values=values, prefix="part.")


@pytest.mark.parametrize("value", [None, True, 1.5, "1", [], {}, -1, 2**63])
def test_only_a_whole_number_is_an_integer(value: Any) -> None:
    with pytest.raises(SpecError, match=r"a\.toml: part\.n must be a whole number"):
        table(n=value).integer("n", lowest=0)


@pytest.mark.parametrize("value", [None, True, "1", [], float("nan"), float("inf"), 10**400])
def test_only_a_finite_number_is_a_number(value: Any) -> None:
    with pytest.raises(SpecError, match=r"a\.toml: part\.x must be a (finite )?number"):
        table(x=value).number("x")


@pytest.mark.parametrize("value", [None, 1, "", "  ", "a\nb", "\x1b[31m", "x" * 3000])
def test_only_a_printable_line_is_a_text(value: Any) -> None:
    with pytest.raises(SpecError, match=r"part\.t must be"):
        table(t=value).text("t")


def test_an_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"unknown key 'part\.sum'; remove it, or use one of a, c"):
        table(a=1, sum=2).refuse_unknown(("a", "c"))


@given(st.text() | st.integers() | st.lists(st.integers()) | st.just(10**5000))
def test_a_shown_value_is_one_short_line(value: Any) -> None:
    assert len(short(value)) <= 60
    assert len(short(value).splitlines()) == 1


@given(st.text(max_size=50))
def test_any_text_is_an_object_or_one_line(text: str) -> None:
    try:
        assert isinstance(parse_json_object(text, where="x"), dict)
    except SpecError as refusal:
        check_one_line(refusal)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(SpecError, match="No space left on device; choose another place"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_mark_of_unicode_before_the_text_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf{}")
    assert read_text(tmp_path / "a", limit_bytes=99, what="plan") == "{}"
    (tmp_path / "b").write_text("{}", encoding="utf-16")
    with pytest.raises(SpecError, match="but UTF-16; save it as UTF-8"):
        read_text(tmp_path / "b", limit_bytes=99, what="plan")


def test_only_files_are_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (
        (tmp_path, "a folder"),
        (tmp_path / "pipe", "a pipe"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(SpecError, match=f"is not a file, but {kind}; "):
            read_text(path, limit_bytes=99, what="plan")

"""Traces on disk."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fsdpplan.errors import SpecError
from fsdpplan.files.traces import read_trace, write_trace

EVENT = {"ph": "X", "name": "aten::mm", "ts": 1.0, "dur": 2.0, "pid": 1, "tid": 1}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    size = write_trace(path, {"traceEvents": [EVENT], "traceName": "x"})
    assert size == path.stat().st_size
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert read_trace(path) == {"traceEvents": [EVENT], "traceName": "x"}
    write_trace(path, {"traceEvents": [EVENT]})
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_bare_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([EVENT, 3, {"no": "phase"}]))
    assert read_trace(path)["traceEvents"] == [EVENT]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (json.dumps({"traceEvents": [EVENT]}).encode()[:-9], "no whole JSON document"),
        (
            gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:-20],
            "ends within its compressed data",
        ),
        (b'{"spans": []}', "no list traceEvents"),
        (b"[]", "without events"),
        (b"\xff\xfe\x00", "no whole JSON document"),
        (b"", "no whole JSON document"),
        (b'{"traceEvents": [' + b"9" * 5000 + b"]}", "no whole JSON document"),
    ],
)
def test_what_is_no_trace_is_refused_in_words(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=why):
        read_trace(path)
    with pytest.raises(SpecError, match=r"does not exist \(did you mean .*/trace.json\?\)"):
        read_trace(tmp_path / "trac.json")


def test_what_never_ends_is_not_read() -> None:
    with pytest.raises(SpecError, match="not a file, but a device"):
        read_trace(Path("/dev/zero"))


def test_what_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * 100_000 + b'{"traceEvents": []}', mtime=0))
    monkeypatch.setattr("fsdpplan.files.traces.LIMIT_BYTES", 10_000)
    with pytest.raises(
        SpecError, match=r"larger than 10.0 kB when it is unpacked: give one of fewer"
    ):
        read_trace(path)

"""Traces on disk: trace-event JSON as torch's profiler writes it, compressed where the name ends in
.gz."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fsdpplan.errors import SpecError
from fsdpplan.files.table import path_text, read_data
from fsdpplan.files.writing import write_bytes_atomically
from fsdpplan.units import format_gb

ADVICE = (
    "give a trace that torch.profiler exported (`export_chrome_trace`, or a run's "
    "trace-rank-0.json)"
)

LIMIT_BYTES = 2_000_000_000
"""Larger ones fit no memory once they are Python's values."""

_FIELDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "name": str,
    "cat": str,
    "pid": (int, str),
    "tid": (int, str),
    "ts": (int, float),
    "dur": (int, float),
    "args": dict,
}
"""What an event has by the trace event format, where it has that."""


def read_trace(path: Path) -> dict[str, Any]:
    """A trace, whose events are dictionaries with a phase and a name, and have nothing of another
    type than the format says. Raises SpecError for what is none."""
    where = path_text(path)
    try:
        # NaN is no number; the file's bytes are kept by nobody while it is parsed
        found = json.loads(_content(path, where), parse_constant=lambda word: None)
    except SpecError:
        raise
    except (ValueError, RecursionError) as error:
        raise SpecError(
            f"{where} is no whole JSON document: {error}; a profiler that was killed leaves half "
            f"of one: profile again, or {ADVICE}"
        ) from error
    if isinstance(found, list):  # the format allows the bare list of events, too
        found = {"traceEvents": found}
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise SpecError(f"{where} is JSON, but no trace: it has no list traceEvents; {ADVICE}")
    kept = [_plain(each) for each in events if isinstance(each, dict) and "ph" in each]
    if not kept:
        raise SpecError(f"{where} is a trace without events; {ADVICE}")
    about = {name: _job(found[name]) for name in found if name == "distributedInfo"}
    return {**found, **about, "traceEvents": kept}


def _content(path: Path, where: str) -> bytes:
    """What stands in a file, unpacked."""
    raw = read_data(path, limit_bytes=LIMIT_BYTES, what="trace")
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        with gzip.open(io.BytesIO(raw)) as packed:
            found = packed.read(LIMIT_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecError(
            f"{where} ends within its compressed data or is damaged: {error}; copy it again, or "
            f"{ADVICE}"
        ) from error
    if len(found) > LIMIT_BYTES:
        raise SpecError(
            f"{where} is larger than {format_gb(LIMIT_BYTES)} when it is unpacked: give one of "
            "fewer steps, as fsdpplan run --profile 10:3 leaves it"
        )
    return found


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what is of another type."""
    wrong = {key for key, of in _FIELDS.items() if key in event and not isinstance(event[key], of)}
    wrong |= {key for key in ("ts", "dur") if key in event and not _is_number(event[key])}
    if not wrong and "name" in event:
        return event
    return {"name": "", **{key: value for key, value in event.items() if key not in wrong}}


def _is_number(value: object) -> bool:
    """A moment or a length; no whole number beyond all floats is."""
    return isinstance(value, int | float) and abs(value) < 1e18


def _job(about: object) -> dict[str, Any]:
    """What a trace says of its job; of groups ranks that are no numbers are left out."""
    if not isinstance(about, dict):
        return {}
    groups = about.get("pg_config")
    kept = [one for one in groups if isinstance(one, dict)] if isinstance(groups, list) else []
    return {**about, "pg_config": [{**one, "ranks": _ranks(one.get("ranks"))} for one in kept]}


def _ranks(found: object) -> list[int]:
    return [rank for rank in found if isinstance(rank, int)] if isinstance(found, list) else []


def write_trace(path: Path, document: dict[str, Any]) -> int:
    """Write a trace, whole or not at all; how many bytes that took."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("utf-8")
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_bytes_atomically(path, data)
    return len(data)

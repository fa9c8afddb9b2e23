"""Traces on disk: trace-event JSON as torch's profiler writes it, compressed where the name ends in
.gz."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.table import path_text
from fsdpplan.files.writing import write_bytes_atomically

ADVICE = (
    "give a trace that torch.profiler exported (`export_chrome_trace`, or a run's "
    "trace-rank-0.json)"
)


def read_trace(path: Path) -> dict[str, Any]:
    """A trace, whose events are dictionaries with a phase. Raises SpecError for what is none."""
    where = path_text(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{where} cannot be read: {error.strerror or error}; {ADVICE}") from error
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        found = json.loads(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecError(
            f"{where} ends within its compressed data or is damaged: {error}; copy it again, or "
            f"{ADVICE}"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(
            f"{where} is no whole JSON document: {error}; a profiler that was killed leaves half "
            f"of one: profile again, or {ADVICE}"
        ) from error
    if isinstance(found, list):  # the format allows the bare list of events, too
        found = {"traceEvents": found}
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise SpecError(f"{where} is JSON, but no trace: it has no list traceEvents; {ADVICE}")
    kept = [each for each in events if isinstance(each, dict) and "ph" in each]
    if not kept:
        raise SpecError(f"{where} is a trace without events; {ADVICE}")
    return {**found, "traceEvents": kept}


def write_trace(path: Path, document: dict[str, Any]) -> int:
    """Write a trace, whole or not at all; how many bytes that took."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("utf-8")
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_bytes_atomically(path, data)
    return len(data)

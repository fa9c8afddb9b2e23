"""Traces on disk: trace-event JSON as torch's profiler writes it, compressed where the name ends in
.gz."""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from pathlib import Path
from typing import Any

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


def read_trace(path: Path) -> dict[str, Any]:
    """A trace, whose events are dictionaries with a phase. Raises SpecError for what is none."""
    where = path_text(path)
    raw = read_data(path, limit_bytes=LIMIT_BYTES, what="trace")
    try:
        if raw[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(raw)) as packed:
                raw = packed.read(LIMIT_BYTES + 1)
            if len(raw) > LIMIT_BYTES:
                raise SpecError(
                    f"{where} is larger than {format_gb(LIMIT_BYTES)} when it is unpacked: give "
                    "one of fewer steps, as fsdpplan run --profile 20:3 leaves it"
                )
        found = json.loads(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecError(
            f"{where} ends within its compressed data or is damaged: {error}; copy it again, or "
            f"{ADVICE}"
        ) from error
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
    kept = [_sound(each) for each in events if isinstance(each, dict) and "ph" in each]
    if not any(kept):
        raise SpecError(f"{where} is a trace without events; {ADVICE}")
    return {
        **found,
        "traceEvents": [each for each in kept if each is not None],
        **({"distributedInfo": _sound_job(found["distributedInfo"])} if _JOB in found else {}),
    }


_JOB = "distributedInfo"
_COUNTED = ("correlation", "Group size")
"""Arguments that stand for one number each."""


def _sound(event: dict[str, Any]) -> dict[str, Any] | None:
    """An event whose fields have the types of the format; None of one that has no time, though it
    lasts."""
    if event["ph"] == "X" and not (_is_time(event.get("ts")) and _is_time(event.get("dur"), 0)):
        return None
    fixed: dict[str, Any] = {}
    if not isinstance(event.get("name"), str):
        fixed["name"] = str(event.get("name", ""))
    fixed |= {
        key: str(event[key])
        for key in ("ph", "pid", "tid", "cat")
        if isinstance(event.get(key), dict | list)
    }
    about = event.get("args", {})
    if not isinstance(about, dict):
        fixed["args"] = {}
    elif any(isinstance(about.get(key), dict | list) for key in _COUNTED):
        fixed["args"] = {key: value for key, value in about.items() if key not in _COUNTED}
    return {**event, **fixed} if fixed else event


def _is_time(value: Any, least: float = -math.inf) -> bool:
    try:
        return math.isfinite(number := float(value)) and number >= least
    except (TypeError, ValueError, OverflowError):
        return False


def _sound_job(about: Any) -> dict[str, Any]:
    """What a trace says of its job, as far as it has the types that torch writes."""
    if not isinstance(about, dict):
        return {}
    numbers = ("rank", "world_size")
    kept = {
        key: value
        for key, value in about.items()
        if key != "pg_config" and not (key in numbers and type(value) is not int)
    }
    groups = about.get("pg_config")
    return {
        **kept,
        "pg_config": [
            {**one, "ranks": ranks if isinstance(ranks := one.get("ranks"), list) else []}
            for one in (groups if isinstance(groups, list) else [])
            if isinstance(one, dict)
        ],
    }


def write_trace(path: Path, document: dict[str, Any]) -> int:
    """Write a trace, whole or not at all; how many bytes that took."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("utf-8")
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_bytes_atomically(path, data)
    return len(data)

"""The log of a calibration: one JSON object a line, the machine first.

In its place there may be what nccl-tests printed (`nccl_tests.py`).

A last line that was cut short, as by an interruption, is dropped. All else that is wrong is an
error.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.nccl_tests import is_nccl_tests, measured_calls, nccl_tests
from fsdpplan.files.seems import seems
from fsdpplan.files.table import Table, parse_json_object, path_text, read_text
from fsdpplan.spec.measurement import MeasuredMachine, Measurement

LIMIT_BYTES = 512 * 2**20
LONGEST_SECONDS = 86400.0

KINDS: dict[str, type[Measurement]] = {
    kind.__name__.removeprefix("Measured").lower(): kind for kind in get_args(Measurement)
}
"""By what `kind` says of a line: `matmul` is a MeasuredMatmul."""

FIELDS: dict[type[Measurement], dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in KINDS.values()
}
"""Type of each field."""

FROM_ZERO = frozenset({"rank", "first_rank"})
"""Whole numbers that may be 0."""


def read_measurements(path: Path) -> tuple[Measurement, ...]:
    """The rows of the log at `path`."""
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="log of measurements")
    where = path_text(path)
    if text.lstrip()[:1] not in ("", "{"):
        if not is_nccl_tests(text):
            raise SpecError(
                f"{where}: {seems(text)}; read are logs of fsdpplan calibrate and what nccl-tests "
                "printed"
            )
        # it does not say when it ran
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return measured_calls(nccl_tests(text, where=where), where=where, date=written)
    return parse_measurements(text, where=where)


def parse_measurements(text: str, *, where: str) -> tuple[Measurement, ...]:
    """The rows of a log; raises SpecError with file, line and field at the first fault."""
    *lines, last = text.split("\n")
    if _is_whole(last):
        lines.append(last)
    rows = tuple(_row(line, where=f"{where}: line {n}") for n, line in enumerate(lines, start=1))
    if not rows or not isinstance(rows[0], MeasuredMachine):
        raise SpecError(
            f"{where} does not begin with what was measured on; measure by fsdpplan calibrate"
        )
    if any(isinstance(row, MeasuredMachine) for row in rows[1:]):
        raise SpecError(f"{where} holds more than one calibration; give each a file of its own")
    return rows


def _is_whole(line: str) -> bool:
    """Whether a line without its line break has all else."""
    try:
        parse_json_object(line, where="")
    except SpecError:
        return False
    return True


def _row(line: str, *, where: str) -> Measurement:
    table = Table(where=where, values=parse_json_object(line, where=where))
    kind = KINDS[table.choice("kind", KINDS)]
    hints = FIELDS[kind]
    table.refuse_unknown(("kind", *hints))
    return kind(**{name: _value(table, name, hint) for name, hint in hints.items()})


def _value(table: Table, name: str, hint: Any) -> Any:
    """The value of a field of type `hint`: one of those that rows of a log have."""
    origin = get_origin(hint)
    if origin is UnionType:
        if table.require(name) is None:
            return None
        (hint,) = (one for one in get_args(hint) if one is not NoneType)
        origin = get_origin(hint)
    if origin is Literal:
        return table.choice(name, get_args(hint))
    if origin is tuple:
        return _texts(table, name) if get_args(hint)[0] is str else _seconds(table, name)
    if hint is bool:
        return table.flag(name)
    if hint is int:
        return table.integer(name, lowest=0 if name in FROM_ZERO else 1)
    assert hint is str, hint
    return table.text(name)


def _texts(table: Table, name: str) -> tuple[str, ...]:
    values = table.require(name)
    if not isinstance(values, list) or not values or not all(map(_is_name, values)):
        raise table.wrong(name, "a list of texts")
    return tuple(values)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= 2000


def _seconds(table: Table, name: str) -> tuple[float, ...]:
    values = table.require(name)
    if not isinstance(values, list) or not values or not all(map(_is_seconds, values)):
        raise table.wrong(name, "a list of seconds, none of them negative")
    return tuple(map(float, values))


def _is_seconds(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and 0 <= value <= LONGEST_SECONDS
    )

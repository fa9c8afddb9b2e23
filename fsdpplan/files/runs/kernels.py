"""Tables of timed kernels: CSV with the columns of docs/reference/kernel-tables.md, and of
collectives what nccl-tests printed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.runs.nccl_tests import NcclTest, is_nccl_tests, nccl_tests
from fsdpplan.files.seems import seems
from fsdpplan.files.table import path_text, read_text, short

LIMIT_BYTES = 16 * 2**20
MATMUL_COLUMNS = ("gpu", "dtype", "m", "n", "k", "achieved_tflops")
COLLECTIVE_COLUMNS = ("gpu", "gpus", "nodes", "fabric", "collective", "bytes")
UNNAMED = "not named"
"""The GPU of a table that does not say it."""
TIMES = ("time_us", "busbw_gbs")
"""Columns of which a row of collectives gives one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedMatmul:
    """One row of a table of matmuls."""

    row: int
    gpu: str
    dtype: str
    m: int
    n: int
    k: int
    flops_per_second: float
    source_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """One row of a table of collectives; of time and bus bandwidth at least one is given."""

    row: int
    source: str
    gpu: str
    node_type: str
    gpus: int
    nodes: int
    fabric: str
    collective: str
    bytes: float
    """The full buffer, as nccl-tests counts it."""
    seconds: float | None
    bus_bytes_per_second: float | None
    notes: str


def read_timed_matmuls(path: Path) -> tuple[TimedMatmul, ...]:
    """The rows of the table at `path`; raises SpecError at the first fault."""
    return tuple(
        TimedMatmul(
            row=one.row,
            gpu=one.text("gpu"),
            dtype=one.text("dtype").lower(),
            m=one.whole("m"),
            n=one.whole("n"),
            k=one.whole("k"),
            flops_per_second=one.number("achieved_tflops") * 1e12,
            source_url=one.text("source_url"),
        )
        for one in _rows(path, MATMUL_COLUMNS)
    )


def read_timed_collectives(path: Path) -> tuple[TimedCollective, ...]:
    """The rows of the table at `path`; raises SpecError at the first fault."""
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="table of kernels")
    if is_nccl_tests(text):
        return tuple(_tested(nccl_tests(text, where=path_text(path)), source=path.stem))
    return tuple(map(_collective, _parsed(text, path, COLLECTIVE_COLUMNS)))


def _tested(tests: Sequence[NcclTest], *, source: str) -> Iterator[TimedCollective]:
    """Rows of nccl-tests, which say neither the network nor, without their Rank lines, the GPU."""
    places = [(test, row) for test in tests for row in test.rows]
    for index, (test, row) in enumerate(places):
        nodes = len(test.hosts) or 1
        even = test.ranks % nodes == 0 and len(test.gpus) < 2
        yield TimedCollective(
            row=index,
            source=source,
            gpu=test.gpus[0] if even and test.gpus else UNNAMED,
            node_type="",
            gpus=test.ranks,
            nodes=nodes if even else 1,
            fabric="",
            collective=test.test,
            bytes=row.bytes,
            seconds=row.seconds,
            bus_bytes_per_second=row.bus_gbs * 1e9 or None,
            notes="in place" if row.in_place else "",
        )


def _collective(row: _Row) -> TimedCollective:
    micros, bus = row.optional("time_us"), row.optional("busbw_gbs")
    if micros is None and bus is None:
        raise SpecError(f"{row.place} has neither {TIMES[0]} nor {TIMES[1]}; give one of them")
    gpus, nodes = row.whole("gpus"), row.whole("nodes")
    if gpus % nodes:
        raise SpecError(
            f"{row.place}: {gpus} gpus do not fill {nodes} nodes alike; write a multiple"
        )
    return TimedCollective(
        row=row.row,
        source=row.text("source_id"),
        gpu=row.text("gpu"),
        node_type=row.text("node_type"),
        gpus=gpus,
        nodes=nodes,
        fabric=row.text("fabric"),
        collective=row.text("collective"),
        bytes=row.number("bytes"),
        seconds=None if micros is None else micros * 1e-6,
        bus_bytes_per_second=None if bus is None else bus * 1e9,
        notes=row.text("notes"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One line under the header."""

    row: int
    place: str
    fields: dict[str, str]

    def text(self, name: str) -> str:
        return self.fields.get(name, "")

    def whole(self, name: str) -> int:
        text = self.text(name)
        if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) > 0):
            raise SpecError(
                f"{self.place}, column {name}: {short(text)} must be a whole number of at least 1"
            )
        return int(text)

    def number(self, name: str) -> float:
        value = self.optional(name)
        if value is None:
            raise SpecError(f"{self.place}, column {name} is empty: give a number above 0")
        return value

    def optional(self, name: str) -> float | None:
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text) if len(text) <= 40 else math.nan
        except ValueError:
            value = math.nan
        if value == 0:  # nccl-tests prints so what it could not resolve
            return None
        if not 0 < value < math.inf:
            raise SpecError(
                f"{self.place}, column {name}: {short(text)} must be a number above 0, without unit"
            )
        return value


def _rows(path: Path, wanted: Sequence[str]) -> list[_Row]:
    return _parsed(read_text(path, limit_bytes=LIMIT_BYTES, what="table of kernels"), path, wanted)


def _parsed(text: str, path: Path, wanted: Sequence[str]) -> list[_Row]:
    where = path_text(path)
    lines = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        filled = [(lines.line_num, fields) for fields in lines if fields]
    except csv.Error as error:
        raise SpecError(
            f"{where} is not CSV at line {lines.line_num}: {error}; quote fields that hold commas "
            "or quotes"
        ) from error
    header = [name.strip() for name in filled[0][1]] if filled else []
    missing = [name for name in wanted if name not in header]
    if len(missing) == len(wanted):
        raise SpecError(
            f"{where}: {seems(text)}; give a table with the columns {', '.join(wanted)} "
            "(docs/reference/kernel-tables.md), or what nccl-tests printed"
        )
    if missing:
        raise SpecError(
            f"{where}: the header lacks {', '.join(missing)}; add what is missing of "
            f"{', '.join(wanted)} (docs/reference/kernel-tables.md)"
        )
    if len(filled) == 1:
        raise SpecError(f"{where} has a header and no rows; add one row a kernel")
    rows = []
    for row, (line, fields) in enumerate(filled[1:]):
        place = f"{where}: row {row} (line {line})"
        if len(fields) != len(header):
            raise SpecError(
                f"{place} has {len(fields)} fields, the header {len(header)}; give one a column"
            )
        named = {name: one.strip() for name, one in zip(header, fields, strict=True)}
        rows.append(_Row(row=row, place=place, fields=named))
    return rows

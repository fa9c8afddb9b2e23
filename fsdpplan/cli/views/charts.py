"""Charts of text: bars, bands and marks over two axes, for a terminal, a log or a pipe.

No colour, so that all that a chart says stands in its marks. Blocks of an eighth of a column are
drawn where stdout is a terminal that can show them; elsewhere it is plain ASCII.

Drawn here and not by a library: plotext, the one that is kept, takes 0.18 s to import where all of
`recommend` takes 0.5 s, and its names change with each of its releases (docs/decisions/charts.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log

from fsdpplan.cli.views.render import wrapped
from fsdpplan.emit.safe_text import printable

LEAST_BAR = 10
"""Columns of a whole bar; with fewer beside its name and words, it has a line of its own."""

MOST_BAR = 100
"""On a wide terminal: longer ones are no easier to read."""

EIGHTHS = " ▏▎▍▌▋▊▉█"
LIGHT = "░"
MARK = "*"
"""Where more marks meet than there are columns for."""


def has_blocks() -> bool:
    """Whether stdout is a terminal that shows block characters."""
    try:
        if not sys.stdout.isatty():
            return False
        (EIGHTHS + LIGHT).encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError, ValueError):  # ValueError: it is closed
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One line of a bar chart."""

    name: str
    value: float
    words: str
    """Beside the bar."""
    rest: float = 0.0
    """Drawn lightly behind the value."""


def bars(rows: Sequence[Bar], *, width: int, whole: float | None = None) -> str:
    """A bar a row; `whole` is as long as a bar may be, by default the longest one."""
    most = max(whole or 0.0, *(row.value + row.rest for row in rows), 0.0) or 1.0
    return _lines(rows, [partial(_bar, row, most) for row in rows], width)


def _bar(row: Bar, most: float, room: int) -> str:
    """In `room` columns, of which all are `most`."""
    both = round(room * (row.value + row.rest) / most)
    eighths = max(round(8 * room * row.value / most), int(row.value > 0))
    if not has_blocks():
        drawn, light = "#" * max(round(eighths / 8), int(eighths > 0)), "-"
    else:
        drawn, light = EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip(), LIGHT
    return drawn + light * (both - len(drawn))


def changes(rows: Sequence[Bar], *, width: int) -> str:
    """A bar a row, to the left of the middle where its value is below 0, to the right above it."""
    most = max((abs(row.value) for row in rows), default=0.0) or 1.0
    return _lines(rows, [partial(_change, row.value / most) for row in rows], width)


def _change(share: float, room: int) -> str:
    half = (room - 1) // 2
    columns = max(round(half * abs(share)), int(share != 0))
    left, right = (columns, 0) if share < 0 else (0, columns)
    fill = EIGHTHS[8] if has_blocks() else "#"
    return f"{fill * left:>{half}}|{fill * right:<{half}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One line of a chart of bands."""

    name: str
    lower: float
    expected: float
    upper: float
    words: str
    measured: float | None = None


def bands(rows: Sequence[Band], *, width: int) -> str:
    """`[--o--]` a row, all on one axis; `x` is what was measured."""
    ends = [end for row in rows for end in (row.lower, row.upper, row.measured) if end is not None]
    scale = _Scale(min(ends, default=0.0), max(ends, default=0.0), is_log=False)
    return _lines(rows, [partial(_band, row, scale) for row in rows], width)


def _band(row: Band, scale: _Scale, room: int) -> str:
    lower, expected, upper = (
        scale.at(value, room) for value in (row.lower, row.expected, row.upper)
    )
    cells = [" "] * room
    cells[lower : upper + 1] = "-" * (upper - lower + 1)
    cells[lower], cells[upper], cells[expected] = "[", "]", "o"
    if row.measured is not None:
        cells[scale.at(row.measured, room)] = "x"
    return "".join(cells)


def _lines(rows: Sequence[Bar | Band], drawn: Sequence[Callable[[int], str]], width: int) -> str:
    """A name, what is drawn in the columns that are left, and words."""
    if not rows:
        return ""
    names, said = [printable(row.name) for row in rows], [printable(row.words) for row in rows]
    label = max(map(len, names))
    room = min(MOST_BAR, width - label - max(map(len, said)) - 6)
    if room >= LEAST_BAR:
        return "\n".join(
            f"  {name:<{label}}  {draw(room):<{room}}  {words}".rstrip()
            for name, draw, words in zip(names, drawn, said, strict=True)
        )
    below = max(LEAST_BAR, min(MOST_BAR, width - 4))
    return "\n".join(
        f"{wrapped(f'{name}: {words}', width=width, first='  ')}\n    {draw(below)}".rstrip()
        for name, draw, words in zip(names, drawn, said, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One of the two axes of marks."""

    words: str
    """What it is, in its unit."""
    label: Callable[[float], str]
    ticks: tuple[float, ...] = ()
    """Values that are written where there is room; empty: both ends and the middle."""
    is_log: bool = False
    from_zero: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A point."""

    x: float
    y: float
    sign: str
    """One character."""


ROWS = 10


def marks(points: Sequence[Mark], *, x: Axis, y: Axis, width: int, rows: int = ROWS) -> str:
    """Points over two axes. Of those that meet, the one that comes first has the place, and the
    next the column beside it."""
    if not points:
        return ""
    across, up = _scale(x, [one.x for one in points]), _scale(y, [one.y for one in points])
    heights = _ticks(y, up, rows)
    label = max(map(len, heights.values()))
    room = max(LEAST_BAR, min(MOST_BAR, width - label - 6))
    grid = [[" "] * room for _ in range(rows)]
    for one in points:
        _put(grid[rows - 1 - up.at(one.y, rows)], across.at(one.x, room), one.sign)
    return "\n".join(
        (
            wrapped(f"{y.words}, by {x.words}", width=width, first="  "),
            *(
                f"  {heights.get(rows - 1 - row, ''):>{label}} |{''.join(cells)}".rstrip()
                for row, cells in enumerate(grid)
            ),
            f"  {'':>{label}} +{'-' * room}",
            f"  {'':>{label}}  {_axis_line(_ticks(x, across, room), room)}".rstrip(),
        )
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    least: float
    most: float
    is_log: bool

    def at(self, value: float, cells: int) -> int:
        """The cell of a value."""
        if self.most == self.least:
            return (cells - 1) // 2
        share = (value - self.least) / (self.most - self.least)
        if self.is_log:
            share = log(value / self.least) / log(self.most / self.least)
        return round((cells - 1) * min(1.0, max(0.0, share)))

    def value(self, share: float) -> float:
        """The value at a share of the axis."""
        if self.is_log:
            return float(self.least * (self.most / self.least) ** share)
        return self.least + share * (self.most - self.least)


def _scale(axis: Axis, values: Sequence[float]) -> _Scale:
    return _Scale(0.0 if axis.from_zero else min(values), max(values), axis.is_log)


def _ticks(axis: Axis, scale: _Scale, cells: int) -> dict[int, str]:
    """Cell -> what is written at it."""
    values = axis.ticks or tuple(scale.value(share) for share in (0.0, 0.5, 1.0))
    labels: dict[str, int] = {}
    for value in sorted(values, key=lambda one: one not in (values[0], values[-1])):
        labels.setdefault(axis.label(value), scale.at(value, cells))  # said once, at an end first
    return {cell: label for label, cell in labels.items()}


def _axis_line(ticks: dict[int, str], room: int) -> str:
    """The labels under their cells, the outer ones first, each where there is room."""
    line = [" "] * room
    cells = sorted(ticks)
    for cell in dict.fromkeys((cells[0], cells[-1], *cells[::-1])):
        text = ticks[cell]
        start = max(0, min(cell - len(text) // 2, room - len(text)))
        around = line[max(0, start - 2) : start + len(text) + 2]
        if len(text) <= room and not any(one.strip() for one in around):
            line[start : start + len(text)] = text
    return "".join(line)


def _put(cells: list[str], column: int, sign: str) -> None:
    for place in (column, column + 1, column - 1, column + 2):
        if 0 <= place < len(cells) and cells[place] == " ":
            cells[place] = sign
            return
    cells[column] = MARK

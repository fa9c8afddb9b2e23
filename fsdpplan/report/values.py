"""A report as plain values: sections made of blocks, which `page` writes as HTML.

A block says what is shown, never how: text is text (it is escaped where it becomes HTML), a chart
is a kind and its numbers (`assets/report.js` draws it). Numbers stand beside their words as
`exact`, so that a page can be held against the plan it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdpplan.spec.plan import Interval
from fsdpplan.units import (
    format_count,
    format_gb,
    format_gib,
    format_kwh,
    format_money,
    format_percent,
    format_seconds,
)

Tone = Literal["plain", "good", "watch", "bad"]
"""What a value or a note is to whoever decides."""

Unit = Literal[
    "seconds",
    "bytes",
    "wire_bytes",
    "fraction",
    "count",
    "whole",
    "dollars",
    "kwh",
    "percent_change",
    "ratio",
    "plain",
]
"""How a number is written: `bytes` are a capacity (GiB), `wire_bytes` a volume (GB); `whole` has
all its digits, `count` three, `plain` four; `percent_change` is in percent and has its sign.
`assets/charts.js` has the same names."""

Number = int | float

_WRITTEN: Mapping[Unit, Callable[[float], str]] = {
    "seconds": lambda number: format_seconds(number) if number else "0 s",
    "bytes": format_gib,
    "wire_bytes": format_gb,
    "fraction": format_percent,
    "count": format_count,
    "whole": lambda number: f"{number:,.0f}",
    "dollars": format_money,
    "kwh": format_kwh,
    "percent_change": lambda number: f"{number:+.3f} %",
    "ratio": lambda number: f"{number:.2f}",
    "plain": lambda number: f"{float(f'{number:.4g}'):.15g}",
}


def written(number: Number, unit: Unit) -> str:
    """`number` as people read it."""
    return _WRITTEN[unit](number)


def sentence(words: str) -> str:
    """`words` from their capital to their full stop."""
    return f"{words[:1].upper()}{words[1:]}{'' if words.endswith('.') else '.'}"


def band_words(seconds: Interval) -> str:
    """The ends of a band, in the unit of what is expected."""
    lower, upper = (
        format_seconds(end, beside=seconds.expected) for end in (seconds.lower, seconds.upper)
    )
    return f"{lower} to {upper}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Words of a table, and the number behind them where there is one."""

    text: str
    exact: Number | None = None


def cell(number: Number | None, unit: Unit) -> Cell:
    """A number as a cell; empty where there is none."""
    return Cell("") if number is None else Cell(written(number, unit), number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A name and a value, such as `step: 2.04 s`, with a line under it."""

    name: str
    value: str
    exact: Number | None = None
    note: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Facts:
    """Cards side by side."""

    items: tuple[Fact, ...]
    large: bool = False
    """Those that a decision hangs on."""


@dataclass(frozen=True, slots=True)
class Words:
    """Paragraphs."""

    paragraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns; a column of numbers is set to the right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    folded: bool = False
    """Behind a line that opens it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something to look at, what to do about it, and where that is from."""

    text: str
    title: str = ""
    advice: str = ""
    source: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Notes:
    """A list of them."""

    items: tuple[Note, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing: `kind` names its renderer in `assets/report.js`, `data` is what that one takes."""

    name: str
    """Of its element: one word, and no other chart has it."""
    kind: str
    title: str
    says: str
    """What is seen, in a sentence, for those who do not see it."""
    data: Mapping[str, Any]
    """JSON of plain numbers and text."""
    table: Table | None = None
    """The numbers in words, folded under the drawing."""


Block = Facts | Words | Table | Notes | Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading and what is under it."""

    name: str
    """Of its anchor: one word."""
    title: str
    says: str = ""
    """What it shows, in a sentence or two."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]
    made_by: str
    """What wrote it, with its version."""
    about: str
    """The file that it is about."""
    made_on: str = ""
    """The day on which it was written, ISO 8601; empty: not said."""
    command: str = ""
    """What was typed for it; empty: not said."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """What it is about as JSON, for whoever reads the page by a program."""

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Of all sections, in the order of the page."""
        return tuple(
            block
            for section in self.sections
            for block in section.blocks
            if isinstance(block, Chart)
        )

"""Text blocks for a terminal: wrapped lines, tables, lists. No colour.

Tables and what stands side by side take the terminal's width, sentences no more than can be read.

What the program says of itself on stderr: the one place where such a sentence is printed.

On a terminal it breaks at words, as wide as the screens of the commands. A command to type stays in
one piece, on a line that the terminal itself breaks where it is longer: what it shows in two rows
is copied as one. In a pipe or a file a sentence is one line, for grep.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from fsdpplan.cli import working
from fsdpplan.emit.safe_text import printable

MOST_COLUMNS = 200
LEAST_COLUMNS = 40

PROSE_COLUMNS = 100
"""Lines of words are no longer: the eye would lose the next one."""


_JOINT = "\u00a0"
"""A space at which no line breaks; none is in what is said, which was made printable before."""

_AMOUNT = re.compile(
    r"(?<=\d) (?=(?:%|[KMGTP]?i?B(?:/s)?|[KMBT]|Gb/s|[munp]?s|min|h|d|days?|hours?|[kM]?Wh?|"
    r"[KMGTP]?FLOP/s|GPUs?|nodes?|ranks?|pts)(?![\w/%-]))"
)
"""The space between a number and its unit."""


def columns() -> int:
    """How wide to write: the terminal, or 80 columns where there is none."""
    return min(MOST_COLUMNS, max(LEAST_COLUMNS, shutil.get_terminal_size((80, 24)).columns))


def wrapped(text: str, *, width: int, first: str = "", then: str | None = None) -> str:
    """`text` in lines of at most `width`, the first led by `first`, the others by `then`. A number
    stays with its unit."""
    return _filled(printable(text), width=width, first=first, then=then)


def _filled(text: str, *, width: int, first: str, then: str | None = None) -> str:
    filled = textwrap.fill(
        _AMOUNT.sub(_JOINT, text),
        width=min(width, PROSE_COLUMNS),
        initial_indent=first,
        subsequent_indent=" " * len(first) if then is None else then,
        break_on_hyphens=False,
    )
    # textwrap leaves the space before a word that it had to cut
    return "\n".join(line.rstrip() for line in filled.replace(_JOINT, " ").split("\n"))


def listed(heading: str, items: Iterable[str], *, width: int) -> str:
    """A heading and one item a line under it, or nothing where there are no items."""
    lines = [wrapped(item, width=width, first="  - ") for item in items]
    return "\n".join([heading, *lines]) if lines else ""


def flowing(heading: str, items: Sequence[str], *, width: int) -> str:
    """A heading, and the items below it: as many per line as it holds whole."""
    if not items:
        return ""
    lines: list[str] = []
    for item in map(printable, items):
        joined = f"{lines[-1]}; {item}" if lines else ""
        if lines and len(joined) + len(FLOWING) <= min(width, PROSE_COLUMNS):
            lines[-1] = joined
        else:
            lines.append(item)
    shown = [wrapped(line, width=width, first=FLOWING, then=f"{FLOWING}  ") for line in lines]
    return "\n".join([heading, *shown])


FLOWING = "    "
"""Before the lines of what flows."""


def facts(pairs: Sequence[tuple[str, str]], *, width: int) -> str:
    """`name  value` lines, the values in one column and wrapped within it."""
    name_width = max(len(name) for name, _ in pairs)
    return "\n".join(
        wrapped(value, width=width, first=f"  {name:<{name_width}}  ") for name, value in pairs
    )


def aligned(rows: Sequence[Sequence[str]], *, align: Sequence[str]) -> str:
    """Rows in columns, indented by two; `align` says left or right for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if side == "right" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        )
        for row in rows
    ]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def table(
    rows: Sequence[Sequence[str]], *, headers: Sequence[str], align: Sequence[str], width: int
) -> str:
    """Rows under headers, indented by two; `align` says left or right for each column.

    Where it would be wider than `width`, one item a row that names each value.
    """
    from tabulate import tabulate  # 30 ms, which `recommend` does without

    cells = [[printable(cell) for cell in row] for row in rows]
    # As rows: tabulate pads a column that has a header of its own by two more.
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    lines = [list(headers), ["-" * length for length in widths], *cells]
    text = tabulate(lines, tablefmt="plain", colalign=align, disable_numparse=True)
    if max(map(len, text.splitlines())) + 2 > width:
        return "\n".join(_record(headers, row, width) for row in cells)
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def rows_with_notes(
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    *,
    headers: Sequence[str],
    align: Sequence[str],
    width: int,
) -> str:
    """Rows under headers, each with a note beside its cells, which is wrapped there; below them
    where it would have less than `LEAST_NOTE` columns."""
    cells = aligned([headers, *rows], align=align).splitlines()
    indent = max(map(len, cells)) + 2
    if width - indent < LEAST_NOTE:
        pairs = zip(cells[1:], notes, strict=True)
        below = [f"{row}\n{wrapped(note, width=width, first=' ' * 6)}" for row, note in pairs]
        return "\n".join([cells[0], *below])
    lines = [wrapped("note", width=width, first=f"{cells[0]:<{indent}}")]
    for row, note in zip(cells[1:], notes, strict=True):
        lines.append(wrapped(note, width=width, first=f"{row:<{indent}}", then=" " * indent))
    return "\n".join(lines)


LEAST_NOTE = 20
"""Columns of a note that stands beside a row."""


def _record(headers: Sequence[str], row: Sequence[str], width: int) -> str:
    named = [
        f"{name} {value}".strip() for name, value in zip(headers[1:], row[1:], strict=True) if value
    ]
    # a value stays with its name, where that leaves no hole at the end of a line
    named = [one.replace(" ", _JOINT) if len(one) <= MOST_JOINED else one for one in named]
    return _filled(f"{row[0]}: {', '.join(named)}", width=width, first="  - ")


MOST_JOINED = 20
"""Letters of a name and a value between which no line breaks."""


def beside(left: str, right: str, *, width: int) -> str:
    """Two blocks side by side where both fit, else one below the other."""
    lefts, rights = left.splitlines(), right.splitlines()
    column = max(map(len, lefts)) + 3
    if column + max(map(len, rights)) > width:
        return f"{left}\n\n{right}"
    height = max(len(lefts), len(rights))
    lefts += [""] * (height - len(lefts))
    rights += [""] * (height - len(rights))
    return "\n".join(
        f"{one:<{column}}{other}".rstrip() for one, other in zip(lefts, rights, strict=True)
    )


def blocks(*parts: str) -> str:
    """The parts that are not empty, with an empty line between them."""
    return "\n\n".join(part for part in parts if part)


def flat_pairs(key: str, value: Any) -> list[tuple[str, str]]:
    """`key.inner  text` pairs of a nested value."""
    match value:
        case dict():
            return [pair for k, v in value.items() for pair in flat_pairs(f"{key}.{k}", v)]
        case list() | tuple() if value and isinstance(value[0], dict):
            return [pair for i, v in enumerate(value) for pair in flat_pairs(f"{key}.{i}", v)]
        case list() | tuple():
            return [(key, ", ".join(map(str, value)))]
        case float():
            return [(key, f"{value:g}")]
        case None:
            return [(key, "none")]
        case _:
            return [(key, str(value))]


PROGRAM = "fsdpplan"
THEN = "  "
"""Before the lines that go on."""

_PROGRAMS = "fsdpplan|python3?|pip|torchrun|sbatch|salloc|srun|kubectl|nvidia-smi|apt-get"
_TOGETHER = re.compile(
    r"`[^`]*`"  # what is marked as code
    # a command: the name of a program, a word that is no other word's end, its options
    rf"|\b(?:{_PROGRAMS}) [-a-z]+(?: [A-Z]+\b)?(?: -[-\w]+(?:[= ](?:'[^']*'|[^\s,;:()]+))?)+"
    # one with the file that it takes, or writes into
    rf"|\b(?:{_PROGRAMS}) (?:-[-\w]+ )*[-a-z]+(?: [-\w./]+\.json\b)?(?: > [-\w./]+)?"
    r"|--?[a-z][-\w]*[= ](?:'[^']*'|[^\s,;:()]+)"  # an option and its value
    r"|'[^']*'"  # a name in quotes
)


def tell(sentence: str) -> None:
    """Say `sentence` on stderr, with the program's name before it."""
    note(f"{PROGRAM}: {sentence}")


def note(sentence: str) -> None:
    """Say on stderr what was done, such as where something is saved."""
    text = printable(sentence)
    columns = _columns()
    if columns is not None:
        text = "\n".join(broken(line, columns) for line in text.splitlines())
    working.hide()
    print(text, file=sys.stderr, flush=True)


def broken(text: str, columns: int) -> str:
    """`text` in lines of `columns`; what is to be typed stays whole, and then may be longer."""
    whole = _AMOUNT.sub(_JOINT, text)
    whole = _TOGETHER.sub(lambda found: found[0].replace(" ", _JOINT), whole)
    lines = textwrap.wrap(
        whole,
        width=columns,
        subsequent_indent=THEN,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_JOINT, " ")


def _columns() -> int | None:
    """How wide to write on stderr; None where it is no terminal."""
    try:
        if not sys.stderr.isatty():
            return None
        terminal = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # nobody says how wide it is
        return None
    return min(PROSE_COLUMNS, max(LEAST_COLUMNS, terminal))

"""Shown: a value as a short table, in text and in HTML, for whoever looks at it in Python.

A row that has fewer cells than the widest one ends in words that go on over the other columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Row = Sequence[str]


def as_text(title: str, rows: Sequence[Row]) -> str:
    """The title, and the rows in columns: the first to the left, the others to the right."""
    most = max((len(row) for row in rows), default=0)
    whole = [row for row in rows if len(row) == most]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    if rows:
        widths[0] = max(len(row[0]) for row in rows)
    return "\n".join([title, *(_line(row, widths) for row in rows)])


def _line(row: Row, widths: Sequence[int]) -> str:
    first, *others = row
    if len(row) == len(widths):
        others = [cell.rjust(size) for cell, size in zip(others, widths[1:], strict=True)]
    return "  " + "  ".join([first.ljust(widths[0]), *others]).rstrip()


def as_html(title: str, rows: Sequence[Row]) -> str:
    """The same as a table with a caption; every text is escaped."""
    most = max((len(row) for row in rows), default=0)
    body = "".join(f"<tr>{_cells(row, most)}</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><tbody>{body}</tbody></table>"


def _cells(row: Row, most: int) -> str:
    first, *others = map(escape, row)
    cells = [f'<th style="text-align:left">{first}</th>']
    cells += [f'<td style="text-align:right">{other}</td>' for other in others]
    if others and len(row) < most:
        wide = f'<td colspan="{most - len(row) + 1}" style="text-align:left">{others[-1]}</td>'
        cells[-1] = wide
    return "".join(cells)

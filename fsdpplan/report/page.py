"""A report as one HTML file: no other file, no network, nothing of it run but what stands in it.

Every word goes through `html.escape`; data stand in a script of JSON in which no `<` is left. The
page's policy lets the browser run the four scripts that are in it, by their digests, and load
nothing: `Content-Security-Policy`, https://www.w3.org/TR/CSP3/.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import assert_never

from fsdpplan.emit.safe_text import printable
from fsdpplan.report.values import (
    Block,
    Cell,
    Chart,
    Fact,
    Facts,
    Note,
    Notes,
    Report,
    Section,
    Table,
    Words,
)

ECHARTS_VERSION = "6.1.0"
ECHARTS_SHA256 = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
"""Of `assets/echarts/echarts.min.js`, as npm's package of that version has it; a test compares
them. How it is renewed is in docs/decisions/charts-in-reports.md."""

SCRIPTS = ("echarts/echarts.min.js", "charts.js", "topology.js", "report.js")
"""In the order in which they run."""


def page(report: Report) -> str:
    """The whole file."""
    scripts = [asset(name) for name in SCRIPTS]
    return Template(asset("page.html")).substitute(
        policy=_policy(scripts),
        title=text(f"{report.title}: {report.subtitle}"),
        heading=text(report.title),
        subtitle=text(report.subtitle),
        style=asset("report.css"),
        contents="".join(
            f'<li><a href="#{text(one.name)}">{text(one.title)}</a></li>' for one in report.sections
        ),
        sections="\n".join(map(_section, report.sections)),
        made_by=text(report.made_by),
        about=text(report.about),
        when=f" on {text(report.made_on)}" if report.made_on else "",
        command=f" by <code>{text(report.command)}</code>" if report.command else "",
        data=json_in_html(
            {
                "charts": [
                    {"name": one.name, "kind": one.kind, "data": one.data} for one in report.charts
                ],
                "numbers": report.numbers,
            }
        ),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


@cache
def asset(name: str) -> str:
    """A file of `assets/`."""
    return (files("fsdpplan") / "report" / "assets" / name).read_text(encoding="utf-8")


def text(words: str) -> str:
    """`words` as HTML shows them, in an element or in an attribute."""
    return escape(printable(words), quote=True)


def json_in_html(document: object) -> str:
    """JSON that may stand in a script element: with no `<`, nothing can end it or open a comment.

    Source: https://html.spec.whatwg.org/multipage/scripting.html, restrictions for contents of
    script elements.
    """
    plain = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        plain = plain.replace(sign, f"\\u{ord(sign):04x}")
    return plain


def _policy(scripts: Iterable[str]) -> str:
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _section(section: Section) -> str:
    lead = f'<p class="lead">{text(section.says)}</p>' if section.says else ""
    name = text(section.name)
    return (
        f'<section id="{name}" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{text(section.title)}</h2>{lead}'
        f"{''.join(map(_block, section.blocks))}</section>"
    )


def _block(block: Block) -> str:
    match block:
        case Facts():
            name = "facts large" if block.large else "facts"
            return f'<dl class="{name}">{"".join(map(_fact, block.items))}</dl>'
        case Words():
            return "".join(f"<p>{text(one)}</p>" for one in block.paragraphs)
        case Table():
            return _table(block)
        case Notes():
            return f'<ul class="notes">{"".join(map(_note, block.items))}</ul>'
        case Chart():
            return _chart(block)
        case _:
            assert_never(block)


def _fact(fact: Fact) -> str:
    note = f'<span class="note">{text(fact.note)}</span>' if fact.note else ""
    return (
        f'<div class="fact {fact.tone}"><dt>{text(fact.name)}</dt>'
        f"<dd>{_number(fact.value, fact.exact)}{note}</dd></div>"
    )


def _number(words: str, exact: float | None) -> str:
    if exact is None:
        return f"<strong>{text(words)}</strong>"
    return f'<strong><data value="{exact!r}">{text(words)}</data></strong>'


def _note(note: Note) -> str:
    parts = [
        f"<strong>{text(note.title)}</strong> " if note.title else "",
        f"<span>{text(note.text)}</span>",
        f'<span class="advice">{text(note.advice)}</span>' if note.advice else "",
        f'<span class="source">{text(note.source)}</span>' if note.source else "",
    ]
    return f'<li class="{note.tone}">{"".join(parts)}</li>'


def _table(table: Table) -> str:
    number = [
        any(isinstance(row[at], Cell) for row in table.rows) for at in range(len(table.columns))
    ]
    heads = "".join(
        f'<th scope="col"{_side(right)}>{text(name)}</th>'
        for name, right in zip(table.columns, number, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            _cell(one, at, right) for at, (one, right) in enumerate(zip(row, number, strict=True))
        )
        + "</tr>"
        for row in table.rows
    )
    drawn = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(table.caption)}">'
        f"<table><caption>{text(table.caption)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )
    if not table.folded:
        return drawn
    return f"<details><summary>{text(table.caption)}</summary>{drawn}</details>"


def _side(right: bool) -> str:
    return ' class="number"' if right else ""


def _cell(one: Cell | str, at: int, right: bool) -> str:
    if isinstance(one, str):
        words = text(one)
    elif one.exact is None:
        words = text(one.text)
    else:
        words = f'<data value="{one.exact!r}">{text(one.text)}</data>'
    tag = 'th scope="row"' if at == 0 else "td"
    return f"<{tag}{_side(right)}>{words}</{tag.split()[0]}>"


HANDLED = frozenset({"topology"})
"""Kinds that are worked with, not looked at alone."""


def _chart(chart: Chart) -> str:
    name, role = text(chart.name), "group" if chart.kind in HANDLED else "img"
    table = "" if chart.table is None else _table(chart.table)
    return (
        f'<figure class="chart {text(chart.kind)}"><figcaption>{text(chart.title)}</figcaption>'
        f'<div class="drawing" id="chart-{name}" role="{role}" aria-label="{text(chart.says)}">'
        f'</div><p class="says">{text(chart.says)}</p>'
        f"{table}</figure>"
    )

"""`fsdpplan report`: a plan as one HTML page to hand over."""

from __future__ import annotations

import json as jsons
import shlex
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, ClassVar, TypedDict

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import EvidenceOptions, Json, PlanFile, PlanNamed, plan_place
from fsdpplan.cli.options.goal import BillOptions
from fsdpplan.cli.options.parse import path
from fsdpplan.cli.options.report import ContentOptions
from fsdpplan.cli.resolve.reported import content as content_of
from fsdpplan.cli.views.render import PROGRAM, tell
from fsdpplan.errors import SpecError
from fsdpplan.files.table import path_text
from fsdpplan.files.writing import require_place, write_text_atomically
from fsdpplan.report.of_plan import plan_report
from fsdpplan.report.page import page
from fsdpplan.report.values import Report
from fsdpplan.units import format_gb

DEFAULT_OUT = Path("report.html")
STDOUT = Path("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """What it is about, and where it goes."""

    HEADING: ClassVar[str] = "Report"

    named: PlanNamed = None
    out: Annotated[
        Path | None,
        Flag(metavar="FILE", parse=path, help="Default: report.html; - is standard output."),
    ] = None


class SectionJson(TypedDict):
    """A section of the page."""

    name: str
    """Its anchor."""
    title: str


class ReportJson(TypedDict):
    """What `report --json` prints."""

    out: str
    bytes: int
    sections: list[SectionJson]


def report(
    *,
    plan: PlanFile = "",
    options: ReportOptions,
    content: ContentOptions,
    bill: BillOptions,
    evidence: EvidenceOptions,
    json: Json = False,
) -> None:
    """Write a saved plan as one page to look at: charts, no network.

    One HTML file that holds all it needs, for any browser, for paper, and by keyboard.
    """
    place = plan_place(plan, options.named)
    out = options.out or DEFAULT_OUT
    if json and out == STDOUT:
        raise SpecError("--out - and --json both want standard output: leave one of them out")
    if out != STDOUT:
        require_place(out, advice="choose another --out")
    found = content_of(
        place,
        content,
        bill,
        evidence,
        named=bool(plan or options.named),
        say=lambda what: working.say(f"searching: {what}"),
    )
    made = plan_report(
        found.plan,
        about=found.about,
        made_on=date.today().isoformat(),
        command=_typed(),
        came_of=found.came_of,
        more=found.more,
    )
    text = page(made)
    if out == STDOUT:
        typer.echo(text, nl=False)
        return
    write_text_atomically(out, text, advice="choose another --out")
    if json:
        typer.echo(report_json(made, out, text))
    else:
        tell(f"wrote {path_text(out)}, {format_gb(len(text.encode()))}; open it in a browser")


def _typed() -> str:
    """The command line; empty where the program is called by another one."""
    is_own = Path(sys.argv[0]).name in (PROGRAM, "__main__.py")
    return shlex.join([PROGRAM, *sys.argv[1:]]) if is_own else ""


def report_json(made: Report, out: Path, text: str) -> str:
    """What `report --json` prints."""
    document: ReportJson = {
        "out": str(out),
        "bytes": len(text.encode()),
        "sections": [{"name": one.name, "title": one.title} for one in made.sections],
    }
    return jsons.dumps(document, indent=2)

"""`fsdpplan bug-report`: what helps to mend a fault, without secrets and names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json
from fsdpplan.cli.options.parse import line, path
from fsdpplan.cli.views.hosts import hosts_blocks
from fsdpplan.cli.views.render import blocks, tell
from fsdpplan.errors import SpecError
from fsdpplan.files.table import path_text
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.run.bug_report import Report
from fsdpplan.run.bug_report import bug_report as gathered
from fsdpplan.run.detect import survey_of_recordings, this_host
from fsdpplan.run.follow.jobs import chosen_run

NEWEST = "newest"
WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class BugReportOptions:
    """What is in it, and where it goes."""

    HEADING: ClassVar[str] = "Bug report"

    plan_file: Annotated[
        Path | None,
        Flag(
            name="--plan",
            metavar="PATH",
            parse=path,
            help="The plan that it is about. Default: fsdpplan.json, where there is one.",
        ),
    ] = None
    no_plan: Annotated[bool | None, Flag(name="--no-plan", help="Leave the plan out.")] = None
    run: Annotated[
        str | None,
        Flag(
            metavar="ID|newest",
            parse=line,
            help="A run of this folder: how it stands, and the ends of its log and notes.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Flag(metavar="FILE", parse=path, help="Write it there. Default: print it."),
    ] = None


def bug_report(*, options: BugReportOptions, json: Json = False) -> None:
    """What helps to mend a fault, without secrets and names.

    Versions, this machine, the plan, the last error of fsdpplan itself and, where asked for, the
    end of a run. Tokens and passwords are masked; users, hosts and addresses are numbered. No rule
    knows every secret: read it before you pass it on. Nothing is sent.
    """
    report = report_of(options)
    text = report_json(report) if json else report_page(report)
    if options.out is None:
        typer.echo(text)
    else:
        write_text_atomically(options.out, text + "\n", advice="give another --out")
        tell(f"wrote {path_text(options.out)}; nothing was sent")
    tell(left_out_words(report.left_out))


def report_of(options: BugReportOptions) -> Report:
    """The report that the options ask for."""
    if options.no_plan and options.plan_file is not None:
        raise SpecError("--plan names a plan, and --no-plan leaves it out: give one of them")
    plan = options.plan_file or Path(DEFAULT_PLAN)
    if options.plan_file is not None and not plan.is_file():
        raise SpecError(f"there is no plan {path_text(plan)}: check the path, or --no-plan")
    has_plan = plan.is_file() and not options.no_plan
    run = None
    if options.run is not None:
        run = chosen_run(Path.cwd(), None if options.run == NEWEST else options.run)
    machine = blocks(*hosts_blocks(survey_of_recordings([this_host()]), width=WIDTH))
    return gathered(plan=plan if has_plan else None, run=run, machine=machine)


def report_json(report: Report) -> str:
    """What `bug-report --json` prints."""
    return json.dumps(report.document, indent=2)


def report_page(report: Report) -> str:
    """The report as Markdown, to be pasted into an issue."""
    document = report.document
    sections = [
        "## What happened\n\n(Say here what you typed, what you expected, and what came.)",
        f"## Versions\n\n{_pairs(document['versions'])}",
        f"## Environment\n\n{_pairs(document['environment'])}",
        f"## Machine\n\n{_fenced(document['machine'])}",
    ]
    if (crash := document["crash"]) is not None:
        sections.append(f"## Last error of fsdpplan itself\n\n{_parts(crash)}")
    if (run := document["run"]) is not None:
        sections.append(f"## Run\n\n{_parts(run)}")
    if (plan := document["plan"]) is not None:
        lines = json.dumps(plan, indent=1).splitlines()
        sections.append(f"## Plan\n\n{_fenced(lines, 'json')}")
    sections.append(f"## Left out\n\n{_pairs(document['left_out'])}")
    return "\n\n".join(sections)


def left_out_words(left_out: Mapping[str, int]) -> str:
    """A sentence for who is about to pass the report on."""
    found = ", ".join(f"{kind} ({count})" for kind, count in left_out.items() if count)
    return f"left out or replaced: {found or 'nothing'}; read it before you pass it on"


def _pairs(values: Mapping[str, Any]) -> str:
    return _fenced([f"{name}: {value}" for name, value in values.items()] or ["none"])


def _parts(values: Mapping[str, Any]) -> str:
    """Long values under their names, short ones together."""
    short = {n: v for n, v in values.items() if not _is_long(v)}
    long = {n: v for n, v in values.items() if _is_long(v)}
    return "\n\n".join([_pairs(short), *(f"{n}:\n\n{_fenced(_lines(v))}" for n, v in long.items())])


def _is_long(value: Any) -> bool:
    return (isinstance(value, list | dict) and bool(value)) or "\n" in str(value)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}: {each}" for name, each in value.items()]
    return value if isinstance(value, list) else str(value).splitlines()


def _fenced(lines: list[str], language: str = "text") -> str:
    """Lines that Markdown shows as they are, whatever they hold."""
    text = "\n".join(map(str, lines))
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"

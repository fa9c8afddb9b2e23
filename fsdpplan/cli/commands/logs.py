"""`fsdpplan logs`: what a run has printed, on all nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, TypedDict

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options import offered
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import line, whole
from fsdpplan.emit.safe_text import log_line
from fsdpplan.errors import SpecError
from fsdpplan.run.follow.jobs import chosen_run
from fsdpplan.run.follow.logs import JobLog, job_log, lines_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Which lines."""

    HEADING: ClassVar[str] = "Log"

    job: Annotated[
        str | None,
        Flag(
            metavar="ID",
            parse=line,
            help="Which run or job. Default: the newest run here.",
            offered=offered.runs,
        ),
    ] = None
    node: Annotated[
        str | None, Flag(metavar="NAME", parse=line, help="Lines of this node only.")
    ] = None
    tail: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=100), help="The last N lines of what is there."),
    ] = None
    follow: Annotated[bool | None, Flag(name="--follow", help="Go on until the run has ended.")] = (
        None
    )


def logs(*, options: LogOptions, json: Json = False) -> None:
    """Print what a run has printed, on all nodes."""
    if json and options.follow:
        raise SpecError("--json prints one object, so it cannot go on: leave out --follow")
    log = job_log(chosen_run(Path.cwd(), options.job), options.job)
    lines = lines_of(log, node=options.node, tail=options.tail, follow=bool(options.follow))
    if json:
        typer.echo(printed_json(log, list(lines)))
        return
    working.stop()
    for text in lines:
        typer.echo(log_line(text))


class LogsJson(TypedDict):
    """What `logs --json` prints."""

    run: str
    job: str | None
    """Null: no engine but this host ran it."""
    log: str | None
    """The file; null: the output is in none."""
    hosts: list[str]
    """Of the tasks of a job on several nodes."""
    lines: list[str]


def printed_json(log: JobLog, lines: Sequence[str]) -> str:
    """The lines, and where they are from."""
    document: LogsJson = {
        "run": log.run.shown_id,
        "job": log.job_id,
        "log": None if log.path is None else str(log.path),
        "hosts": list(log.hosts),
        "lines": list(lines),
    }
    return json.dumps(document, indent=2)

"""`fsdpplan cancel`: end what this folder launched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import typer

from fsdpplan.cli.options import offered
from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import Json
from fsdpplan.cli.options.parse import line
from fsdpplan.cli.views.render import columns, wrapped
from fsdpplan.errors import SpecError
from fsdpplan.run.follow.cancel import Cancelled, cancel_run, goes_on
from fsdpplan.run.follow.jobs import RecordedRun, chosen_run, runs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOptions:
    """Which runs."""

    HEADING: ClassVar[str] = "Cancel"

    job: Annotated[
        str | None,
        Flag(
            metavar="ID",
            parse=line,
            help="Which run. Default: the one that goes on.",
            offered=offered.runs,
        ),
    ] = None
    every: Annotated[
        bool | None, Flag(name="--all", help="All runs of this folder that go on.")
    ] = None


def cancel(*, options: CancelOptions, json: Json = False) -> None:
    """End a run of this folder."""
    done = cancelled(options)
    if json:
        typer.echo(cancelled_json(done))
        return
    for each in done:
        typer.echo(wrapped(each.words, width=columns()))


def cancelled(options: CancelOptions) -> list[Cancelled]:
    """End the runs that the options name."""
    return [cancel_run(run) for run in _chosen(options)]


class CancelJson(TypedDict):
    """What `cancel --json` prints."""

    cancelled: list[Annotated[dict[str, Any], Cancelled]]


def cancelled_json(done: Sequence[Cancelled]) -> str:
    """What `cancel --json` prints."""
    document: CancelJson = {"cancelled": [asdict(each) for each in done]}
    return json.dumps(document, indent=2)


def _chosen(options: CancelOptions) -> list[RecordedRun]:
    folder = Path.cwd()
    if options.job is not None:
        if options.every:
            raise SpecError("--job names one run, --all means every one: leave one of them out")
        return [chosen_run(folder, options.job)]
    newest = chosen_run(folder, None)
    going = [run for run in runs_of(folder) if goes_on(run)]
    if len(going) > 1 and not options.every:
        names = ", ".join(run.shown_id for run in going)
        raise SpecError(
            f"{len(going)} runs of this folder go on: name one of {names} by --job, or type --all"
        )
    return going or [newest]

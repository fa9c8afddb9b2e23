"""Which runs `fsdpplan cancel` ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fsdpplan.cli.commands.cancel import CancelOptions
from fsdpplan.errors import SpecError
from fsdpplan.run.cancel import Cancelled, cancel_run, goes_on
from fsdpplan.run.jobs import Run, chosen_run, runs_of


def cancelled(options: CancelOptions) -> list[Cancelled]:
    """End the runs that the options name."""
    return [cancel_run(run) for run in _chosen(options)]


def cancelled_json(done: Sequence[Cancelled]) -> str:
    """What `cancel --json` prints."""
    return json.dumps({"cancelled": [asdict(each) for each in done]}, indent=2)


def _chosen(options: CancelOptions) -> list[Run]:
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

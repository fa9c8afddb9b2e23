"""A run of `fsdpplan run` in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdpplan.cli.options.files import LedgerOptions
from fsdpplan.cli.resolve.evidence import ledger_file
from fsdpplan.cli.resolve.launch import Started
from fsdpplan.errors import SpecError
from fsdpplan.run.fallback import Attempt
from fsdpplan.run.jobs import is_in_ledger, remember_in_ledger
from fsdpplan.run.ledger import record
from fsdpplan.spec.ledger import LEAST_STEPS


def wanted(options: LedgerOptions, *, is_smoke: bool) -> Path | None:
    """The ledger that the run goes to; None where it goes to none, as a smoke run does."""
    file = ledger_file(options)
    if is_smoke and options.ledger is not None:
        raise SpecError(
            "--ledger has no meaning with --smoke: a shrunk job says nothing of a real one's "
            "speed; leave it out"
        )
    return None if is_smoke else file


def recorded(started: Started, attempts: Sequence[Attempt], ledger: Path) -> str:
    """Add each attempt; what to say about that. It never fails a run."""
    for each in attempts:
        if not each.outcome.ended:
            return (
                "a job that goes on is not in the ledger; fsdpplan run --attach adds it at its end"
            )
        if is_in_ledger(each.outcome.run_folder):
            continue
        failed = record(
            each.launch, each.outcome, target=started.target, folder=started.folder, ledger=ledger
        )
        if failed is not None:
            return f"warning: {failed}"
        remember_in_ledger(each.outcome.run_folder)
    all_runs = "fsdpplan ledger shows all runs"
    if attempts[-1].outcome.measured.measured_steps < LEAST_STEPS:
        return f"next: {all_runs}"
    return f"next: fsdpplan verify holds this run to limits, {all_runs}"

"""`fsdpplan run`: start the job here or by Slurm, follow it, compare it with the prediction."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json, LedgerOptions, PlanFile
from fsdpplan.cli.options.job import ContainerOptions, JobOptions, ProgramOptions, SurvivalOptions
from fsdpplan.cli.options.run import AgainOptions, LaunchFile, RunOptions
from fsdpplan.cli.resolve import launch
from fsdpplan.cli.resolve.evidence import ledger_file
from fsdpplan.cli.resolve.launch import Started
from fsdpplan.cli.views.outcome import outcome_json, outcome_table
from fsdpplan.cli.views.render import columns, note, tell
from fsdpplan.emit.safe_text import log_line
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.run.fallback import Attempt, run_with_fallback
from fsdpplan.run.follow.jobs import is_in_ledger, remember_in_ledger
from fsdpplan.run.follow.show import display_for
from fsdpplan.run.launch import Launch
from fsdpplan.run.ledger import record
from fsdpplan.run.outcome import Manner, Outcome
from fsdpplan.run.session import attach, resume, run_launch
from fsdpplan.spec.ledger import LEAST_STEPS


def run(
    *,
    file: LaunchFile = "",
    plan: PlanFile = DEFAULT_PLAN,
    options: RunOptions,
    again: AgainOptions,
    job: JobOptions,
    trainer: Trainer,
    program: ProgramOptions,
    survival: SurvivalOptions,
    container: ContainerOptions,
    ledger: LedgerOptions,
    json: Json = False,
) -> None:
    """Run the job and compare it with the prediction."""
    remembered = ledger_wanted(ledger, is_smoke=bool(options.smoke))
    asked = launch.job_given(job, trainer, program, survival, container)
    if again.attach or again.resume or again.job is not None:
        launch.require_alone(again, options, job=asked, file=file, plan=plan)
        started = launch.prepare_again(again, options)
    else:
        started = launch.prepare(plan, options, asked, file=file)
    if options.dry_run:
        typer.echo(dry_run_json(started) if json else started.launch.script, nl=json)
        for remark in started.remarks:
            tell(remark)
        note(f"would run: {' '.join(started.command)}")
        return
    started.require_torch()
    working.stop()  # following a job has a display of its own
    attempts = follow(started, launch.manner_of(options), fallback=options.fallback or 0)
    if json:
        typer.echo(outcome_json(attempts))
    else:
        typer.echo(outcome_table(attempts, width=columns()))
    if remembered is not None:
        note(recorded(started, attempts, remembered))
    raise typer.Exit(attempts[-1].outcome.exit_code)


def follow(started: Started, manner: Manner, *, fallback: int = 0) -> tuple[Attempt, ...]:
    """Run it to its end; where memory runs out, then up to `fallback` leaner layouts."""

    def attempt(tried: Launch) -> Outcome:
        target = started.target
        mfu = tried.plan.estimate.mfu_fraction if tried.predicts else None
        display = display_for(sys.stderr, planned_mfu_fraction=mfu)
        if started.again is None:
            folder = started.folder
            return run_launch(tried, folder=folder, target=target, display=display, manner=manner)
        if started.attaches:
            return attach(started.again, tried, display=display, manner=manner)
        return resume(started.again, tried, target=target, display=display, manner=manner)

    def say(text: str) -> None:
        print(f"fsdpplan: {log_line(text)}", file=sys.stderr, flush=True)

    for remark in started.remarks:
        say(remark)
    return run_with_fallback(started.launch, job=started.job, most=fallback, run=attempt, say=say)


class DryRunJson(TypedDict):
    """What `run --dry-run --json` prints."""

    command: list[str]
    target: str
    origin: str
    """What the script was made of."""
    script: str


def dry_run_json(started: Started) -> str:
    """What `run --dry-run --json` prints."""
    document: DryRunJson = {
        "command": list(started.command),
        "target": started.target,
        "origin": started.launch.origin,
        "script": started.launch.script,
    }
    return json.dumps(document, indent=2)


def ledger_wanted(options: LedgerOptions, *, is_smoke: bool) -> Path | None:
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

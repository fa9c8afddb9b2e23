"""`fsdpplan run --attach` and `--resume`: a run that was started before."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.cli.commands.run import AgainOptions, RunOptions
from fsdpplan.cli.options.files import DEFAULT_PLAN
from fsdpplan.cli.resolve.launch import Started
from fsdpplan.emit.job import Job
from fsdpplan.errors import SpecError
from fsdpplan.run.jobs import chosen_run
from fsdpplan.run.launch import Launch, read_launch
from fsdpplan.run.machine import Target, choose_target, this_machine


def require_alone(
    again: AgainOptions, options: RunOptions, *, job: Job | None, file: str, plan: str
) -> None:
    """Refuse options that would change nothing of a run as it is."""
    if not again.attach and not again.resume:
        raise SpecError("--job says which run to come back to: add --attach or --resume to it")
    if again.attach and again.resume:
        raise SpecError("--attach follows a run, --resume starts it again: leave one of them out")
    flag = "--attach" if again.attach else "--resume"
    others = {
        "FILE": file,
        "--plan": plan != DEFAULT_PLAN,
        "--from": options.source is not None,
        "--smoke": options.smoke,
        "--fallback": options.fallback is not None,
        "options of the job": job is not None,
        "--dry-run": options.dry_run and again.attach,
        "--chain": options.chain is not None and again.attach,
        "--allow-sockets": options.allow_sockets and again.attach,
    }
    if idle := [name for name, is_given in others.items() if is_given]:
        raise SpecError(
            f"{flag} takes a run as it is, so {' and '.join(idle)} would change nothing: leave out "
            "the one or the other"
        )


def prepare(again: AgainOptions, options: RunOptions) -> Started:
    """The run, with its own script."""
    run = chosen_run(Path.cwd(), again.job)
    if options.target not in (None, run.record.engine):
        raise SpecError(
            f"run {run.shown_id} is one of --target {run.record.engine}, and stays there: leave "
            "--target out, or start a new run"
        )
    launch = read_launch(Path(run.record.script))
    if options.chain is not None and not launch.saves:
        raise SpecError(
            "--chain needs checkpoints, and this run keeps none: start a new one from a script "
            "with --checkpoint-dir"
        )
    return Started(
        launch=launch,
        target=_target(launch, run.record.engine),
        folder=Path(run.record.folder),
        again=run,
        attaches=bool(again.attach),
    )


def _target(launch: Launch, engine: Target) -> Target:
    """A run of this host may have been one in an allocation, and is where there is one again."""
    if engine != "here":
        return engine
    machine = this_machine()
    inside = machine.allocation_nodes == launch.plan.cluster.nodes
    return choose_target(plan=launch.plan, machine=machine, asked=None if inside else "here")

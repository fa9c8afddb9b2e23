"""One `fsdpplan run`: which script, where, and what it came to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpplan.cli.commands.run import RunOptions
from fsdpplan.cli.options.files import DEFAULT_PLAN
from fsdpplan.cli.options.job import ContainerOptions, JobOptions, ProgramOptions, SurvivalOptions
from fsdpplan.cli.resolve.job import given, job_of, saved_plan, with_this_python
from fsdpplan.cli.resolve.torch import other_torch
from fsdpplan.cli.views.comparison import comparison_table, row_document
from fsdpplan.cli.views.memory import attempt_document, memory_document, memory_words
from fsdpplan.cli.views.nccl import nccl_document, nccl_words
from fsdpplan.cli.views.render import blocks, wrapped
from fsdpplan.cost.step import estimate
from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl_cloud import gap_of
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import estimate_document, layout_document
from fsdpplan.run.compare import compare
from fsdpplan.run.fallback import Attempt, run_with_fallback
from fsdpplan.run.jobs import Run
from fsdpplan.run.launch import Launch, emit_script, is_plan, read_launch, resolve_launch
from fsdpplan.run.machine import Target, choose_target, this_machine
from fsdpplan.run.outcome import Manner, Outcome
from fsdpplan.run.session import attach, command_words, resume, run_launch
from fsdpplan.run.show import display_for
from fsdpplan.run.smoke import smoke_plan
from fsdpplan.terminal import log_line
from fsdpplan.units import format_seconds

SMOKE_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is to be run, and where."""

    launch: Launch
    target: Target
    folder: Path
    job: Job | None = None
    """What the script was emitted for; None for one that stands there."""
    again: Run | None = None
    """The run that is come back to, or resumed."""
    attaches: bool = False
    """Whether `again` is only followed."""
    remarks: tuple[str, ...] = ()
    """What this run does not show of the plan, or lacks."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that starts it."""
        return command_words(self.target, Path(self.launch.file_name))


def job_given(
    job: JobOptions,
    trainer: Trainer,
    program: ProgramOptions,
    survival: SurvivalOptions,
    container: ContainerOptions,
) -> Job | None:
    """The job that the options describe; None where none was given."""
    groups = (job, trainer, program, survival, container)
    if not any(map(given, groups)):
        return None
    return with_this_python(job_of(*groups), given=job)


def manner_of(options: RunOptions) -> Manner:
    """How the run is to be started and followed."""
    return Manner(
        allow_sockets=bool(options.allow_sockets),
        chain=options.chain or 1,
        cancel_on_exit=bool(options.cancel_on_exit),
    )


def prepare(plan: str, options: RunOptions, job: Job | None, *, file: str = "") -> Started:
    """Find the script and the place to run it."""
    folder = Path.cwd()
    if file and is_plan(Path(file)):
        plan, file = _named_plan(file, plan, options), ""
        options = replace(options, source=None if options.smoke else "plan")
    if file:
        return _file(file, plan, options, job)
    if options.smoke:
        launch = _smoke(plan, options, job)
        _require_sockets_meant(launch, options)
        if options.fallback is not None:
            raise SpecError(
                "--fallback has no meaning with --smoke: a shrunk job does not run out of memory; "
                "leave it out"
            )
        remarks = (*launch.plan.warnings, *launch.plan.assumptions)
        return Started(launch=launch, target="here", folder=folder, remarks=remarks)
    emits = options.source == "plan" or not os.path.exists(folder / SCRIPT_NAME)
    asked = job or (Job(python=sys.executable) if emits else None)
    launch = resolve_launch(
        folder,
        plan_file=None if plan == DEFAULT_PLAN else Path(plan),
        job=asked,
        source=options.source,
    )
    if options.fallback is not None and not emits:
        raise SpecError(
            f"--fallback emits a script for each layout, and {SCRIPT_NAME} stands here: add --from "
            "plan and the job's options"
        )
    target, emitted_for = _target(launch, options), asked if emits else None
    gap = None if emitted_for is None else gap_of(launch.plan, emitted_for)
    return Started(
        launch=launch,
        target=target,
        folder=folder,
        job=emitted_for,
        remarks=() if gap is None else (gap.sentences,),
    )


def _named_plan(file: str, plan: str, options: RunOptions) -> str:
    """The plan that was given in the place of a script."""
    if plan != DEFAULT_PLAN:
        raise SpecError(f"{file} and {plan} are both plans: name one of them")
    if options.source == "script":
        raise SpecError(f"--from script runs a script, and {file} is a plan: leave out the one")
    return file


def _file(file: str, plan: str, options: RunOptions, job: Job | None) -> Started:
    """A script or manifest that was named."""
    others = {
        "--plan": plan != DEFAULT_PLAN,
        "--from": options.source is not None,
        "--smoke": options.smoke,
        "--fallback": options.fallback is not None,
        "options of the job": job is not None,
    }
    if idle := [name for name, is_given in others.items() if is_given]:
        raise SpecError(
            f"{file} is run as it stands, so {' and '.join(idle)} would change nothing: leave out "
            "the one or the other"
        )
    launch = read_launch(Path(file))
    return Started(launch=launch, target=_target(launch, options), folder=Path.cwd())


def _target(launch: Launch, options: RunOptions) -> Target:
    """Where it runs; refused where an option has no meaning there."""
    _require_sockets_meant(launch, options)
    target: Target = "kubernetes"
    if launch.kind == "script":
        target = choose_target(plan=launch.plan, machine=this_machine(), asked=options.target)
    elif options.target is not None:
        raise SpecError(
            f"{launch.origin} is a manifest, which runs on Kubernetes: leave out --target, or emit "
            "a job script by fsdpplan emit-launch"
        )
    _require_chain_meant(launch, target, options)
    if options.cancel_on_exit and target in ("here", "allocation"):
        raise SpecError(
            "--cancel-on-exit has no meaning here: a job on this machine ends with fsdpplan run "
            "anyway; leave it out"
        )
    return target


def _require_chain_meant(launch: Launch, target: Target, options: RunOptions) -> None:
    if options.chain is None:
        return
    if target != "slurm":
        raise SpecError(
            "--chain submits jobs that wait for each other, which is Slurm's: leave it out, or add "
            "--target slurm where there is one"
        )
    if not launch.saves:
        raise SpecError(
            "--chain needs checkpoints, from which each job goes on: emit the script with "
            "--checkpoint-dir DIR on a disk that all nodes share"
        )


def _require_sockets_meant(launch: Launch, options: RunOptions) -> None:
    cluster = launch.plan.cluster
    if options.allow_sockets and (cluster.device.kind != "cuda" or cluster.nodes == 1):
        raise SpecError(
            "--allow-sockets has no meaning here: it is about NCCL between nodes, and this runs "
            f"on {'CPU processes' if cluster.device.kind == 'cpu' else 'one node'}; leave it out"
        )


def _smoke(plan: str, options: RunOptions, job: Job | None) -> Launch:
    if options.source == "script" or options.target == "slurm":
        raise SpecError(
            "--smoke shrinks the plan and runs it here: leave out --from script and --target slurm"
        )
    if options.chain is not None or options.cancel_on_exit:
        raise SpecError(
            "--chain and --cancel-on-exit have no meaning with --smoke, which runs here: leave "
            "them out"
        )
    asked = job or Job(python=sys.executable)
    if isinstance(asked.program, Trainer) and asked.program.steps is None:
        asked = replace(asked, program=replace(asked.program, steps=SMOKE_STEPS))
    small = smoke_plan(plan=saved_plan(plan), estimate=estimate)
    return Launch(script=emit_script(small, asked), plan=small, origin=f"smoke run of {plan}")


def follow(started: Started, manner: Manner, *, fallback: int = 0) -> tuple[Attempt, ...]:
    """Run it to its end; where memory runs out, then up to `fallback` leaner layouts."""

    def run(launch: Launch) -> Outcome:
        target, mfu = started.target, launch.plan.estimate.mfu_fraction
        display = display_for(sys.stderr, planned_mfu_fraction=mfu)
        if started.again is None:
            folder = started.folder
            return run_launch(launch, folder=folder, target=target, display=display, manner=manner)
        if started.attaches:
            return attach(started.again, launch, display=display, manner=manner)
        return resume(started.again, launch, target=target, display=display, manner=manner)

    def say(text: str) -> None:
        print(f"fsdpplan: {log_line(text)}", file=sys.stderr, flush=True)

    for remark in started.remarks:
        say(remark)
    return run_with_fallback(started.launch, job=started.job, most=fallback, run=run, say=say)


def dry_run_json(started: Started) -> str:
    """What `run --dry-run --json` prints."""
    return json.dumps(
        {
            "command": list(started.command),
            "target": started.target,
            "origin": started.launch.origin,
            "script": started.launch.script,
        },
        indent=2,
    )


def outcome_json(attempts: Sequence[Attempt]) -> str:
    """What `run --json` prints: of the last attempt, and the others in short."""
    last = attempts[-1]
    outcome, plan = last.outcome, last.launch.plan
    rows = compare(estimate=plan.estimate, measured=outcome.measured)
    return json.dumps(
        {
            "job_exit_code": outcome.exit_code,
            "job_id": outcome.job_id,
            "ended": outcome.ended,
            "steps": outcome.steps_done,
            "seconds": outcome.seconds,
            "stopped": outcome.stopped,
            "run_folder": str(outcome.run_folder),
            "torch": {"planned": plan.training.torch, "ran": _torch_that_ran(outcome)},
            "layout": layout_document(plan.layout),
            "predicted": estimate_document(plan.estimate),
            "measured": {row.quantity: row.measured for row in rows},
            "comparison": [row_document(row) for row in rows],
            "nccl": None if outcome.nccl is None else nccl_document(outcome.nccl),
            "warnings": list(outcome.warnings),
            "out_of_memory": memory_document(last),
            "attempts": [attempt_document(each) for each in attempts],
        },
        indent=2,
    )


def outcome_table(attempts: Sequence[Attempt], *, width: int) -> str:
    """Predicted against measured, what NCCL did, and how the job ended."""
    last = attempts[-1]
    outcome = last.outcome
    rows = compare(estimate=last.launch.plan.estimate, measured=outcome.measured)
    complaint = outcome.complaint if outcome.exit_code else None
    return blocks(
        comparison_table(rows, width=width),
        "" if outcome.nccl is None else wrapped(nccl_words(outcome.nccl), width=width),
        *(wrapped(text, width=width) for text in memory_words(attempts)),
        wrapped(other_torch(last.launch.plan, _torch_that_ran(outcome)), width=width),
        wrapped(_ending(outcome), width=width),
        # Once more: launchers print tracebacks of their own below it.
        "" if complaint is None else wrapped(f"It said: {complaint}", width=width),
    )


def _torch_that_ran(outcome: Outcome) -> str | None:
    summary = outcome.measured.summary
    return None if summary is None else summary.torch_version


def _ending(outcome: Outcome) -> str:
    steps = outcome.steps_done
    says_code = outcome.ended and outcome.exit_code != 0
    code = f" with exit code {outcome.exit_code}" if says_code else ""
    verb = "was stopped" if outcome.stopped else "ended" if outcome.ended else "was left running"
    took = "" if outcome.seconds is None else f" and {format_seconds(outcome.seconds)}"
    return (
        f"The job {verb} after {steps} step{'' if steps == 1 else 's'}{took}{code}; log and "
        f"metrics: {outcome.run_folder}"
    )

"""Which script is run, and where: one that stands here, is named or emitted, a shrunk one, or that
of a run which was started before."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fsdpplan.cli.options.files import DEFAULT_PLAN, LedgerOptions
from fsdpplan.cli.options.job import ContainerOptions, JobOptions, ProgramOptions, SurvivalOptions
from fsdpplan.cli.options.run import AgainOptions, RunOptions
from fsdpplan.cli.resolve.failures import runs_of
from fsdpplan.cli.resolve.job import (
    epoch_sentence,
    given,
    job_of,
    require_its_chats,
    require_its_libraries,
    require_its_recipe,
    require_its_script,
    require_its_weights,
    steps_sentence,
    with_this_python,
)
from fsdpplan.cost.estimate import estimate
from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.job import Job, saves_to
from fsdpplan.emit.nccl.cloud import gap_of
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.run.engines.machine import Target, choose_target, this_machine
from fsdpplan.run.follow.jobs import RecordedRun, chosen_run
from fsdpplan.run.known import with_best_interval
from fsdpplan.run.launch import (
    Launch,
    emit_script,
    is_plan,
    job_as_planned,
    read_launch,
    resolve_launch,
)
from fsdpplan.run.outcome import Manner
from fsdpplan.run.plans import read_plan
from fsdpplan.run.rehearse.smoke import smoke_plan
from fsdpplan.run.session import command_words
from fsdpplan.run.time_limit import with_time_to_save
from fsdpplan.topology import probe

SMOKE_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What is to be run, and where."""

    launch: Launch
    target: Target
    folder: Path
    job: Job | None = None
    """What the script was emitted for; None for one that stands there."""
    python: str | None = None
    """What runs it, where that was chosen now."""
    again: RecordedRun | None = None
    """The run that is come back to, or resumed."""
    attaches: bool = False
    """Whether `again` is only followed."""
    remarks: tuple[str, ...] = ()
    """What this run does not show of the plan, or lacks."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command that starts it."""
        return command_words(self.target, Path(self.launch.file_name))

    def require_torch(self) -> None:
        """Raise LaunchError where the job would run here, by a Python that has no torch."""
        if self.target == "here" and self.python == sys.executable:
            probe.require_torch("a job on this machine")


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
        python = sys.executable if job is None else job.python
        return Started(launch=launch, target="here", folder=folder, python=python, remarks=remarks)
    emits = options.source == "plan" or not os.path.exists(folder / SCRIPT_NAME)
    asked = job or (Job(python=sys.executable) if emits else None)
    said: list[str | None] = []
    if emits and asked is not None and saves_to(asked) is not None:
        chosen, measured = read_plan(plan), runs_of(LedgerOptions())
        asked, saves = with_best_interval(asked, chosen, measured=measured)
        asked, limit = with_time_to_save(asked, chosen, measured=measured)
        said += (saves, limit)
    launch = resolve_launch(
        folder,
        plan_file=None if plan == DEFAULT_PLAN else Path(plan),
        job=asked,
        source=options.source,
    )
    if asked is not None:
        require_its_weights(launch.plan, asked)
        require_its_chats(asked)
        require_its_script(asked)
        require_its_libraries(launch.plan, asked)
        said += (steps_sentence(launch.plan, asked), epoch_sentence(launch.plan, asked))
        asked = job_as_planned(launch.plan, asked)
        said += require_its_recipe(launch.plan, asked)
    if options.fallback is not None and not emits:
        raise SpecError(
            f"--fallback emits a script for each layout, and {SCRIPT_NAME} stands here: add --from "
            "plan and the job's options"
        )
    target, emitted_for = _target(launch, options), asked if emits else None
    gap = None if emitted_for is None else gap_of(launch.plan, emitted_for)
    said.append(None if gap is None else gap.sentences)
    return Started(
        launch=launch,
        target=target,
        folder=folder,
        job=emitted_for,
        python=None if emitted_for is None else emitted_for.python,
        remarks=tuple(filter(None, said)),
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
        asked = options.target or (None if options.chain is None else "slurm")
        target = choose_target(
            plan=launch.plan, machine=this_machine(), asked=asked, starts=not options.dry_run
        )
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
            "--chain submits jobs that wait for each other, which is Slurm's: leave it out, or run "
            "a job script with --target slurm where there is one"
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
    require_its_script(asked)
    if isinstance(asked.program, Trainer) and asked.program.steps is None:
        asked = replace(asked, program=replace(asked.program, steps=SMOKE_STEPS))
    small = smoke_plan(plan=read_plan(plan), estimate=estimate)
    return Launch(
        script=emit_script(small, asked), plan=small, origin=f"smoke run of {plan}", shrunk=True
    )


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


def prepare_again(again: AgainOptions, options: RunOptions) -> Started:
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
        target=_target_again(launch, run.record.engine, starts=not options.dry_run),
        folder=Path(run.record.folder),
        again=run,
        attaches=bool(again.attach),
    )


def _target_again(launch: Launch, engine: Target, *, starts: bool) -> Target:
    """A run of this host may have been one in an allocation, and is where there is one again."""
    if engine != "here":
        return engine
    machine = this_machine()
    inside = machine.allocation_nodes == launch.plan.cluster.nodes
    asked: Literal["here"] | None = None if inside else "here"
    return choose_target(plan=launch.plan, machine=machine, asked=asked, starts=starts)

"""`fsdpplan emit-launch`: the launch script of a plan, or a job folder."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import typer

from fsdpplan.cli.options.expand import Flag
from fsdpplan.cli.options.files import DEFAULT_PLAN, Json, LedgerOptions, PlanFile
from fsdpplan.cli.options.job import (
    ContainerOptions,
    JobOptions,
    PodOptions,
    ProgramOptions,
    SurvivalOptions,
)
from fsdpplan.cli.options.parse import choice, path, whole
from fsdpplan.cli.options.question import Torch
from fsdpplan.cli.resolve.failures import runs_of
from fsdpplan.cli.resolve.job import (
    epoch_sentence,
    job_of,
    pods_of,
    python_here,
    ranked,
    require_its_chats,
    require_its_libraries,
    require_its_recipe,
    require_its_script,
    require_its_weights,
    steps_sentence,
    with_this_python,
)
from fsdpplan.cli.resolve.torch import settled_plan, torch_of_job
from fsdpplan.cli.views.render import note, tell
from fsdpplan.emit.alerts import alert_rules
from fsdpplan.emit.folder import SCRIPT_NAME
from fsdpplan.emit.job import Job, excluded_hosts, left_out, trial_words
from fsdpplan.emit.kubernetes.adapters import adapter_words
from fsdpplan.emit.nccl.cloud import gap_of
from fsdpplan.emit.slurm.header import job_plan, plan_digest
from fsdpplan.emit.targets import ON_KUBERNETES, OTHER_TRAINERS, Target
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import GateFailed, SpecError
from fsdpplan.files.plans import carried_json
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.run.folder import write_job_folder
from fsdpplan.run.known import with_best_interval
from fsdpplan.run.launch import job_as_planned, launch_text
from fsdpplan.run.rehearse import rehearse as program
from fsdpplan.run.rehearse.ranks import DEFAULT_RANKS, chosen_ranks
from fsdpplan.run.time_limit import with_grace, with_time_to_save
from fsdpplan.search.recommend import price_of_weak_nodes, without_excluded
from fsdpplan.spec.plan import Plan

SAME_PYTHON = frozenset({"slurm", "ssh"})
"""Targets whose hosts see this one's Python, as far as anybody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """Which layout of the plan, and where the script goes."""

    HEADING: ClassVar[str] = "Script"

    target: Annotated[
        Target | None,
        Flag(
            metavar="NAME",
            parse=choice(Target),
            help=f"What starts the job: {', '.join(get_args(Target))}. Default: slurm.",
        ),
    ] = None
    rank: Annotated[
        int | None,
        Flag(metavar="N", parse=whole(example=2), help="Another layout of the plan's list."),
    ] = None
    torch: Torch = None
    out: Annotated[
        Path | None,
        Flag(
            metavar="DIR",
            parse=path,
            help="Write a job folder: script, plan, alert rules and the trainer's source.",
        ),
    ] = None
    alerts: Annotated[
        Path | None,
        Flag(metavar="FILE.yml", parse=path, help="Write alert rules of the plan for Prometheus."),
    ] = None
    rehearsed: Annotated[
        bool | None,
        Flag(name="--rehearsed", help="Rehearse the plan first, and emit nothing if that fails."),
    ] = None


def emit_launch(
    *,
    plan: PlanFile = DEFAULT_PLAN,
    emit: EmitOptions,
    job: JobOptions,
    trainer: Trainer,
    program: ProgramOptions,
    survival: SurvivalOptions,
    container: ContainerOptions,
    pods: PodOptions,
    json: Json = False,
) -> None:
    """Print what launches a plan: for Slurm, Kubernetes or others."""
    target = emit.target or "slurm"
    require_meaning(target, out=emit.out, alerts=emit.alerts, rehearsed=bool(emit.rehearsed))
    asked = job_of(job, trainer, program, survival, container)
    if target in SAME_PYTHON:
        asked = with_this_python(asked, given=job)
    own_program = program.script is not None
    chosen = ranked(plan, emit.rank, own_program=own_program or target in OTHER_TRAINERS)
    excluded = excluded_hosts(asked)
    for sentence in price_of_weak_nodes(chosen, excluded):
        tell(sentence)
    chosen = without_excluded(chosen, excluded)
    require_its_weights(chosen, asked)
    require_its_chats(asked)
    if target in SAME_PYTHON:
        require_its_script(asked)
    if target not in OTHER_TRAINERS:
        if steps := steps_sentence(chosen, asked):
            tell(steps)
        if epoch := epoch_sentence(chosen, asked):
            tell(epoch)
        asked = job_as_planned(chosen, asked)
        for sentence in require_its_recipe(chosen, asked):
            tell(f"the run that goes on: {sentence}")
    require_its_libraries(chosen, asked)
    python = python_here(asked) if target in SAME_PYTHON else None
    image = pods.image if asked.container is None else asked.container.image
    its_torch = torch_of_job(emit.torch, image=image, python=python)
    settled = settled_plan(chosen, its_torch, own_program=own_program)
    chosen = settled.value
    for sentence in settled.warnings:
        tell(sentence)
    if (gap := gap_of(chosen, asked)) is not None:
        tell(gap.sentences)
    measured = runs_of(LedgerOptions())
    asked, saves = with_best_interval(asked, chosen, target=target, measured=measured)
    asked_pods, limit = pods_of(pods), ""
    if target == "slurm":
        asked, limit = with_time_to_save(asked, chosen, measured=measured)
    elif target in ON_KUBERNETES:
        asked_pods = with_grace(asked_pods, chosen, asked, measured=measured)
    if emit.rehearsed:
        require_rehearsed(chosen, own_program=own_program, python=python)
    if emit.alerts is not None:
        write_alerts(emit.alerts, chosen)
        note(f"wrote {emit.alerts}, for a run with --prometheus")
    text = launch_text(target, plan=chosen, job=asked, pods=asked_pods)
    if emit.out is not None:
        write_job_folder(emit.out, plan=chosen, job=asked)
        text = (emit.out / SCRIPT_NAME).read_text(encoding="utf-8")
        note(f"wrote {emit.out}; next: sbatch {emit.out / SCRIPT_NAME}")
    for sentence in filter(None, (saves, limit)):
        tell(sentence)
    if target in ON_KUBERNETES and (adapters := adapter_words(chosen, asked_pods)):
        tell(adapters)
    if target not in OTHER_TRAINERS and (trial := trial_sentence(asked)):
        tell(trial)
    if json:
        typer.echo(script_json(text, target, chosen, asked, emit.out, saves=saves, limit=limit))
    elif emit.out is None:
        typer.echo(text, nl=False)


def require_meaning(
    target: Target, *, out: Path | None, alerts: Path | None, rehearsed: bool
) -> None:
    """Refuse what a target has no use for."""
    if out is not None and target != "slurm":
        raise SpecError(
            f"--out writes a job folder for Slurm: leave it out for --target {target}, and put "
            "what is printed into a file"
        )
    if target not in OTHER_TRAINERS:
        return
    for flag, given in (("--rehearsed", rehearsed), ("--alerts", alerts is not None)):
        if given:
            raise SpecError(
                f"{flag} is about fsdpplan's own trainer, which --target {target} does not run: "
                "leave it out"
            )


def require_rehearsed(plan: Plan, *, own_program: bool, python: str | None = None) -> None:
    """Raise GateFailed unless the plan's own program goes through its rehearsal as predicted."""
    if own_program:
        raise SpecError(
            "--rehearsed rehearses fsdpplan's own trainer, not a --script: rehearse a model of "
            "yours with fsdpplan rehearse --build FILE.py:FUNCTION"
        )
    ranks = chosen_ranks(plan.model, plan.layout, DEFAULT_RANKS)
    found = program.rehearse(plan, ranks, python=None if python == sys.executable else python)
    if not found.agrees:
        raise GateFailed(
            f"the plan did not rehearse, so nothing is emitted: {'; '.join(found.said)}; type "
            "fsdpplan rehearse for all of it"
        )


def write_alerts(path: Path, plan: Plan) -> None:
    """Write the plan's rules for Prometheus."""
    digest = plan_digest(carried_json(job_plan(plan)))
    write_text_atomically(path, alert_rules(plan, digest=digest), advice="choose another --alerts")


def trial_sentence(job: Job) -> str | None:
    """That the job is no more than a trial, and the options by which it would be."""
    words, options = trial_words(job), left_out(job)
    if words is None:
        return None
    listed = " and ".join(filter(None, (", ".join(options[:-1]), options[-1])))
    return f"the job {words}: {listed} {'says' if len(options) == 1 else 'say'} otherwise"


def script_json(
    script: str,
    target: Target,
    plan: Plan,
    job: Job,
    out: Path | None,
    *,
    saves: str = "",
    limit: str = "",
) -> str:
    """What `emit-launch --json` prints."""
    return json.dumps(
        {
            "script": script,
            "target": target,
            "folder": None if out is None else os.path.abspath(out),
            "plan_sha256": plan_digest(carried_json(job_plan(plan))),
            "job_name": job.job_name,
            "nodes": plan.cluster.nodes,
            "ranks": plan.cluster.gpus,
            "checkpoint_every": (
                job.program.checkpoint_every if isinstance(job.program, Trainer) else None
            ),
            "checkpoint_every_reason": saves or None,
            "signal_seconds": job.signal_seconds,
            "signal_seconds_reason": limit or None,
        },
        indent=2,
    )

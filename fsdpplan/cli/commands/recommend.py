"""`fsdpplan recommend`: search, rank, explain on one screen, save the plan."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fsdpplan.cli.options.files import DEFAULT_PLAN, EvidenceOptions, Json, NoSave, Save
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.parse import path
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.scaling import FewestOptions, SlurmOptions
from fsdpplan.cli.resolve.fewest import on_the_fewest
from fsdpplan.cli.resolve.found import Found, advised, best_of, plan_of, searched
from fsdpplan.cli.resolve.inputs import Inputs, resolve
from fsdpplan.cli.views.answer import recommend_json
from fsdpplan.cli.views.render import columns
from fsdpplan.cli.views.screen import recommend_screen
from fsdpplan.cli.views.unfit import nothing_fits
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import write_plan
from fsdpplan.search.question import SearchResult
from fsdpplan.spec.training import program_named, program_needs

if TYPE_CHECKING:
    from fsdpplan.cli.resolve.idle import IdleMachines

NOT_SAVED = "not saved; fsdpplan emit-launch and fsdpplan run read what is saved without --no-save"


def recommend(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    fewest: FewestOptions,
    slurm: SlurmOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    save: Save = DEFAULT_PLAN,
    no_save: NoSave = False,
    json: Json = False,
) -> None:
    """Search, rank, explain on one screen, save the plan."""
    if no_save and save != DEFAULT_PLAN:
        raise SpecError("--save and --no-save contradict each other: give one of them")
    place = None if no_save else path(save, name="--save")
    idle = _idle(slurm, fewest, cluster)
    ask = on_the_fewest if fewest.min_gpus else resolve
    inputs = ask(
        model=model,
        cluster=cluster if idle is None else idle.cluster,
        training=training,
        layout=layout,
        torch=torch,
        evidence=evidence,
    )
    found = search(inputs)
    inputs = advised(inputs, found)
    if idle is not None:
        inputs = _of_slurm(inputs, found, idle)
    said = saved(inputs, found.result, place) if place is not None else NOT_SAVED
    if json:
        typer.echo(recommend_json(inputs, found.result, seconds=found.seconds))
    else:
        typer.echo(recommend_screen(inputs, found.result, width=columns()))
    typer.echo(said, err=True)


def _idle(
    slurm: SlurmOptions, fewest: FewestOptions, cluster: ClusterOptions
) -> IdleMachines | None:
    if slurm.partition is not None and not slurm.from_slurm:
        raise SpecError("--partition goes with --from-slurm: add it, or leave it to emit-launch")
    if slurm.from_slurm and fewest.min_gpus:
        raise SpecError("--from-slurm and --min-gpus each say how many GPUs: leave one of them out")
    if not slurm.from_slurm:
        return None
    from fsdpplan.cli.resolve.idle import idle_machines

    return idle_machines(slurm, cluster)


def _of_slurm(inputs: Inputs, found: Found, idle: IdleMachines) -> Inputs:
    from fsdpplan.cli.resolve.idle import time_warning, with_idle

    best, tokens = best_of(inputs, found), inputs.training.tokens
    seconds = None if best is None or tokens is None else best.seconds_for(tokens)
    inputs = with_idle(inputs, idle)
    return replace(inputs, warnings=(*inputs.warnings, *time_warning(idle, seconds)))


def search(inputs: Inputs) -> Found:
    """The ranked layouts. Raises NoFeasibleLayout with the nearest miss when there are none."""
    found = searched(inputs)
    if not found.result.ranked:
        raise nothing_fits(inputs, found.result)
    return found


def saved(inputs: Inputs, result: SearchResult, place: Path) -> str:
    """Save the best plan; what to say about it."""
    chosen = result.ranked[0]
    write_plan(plan_of(inputs, result, chosen), place)
    shown = "" if place == Path(DEFAULT_PLAN) else f" {shlex.quote(str(place))}"
    program = inputs.training.program
    if program_named(program).is_target:
        return f"saved as {place}; next: fsdpplan emit-launch{shown} --target {program}"
    if not chosen.estimate.runnable:
        return (
            f"saved as {place}; fsdpplan's own trainer is FSDP2's, not "
            f"{inputs.training.traits.words}: launch a program of yours by fsdpplan "
            f"emit-launch{shown} --script train.py"
        )
    if program != "reference":
        needs = program_needs(program, chosen.layout)
        words = "".join(f"; for {each.setting} your program needs {each.words}" for each in needs)
        return (
            f"saved as {place}{words}; next: fsdpplan emit-launch{shown} --script train.py > "
            "job.sbatch"
        )
    return (
        f"saved as {place}; next: fsdpplan emit-launch{shown} > job.sbatch, or fsdpplan run{shown}"
    )

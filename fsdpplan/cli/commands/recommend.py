"""`fsdpplan recommend`: search, rank, explain on one screen, save the plan."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

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
from fsdpplan.cli.resolve.inputs import Inputs, refuse_question, resolve, slower_words
from fsdpplan.cli.views.answer import recommend_json, rejections
from fsdpplan.cli.views.render import columns
from fsdpplan.cli.views.screen import recommend_screen
from fsdpplan.cli.views.unfit import remedy_words
from fsdpplan.cost.band import peak_factor
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files.plans import write_plan
from fsdpplan.run.plans import new_plan
from fsdpplan.search.advice.alternatives import RecommendedPlan, advice
from fsdpplan.search.advice.words import describe
from fsdpplan.search.question import NearestMiss, SearchResult
from fsdpplan.search.recommend import recommend as ranked_layouts
from fsdpplan.spec.plan import Plan, RankedLayout, assumed
from fsdpplan.spec.training import program_named, program_needs
from fsdpplan.units import format_gib

NOT_SAVED = "not saved; fsdpplan emit-launch and fsdpplan run read what is saved without --no-save"


def recommend(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
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
    inputs = resolve(
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        torch=torch,
        evidence=evidence,
    )
    found = search(inputs)
    inputs = advised(inputs, found)
    said = saved(inputs, found.result, place) if place is not None else NOT_SAVED
    if json:
        typer.echo(recommend_json(inputs, found.result, seconds=found.seconds))
    else:
        typer.echo(recommend_screen(inputs, found.result, width=columns()))
    typer.echo(said, err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search found, and how long it took."""

    result: SearchResult
    seconds: float


def search(inputs: Inputs) -> Found:
    """The ranked layouts. Raises NoFeasibleLayout with the nearest miss when there are none."""
    refuse_question(inputs)
    started = time.perf_counter()
    result = ranked_layouts(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        pins=inputs.pins,
        learner=inputs.learner,
    )
    seconds = time.perf_counter() - started
    if not result.ranked:
        raise NoFeasibleLayout(_nothing(inputs, result), rejected=dict(result.rejected))
    return Found(result=result, seconds=seconds)


def advised(inputs: Inputs, found: Found) -> Inputs:
    """`inputs` with what the best layout assumes, and warnings on machines that cost more than they
    bring."""
    chosen = found.result.ranked[0]
    job = RecommendedPlan(
        model=inputs.model, cluster=inputs.cluster, training=inputs.training, best=chosen
    )
    said = (*advice(job, parts=inputs.parts), *slower_words(inputs, chosen.layout))
    return replace(
        inputs,
        assumptions=assumed(inputs.assumptions, model=inputs.model, layout=chosen.layout),
        warnings=(*inputs.warnings, *said),
    )


def _nothing(inputs: Inputs, result: SearchResult) -> str:
    what = f"{inputs.model.name} on {inputs.cluster.gpus} x {inputs.cluster.device.name}"
    reasons = rejections(result.rejected)
    if result.nearest_miss is None:
        advice = f"; {result.example}" if result.example else ""
        counts = reasons or "no degrees multiply to the GPUs"
        return f"no layout of {what} is legal: {counts}{advice}; {remedy_words(inputs, None)}"
    return f"no layout of {what} fits: {_miss(inputs, result.nearest_miss)} (searched: {reasons})"


def _miss(inputs: Inputs, miss: NearestMiss) -> str:
    factor = peak_factor(inputs.cluster.device)
    needed, available = round(factor * miss.needed_bytes), round(factor * miss.available_bytes)
    return (
        f"the nearest ({describe(miss.layout, inputs.cluster)}) needs "
        f"{format_gib(needed)} of {format_gib(available)} per GPU, "
        f"{format_gib(needed - available)} too much; {remedy_words(inputs, miss.layout)}"
    )


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


def plan_of(inputs: Inputs, result: SearchResult, chosen: RankedLayout) -> Plan:
    """The plan that runs `chosen`."""
    return new_plan(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        chosen=chosen,
        ranked=result.ranked,
        sources=inputs.sources,
        assumptions=inputs.assumptions,
        warnings=inputs.warnings,
    )

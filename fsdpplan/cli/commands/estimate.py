"""`fsdpplan estimate`: predict one given layout."""

from __future__ import annotations

from dataclasses import replace

import typer

from fsdpplan.cli.options.files import EvidenceOptions, Json
from fsdpplan.cli.options.layout import OneLayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.resolve.inputs import (
    Inputs,
    OneLayout,
    refuse_question,
    remedy_words,
    resolve,
    slower_words,
)
from fsdpplan.cli.resolve.layout import the_layout
from fsdpplan.cli.views.answer import estimate_json, fits_words, too_unsure
from fsdpplan.cli.views.render import columns
from fsdpplan.cli.views.screen import estimate_screen
from fsdpplan.cli.views.told import tell
from fsdpplan.cost.memory import available_bytes
from fsdpplan.cost.peak_band import peak_factor
from fsdpplan.cost.step import estimate as predicted
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.search.ladder import leaner_layouts
from fsdpplan.search.legality import legal_layout_problem
from fsdpplan.search.pins import Pins, changed_pins
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.plan import Plan
from fsdpplan.units import format_gib, format_seconds


def estimate(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: OneLayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    json: Json = False,
) -> None:
    """Predict the time and memory of one layout.

    Where it does not fit, it says the nearest one that does, and ends with code 3.
    """
    inputs = resolve(
        model=model,
        cluster=cluster,
        training=training,
        layout=layout,
        torch=torch,
        evidence=evidence,
    )
    one = one_layout(inputs)
    if json:
        typer.echo(estimate_json(one))
    else:
        typer.echo(estimate_screen(one, width=columns()))
    if not one.fits:
        tell(too_large(one))
        raise typer.Exit(NoFeasibleLayout.exit_code)


def one_layout(inputs: Inputs) -> OneLayout:
    """The layout that the pins name and its prediction. Raises SpecError where it is illegal."""
    model, cluster, training = inputs.model, inputs.cluster, inputs.training
    refuse_question(inputs)
    found = the_layout(inputs.pins, cluster=cluster, training=training)
    layout = found.value
    problem = legal_layout_problem(model=model, cluster=cluster, training=training, layout=layout)
    if problem is not None:
        raise SpecError(problem)
    found_estimate = predicted(model=model, cluster=cluster, training=training, layout=layout)
    if inputs.learner is not None:
        found_estimate = inputs.learner.corrected(layout, found_estimate)
    return OneLayout(
        inputs=replace(
            inputs,
            assumptions=(*inputs.assumptions, *found.assumptions),
            warnings=(*inputs.warnings, *slower_words(inputs, layout)),
        ),
        layout=layout,
        estimate=found_estimate,
        available_bytes=available_bytes(cluster=cluster, training=training),
    )


def nearest_that_fits(one: OneLayout) -> tuple[str, Estimate] | None:
    """What to change of a layout that does not fit, and what comes of it: of leaner layouts of the
    same ranks, the fastest of those with the fewest changes; else what the search puts first."""
    inputs = one.inputs
    plan = Plan(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        layout=one.layout,
        estimate=one.estimate,
        alternatives=(),
        sources=(),
        assumptions=(),
        warnings=(),
        versions=(),
    )
    rungs = leaner_layouts(plan, needed_bytes=None)
    if rungs:
        nearest = min(rungs, key=lambda rung: rung.words.count("--"))
        return nearest.words, nearest.estimate
    found = recommend(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        pins=Pins(),
        limit=1,
        learner=inputs.learner,
    )
    if not found.ranked:
        return None
    first = found.ranked[0]
    return changed_pins(one.layout, first.layout), first.estimate


def too_large(one: OneLayout) -> str:
    """That the layout does not fit, and what to type for one that does."""
    inputs, memory = one.inputs, one.estimate.memory
    factor = peak_factor(inputs.cluster.device)
    needed, available = (
        round(factor * memory.peak_device_bytes),
        round(factor * one.available_bytes),
    )
    short = f"{format_gib(needed - available)} too much"
    if unsure := too_unsure(memory, inputs.training, inputs.cluster):
        short = f"{fits_words(memory)}, where {unsure}"
    nearest = nearest_that_fits(one)
    if nearest is None:
        free = replace(inputs, pins=Pins())
        advice = (
            f"nor does any other here; with fsdpplan recommend: {remedy_words(free, one.layout)}"
        )
    else:
        words, estimated = nearest
        step = format_seconds(estimated.step_seconds.expected)
        peak = format_gib(round(factor * estimated.memory.peak_device_bytes))
        advice = f"the nearest that fits: {words} ({step} a step, {peak})"
    room = f"{format_gib(needed)} of {format_gib(available)}"
    return f"the layout needs {room} per GPU, {short}; {advice}"

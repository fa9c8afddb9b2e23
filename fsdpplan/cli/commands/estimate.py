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
    case_of,
    question_of,
    refuse_question,
    remedy_words,
    resolve,
    slower_words,
)
from fsdpplan.cli.views.answer import estimate_json, fits_words, too_unsure
from fsdpplan.cli.views.render import columns, tell
from fsdpplan.cli.views.screen import estimate_screen
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.cost.memory.peak_band import peak_factor
from fsdpplan.cost.step import estimate as predicted
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.search.one_layout import named_layout, nearest_that_fits
from fsdpplan.search.pins import Pins
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.plan import assumed
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
    cluster, training = inputs.cluster, inputs.training
    refuse_question(inputs)
    found = named_layout(inputs.pins, cluster=cluster, training=training)
    layout = found.layout
    case = case_of(inputs, layout)
    problem = legal_layout_problem(case)
    if problem is not None:
        raise SpecError(problem)
    found_estimate = predicted(case)
    if inputs.learner is not None:
        found_estimate = inputs.learner.corrected(layout, found_estimate)
    return OneLayout(
        inputs=replace(
            inputs,
            assumptions=assumed(
                (*inputs.assumptions, *found.assumptions), model=inputs.model, layout=layout
            ),
            warnings=(*inputs.warnings, *slower_words(inputs, layout)),
        ),
        layout=layout,
        estimate=found_estimate,
        available_bytes=available_bytes(cluster=cluster, training=training),
    )


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
    nearest = nearest_that_fits(question_of(inputs), one.layout, one.estimate)
    if nearest is None:
        free = replace(inputs, pins=Pins())
        advice = (
            f"nor does any other here; with fsdpplan recommend: {remedy_words(free, one.layout)}"
        )
    else:
        step = format_seconds(nearest.estimate.step_seconds.expected)
        peak = format_gib(round(factor * nearest.estimate.memory.peak_device_bytes))
        advice = f"the nearest that fits: {nearest.words} ({step} a step, {peak})"
    room = f"{format_gib(needed)} of {format_gib(available)}"
    return f"the layout needs {room} per GPU, {short}; {advice}"

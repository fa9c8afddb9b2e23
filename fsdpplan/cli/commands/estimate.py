"""`fsdpplan estimate`: predict one given layout."""

from __future__ import annotations

from dataclasses import replace

import typer

from fsdpplan.cli.options.failures import GoodputOptions
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
    refuse_question,
    resolve,
    slower_words,
)
from fsdpplan.cli.views.answer import estimate_json, goodput_said
from fsdpplan.cli.views.render import blocks, columns, tell
from fsdpplan.cli.views.screen import estimate_screen
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.cost.step import estimate as predicted
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.search.defaults import named_layout
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.plan import assumed


def estimate(
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: OneLayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    failures: GoodputOptions,
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
    said = goodput_said(one, failures, evidence, width=columns())
    if json:
        typer.echo(estimate_json(one, more=said.document))
    else:
        typer.echo(blocks(estimate_screen(one, width=columns()), said.screen))
    if not one.fits:
        from fsdpplan.cli.views.unfit import too_large

        tell(too_large(one))
        raise typer.Exit(NoFeasibleLayout.exit_code)


def one_layout(inputs: Inputs) -> OneLayout:
    """The layout that the pins name and its prediction. Raises SpecError where it is illegal."""
    cluster, training = inputs.cluster, inputs.training
    refuse_question(inputs)
    found = named_layout(inputs.pins, cluster=cluster, training=training, model=inputs.model)
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

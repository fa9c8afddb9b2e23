"""`fsdpplan estimate`: predict one given layout."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import typer

from fsdpplan.cli.options.configuration import ConfigurationOptions
from fsdpplan.cli.options.failures import GoodputOptions
from fsdpplan.cli.options.files import EvidenceOptions, Json
from fsdpplan.cli.options.goal import BillOptions
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
from fsdpplan.cli.resolve.training import with_data
from fsdpplan.cli.views.answer import Said, estimate_json, goodput_said
from fsdpplan.cli.views.render import blocks, columns, tell
from fsdpplan.cli.views.screen import estimate_screen
from fsdpplan.cost.estimate import estimate as predicted
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.search.advice.field_rules import broken_rules
from fsdpplan.search.defaults import named_layout
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.plan import assumed


def estimate(
    *,
    configuration: ConfigurationOptions,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    bill: BillOptions,
    layout: OneLayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
    failures: GoodputOptions,
    json: Json = False,
) -> None:
    """Predict the time and memory of one layout.

    Where it does not fit, it says the nearest one that does, and ends with code 3.
    """
    question: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "training": training,
        "layout": layout,
        "torch": torch,
        "evidence": evidence,
    }
    read = Said()
    if configuration.file is not None:
        from fsdpplan.cli.resolve.configuration import laid_under
        from fsdpplan.cli.views.configuration import configuration_said

        under = laid_under(configuration.file, question)
        question, read = under.question, configuration_said(under, width=columns())
    question["training"] = with_data(question["training"])
    if bill.is_asked:
        one, shown = billed(bill, **question)
    else:
        one, shown = one_layout(resolve(**question)), {}
    said = goodput_said(one, failures, evidence, width=columns())
    if json:
        more = {**shown.get("document", {}), **said.document, **read.document}
        typer.echo(estimate_json(one, more=more))
    else:
        screen = estimate_screen(one, width=columns(), more=shown.get("lines", ()))
        typer.echo(blocks(read.screen, screen, said.screen))
    if late := shown.get("late"):
        tell(f"{late}, or another layout")
        raise typer.Exit(NoFeasibleLayout.exit_code)
    if not one.fits:
        from fsdpplan.cli.views.unfit import too_large

        tell(too_large(one))
        raise typer.Exit(NoFeasibleLayout.exit_code)


def billed(bill: BillOptions, **question: Any) -> tuple[OneLayout, dict[str, Any]]:
    """The layout, and what is to be shown of what its whole training takes."""
    from fsdpplan.cli.resolve import goal as goals
    from fsdpplan.cli.views import goal as views
    from fsdpplan.cost.bill import bill as bill_for

    goal = goals.Goal(bill=bill, today=date.today())
    goals.require_whole(goal, question["training"], counts=1)
    question["training"] = goals.with_epochs(question["training"], bill)
    inputs = resolve(**question)
    terms = goals.terms_of(goal, inputs.cluster)
    one = one_layout(inputs)
    found = bill_for(case_of(one.inputs, one.layout), one.estimate, terms.value)
    inputs = replace(
        one.inputs,
        assumptions=(*one.inputs.assumptions, *terms.assumptions),
        warnings=(*one.inputs.warnings, *terms.warnings),
    )
    return replace(one, inputs=inputs), {
        "lines": views.bill_lines(found, goal, terms.value),
        "document": {"goal": views.bills_document(goal, terms.value, [found])},
        "late": views.late_words(found, goal, inputs.training.tokens),
    }


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
            rules=broken_rules(case, found_estimate),
        ),
        layout=layout,
        estimate=found_estimate,
        available_bytes=available_bytes(cluster=cluster, training=training),
    )

"""`fsdpplan compare`: saved plans, or questions, side by side."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Annotated

import typer

from fsdpplan.cli import working
from fsdpplan.cli.options.expand import Each, Lists
from fsdpplan.cli.options.files import EvidenceOptions, Json
from fsdpplan.cli.options.goal import PriceOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.report import ReportFile
from fsdpplan.cli.resolve import flag
from fsdpplan.cli.resolve.again import as_planned
from fsdpplan.cli.resolve.found import advised, best_of, priced, searched
from fsdpplan.cli.resolve.goal import price_per_gpu_hour, require_one_price
from fsdpplan.cli.resolve.inputs import Inputs, resolve
from fsdpplan.cli.views.comparison import (
    Entry,
    compare_json,
    compare_screen,
    compared_report,
)
from fsdpplan.cli.views.page import require_report_place, written_report
from fsdpplan.cli.views.render import columns, tell
from fsdpplan.cli.views.unfit import nothing_fits
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.run.plans import read_plan
from fsdpplan.spec.plan import Terms

MOST = 8
"""Questions at a time."""

Plans = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PLAN",
        help="Two or more saved plans; without, options with several values.",
        show_default=False,
    ),
]


def compare(
    *,
    plans: Plans = None,
    model: Annotated[Lists[ModelOptions], Each(ModelOptions)],
    cluster: Annotated[Lists[ClusterOptions], Each(ClusterOptions)],
    training: Annotated[Lists[TrainingOptions], Each(TrainingOptions)],
    layout: Annotated[Lists[LayoutOptions], Each(LayoutOptions)],
    price: Annotated[Lists[PriceOptions], Each(PriceOptions)],
    torch: TorchOptions,
    evidence: EvidenceOptions,
    page: ReportFile,
    json: Json = False,
) -> None:
    """Compare saved plans, or questions, side by side.

    With commas an option has a value for each question: --hardware dgx-h100,dgx-b200 --gpus
    512,256 are two. An option with one value has it in all of them.
    """
    require_report_place(page.report)
    lists = (model, cluster, training, layout)
    if plans:
        entries = _of_plans(plans, lists, training, price, evidence)
    else:
        number = max(one.longest for one in (*lists, price))
        if not 2 <= number <= MOST:
            raise SpecError(
                f"compare takes two or more saved plans, or an option with 2 to {MOST} values: "
                "type such as --gpus 64,128"
            )
        for one in (*lists, price):
            one.require_length(number)
        _require_tokens(price, [training.at(index).tokens for index in range(number)])
        questions = [
            resolve(
                model=model.at(index),
                cluster=cluster.at(index),
                training=training.at(index),
                layout=layout.at(index),
                torch=torch,
                evidence=evidence,
            )
            for index in range(number)
        ]
        questions = [_priced(inputs, price.at(index)) for index, inputs in enumerate(questions)]
        entries = [_of_question(inputs, index) for index, inputs in enumerate(questions)]
    if page.report is not None:
        tell(written_report(compared_report(entries), page.report))
    if json:
        typer.echo(compare_json(entries))
    else:
        screen = compare_screen(entries, width=columns())
        typer.echo(screen)
    if all(entry.priced is None for entry in entries):
        tell(f"nothing fits in any of them; {entries[0].name}: {entries[0].problem}")
        raise typer.Exit(NoFeasibleLayout.exit_code)


def _of_plans(
    plans: list[str],
    lists: tuple[Lists[object], ...],
    training: Lists[TrainingOptions],
    price: Lists[PriceOptions],
    evidence: EvidenceOptions,
) -> list[Entry]:
    if not 2 <= len(plans) <= MOST:
        raise SpecError(
            f"compare takes 2 to {MOST} saved plans, not {len(plans)}: use fsdpplan what-if for "
            "one plan under other inputs"
        )
    given = [name for one in lists for name in one.values if name != "tokens"]
    if given:
        raise SpecError(
            f"saved plans say their questions themselves: leave --{given[0].replace('_', '-')} "
            "out, or use fsdpplan what-if"
        )
    training.require_length(1)
    price.require_length(len(plans))
    tokens = training.at(0).tokens
    saved = [read_plan(place) for place in plans]
    if tokens is not None:
        saved = [replace(one, training=replace(one.training, tokens=tokens)) for one in saved]
    _require_tokens(price, [one.training.tokens for one in saved])
    entries = []
    for index, (place, plan) in enumerate(zip(plans, saved, strict=True)):
        inputs = _priced(as_planned(plan, evidence), price.at(index))
        entries.append(
            Entry(
                name=_letter(index), file=place, inputs=inputs, priced=priced(inputs, plan.layout)
            )
        )
    return entries


def _require_tokens(price: Lists[PriceOptions], tokens: list[int | None]) -> None:
    if price.values and None in tokens:
        name = flag(next(iter(price.values)))
        raise SpecError(f"{name} is of a whole training: say its tokens, such as --tokens 2T")


def _priced(inputs: Inputs, given: PriceOptions) -> Inputs:
    """`inputs` with what a GPU hour costs: what is typed, over what a plan says."""
    require_one_price(given)
    terms = inputs.terms or Terms()
    found = price_per_gpu_hour(given, inputs.cluster, today=date.today(), known=terms.price)
    return replace(
        inputs,
        terms=replace(terms, price=found.value),
        assumptions=(*inputs.assumptions, *found.assumptions),
        warnings=(*inputs.warnings, *found.warnings),
    )


def _of_question(inputs: Inputs, index: int) -> Entry:
    working.say(f"searching: layouts of {_letter(index)}")
    found = searched(inputs)
    if not found.result.ranked:
        problem = str(nothing_fits(inputs, found.result))
        return Entry(name=_letter(index), inputs=inputs, problem=problem)
    inputs = advised(inputs, found)
    return Entry(name=_letter(index), inputs=inputs, priced=best_of(inputs, found))


def _letter(index: int) -> str:
    return "ABCDEFGH"[index]

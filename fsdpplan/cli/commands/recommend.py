"""`fsdpplan recommend`: search, rank, explain on one screen, save the plan."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdpplan.cli.options.expand import Each, Lists
from fsdpplan.cli.options.failures import FailureOptions, given_failures
from fsdpplan.cli.options.files import (
    DEFAULT_PLAN,
    EvidenceOptions,
    Json,
    NoSave,
    Save,
)
from fsdpplan.cli.options.goal import BillOptions, ObjectiveOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.parse import path
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.scaling import (
    GPU_COUNT_OR_COUNTS,
    Counts,
    FewestOptions,
    SlurmOptions,
)
from fsdpplan.cli.resolve.fewest import on_the_fewest
from fsdpplan.cli.resolve.found import Found, advised, best_of, plan_of, searched
from fsdpplan.cli.resolve.inputs import Inputs, OneLayout, case_of, question_of, resolve
from fsdpplan.cli.resolve.training import with_data
from fsdpplan.cli.views.answer import goodput_said, recommend_json
from fsdpplan.cli.views.first_screen import recommend_screen
from fsdpplan.cli.views.render import blocks, columns, note, wrapped
from fsdpplan.cli.views.unfit import adapters_beside, nothing_fits
from fsdpplan.cost.estimate import unbuilt_words
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import write_plan
from fsdpplan.search.question import SearchResult
from fsdpplan.search.recommend import near_miss
from fsdpplan.search.rules.program import optimizer_problem
from fsdpplan.spec.plan import Failures
from fsdpplan.spec.training import program_named, program_needs

if TYPE_CHECKING:
    from fsdpplan.cli.resolve.idle import IdleMachines

NOT_SAVED = "not saved; fsdpplan emit-launch and fsdpplan run read what is saved without --no-save"


def recommend(
    *,
    model: ModelOptions,
    cluster: Annotated[
        Lists[ClusterOptions],
        Each(ClusterOptions, fields=(), instead={"gpus": GPU_COUNT_OR_COUNTS}),
    ],
    fewest: FewestOptions,
    slurm: SlurmOptions,
    training: TrainingOptions,
    objective: ObjectiveOptions,
    bill: BillOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    failures: FailureOptions,
    evidence: EvidenceOptions,
    save: Save = DEFAULT_PLAN,
    no_save: NoSave = False,
    json: Json = False,
) -> None:
    """Search, rank, explain on one screen, save the plan."""
    if no_save and save != DEFAULT_PLAN:
        raise SpecError("--save and --no-save contradict each other: give one of them")
    place = None if no_save else path(save, name="--save")
    counts: Counts | None = cluster.values.get("gpus", (None,))[0]
    is_one = counts is not None and not counts.is_range and len(counts.numbers) == 1
    machines = cluster.at(0, gpus=counts.numbers[0] if counts and is_one else None)
    idle = _idle(slurm, fewest, machines)
    if idle is not None and counts is not None and not is_one:
        raise SpecError(
            "--from-slurm and a range of --gpus each say how many GPUs: leave one of them out"
        )
    question: dict[str, Any] = {
        "model": model,
        "cluster": machines if idle is None else idle.cluster,
        "training": with_data(training),
        "layout": layout,
        "torch": torch,
        "evidence": evidence,
    }
    shown: dict[str, Any] = {}
    if objective.objective or bill.is_asked or (counts and not is_one):
        inputs, found, shown = by_goal(
            objective,
            bill,
            None if is_one else counts,
            is_fewest=bool(fewest.min_gpus),
            failures=given_failures(failures),
            **question,
        )
    else:
        inputs = (on_the_fewest if fewest.min_gpus else resolve)(**question)
        found = search(inputs)
    inputs = replace(inputs, failures=given_failures(failures))
    if objective.objective == "goodput":
        failures = replace(failures, goodput=True)
    inputs = advised(inputs, found)
    near = near_miss(question_of(inputs), found.result)
    if idle is not None:
        inputs = _of_slurm(inputs, found, idle)
    outlook = goodput_said(_chosen(inputs, found.result), failures, evidence, width=columns())
    said = saved(inputs, found.result, place) if place is not None else NOT_SAVED
    if json:
        document = {**shown.get("document", {}), **outlook.document}
        typer.echo(
            recommend_json(inputs, found.result, seconds=found.seconds, near=near, more=document)
        )
    else:
        lines, others = shown.get("lines", ()), shown.get("others", "")
        tuned = adapters_beside(inputs, found.result.ranked[0].layout)
        screen = recommend_screen(
            *(inputs, found.result),
            width=columns(),
            near=near,
            more=lines,
            others=blocks(others, wrapped(tuned, width=columns())),
        )
        typer.echo(blocks(screen, outlook.screen))
    note(said)


def by_goal(
    objective: ObjectiveOptions,
    bill: BillOptions,
    counts: Counts | None,
    *,
    is_fewest: bool,
    failures: Failures | None,
    **question: Any,
) -> tuple[Inputs, Found, dict[str, Any]]:
    """The best answer by an objective, on one number of GPUs or on that which is best, and what is
    to be shown of it. Raises NoFeasibleLayout where nothing fits, or nothing ends in time."""
    from fsdpplan.cli.resolve import goal as goals
    from fsdpplan.cli.views import goal as views

    goal = goals.Goal(
        bill=bill,
        objective=objective.objective,
        today=date.today(),
        failures=failures,
        ledger=question["evidence"],
    )
    is_open = counts is not None or (
        question["cluster"].gpus is None and goal.is_open and not is_fewest
    )
    number = len(counts.numbers) if counts else 0 if is_open or is_fewest else 1
    goals.require_whole(goal, question["training"], counts=number)
    question["training"] = goals.with_epochs(question["training"], bill)
    if counts is not None and is_fewest:
        raise SpecError("--min-gpus asks how many, and --gpus says it: leave one of them out")
    exact = goal.objective == "fewest-gpus" and bill.deadline is None and counts is None
    if is_open and not exact:
        answer = goals.on_the_best(goal, counts, **question)
    else:
        inputs = (on_the_fewest if is_fewest or exact else resolve)(**question)
        known = goals.terms_of(goal, inputs.cluster)  # what is not known is refused before a search
        answer = goals.answered(goal, inputs, search(inputs), known)
    if answer.chosen is None:
        raise views.too_late(answer)
    best, terms = answer.best, answer.terms
    shown = {
        "lines": views.bill_lines(best.offer.bill, goal, terms.value),
        "others": views.answer_screen(answer, width=columns()),
        "document": {"goal": views.answer_document(answer)},
    }
    inputs = replace(
        best.inputs,
        assumptions=(
            *best.inputs.assumptions,
            *goals.shared_words(goal, answer),
            *terms.assumptions,
        ),
        warnings=(*best.inputs.warnings, *terms.warnings),
        terms=terms.value if bill.is_asked else None,
    )
    return inputs, best.found, shown


def _chosen(inputs: Inputs, result: SearchResult) -> OneLayout:
    chosen = result.ranked[0]
    return OneLayout(
        inputs=inputs,
        layout=chosen.layout,
        estimate=chosen.estimate,
        available_bytes=available_bytes(cluster=inputs.cluster, training=inputs.training),
    )


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
    lacking = unbuilt_words(model=inputs.model, seq_len=inputs.training.seq_len)
    if lacking and program == "reference":
        return (
            f"saved as {place}; fsdpplan's own trainer cannot build {lacking}: launch a "
            f"program of yours by fsdpplan emit-launch{shown} --script train.py"
        )
    if unsplit := optimizer_problem(case_of(inputs, chosen.layout)):
        return f"saved as {place}; {unsplit}"
    if not chosen.estimate.runnable and not lacking:
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

"""What a report holds beside the plan itself: what has to be searched, read or learnt again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from fsdpplan.cli.options.files import EvidenceOptions
from fsdpplan.cli.options.goal import BillOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.report import ContentOptions
from fsdpplan.cli.resolve.again import Asked, as_planned, asked_again, machines_by_number
from fsdpplan.cli.resolve.evidence import kept_rows, own_runs
from fsdpplan.cli.resolve.found import best_of, priced, searched
from fsdpplan.cli.resolve.goal import Goal, numbers_of, require_whole, terms_of
from fsdpplan.cli.resolve.inputs import Inputs, question_of
from fsdpplan.cost.bill import bill
from fsdpplan.cost.estimate import estimate
from fsdpplan.errors import SpecError
from fsdpplan.files.ledger import same_run
from fsdpplan.files.table import path_text
from fsdpplan.report.after_a_run import after_sections
from fsdpplan.report.frontier import explored, frontier_section
from fsdpplan.report.hangs_on import Followed, hangs_on_section
from fsdpplan.report.how_it_went import Learnt
from fsdpplan.report.scaling import bill_section, scaling_section
from fsdpplan.report.values import Section
from fsdpplan.run.aftermath import Aftermath, aftermath
from fsdpplan.run.ledger import finished_row
from fsdpplan.run.plans import read_plan
from fsdpplan.search.advice.measurement import measurements
from fsdpplan.search.advice.sensitivity import sensitivities
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question
from fsdpplan.search.scaling import Curve, Point, knee_words
from fsdpplan.spec.ledger import LEAST_STEPS, LedgerRow
from fsdpplan.spec.plan import Estimate, Plan, Terms
from fsdpplan.units import format_percent
from fsdpplan.validate.calibrate.calibrated import measured_error

NEWEST = Path("newest")
"""The last run of this folder, for a run."""

LEAST_OFF = 0.005
"""By which the plan's step is said to be another one today."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A plan, what a run of it came to, and what was found out beside it."""

    plan: Plan
    about: str
    """The file."""
    came_of: tuple[Section, ...]
    more: tuple[Section, ...]


def content(
    place: str,
    options: ContentOptions,
    bills: BillOptions,
    evidence: EvidenceOptions,
    *,
    named: bool,
    say: Callable[[str], None],
) -> Content:
    """All that was asked for. `place` is a saved plan, `named` by the user or not; `say` is told
    what takes time. Raises SpecError where something that was asked for cannot be had."""
    left: Aftermath | None = None
    if options.run is not None:
        plan_file = Path(place) if named else None
        run = None if options.run == NEWEST else options.run
        left = aftermath(run, plan_file=plan_file, folder=Path.cwd())
    plan = left.run.plan if left is not None and not named else read_plan(place)
    if options.tokens is not None:
        plan = replace(plan, training=replace(plan.training, tokens=options.tokens))
    goal = Goal(bill=bills, today=date.today())
    require_whole(goal, TrainingOptions(tokens=plan.training.tokens), counts=1)
    came_of: tuple[Section, ...] = ()
    if left is not None:
        came_of = after_sections(left, _learnt(left, evidence))
    inputs = as_planned(plan, evidence)
    terms = terms_of(goal, plan.cluster, known=plan.terms).value
    found = (
        *_bill(plan, goal, terms),
        *_scaling(plan, options, terms, evidence, say),
        *([] if options.quick else _others(plan, inputs, say)),
    )
    return Content(
        plan=plan,
        about=path_text(place if left is None or named else left.folder),
        came_of=came_of,
        more=found,
    )


def _bill(plan: Plan, goal: Goal, terms: Terms) -> Iterator[Section]:
    tokens = plan.training.tokens
    if tokens is None:
        return
    training = replace(plan.training, tokens=round(tokens * (goal.bill.epochs or 1)))
    found = bill(replace(plan.case, training=training), plan.estimate, terms)
    section = bill_section(found, chance=terms.deadline_chance or goal.chance)
    if section is not None:
        yield section


def _others(plan: Plan, inputs: Inputs, say: Callable[[str], None]) -> Iterator[Section]:
    """Other layouts of the plan's question, and what the plan hangs on."""
    found = explored(plan, question_of(inputs), say=say)
    section = frontier_section(plan, found)
    subject = priced(inputs, plan.layout)
    if section is not None:
        other = _other_today(plan.estimate, subject.estimate)
        yield replace(section, says=f"{section.says}{other}")
    say("what each input changes")
    device = plan.cluster.device
    hangs_on = hangs_on_section(
        Followed(
            subject=subject,
            found=sensitivities(subject.case, resized=machines_by_number(plan, ClusterOptions())),
            measurements=measurements(
                subject.case,
                # CPU processes keep their errors, whatever is measured
                measured=measured_error() if device.kind == "cuda" else device.error,
                told_stack=inputs.learner is not None,
            ),
            sources=dict(plan.sources),
        )
    )
    if hangs_on is not None:
        yield hangs_on


def _other_today(then: Estimate, now: Estimate) -> str:
    """That the others are priced otherwise than the plan was."""
    off = now.step_seconds.expected / then.step_seconds.expected - 1
    if abs(off) < LEAST_OFF:
        return ""
    return (
        f" This plan is drawn as it was predicted when it was made; this version, with what your "
        f"runs say today, would say {format_percent(abs(off))} {'more' if off > 0 else 'less'}, "
        "and the others are priced so."
    )


def _scaling(
    plan: Plan,
    options: ContentOptions,
    terms: Terms,
    evidence: EvidenceOptions,
    say: Callable[[str], None],
) -> Iterator[Section]:
    """The plan's question, with its global batch, on other numbers of GPUs."""
    if options.gpus is None:
        return
    points = []
    for gpus in numbers_of(options.gpus, plan.cluster.gpus_per_node):
        say(f"{gpus:,} GPUs")
        points.append(_point(plan, gpus, evidence))
    curve = Curve(
        hardware=plan.cluster.name,
        scaling="strong",
        points=tuple(points),
        price_per_gpu_hour=terms.price,
    )
    section = scaling_section([curve])
    if section is None:
        raise SpecError(
            f"nothing fits on any of these numbers of GPUs; {points[-1].problem}: type other --gpus"
        )
    yield replace(section, says=knee_words(curve))


def _point(plan: Plan, gpus: int, evidence: EvidenceOptions) -> Point:
    batch = plan.training.global_batch
    try:
        inputs = asked_again(
            plan,
            Asked(
                model=ModelOptions(),
                cluster=ClusterOptions(gpus=gpus),
                training=TrainingOptions(global_batch=batch, tokens=plan.training.tokens),
                layout=LayoutOptions(),
                torch=TorchOptions(),
                evidence=evidence,
            ),
        )
        found = searched(inputs)
    except SpecError as error:
        return Point(gpus=gpus, global_batch=batch, problem=str(error))
    best = best_of(inputs, found)
    return Point(
        gpus=gpus,
        global_batch=batch,
        priced=best,
        problem="" if best else "no layout that is legal fits in memory",
    )


def _learnt(left: Aftermath, evidence: EvidenceOptions) -> Learnt:
    """What the ledger says of the plan's layout without this run, and with it."""
    case = left.run.plan.case
    plain = estimate(case)
    nothing = Learnt(plain=plain, before=plain, after=plain, runs_before=0, runs_after=0)
    ended = left.ending
    row = finished_row(left.run, folder=left.folder, exit_code=ended.exit_code if ended else 0)
    if not row.tells_speed:
        return replace(
            nothing,
            problem=f"this run teaches nothing of speed: {row.observed.measured_steps} steps were "
            f"measured, and {LEAST_STEPS} on sound nodes are the least",
        )
    if case.training.precision_switch != "none":
        return replace(
            nothing,
            problem="this run teaches nothing of speed: runs tell of one precision, and this "
            "changes",
        )
    same = same_run(row)
    before = [
        one
        for one in kept_rows(evidence)
        if not (isinstance(one, LedgerRow) and same_run(one) == same)
    ]
    asked = Question(model=case.model, cluster=case.cluster, training=case.training, pins=Pins())
    known = [
        own_runs(rows, [], asked, software=evidence.software)[0].learner
        for rows in (before, [*before, row])
    ]
    then, now = (plain if one is None else one.corrected(case.layout, plain) for one in known)
    runs = [0 if one is None else one.runs for one in known]
    return replace(nothing, before=then, after=now, runs_before=runs[0], runs_after=runs[1])

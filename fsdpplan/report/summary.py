"""Summary: what is trained on what, how long, how sure, whether it fits, and what to watch, for
somebody who decides."""

from __future__ import annotations

from fsdpplan.cost.band import expected_peak_bytes
from fsdpplan.cost.bill import bill
from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.report.values import Chart, Fact, Facts, Section, Table, Tone, Words, band_words, cell
from fsdpplan.search.advice.words import EVIDENCE, chance_words, degrees, describe
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Estimate, MemoryBreakdown, Plan, Terms
from fsdpplan.units import (
    format_count,
    format_gib,
    format_gpu_hours,
    format_money,
    format_percent,
    format_seconds,
)

WIDE_FACTOR = 1.5
"""An end of the band that far off is told as a factor: a share less might be below nothing."""

UNNAMED = "custom"
"""What a model is called whose shapes were typed."""

SURE_FRACTION = 0.9
"""A chance to fit from which it is said to."""


def subtitle(plan: Plan) -> str:
    """The question in a line."""
    cluster, training = plan.cluster, plan.training
    device = cluster.device
    where = f"{cluster.gpus:,} × {device.name}"
    if device.kind == "cpu":
        where = device.counted(cluster.gpus)
    nodes = "one node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    return (
        f"{where} on {nodes} of {cluster.name}; "
        f"{training.global_batch:,} sequences of {training.seq_len:,} tokens a step, "
        f"{training.precision}"
    )


def title(plan: Plan) -> str:
    """What is trained."""
    return f"Training {_model_name(plan.model)}"


def summary_section(plan: Plan) -> Section:
    """The section that comes first."""
    return Section(
        name="summary",
        title="In short",
        blocks=(
            Words((_sentence(plan), _layout_sentence(plan))),
            *([Facts(_whole(plan), large=True)] if plan.training.steps else []),
            Facts((_step(plan), _throughput(plan), _fits(plan), _limit(plan), *_watch(plan))),
            _where_time_goes(plan.estimate),
        ),
    )


def _sentence(plan: Plan) -> str:
    step, cluster = plan.estimate.step_seconds, plan.cluster
    sure = {
        "measured": "It rests on measurements of this very hardware.",
        "fitted": "It rests on published runs of such hardware, not on measurements of yours.",
        "datasheet": "It rests on the hardware's datasheet alone: measure before you rely on it.",
    }[cluster.device.evidence]
    learned = plan.estimate.learned
    if learned is not None and learned.runs:
        sure = f"It rests on {learned.runs} of your own runs, which are like it."
    return (
        f"One step of {_model_name(plan.model)} ({_parameters(plan.model)}) on "
        f"{cluster.device.counted(cluster.gpus)} is predicted to take "
        f"{format_seconds(step.expected)}; in four cases of five it takes {band_words(step)}. "
        f"{sure}"
    )


def _model_name(model: Model) -> str:
    """Its name; of shapes that were typed, that it has none."""
    return "a model of your own" if model.name == UNNAMED else model.name


def _parameters(model: Model) -> str:
    total = f"{format_count(parameter_count(model))} parameters"
    if model.experts is None:
        return total
    return f"{total}, {format_count(active_parameter_count(model))} of them active for a token"


def _layout_sentence(plan: Plan) -> str:
    return (
        f"How the work is spread: {describe(plan.layout, plan.cluster)} ({degrees(plan.layout)})."
    )


def _step(plan: Plan) -> Fact:
    step, evidence = plan.estimate.step_seconds, plan.cluster.device.evidence
    learned = plan.estimate.learned
    grounds = EVIDENCE[evidence]
    if learned is not None and learned.runs:
        grounds = f"{learned.runs} of your runs are like it"
    return Fact(
        name="One step",
        value=format_seconds(step.expected),
        exact=step.expected,
        note=f"{_width(plan)}: {band_words(step)} in four cases of five; {grounds}",
        tone="watch" if evidence == "datasheet" else "plain",
    )


def _width(plan: Plan) -> str:
    """Half the width of the band, or how far off its farther end is."""
    step = plan.estimate.step_seconds
    factor = max(step.upper / step.expected, step.expected / step.lower)
    if factor < WIDE_FACTOR:
        return f"± {(step.upper - step.lower) / 2 / step.expected * 100:.0f} %"
    return f"within a factor of {factor:.1f}"


def _whole(plan: Plan) -> tuple[Fact, ...]:
    """Time and money of the whole training."""
    found = bill(plan.case, plan.estimate, plan.terms or Terms())
    assert found is not None  # its steps are said
    assert plan.training.tokens is not None
    facts = [
        Fact(
            name="The whole training",
            value=format_seconds(found.seconds.expected),
            exact=found.seconds.expected,
            note=f"{format_count(plan.training.tokens)} tokens in {found.steps:,} steps; "
            f"{band_words(found.seconds)}, without failures, restarts and evaluation",
        )
    ]
    hours = format_gpu_hours(found.gpu_hours.expected)
    if found.cost is None:
        facts.append(
            Fact(
                name="GPU hours",
                value=hours,
                exact=found.gpu_hours.expected,
                note=f"on {found.gpus:,} GPUs; a --price per GPU hour makes it money",
            )
        )
    else:
        lower, upper = (
            format_money(end, beside=found.cost.expected)
            for end in (found.cost.lower, found.cost.upper)
        )
        facts.append(
            Fact(
                name="Cost",
                value=format_money(found.cost.expected),
                exact=found.cost.expected,
                note=f"{lower} to {upper}; {hours} GPU hours",
            )
        )
    return tuple(facts)


def _throughput(plan: Plan) -> Fact:
    found = plan.estimate
    return Fact(
        name="Tokens a second",
        value=f"{found.tokens_per_second:,.0f}",
        exact=found.tokens_per_second,
        note=f"{found.tokens_per_second_per_gpu:,.0f} on each; MFU "
        f"{format_percent(found.mfu_fraction)}: the share of {plan.training.peak_words} that "
        "trains",
    )


def _fits(plan: Plan) -> Fact:
    memory, device = plan.estimate.memory, plan.cluster.device
    needed = round(expected_peak_bytes(memory, device))
    chance = memory.fits_fraction
    tone: Tone = "good" if needed <= device.memory_bytes else "bad"
    if chance is not None:
        tone = "good" if chance >= SURE_FRACTION else "watch" if chance >= 0.5 else "bad"
    return Fact(
        name="Fits in memory",
        value=_fits_words(memory, needed <= device.memory_bytes),
        exact=chance,
        note=f"{format_gib(needed)} of {format_gib(device.memory_bytes)} on the fullest, in "
        f"{memory.peak_phase}",
        tone=tone,
    )


def _fits_words(memory: MemoryBreakdown, fits: bool) -> str:
    if memory.fits_fraction is None:
        return "yes" if fits else "no"
    return chance_words(memory.fits_fraction)


def _limit(plan: Plan) -> Fact:
    found = plan.estimate
    share = found.time.compute_seconds / found.time.total_seconds
    return Fact(
        name="What limits it",
        value=found.bottleneck,
        note=f"{format_percent(share)} of a step are computing",
    )


def _watch(plan: Plan) -> tuple[Fact, ...]:
    """How many there are, and the first; nothing where there are none."""
    number = len(plan.rules) + len(plan.warnings)
    if not number:
        return ()
    first = plan.rules[0].says if plan.rules else plan.warnings[0]
    return (
        Fact(
            name="Warnings",
            value=str(number),
            exact=number,
            note=first[:1].upper() + first[1:],
            tone="watch",
        ),
    )


COLORS = {
    "compute": 0,
    "waits for communication": 5,
    "pipeline bubble": 8,
    "optimizer": 3,
    "host copies": 6,
    "your runs": 7,
}
"""A colour for each part of a step, that of the timeline: numbers of the page's palette."""


def time_terms(found: Estimate) -> dict[str, float]:
    """The parts of a step by the names that people read; they add up to the expected step."""
    time = found.time
    terms = {
        "compute": time.compute_seconds,
        "waits for communication": time.exposed_communication_seconds,
        "pipeline bubble": time.bubble_seconds,
        "optimizer": time.optimizer_seconds,
        "host copies": time.host_seconds,
        "your runs": found.step_seconds.expected - time.total_seconds,
    }
    return {name: value for name, value in terms.items() if abs(value) > 1e-12}


def _where_time_goes(found: Estimate) -> Chart:
    terms = time_terms(found)
    step, worked_out = found.step_seconds.expected, found.time.total_seconds
    largest = max(terms, key=lambda name: terms[name])
    title = f"Where a step of {format_seconds(step)} goes"
    if abs(worked_out - step) > 1e-6 * step:
        title = (
            f"Where a step of {format_seconds(worked_out)} goes, which your runs make "
            f"{format_seconds(step)}"
        )
    return Chart(
        name="step",
        kind="bars",
        title=title,
        says=f"Most of it is {largest}: {format_seconds(terms[largest])}, "
        f"{format_percent(terms[largest] / worked_out)}.",
        data={
            "unit": "seconds",
            "categories": ["one step"],
            "series": [
                {"name": name, "color": COLORS[name], "values": [value]}
                for name, value in terms.items()
                if value > 0
            ],
        },
        table=Table(
            caption="Parts of a step",
            columns=("part", "time", "share"),
            rows=tuple(
                (name, cell(value, "seconds"), cell(value / step, "fraction"))
                for name, value in (*terms.items(), ("together", step))
            ),
            folded=True,
        ),
    )

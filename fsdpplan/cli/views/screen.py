"""One layout in full: its prediction, the terms of its step and memory, what was assumed."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpplan.cli.resolve.cluster import why_default
from fsdpplan.cli.resolve.inputs import Inputs, OneLayout
from fsdpplan.cli.views.answer import answer_lines
from fsdpplan.cli.views.render import aligned, beside, blocks, listed, table, wrapped
from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.search.advice.field_rules import shown
from fsdpplan.spec.plan import (
    DEFAULT_SOURCE,
    TORCH_SOURCE,
    BrokenRule,
    CollectiveCost,
    Estimate,
)
from fsdpplan.spec.training import Training, program_named
from fsdpplan.units import format_count, format_gb, format_gib, format_percent, format_seconds

MOST_TERMS = 6
"""Terms of the memory that get a line each; the smaller ones share one."""

RULES_OF_A_PLAN = "fsdpplan explain --rules has all, with their sources"


def estimate_screen(
    one: OneLayout,
    *,
    width: int,
    more: Sequence[tuple[str, str]] = (),
    rest: str = "--json has all",
) -> str:
    """What `estimate` prints; `more` is said of the whole training, `rest` says where all broken
    rules of the field are."""
    return blocks(
        question_line(one.inputs, width),
        answer_lines(one.inputs, one.layout, one.estimate, width, more=more),
        _breakdowns(one.inputs, one.estimate, width),
        _communication(one.estimate.communication, width),
        listed("Assumed", one.inputs.assumptions, width=width),
        warning_lines(one.inputs, width, rest=rest),
    )


def warning_lines(inputs: Inputs, width: int, *, rest: str) -> str:
    """The warnings, the dearest rules of the field that are broken, and where the others are."""
    broken = inputs.rules or ()
    chosen = shown(broken)
    lines = [*inputs.warnings, *map(rule_words, chosen)]
    if more := len(broken) - len(chosen):
        lines.append(f"{more} more: {rest}")
    return listed("Warnings", lines, width=width)


def rule_words(one: BrokenRule) -> str:
    """A broken rule in a sentence: its name, its number, what to do."""
    return f"{one.rule}: {one.says}; {one.advice}"


def question_line(inputs: Inputs, width: int) -> str:
    """The model, the machines and the training, in a sentence."""
    cluster, training = inputs.cluster, inputs.training
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    why = why_default(inputs.sources)
    because = "" if why is None else f"; {why}"
    return wrapped(
        f"{_model(inputs)} on {cluster.gpus:,} x {cluster.device.name} ({nodes}, "
        f"{cluster.name}{because}), {_precision(inputs)}, {training.global_batch:,} x "
        f"{training.seq_len:,} tokens per step{_packed(training)}",
        width=width,
    )


def _model(inputs: Inputs) -> str:
    """Its name and all its parameters, and of a mixture of experts those that a token meets."""
    model = inputs.model
    total = f"{format_count(parameter_count(model))} parameters"
    if model.experts is not None:
        total += f", {format_count(active_parameter_count(model))} active by "
        total += f"{model.experts.active} of {model.experts.experts} experts"
    return f"{model.name} ({total})"


def _packed(training: Training) -> str:
    if not training.packed:
        return ""
    mean = training.mean_document_tokens
    return ", documents apart" + ("" if mean is None else f" ({mean:,} tokens in the mean)")


def _precision(inputs: Inputs) -> str:
    training = inputs.training
    software = "" if training.runtime == "fsdp2" else f" with {training.traits.words}"
    if training.program != "reference":
        software = f", for {program_named(training.program).words}"
    if dict(inputs.sources).get(TORCH_SOURCE, DEFAULT_SOURCE) != DEFAULT_SOURCE:
        software += f", torch {training.torch}"
    if training.param_dtype == "bf16":
        software = f", parameters and moments kept in it{software}"
    if training.adapters is not None:
        software = f", {training.adapters.words}{software}"
    first, *later = (_format(training, each.precision) for _, each in training.phases)
    return f"{first}{_from_step(training, later)}{software}"


def _format(training: Training, precision: str) -> str:
    if precision != "fp8":
        return precision
    gathered = ", weights gathered in fp8" if training.fp8_all_gather else ""
    return f"fp8 ({training.fp8_recipe}{gathered})"


def _from_step(training: Training, later: list[str]) -> str:
    """What the rest of the run is in; nothing where it is all in one precision."""
    if not later:
        return ""
    return f", and behind {format_percent(training.phases[0][0])} of the steps {later[0]}"


def _breakdowns(inputs: Inputs, estimate: Estimate, width: int) -> str:
    return beside(_time(estimate), _memory(inputs, estimate, width), width=width)


def _time(estimate: Estimate) -> str:
    time = estimate.time
    step = estimate.step_seconds.expected or 1.0
    rows = [
        (name, format_seconds(seconds), f"{100 * seconds / step:.0f} %")
        for name, seconds in sorted(time.terms.items(), key=lambda term: -term[1])
        if seconds > 0
    ]
    if estimate.learned is not None:
        more = estimate.step_seconds.expected - time.total_seconds
        sign = "-" if more < 0 else "+"
        rows.append(
            ("your runs", f"{sign}{format_seconds(abs(more))}", f"{100 * more / step:+.0f} %")
        )
    return f"Time of a step\n{aligned(rows, align=('left', 'right', 'right'))}"


def _memory(inputs: Inputs, estimate: Estimate, width: int) -> str:
    memory = estimate.memory
    ordered = sorted(memory.terms.items(), key=lambda term: -term[1])
    rest = sum(size for _, size in ordered[MOST_TERMS:])
    shown = [*ordered[:MOST_TERMS], ("all else", rest)]
    rows = [(name, format_gib(size)) for name, size in shown if size > 0]
    heading = wrapped(
        f"Memory of the fullest {inputs.cluster.device.unit} (peak in {memory.peak_phase})",
        width=width,
    )
    return f"{heading}\n{aligned(rows, align=('left', 'right'))}"


def _communication(costs: tuple[CollectiveCost, ...], width: int) -> str:
    if not costs:
        return ""
    rows = [
        (
            cost.collective,
            f"{cost.axis} {cost.ranks}",
            cost.level,
            f"{cost.count:,}",
            format_gb(cost.bytes),
            format_seconds(cost.seconds),
            format_seconds(cost.exposed_seconds),
        )
        for cost in costs
    ]
    headers = ("collective", "over ranks", "by", "calls", "volume", "time", "exposed")
    align = ("left", "left", "left", "right", "right", "right", "right")
    return "Collectives of a step, each rank\n" + table(
        rows, headers=headers, align=align, width=width
    )

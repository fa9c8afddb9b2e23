"""The answer on one screen: what was chosen, what it costs, what lost, what was assumed."""

from __future__ import annotations

from fsdpplan.cli.resolve.inputs import Inputs, OneLayout
from fsdpplan.cli.views.answer import answer_lines, rejections, unit
from fsdpplan.cli.views.ranks import ranked_lines, why, worth_running
from fsdpplan.cli.views.render import aligned, beside, blocks, listed, table, wrapped
from fsdpplan.cost.params import active_parameter_count, parameter_count
from fsdpplan.search.result import SearchResult
from fsdpplan.spec.estimate import CollectiveCost, Estimate
from fsdpplan.spec.plan import DEFAULT_SOURCE, TORCH_SOURCE
from fsdpplan.spec.program import program_named
from fsdpplan.units import format_count, format_gb, format_gib, format_seconds

MOST_TERMS = 6
"""Terms of the memory that get a line each; the smaller ones share one."""

RUNNERS_UP = "Runners-up, and why they are not first"


def recommend_screen(inputs: Inputs, result: SearchResult, *, width: int) -> str:
    """What `recommend` prints when something fits."""
    chosen = result.ranked[0]
    return blocks(
        _question(inputs, width),
        answer_lines(inputs, chosen.layout, chosen.estimate, width),
        wrapped(why(result), width=width),
        wrapped(worth_running(result), width=width),
        _breakdowns(inputs, chosen.estimate, width),
        ranked_lines(RUNNERS_UP, result, width),
        _searched(result, width),
        _assumed(inputs, width),
    )


def estimate_screen(one: OneLayout, *, width: int) -> str:
    """What `estimate` prints."""
    return blocks(
        _question(one.inputs, width),
        answer_lines(one.inputs, one.layout, one.estimate, width),
        _breakdowns(one.inputs, one.estimate, width),
        _communication(one.estimate.communication, width),
        _assumed(one.inputs, width),
    )


def _assumed(inputs: Inputs, width: int) -> str:
    """What was taken for granted, and what to look at."""
    return blocks(
        listed("Assumed", inputs.assumptions, width=width),
        listed("Warnings", inputs.warnings, width=width),
    )


def _question(inputs: Inputs, width: int) -> str:
    model, cluster, training = inputs.model, inputs.cluster, inputs.training
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.gpus_per_node}"
    return "\n".join(
        (
            wrapped(
                f"{model.name}, {_parameters(inputs)}, on "
                f"{cluster.name}: {nodes} x {cluster.device.name}",
                width=width,
            ),
            wrapped(
                f"{training.global_batch:,} sequences of {training.seq_len:,} tokens a step "
                f"({format_count(training.tokens_per_step)} tokens), {_precision(inputs)}",
                width=width,
            ),
        )
    )


def _parameters(inputs: Inputs) -> str:
    """All parameters, and of a model with experts those that a token meets."""
    model = inputs.model
    total = f"{format_count(parameter_count(model))} parameters"
    if model.experts is None:
        return total
    return (
        f"{total}, {format_count(active_parameter_count(model))} active ({model.experts.active} of "
        f"{model.experts.experts} experts)"
    )


def _precision(inputs: Inputs) -> str:
    training = inputs.training
    software = "" if training.runtime == "fsdp2" else f" with {training.traits.words}"
    if training.program != "reference":
        software = f", for {program_named(training.program).words}"
    if dict(inputs.sources).get(TORCH_SOURCE, DEFAULT_SOURCE) != DEFAULT_SOURCE:
        software += f", torch {training.torch}"
    if training.precision != "fp8":
        return f"{training.precision}{software}"
    gathered = ", weights gathered in fp8" if training.fp8_all_gather else ""
    return f"fp8 ({training.fp8_recipe}{gathered}){software}"


def _breakdowns(inputs: Inputs, estimate: Estimate, width: int) -> str:
    return beside(_time(estimate), _memory(inputs, estimate, width), width=width)


def _time(estimate: Estimate) -> str:
    time = estimate.time
    terms = {
        "compute": time.compute_seconds,
        "communication": time.exposed_communication_seconds,
        "pipeline bubble": time.bubble_seconds,
        "optimizer": time.optimizer_seconds,
    }
    step = estimate.step_seconds.expected or 1.0
    rows = [
        (name, format_seconds(seconds), f"{100 * seconds / step:.0f} %")
        for name, seconds in sorted(terms.items(), key=lambda term: -term[1])
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
    terms = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "gathered parameters": memory.unsharded_parameters_bytes,
        "unreduced gradients": memory.unsharded_gradients_bytes,
        "activations": memory.activations_bytes,
        "logits and loss": memory.logits_bytes,
        "temporaries": memory.temporaries_bytes,
        "allocator reserve": memory.reserved_overhead_bytes,
        "CUDA and NCCL": memory.context_bytes,
    }
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    rest = sum(size for _, size in ordered[MOST_TERMS:])
    shown = [*ordered[:MOST_TERMS], ("all else", rest)]
    rows = [(name, format_gib(size)) for name, size in shown if size > 0]
    heading = wrapped(
        f"Memory of the fullest {unit(inputs)} (peak in {memory.peak_phase})", width=width
    )
    return f"{heading}\n{aligned(rows, align=('left', 'right'))}"


def _searched(result: SearchResult, width: int) -> str:
    lost = f"; slower than a bound allows: {result.pruned:,}" if result.pruned else ""
    lost += f"; rejected: {rejections(result.rejected)}" if result.rejected else ""
    return wrapped(
        f"Searched {result.candidates:,} layouts: {result.feasible:,} legal and fitting{lost}.",
        width=width,
    )


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

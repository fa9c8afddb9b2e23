"""The answer on one screen: what was chosen, what it costs, what lost, what was assumed."""

from __future__ import annotations

from fsdpplan.cli.answer import OneLayout, rejections
from fsdpplan.cli.inputs import Inputs
from fsdpplan.cli.render import aligned, beside, blocks, facts, listed, table, wrapped
from fsdpplan.cost.memory import available_bytes
from fsdpplan.cost.params import parameter_count
from fsdpplan.search.result import SearchResult
from fsdpplan.search.words import describe
from fsdpplan.spec.estimate import CollectiveCost, Estimate
from fsdpplan.spec.layout import MESH_AXES, Layout
from fsdpplan.spec.plan import RankedLayout
from fsdpplan.units import (
    format_count,
    format_gb,
    format_gib,
    format_percent,
    format_seconds,
)

MOST_TERMS = 6
"""Terms of the memory that get a line each; the smaller ones share one."""
MOST_RUNNERS_UP = 4
RUNNERS_UP = "Runners-up, and what they lose to rank 1"
LEAST_GAIN_FRACTION = 0.01
"""A layout that cannot run yet is worth a place of its own from this gain on."""


def recommend_screen(inputs: Inputs, result: SearchResult, *, width: int) -> str:
    """What `recommend` prints when something fits."""
    chosen = result.best_runnable or result.ranked[0]
    faster = _faster(result, chosen)
    others = [ranked for ranked in result.ranked if ranked not in (chosen, *faster)]
    return blocks(
        _question(inputs, width),
        _answer(inputs, chosen.layout, chosen.estimate, width),
        wrapped(_why(chosen), width=width),
        _breakdowns(inputs, chosen.estimate, width),
        _listed("Faster, but today's trainer cannot run it", faster, chosen, width),
        _listed(RUNNERS_UP, others[:MOST_RUNNERS_UP], chosen, width),
        _searched(result, width),
        _assumed(inputs, width),
    )


def estimate_screen(one: OneLayout, *, width: int) -> str:
    """What `estimate` prints."""
    return blocks(
        _question(one.inputs, width),
        _answer(one.inputs, one.layout, one.estimate, width),
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
                f"{model.name}, {format_count(parameter_count(model))} parameters, on "
                f"{cluster.name}: {nodes} x {cluster.device.name}",
                width=width,
            ),
            wrapped(
                f"{training.global_batch:,} sequences of {training.seq_len:,} tokens a step "
                f"({format_count(training.tokens_per_step)} tokens), {training.precision}",
                width=width,
            ),
        )
    )


def _answer(inputs: Inputs, layout: Layout, estimate: Estimate, width: int) -> str:
    step, usable = (
        estimate.step_seconds,
        available_bytes(cluster=inputs.cluster, training=inputs.training),
    )
    needed = estimate.memory.peak_device_bytes
    fit = "" if needed <= usable else f"; DOES NOT FIT: {format_gib(needed - usable)} too much"
    pairs = [
        ("degrees", degrees(layout)),
        ("policy", policy(layout)),
        ("batch", _batch(layout)),
        ("step", f"{format_seconds(step.expected)} (80 % band {_band(estimate)})"),
        (
            "tokens/s",
            f"{estimate.tokens_per_second:,.0f} "
            f"({estimate.tokens_per_second_per_gpu:,.0f} per {_unit(inputs)})",
        ),
        (
            "MFU",
            f"{format_percent(estimate.mfu_fraction)} "
            f"(HFU {format_percent(estimate.hfu_fraction)})",
        ),
        *_time_to_train(inputs, estimate),
        (
            "memory",
            f"{format_gib(needed)} of {format_gib(usable)} per {_unit(inputs)} "
            f"({format_gib(inputs.cluster.device.memory_bytes)} less head-room){fit}",
        ),
        ("bottleneck", estimate.bottleneck),
    ]
    heading = wrapped(describe(layout, inputs.cluster), width=width)
    return f"{heading}\n\n{facts(pairs, width=width)}"


def _band(estimate: Estimate) -> str:
    step = estimate.step_seconds
    return f"{format_seconds(step.lower)} to {format_seconds(step.upper)}"


def _time_to_train(inputs: Inputs, estimate: Estimate) -> list[tuple[str, str]]:
    tokens = inputs.training.tokens
    if tokens is None:
        return []
    steps = -(-tokens // inputs.training.tokens_per_step)
    step = estimate.step_seconds
    lower, expected, upper = (
        format_seconds(steps * seconds) for seconds in (step.lower, step.expected, step.upper)
    )
    words = f"{expected} for {format_count(tokens)} tokens in {steps:,} steps"
    return [("to train", f"{words} (80 % band {lower} to {upper})")]


def degrees(layout: Layout) -> str:
    """`dp_replicate 16 x dp_shard 8`: the degrees that are not 1."""
    parts = [f"{axis} {getattr(layout, axis)}" for axis in MESH_AXES if getattr(layout, axis) > 1]
    return " x ".join(parts) or "one rank"


def policy(layout: Layout) -> str:
    """The policies in words, those that do not apply left out."""
    parts: list[str] = [layout.sharding]
    if layout.sharding == "fsdp":
        parts.append(f"reshard {layout.reshard_after_forward}")
        if layout.num_microbatches > 1:
            parts.append(f"gradient sync {layout.gradient_sync}")
    if layout.pp > 1:
        stages = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        parts.append(f"schedule {layout.schedule}{stages}")
    if layout.sequence_parallel:
        parts.append("sequence parallel")
    parts.append(f"checkpointing {layout.activation_checkpointing}")
    parts.append("compiled" if layout.compile else "eager")
    return ", ".join(parts)


def _batch(layout: Layout) -> str:
    passes = f"{layout.num_microbatches} forward pass{'es' if layout.num_microbatches > 1 else ''}"
    return f"micro-batch {layout.micro_batch} x {passes} x {layout.data_parallel} data-parallel"


def _unit(inputs: Inputs) -> str:
    """What one rank runs on."""
    return "GPU" if inputs.cluster.device.kind == "cuda" else "process"


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
    total = time.total_seconds or 1.0
    rows = [
        (name, format_seconds(seconds), f"{100 * seconds / total:.0f} %")
        for name, seconds in sorted(terms.items(), key=lambda term: -term[1])
        if seconds > 0
    ]
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
        f"Memory of the fullest {_unit(inputs)} (peak in {memory.peak_phase})", width=width
    )
    return f"{heading}\n{aligned(rows, align=('left', 'right'))}"


def _faster(result: SearchResult, chosen: RankedLayout) -> list[RankedLayout]:
    """The fastest layout that today's trainer cannot run, where it gains enough."""
    most = chosen.estimate.step_seconds.expected * (1 - LEAST_GAIN_FRACTION)
    gaining = [
        ranked
        for ranked in result.ranked
        if not ranked.estimate.runnable and ranked.estimate.step_seconds.expected < most
    ]
    return sorted(gaining, key=lambda ranked: ranked.estimate.step_seconds.expected)[:1]


def _why(chosen: RankedLayout) -> str:
    if chosen.rank == 1:
        return f"Rank 1: {chosen.reason}."
    return (
        f"Rank {chosen.rank}, the first that today's trainer can run; against rank 1: "
        f"{chosen.reason}."
    )


def _listed(heading: str, others: list[RankedLayout], chosen: RankedLayout, width: int) -> str:
    items = [_other(ranked, chosen, width) for ranked in others]
    return "\n".join([wrapped(heading, width=width), *items]) if items else ""


def _other(ranked: RankedLayout, chosen: RankedLayout, width: int) -> str:
    step = ranked.estimate.step_seconds.expected
    gain = 1 - step / chosen.estimate.step_seconds.expected
    faster = f" ({format_percent(gain)} less)" if gain >= LEAST_GAIN_FRACTION else ""
    memory = format_gib(ranked.estimate.memory.peak_device_bytes)
    words = "; ".join((degrees(ranked.layout), *_differences(ranked.layout, chosen.layout)))
    return "\n".join(
        (
            wrapped(
                f"{format_seconds(step)}{faster}, {memory}: {words}",
                width=width,
                first=f"  {ranked.rank:>2}  ",
            ),
            wrapped(ranked.reason, width=width, first="      "),
        )
    )


POLICIES = {
    "sharding": "sharding",
    "reshard_after_forward": "reshard",
    "gradient_sync": "gradient sync",
    "schedule": "schedule",
    "virtual_stages": "stages a rank",
    "micro_batch": "micro-batch",
    "activation_checkpointing": "checkpointing",
    "compile": "compile",
}
"""Policies of a layout and what to call them."""


def _differences(layout: Layout, other: Layout) -> list[str]:
    """The policies in which `layout` differs from `other`."""
    pairs = ((words, getattr(layout, name), name) for name, words in POLICIES.items())
    return [f"{words} {value}" for words, value, name in pairs if value != getattr(other, name)]


def _searched(result: SearchResult, width: int) -> str:
    lost = f"; rejected: {rejections(result.rejected)}" if result.rejected else ""
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

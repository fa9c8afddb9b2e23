"""The answer: the layout that was chosen in lines of a name and a value, and all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fsdpplan.cli.options.failures import FailureOptions, is_asked
from fsdpplan.cli.options.files import LedgerOptions
from fsdpplan.cli.resolve.inputs import Inputs, OneLayout, case_of
from fsdpplan.cli.views.render import facts, wrapped
from fsdpplan.cost.band import fits_fraction, peak_factor, peak_log_error
from fsdpplan.cost.memory.peak import available_bytes, grows_segments
from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    cluster_document,
    estimate_document,
    layout_document,
    model_document,
    needed_document,
    rules_document,
    training_document,
)
from fsdpplan.search.advice.words import (
    EVIDENCE,
    batch_words,
    chance_words,
    degrees,
    describe,
    policy,
)
from fsdpplan.search.question import NearMiss, SearchResult
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Estimate, LearnedStep, MemoryBreakdown
from fsdpplan.spec.training import Training
from fsdpplan.units import format_count, format_gib, format_percent, format_seconds

LEFT_OUT = (
    "restarts and lost steps, evaluation, waits for data, runs that are thrown away: published "
    "trainings took 1.5 to 2.5 times the GPU hours of their steps alone"
)
"""What days, GPU hours and money of steps do not hold.

Source of the factor: the model cards of Llama 3.1 (1.46 M H100 hours for the 8B, 7.0 M for the 70B,
each of 15 T tokens) over the hours of as many tokens by the steps that are predicted for them.
"""

LEAST_CHANCE_SAID = 0.01
"""To fit, of what is above what is planned with."""

NOTHING_MORE: Mapping[str, Any] = {}


def answer_lines(
    inputs: Inputs,
    layout: Layout,
    estimate: Estimate,
    width: int,
    *,
    more: Sequence[tuple[str, str]] = (),
) -> str:
    """The layout and its prediction; `more` is said of the whole training."""
    step = estimate.step_seconds
    pairs = [
        ("degrees", degrees(layout)),
        ("policy", policy(layout)),
        ("batch", batch_words(layout)),
        (
            "step",
            f"{format_seconds(step.expected)} (80 % band {_band(estimate)}; "
            f"{trust(inputs, estimate)})",
        ),
        (
            "tokens/s",
            f"{estimate.tokens_per_second:,.0f} "
            f"({estimate.tokens_per_second_per_gpu:,.0f} per {inputs.cluster.device.unit})",
        ),
        ("MFU", _mfu(inputs, estimate)),
        *phase_steps(estimate),
        *(whole := [*time_to_train(inputs, estimate), *more]),
        *([("left out", LEFT_OUT)] if whole else []),
        ("memory", _memory_needed(inputs, estimate.memory)),
        *other_peaks(estimate.memory),
        ("bottleneck", estimate.bottleneck),
    ]
    heading = wrapped(describe(layout, inputs.cluster), width=width)
    return f"{heading}\n\n{facts(pairs, width=width)}"


def trust(inputs: Inputs, estimate: Estimate) -> str:
    """What the time of the step rests on."""
    if estimate.learned is not None:
        return _learned(estimate.learned)
    return EVIDENCE[inputs.cluster.device.evidence]


def _mfu(inputs: Inputs, estimate: Estimate) -> str:
    """Useful and executed work over the peak, named; of fp8, whose peak is twice as high, also over
    that of bf16, with which other runs are compared."""
    training, device = inputs.training, inputs.cluster.device
    words = (
        f"{format_percent(estimate.mfu_fraction)} of {training.peak_words} "
        f"(HFU {format_percent(estimate.hfu_fraction)})"
    )
    if training.precision != "fp8" or len(training.phases) > 1:
        return words
    fp8, bf16 = (device.peak_flops_per_second(name) for name in ("fp8", "bf16"))
    return f"{words}, {format_percent(estimate.mfu_fraction * fp8 / bf16)} of the bf16 peak"


def _learned(learned: LearnedStep) -> str:
    """What measured runs say of the step, and how near they are."""
    told = f"from {learned.runs} of your runs" if learned.runs else "none of your runs is like it"
    far = f"; {learned.far}" if learned.far else ""
    without = format_seconds(learned.without.expected)
    return f"{told}, nearest: {learned.nearest}{far}; without them {without}"


def _memory_needed(inputs: Inputs, memory: MemoryBreakdown) -> str:
    """What the fullest rank needs of what there is, as each tool would count it, and the chance
    that it fits."""
    device = inputs.cluster.device
    factor, device_bytes = peak_factor(device), device.memory_bytes
    usable = round(factor * available_bytes(cluster=inputs.cluster, training=inputs.training))
    needed = round(factor * memory.peak_device_bytes)
    chance = fits_words(memory)
    words = (
        f"{f'{chance}: ' if chance else ''}{format_gib(needed)}{_peak_band(memory)} of "
        f"{format_gib(device_bytes)} per {inputs.cluster.device.unit}, of which "
        f"{format_gib(usable)} are planned with; "
        f"{format_gib(memory.peak_allocated_bytes)} allocated, "
        f"{format_gib(memory.peak_reserved_bytes)} reserved"
    )
    if device.kind == "cuda":
        grows = grows_segments(training=inputs.training, device=device)
        words += f" by {'growing' if grows else 'fixed'} segments"
    if device.learned_peaks is not None:
        without = format_gib(memory.peak_device_bytes)
        words += f", as predicted without your runs, in all {without}"
    if len(set(memory.stage_peak_device_bytes)) > 1:
        stages = memory.stage_peak_device_bytes
        fullest = stages.index(max(stages)) + 1
        words += (
            f"; stage {fullest} of {len(stages)} is the fullest, the emptiest needs "
            f"{format_gib(round(factor * min(stages)))}"
        )
    if needed <= usable:
        return words
    unsure = too_unsure(memory, inputs.training, inputs.cluster)
    short = f"{format_gib(needed - usable)} too much"
    return f"{words}; {f'NOT SURE TO FIT: {unsure}' if unsure else f'DOES NOT FIT: {short}'}"


def fits_words(memory: MemoryBreakdown) -> str:
    """`fits 97 %`; nothing where the chance is not known."""
    if memory.fits_fraction is None:
        return ""
    return f"fits {chance_words(memory.fits_fraction)}"


def chance_beyond(needed_bytes: int, cluster: Cluster) -> str:
    """`, which fits 94 %`: that of a peak above what is planned with; empty where it is none to
    speak of, or not known."""
    if not peak_log_error(cluster.device):
        return ""
    chance = fits_fraction(peak_bytes=needed_bytes, device=cluster.device)
    return f", which fits {chance_words(chance)}" if chance >= LEAST_CHANCE_SAID else ""


def too_unsure(memory: MemoryBreakdown, training: Training, cluster: Cluster) -> str:
    """What chance is missing of a layout that leaves the head-room free; empty: none is."""
    free = cluster.device.memory_bytes * (1 - training.headroom_fraction)
    chance, needed = memory.fits_fraction, memory.peak_device_bytes * peak_factor(cluster.device)
    if chance is None or chance >= training.fits_fraction or needed > free:
        return ""
    return f"{chance_words(training.fits_fraction)} are asked for (--fits)"


def _peak_band(memory: MemoryBreakdown) -> str:
    band = memory.peak_device_band_bytes
    if band is None:
        return ""
    lower, upper = (format_gib(round(end)) for end in (band.lower, band.upper))
    return f" (80 % band {lower} to {upper})"


def other_peaks(memory: MemoryBreakdown) -> list[tuple[str, str]]:
    """Peaks outside of the step, where they are higher, and what stands on the host."""
    pairs = []
    for name, peak in (
        ("at start", memory.initialization_peak_bytes),
        ("checkpoint", memory.checkpoint_peak_bytes),
    ):
        if peak > memory.peak_allocated_bytes:
            pairs.append((name, f"{format_gib(peak)} allocated, more than in a step"))
    if memory.host_bytes:
        pairs.append(("host", f"{format_gib(memory.host_bytes)} of host memory each"))
    return pairs


def _band(estimate: Estimate) -> str:
    step = estimate.step_seconds
    lower, upper = (format_seconds(end, beside=step.expected) for end in (step.lower, step.upper))
    return f"{lower} to {upper}"


def phase_steps(estimate: Estimate) -> list[tuple[str, str]]:
    """The step of each part of a run whose precision changes; that above is their mean."""
    if not estimate.phases:
        return []
    first, second = estimate.phases
    at = format_percent(second.from_fraction)
    words = [
        f"{format_seconds(one.step_seconds.expected)} in {one.precision}{where}, "
        f"{format_percent(one.mfu_fraction)} of its peak, {format_gib(one.peak_device_bytes)}"
        for one, where in ((first, f" up to {at} of the steps"), (second, " behind it"))
    ]
    return [("step of each", "; ".join(words))]


def time_to_train(inputs: Inputs, estimate: Estimate) -> list[tuple[str, str]]:
    tokens, steps = inputs.training.tokens, inputs.training.steps
    if tokens is None or steps is None:
        return []
    whole = estimate.step_seconds.scaled(steps)
    lower, expected, upper = (
        format_seconds(seconds, beside=whole.expected)
        for seconds in (whole.lower, whole.expected, whole.upper)
    )
    words = f"{expected} for {format_count(tokens)} tokens in {steps:,} steps"
    return [("to train", f"{words} (80 % band {lower} to {upper})")]


def rejections(rejected: tuple[tuple[str, int], ...]) -> str:
    """Why layouts were rejected, and how many."""
    return "; ".join(f"{reason} ({count:,})" for reason, count in rejected)


def recommend_json(
    inputs: Inputs,
    result: SearchResult,
    *,
    seconds: float,
    near: NearMiss | None = None,
    more: Mapping[str, Any] = NOTHING_MORE,
) -> str:
    """What `recommend --json` prints, with the layout that hardly misses the chance to fit; `more`
    is beside it: time and money, failures."""
    next_run = result.listed.next_run
    return _dumps(
        {
            **_inputs_document(inputs),
            "plans": [
                {
                    "rank": ranked.rank,
                    "layout": layout_document(_named(inputs, ranked.layout)),
                    "torch_needed": needed_document(case_of(inputs, ranked.layout)),
                    "estimate": estimate_document(ranked.estimate),
                    "reason": ranked.reason,
                    "behind_fastest_fraction": result.behind_fastest(ranked),
                    "difference_error_fraction": error,
                }
                for ranked, error in zip(result.ranked, result.listed.errors, strict=True)
            ],
            "fastest_rank": result.listed.fastest_rank,
            "not_told_apart": list(result.listed.tied),
            "next_run": None if next_run is None else asdict(next_run),
            "near_miss": None if near is None else _near_miss_document(inputs, near),
            "search": {
                "candidates": result.candidates,
                "feasible": result.feasible,
                "priced": result.priced,
                "pruned": result.pruned,
                "rejected": dict(result.rejected),
                "seconds": seconds,
            },
            **_said(inputs),
            **more,
        }
    )


def _near_miss_document(inputs: Inputs, near: NearMiss) -> dict[str, Any]:
    return {
        "layout": layout_document(_named(inputs, near.layout)),
        "torch_needed": needed_document(case_of(inputs, near.layout)),
        "estimate": estimate_document(near.estimate),
        "faster_fraction": near.faster_fraction,
    }


def estimate_json(one: OneLayout, *, more: Mapping[str, Any] = NOTHING_MORE) -> str:
    """What `estimate --json` prints; `more` as for `recommend`."""
    return _dumps(estimate_document_of(one, more=more))


def estimate_document_of(
    one: OneLayout, *, more: Mapping[str, Any] = NOTHING_MORE
) -> dict[str, Any]:
    """The estimate's fields beside the layout."""
    return {
        **_inputs_document(one.inputs),
        "layout": layout_document(_named(one.inputs, one.layout)),
        "torch_needed": needed_document(case_of(one.inputs, one.layout)),
        **estimate_document(one.estimate),
        "available_bytes": one.available_bytes,
        "fits": one.fits,
        **_said(one.inputs),
        **more,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What stands behind an answer, on the screen and in its JSON."""

    screen: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)


def goodput_said(
    one: OneLayout, options: FailureOptions, ledger: LedgerOptions, *, width: int
) -> Said:
    """What failures leave of the layout's time, where that was asked or its plan says how machines
    fail."""
    inputs = one.inputs
    if not is_asked(options) and inputs.failures is None:
        return Said()
    from fsdpplan.cli.resolve.failures import outlook
    from fsdpplan.cli.views.failures import outlook_document, outlook_screen

    case = case_of(inputs, one.layout)
    found = outlook(case, one.estimate, inputs.failures, options, ledger=ledger)
    return Said(
        screen=outlook_screen(found, inputs.training, one.estimate, width=width),
        document={"goodput": outlook_document(found)},
    )


def _named(inputs: Inputs, layout: Layout) -> Layout:
    """`layout` as plans have it."""
    return named_stages(model=inputs.model, layout=layout)


def _inputs_document(inputs: Inputs) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(inputs.model),
        "cluster": cluster_document(inputs.cluster),
        "training": training_document(inputs.training),
    }


def _said(inputs: Inputs) -> dict[str, Any]:
    return {
        "sources": dict(inputs.sources),
        "assumptions": list(inputs.assumptions),
        "warnings": list(inputs.warnings),
        "rules": rules_document(inputs.rules),
        **({} if inputs.training.tokens is None else {"left_out": LEFT_OUT}),
    }


def _dumps(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False)

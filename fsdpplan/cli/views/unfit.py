"""What does not fit, in words: by how much, and what to type for something that does."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cli.resolve.inputs import Inputs, OneLayout, question_of
from fsdpplan.cli.views.answer import chance_beyond, fits_words, rejections, too_unsure
from fsdpplan.cost.band import peak_factor
from fsdpplan.errors import NoFeasibleLayout
from fsdpplan.search.advice.remedies import Asked, Tuned, remedy, with_adapters
from fsdpplan.search.advice.words import describe
from fsdpplan.search.nearest import nearest_that_fits
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import NearestMiss, Question, SearchResult
from fsdpplan.spec.layout import Layout
from fsdpplan.units import format_gib, format_seconds


def too_large(one: OneLayout) -> str:
    """That the layout does not fit, and what to type for one that does."""
    inputs, memory = one.inputs, one.estimate.memory
    factor = peak_factor(inputs.cluster.device)
    needed, available = (
        round(factor * memory.peak_device_bytes),
        round(factor * one.available_bytes),
    )
    short = f"{format_gib(needed - available)} too much"
    if unsure := too_unsure(memory, inputs.training, inputs.cluster):
        short = f"{fits_words(memory)}, where {unsure}"
    nearest = nearest_that_fits(question_of(inputs), one.layout, one.estimate)
    if nearest is None:
        free = replace(inputs, pins=Pins())
        advice = (
            f"nor does any other here; with fsdpplan recommend: {remedy_words(free, one.layout)}"
        )
    else:
        step = format_seconds(nearest.estimate.step_seconds.expected)
        peak = format_gib(round(factor * nearest.estimate.memory.peak_device_bytes))
        advice = f"the nearest that fits: {nearest.words} ({step} a step, {peak})"
    room = f"{format_gib(needed)} of {format_gib(available)}"
    return f"the layout needs {room} per GPU, {short}; {advice}"


def nothing_fits(inputs: Inputs, result: SearchResult) -> NoFeasibleLayout:
    """The error of a search that found nothing: why, and what to type."""
    return NoFeasibleLayout(_nothing(inputs, result), rejected=dict(result.rejected))


def why_nothing_fits(inputs: Inputs, result: SearchResult) -> str:
    """The same in one sentence, without what to do about it."""
    if result.nearest_miss is not None:
        return short_miss(inputs, result.nearest_miss)
    return f"no layout is legal: {rejections(result.rejected) or 'no degrees multiply to the GPUs'}"


def _nothing(inputs: Inputs, result: SearchResult) -> str:
    what = f"{inputs.model.name} on {inputs.cluster.gpus} x {inputs.cluster.device.name}"
    reasons = rejections(result.rejected)
    if result.nearest_miss is None:
        advice = f"; {result.example}" if result.example else ""
        counts = reasons or "no degrees multiply to the GPUs"
        return f"no layout of {what} is legal: {counts}{advice}; {remedy_words(inputs, None)}"
    return f"no layout of {what} fits: {_miss(inputs, result.nearest_miss)} (searched: {reasons})"


def _miss(inputs: Inputs, miss: NearestMiss) -> str:
    return f"{short_miss(inputs, miss)}; {remedy_words(inputs, miss.layout)}"


def short_miss(inputs: Inputs, miss: NearestMiss) -> str:
    """By how much the nearest layout does not fit."""
    factor = peak_factor(inputs.cluster.device)
    needed, available = round(factor * miss.needed_bytes), round(factor * miss.available_bytes)
    return (
        f"the nearest ({describe(miss.layout, inputs.cluster)}) needs "
        f"{format_gib(needed)} of {format_gib(available)} per GPU, "
        f"{format_gib(needed - available)} too much"
        f"{chance_beyond(miss.needed_bytes, inputs.cluster)}"
    )


def remedy_words(inputs: Inputs, closest: Layout | None) -> str:
    """What to type, tried by a search of its own."""
    # What fits does not hang on what runs say of times.
    question = replace(question_of(inputs), learner=None)
    found = remedy(Asked(question=question, larger=inputs.larger), closest)
    tuned = _adapters(inputs, question)
    if tuned:
        words = f"adapters fit: {tuned}"
        return f"{words}; {found}" if found else words
    return found or (
        "nothing that was tried fits, neither other policies, recipes and shorter sequences nor "
        "more of these GPUs: use GPUs with more memory, or a smaller --model"
    )


def adapters_beside(inputs: Inputs, chosen: Layout) -> str:
    """Adapters that fit on the GPUs alone, where what is planned has its state on the host; else
    nothing."""
    if chosen.offload == "none":
        return ""
    tuned = _adapters(inputs, replace(question_of(inputs), learner=None))
    return tuned and f"Adapters in the place of all weights need no host memory: {tuned}."


def _adapters(inputs: Inputs, question: Question) -> str:
    """What to type for adapters that fit, each with what it needs and takes."""
    return ", or ".join(_tuned_words(each, inputs) for each in with_adapters(question))


def _tuned_words(tuned: Tuned, inputs: Inputs) -> str:
    """What to type, with what it needs and takes."""
    estimate = tuned.first.estimate
    peak = round(peak_factor(inputs.cluster.device) * estimate.memory.peak_device_bytes)
    step = format_seconds(estimate.step_seconds.expected)
    return f"{tuned.words} ({format_gib(peak)}, {step} a step)"

"""The first screen of a search, which is read in half a minute: the layout and why, its speed,
memory and cost with what they rest on, the alternatives, what was guessed.

The terms of the step and of the peak, with their formulas, are in `explain` and `report`; all that
was found is in `--json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, sqrt

from fsdpplan.cli.resolve.cluster import FOUND_HERE
from fsdpplan.cli.resolve.inputs import Inputs, case_of
from fsdpplan.cli.views.answer import LEFT_OUT, other_peaks, phase_steps, time_to_train, trust
from fsdpplan.cli.views.render import blocks, facts, flowing, rows_with_notes, wrapped
from fsdpplan.cli.views.screen import RULES_OF_A_PLAN, question_line, warning_lines
from fsdpplan.cost.band import NORMAL_80, peak_factor
from fsdpplan.search.advice.measurement import calibrated_log_error
from fsdpplan.search.advice.words import chance_words, compact, describe, settings
from fsdpplan.search.order import is_expert_parallel, is_hybrid
from fsdpplan.search.question import NearMiss, SearchResult
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Estimate, RankedLayout
from fsdpplan.units import format_gib, format_percent, format_seconds

MOST_RUNNERS_UP = 3
"""Rows beside the chosen one. The fastest, the best HSDP and the best with expert parallelism come
before others."""

LEAST_SHARE = 0.005
"""Of a step, for which one of its parts is named."""

HEADERS = ("#", "layout", "step", "memory")
ALIGN = ("right", "left", "right", "right")


def recommend_screen(
    inputs: Inputs,
    result: SearchResult,
    *,
    width: int,
    near: NearMiss | None = None,
    more: Sequence[tuple[str, str]] = (),
    others: str = "",
) -> str:
    """What `recommend` prints when something fits; `near` is the layout that hardly misses the
    chance to fit, `more` is said of the whole training, and `others` of the answers that were
    looked at beside it."""
    chosen = result.ranked[0]
    return blocks(
        question_line(inputs, width),
        _use(inputs, chosen, width),
        facts(_figures(inputs, chosen, more), width=width),
        others,
        _alternatives(inputs, result, near, width),
        _worth_running(result, width),
        flowing("Guessed; correct what is wrong", inputs.assumptions, width=width),
        warning_lines(inputs, width, rest=RULES_OF_A_PLAN),
        wrapped("More: fsdpplan explain (formulas), fsdpplan report (a page), --json", width=width),
    )


def _use(inputs: Inputs, chosen: RankedLayout, width: int) -> str:
    layout, led = chosen.layout, "  USE   "
    words = f"{describe(layout, inputs.cluster)}; {', '.join(settings(layout))}"
    indent = " " * len(led)
    reason = f"{chosen.reason[0].upper()}{chosen.reason[1:]}."
    return "\n".join(
        (wrapped(words, width=width, first=led), wrapped(reason, width=width, first=indent))
    )


def _figures(
    inputs: Inputs, chosen: RankedLayout, more: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    estimate = chosen.estimate
    training = [*time_to_train(inputs, estimate), *more]
    return [
        ("speed", _speed(inputs, estimate)),
        *phase_steps(estimate),
        ("memory", _memory(inputs, estimate)),
        *other_peaks(estimate.memory),
        *training,
        *([("left out", LEFT_OUT)] if training else []),
        ("limit", _limit(estimate)),
        ("trust", _trust(inputs, chosen)),
    ]


def _speed(inputs: Inputs, estimate: Estimate) -> str:
    step = estimate.step_seconds
    ends = _span(*(format_seconds(end, beside=step.expected) for end in (step.lower, step.upper)))
    return (
        f"{format_seconds(step.expected)} per step (80 %: {ends}), "
        f"{estimate.tokens_per_second:,.0f} tokens/s, MFU "
        f"{format_percent(estimate.mfu_fraction)} of {inputs.training.peak_words}"
    )


def _memory(inputs: Inputs, estimate: Estimate) -> str:
    device, memory = inputs.cluster.device, estimate.memory
    needed = format_gib(round(peak_factor(device) * memory.peak_device_bytes))
    words = f"{needed} of {format_gib(device.memory_bytes)} per {device.unit}"
    if memory.peak_device_band_bytes is not None:
        band = memory.peak_device_band_bytes
        words += f" (80 %: {_span(*(format_gib(round(end)) for end in (band.lower, band.upper)))})"
    if memory.fits_fraction is not None:
        words += f", {chance_words(memory.fits_fraction)} sure to fit"
    return words


def _span(lower: str, upper: str) -> str:
    """`64.6 to 83.6 s`: the unit once, where both have it."""
    number, _, unit = lower.partition(" ")
    return f"{number if upper.endswith(f' {unit}') else lower} to {upper}"


def _limit(estimate: Estimate) -> str:
    """Shares of the step, the largest first."""
    whole = estimate.step_seconds.expected or 1.0
    shares = {name: seconds / whole for name, seconds in estimate.time.terms.items()}
    named = sorted(shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in named if share >= LEAST_SHARE)


def _trust(inputs: Inputs, chosen: RankedLayout) -> str:
    estimate = chosen.estimate
    words = trust(inputs, estimate)
    if estimate.learned is not None or inputs.cluster.device.evidence == "measured":
        return words
    if not dict(inputs.sources).get("cluster", "").startswith(FOUND_HERE):
        return f"{words}; a run or fsdpplan calibrate narrows it"
    # only where a GPU is here
    from fsdpplan.topology.measure.settings import DEFAULT_SECONDS
    from fsdpplan.validate.calibrate.calibrated import measured_error

    step = estimate.step_seconds
    after = calibrated_log_error(
        case_of(inputs, chosen.layout), step=step, measured=measured_error()
    )
    now = format_percent(sqrt(step.upper / step.lower) - 1)
    return (
        f"{words}; never measured: `fsdpplan calibrate` ({DEFAULT_SECONDS:.0f} s) would narrow the "
        f"band from ±{now} to ±{format_percent(exp(NORMAL_80 * after) - 1)}"
    )


def runners_up(result: SearchResult) -> list[RankedLayout]:
    """The rows to show beside the chosen one, in their order: the fastest, the best HSDP, the best
    with expert parallelism, then the next best."""
    chosen, *others = result.ranked
    firsts = (
        next((one for one in result.ranked if is_of_kind(one.layout)), chosen)
        for is_of_kind in (is_hybrid, is_expert_parallel)
    )
    wanted = [one for one in (result.fastest or chosen, *firsts, *others) if one is not chosen]
    ranks = list(dict.fromkeys(one.rank for one in wanted))[:MOST_RUNNERS_UP]
    return [one for one in others if one.rank in ranks]


def _alternatives(inputs: Inputs, result: SearchResult, near: NearMiss | None, width: int) -> str:
    chosen, others = result.ranked[0], runners_up(result)
    if not others and near is None:
        return ""
    rows = [_row(inputs, str(one.rank), one.layout, one.estimate) for one in (chosen, *others)]
    notes = ["this one", *(result.listed.notes[one.rank - 1] for one in others)]
    if near is not None:
        rows.append(_row(inputs, "-", near.layout, near.estimate))
        notes.append(_near_miss(near))
    heading = wrapped(f"Alternatives{_ties(result)}", width=width)
    table = rows_with_notes(
        rows,
        notes,
        headers=("#", "layout", "step", "memory"),
        align=("r", "l", "r", "r"),
        width=width,
    )
    return f"{heading}\n{table}"


def _row(inputs: Inputs, rank: str, layout: Layout, estimate: Estimate) -> tuple[str, ...]:
    needed = round(peak_factor(inputs.cluster.device) * estimate.memory.peak_device_bytes)
    step = format_seconds(estimate.step_seconds.expected)
    return (rank, compact(layout), step, format_gib(needed))


def _ties(result: SearchResult) -> str:
    tied = result.listed.tied
    if not tied:
        return ""
    ranks = f"1 to {tied[-1]}" if len(tied) > 1 else "1 and 2"
    return f" (ranks {ranks} tie: inside the model's error)"


def _near_miss(near: NearMiss) -> str:
    """By how much it is faster, and what to type for it."""
    chance = near.estimate.memory.fits_fraction
    assert chance is not None  # what is planned with depends on a chance
    words = chance_words(chance)
    return (
        f"{format_percent(near.faster_fraction)} faster, {words} sure to fit: --fits "
        f"{words.replace(' ', '')} plans it"
    )


def _worth_running(result: SearchResult, width: int) -> str:
    """Which other layout a run would tell most of; empty where none is worth it."""
    found = result.listed.next_run
    if found is None:
        return ""
    layout = result.ranked[found.rank - 1].layout
    words = (
        f"Most worth running beside it: rank {found.rank} ({compact(layout)}), faster with a "
        f"chance of {found.chance:.0%}; a look at it is expected to spare "
        f"{found.expected_gain_fraction:.1%} of every step."
    )
    return wrapped(words, width=width)

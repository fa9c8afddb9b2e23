"""The answer on one screen: what was chosen, what it costs, what lost and why, what was assumed."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpplan.cli.resolve.cluster import why_default
from fsdpplan.cli.resolve.inputs import Inputs, OneLayout
from fsdpplan.cli.views.answer import answer_lines, fits_words, rejections
from fsdpplan.cli.views.render import aligned, beside, blocks, listed, table, wrapped
from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.search.advice.field_rules import shown
from fsdpplan.search.advice.words import chance_words, degrees, differences
from fsdpplan.search.question import LEAST_HEADROOM_FRACTION, NearMiss, SearchResult
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import (
    DEFAULT_SOURCE,
    TORCH_SOURCE,
    BrokenRule,
    CollectiveCost,
    Estimate,
    RankedLayout,
)
from fsdpplan.spec.training import Training, program_named
from fsdpplan.units import format_count, format_gb, format_gib, format_percent, format_seconds

MOST_TERMS = 6
"""Terms of the memory that get a line each; the smaller ones share one."""

RULES_BROKEN = "Rules of the field that it breaks"

RULES_OF_A_PLAN = "fsdpplan explain --rules has all, with their sources"

RUNNERS_UP = "Runners-up, and why they are not first"

NEAR_MISS = "Faster, but less sure to fit than was asked for"

MOST_RUNNERS_UP = 4
"""Besides these the fastest is shown, wherever it stands, and what is most worth running."""


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
        _question(inputs, width),
        answer_lines(inputs, chosen.layout, chosen.estimate, width, more=more),
        others,
        wrapped(why(result), width=width),
        wrapped(worth_running(result), width=width),
        _breakdowns(inputs, chosen.estimate, width),
        rules_lines(inputs, width, rest=RULES_OF_A_PLAN),
        ranked_lines(RUNNERS_UP, result, width),
        "" if near is None else near_miss_lines(near, inputs.training, chosen, width),
        _searched(result, width),
        _assumed(inputs, width),
    )


def estimate_screen(
    one: OneLayout,
    *,
    width: int,
    more: Sequence[tuple[str, str]] = (),
    rest: str = "--json has all",
) -> str:
    """What `estimate` prints; `more` is said of the whole training, `rest` says where all broken
    rules are."""
    return blocks(
        _question(one.inputs, width),
        answer_lines(one.inputs, one.layout, one.estimate, width, more=more),
        _breakdowns(one.inputs, one.estimate, width),
        rules_lines(one.inputs, width, rest=rest),
        _communication(one.estimate.communication, width),
        _assumed(one.inputs, width),
    )


def rules_lines(inputs: Inputs, width: int, *, rest: str) -> str:
    """The dearest rules of the field that are broken, and where the others are."""
    broken = inputs.rules or ()
    chosen = shown(broken)
    lines = listed(RULES_BROKEN, (rule_words(one) for one in chosen), width=width)
    more = len(broken) - len(chosen)
    if not more:
        return lines
    return f"{lines}\n{wrapped(f'{more} more: {rest}', width=width, first='  - ')}"


def rule_words(one: BrokenRule) -> str:
    """A broken rule in a sentence: its name, its number, what to do."""
    return f"{one.rule}: {one.says}; {one.advice}"


def _assumed(inputs: Inputs, width: int) -> str:
    """What was taken for granted, and what to look at."""
    return blocks(
        listed("Assumed", inputs.assumptions, width=width),
        listed("Warnings", inputs.warnings, width=width),
    )


def _question(inputs: Inputs, width: int) -> str:
    model, cluster, training = inputs.model, inputs.cluster, inputs.training
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.gpus_per_node}"
    why = why_default(inputs.sources)
    because = "" if why is None else f" ({why})"
    return "\n".join(
        (
            wrapped(
                f"{model.name}, {_parameters(inputs)}, on "
                f"{cluster.name}{because}: {nodes} x {cluster.device.name}",
                width=width,
            ),
            wrapped(
                f"{training.global_batch:,} sequences of {training.seq_len:,} tokens a step "
                f"({format_count(training.tokens_per_step)} tokens){_packed(training)}, "
                f"{_precision(inputs)}",
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


def why(result: SearchResult) -> str:
    """Why the first is first, and which others the model cannot tell from the fastest."""
    shown = f"Rank 1: {result.ranked[0].reason}."
    tied = result.listed.tied
    if not tied:
        return shown
    ranks = f"1 to {tied[-1]}" if len(tied) > 1 else "1 and 2"
    return (
        f"{shown} Ranks {ranks} are a tie; ties go to the simpler layout: the fewest kinds of "
        "parallelism, then the fewest unusual settings, then "
        f"{LEAST_HEADROOM_FRACTION:.0%} of the memory free, then gathers inside a domain of the "
        "network, then the shortest step."
    )


def worth_running(result: SearchResult) -> str:
    """Which other layout a run would tell most of; empty where none is worth it."""
    found = result.listed.next_run
    if found is None:
        return ""
    layout = result.ranked[found.rank - 1].layout
    return (
        f"Most worth running beside it: rank {found.rank} ({degrees(layout)}), faster with a "
        f"chance of {found.chance:.0%}; a look at it is expected to spare "
        f"{found.expected_gain_fraction:.1%} of every step."
    )


def runners_up(result: SearchResult) -> list[RankedLayout]:
    """The next best, the fastest, and what is most worth running."""
    others = result.ranked[1:]
    next_rank = None if result.listed.next_run is None else result.listed.next_run.rank
    return [
        ranked
        for index, ranked in enumerate(others)
        if index < MOST_RUNNERS_UP or ranked is result.fastest or ranked.rank == next_rank
    ]


def ranked_lines(heading: str, result: SearchResult, width: int) -> str:
    """The runners-up, each with what sets it apart from the first and why it is not first."""
    chosen = result.ranked[0]
    items = [_other(ranked, chosen, width) for ranked in runners_up(result)]
    return "\n".join([wrapped(heading, width=width), *items]) if items else ""


def near_miss_lines(near: NearMiss, training: Training, chosen: RankedLayout, width: int) -> str:
    """The faster layout that hardly misses the chance to fit, and what to type for it."""
    chance = near.estimate.memory.fits_fraction
    assert chance is not None  # what is planned with depends on a chance
    asked = chance_words(training.fits_fraction)
    flag = f"--fits {chance_words(chance).replace(' ', '')}"
    words = (
        f"{format_percent(near.faster_fraction)} more tokens/s than the fastest that is sure "
        f"enough; {asked} are asked for, and {flag} plans it"
    )
    return "\n".join(
        (
            wrapped(NEAR_MISS, width=width),
            wrapped(
                _step_and_spread(near.layout, near.estimate, chosen.layout),
                width=width,
                first="      ",
            ),
            wrapped(words, width=width, first="      "),
        )
    )


def _step_and_spread(layout: Layout, estimate: Estimate, chosen: Layout) -> str:
    """Time and memory of a layout, and what sets it apart from the first."""
    peak = estimate.memory
    memory = format_gib(round(peak.peak_device_bytes * peak.expected_over_predicted))
    if chance := fits_words(peak):
        memory += f", {chance}"
    words = "; ".join((degrees(layout), *differences(layout, chosen)))
    return f"{format_seconds(estimate.step_seconds.expected)}, {memory}: {words}"


def _other(ranked: RankedLayout, chosen: RankedLayout, width: int) -> str:
    return "\n".join(
        (
            wrapped(
                _step_and_spread(ranked.layout, ranked.estimate, chosen.layout),
                width=width,
                first=f"  {ranked.rank:>2}  ",
            ),
            wrapped(ranked.reason, width=width, first="      "),
        )
    )

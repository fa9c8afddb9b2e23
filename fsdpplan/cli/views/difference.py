"""Two priced layouts side by side: what was changed, what that changes, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypedDict

from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.views.render import aligned, blocks, listed, wrapped
from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    EstimateJson,
    LayoutJson,
    cluster_document,
    estimate_document,
    layout_document,
    model_document,
    rules_document,
    training_document,
)
from fsdpplan.search.advice.difference import (
    Changed,
    Difference,
    Priced,
    Term,
    changed_inputs,
    difference,
    lost_and_won,
)
from fsdpplan.search.advice.words import degrees, policy
from fsdpplan.units import (
    format_bandwidth,
    format_count,
    format_gib,
    format_gpu_hours,
    format_money,
    format_percent,
    format_seconds,
)

LEAST_SECONDS = 1e-9
"""Of a change: less is what rounding leaves."""

MOST_TERMS = 3
LEAST_SHARE = 0.02
"""Terms that are named in a sentence: so many, of at least that share of the largest; the smaller
ones share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A plan under other inputs."""

    inputs: Inputs
    """The other inputs."""
    before: Priced
    """The plan as it is."""
    same: Priced | None
    """Its layout under them; None where it is not legal."""
    same_problem: str
    """Why it cannot be taken; empty: it can."""
    best: Priced | None
    """The best layout under them; None where nothing fits."""

    @property
    def is_same(self) -> bool:
        """Whether the plan's layout is still the best."""
        return self.same is not None and self.same == self.best


def what_if_screen(answer: WhatIf, *, width: int) -> str:
    """What `what-if` prints."""
    after = [one for one in (answer.same, answer.best) if one is not None]
    changed = changed_inputs(answer.before.case, after[0].case) if after else ()
    parts = [wrapped(_asked(answer.before, changed), width=width)]
    if answer.same is None:
        problem = f"The plan's layout cannot be kept: {answer.same_problem}."
        parts.append(wrapped(problem, width=width))
    else:
        name = "The same layout, still the best" if answer.is_same else "The same layout"
        if answer.same_problem:
            name += f" ({answer.same_problem})"
        parts.append(side_by_side(name, answer.before, answer.same, width))
    if answer.best is not None and not answer.is_same:
        parts.append(side_by_side("The best layout then", answer.before, answer.best, width))
        if answer.same is not None and not answer.same_problem:
            beside = verdict(difference(answer.same, answer.best))
            parts.append(wrapped(f"Beside the same layout then, the best: {beside}", width=width))
    return blocks(
        *parts,
        listed("Assumed", answer.inputs.assumptions, width=width),
        listed("Warnings", answer.inputs.warnings, width=width),
    )


def _asked(before: Priced, changed: Sequence[Changed]) -> str:
    cluster = before.case.cluster
    what = f"{before.case.model.name} on {cluster.gpus} x {cluster.device.name}"
    if not changed:
        return f"{what}: no input is changed."
    return f"{what}, and then {'; '.join(map(changed_words, changed))}."


def changed_words(one: Changed) -> str:
    """`gpus 512 in place of 256`."""
    return f"{_name(one)} {_value(one, one.after)} in place of {_value(one, one.before)}"


def _name(one: Changed) -> str:
    return one.name.removesuffix("_bytes_per_second").replace("_", " ")


def _value(one: Changed, value: object) -> str:
    if one.name.endswith("_bytes_per_second") and isinstance(value, float):
        return format_bandwidth(value)
    if one.name == "tokens" and isinstance(value, int):
        return format_count(value)
    if one.name.endswith("_fraction") and isinstance(value, float):
        return format_percent(value)
    return "none" if value is None else str(value)


def side_by_side(name: str, before: Priced, after: Priced, width: int) -> str:
    """The second layout under its `name`, and both of them by terms."""
    found = difference(before, after)
    return blocks(
        "\n".join(
            (
                wrapped(f"{name}: {degrees(after.case.layout)}", width=width),
                wrapped(
                    policy(after.case.layout),
                    width=width,
                    first="  ",
                ),
                wrapped(verdict(found), width=width, first="  "),
            )
        ),
        terms_table(before, after, found),
    )


def terms_table(
    before: Priced, after: Priced, found: Difference, *, heads: tuple[str, str] = ("now", "then")
) -> str:
    """Rates, step and memory of both, by their terms."""
    return aligned(
        [
            ("", *heads, "difference"),
            *_totals(before, after),
            *_time(found),
            *_memory(found),
        ],
        align=("left", "right", "right", "right"),
    )


def told_terms(before: Priced, after: Priced, *, most: int = MOST_TERMS) -> str:
    """What the second loses and wins of a step, the largest terms first: `loses 310 ms to exposed
    all_gather over tp (nvlink), 20.1 ms to 3 others; wins 40.2 ms in optimizer`."""
    lost, won = lost_and_won(before, after)
    parts = []
    largest = max((abs(term.change) for term in (*lost, *won)), default=0.0)
    for word, of, terms in (("loses", "to", lost), ("wins", "in", won)):
        own = [term for term in terms[:most] if abs(term.change) >= LEAST_SHARE * largest]
        named = [f"{format_seconds(abs(term.change))} {of} {term.name}" for term in own]
        rest = terms[len(own) :]
        if rest and own:
            others = f"{len(rest)} other{'s' if len(rest) > 1 else ''}"
            named.append(f"{format_seconds(sum(abs(term.change) for term in rest))} {of} {others}")
        if named:
            parts.append(f"{word} {', '.join(named)}")
    return "; ".join(parts)


def verdict(found: Difference) -> str:
    """How much faster or slower the second is, and whether that can be told."""
    if found.ratio == 1:
        return "As fast."
    lower, upper = found.ratio_band
    if found.ratio < 1:
        band = f"80 % band {_more(1 / upper)} to {_more(1 / lower)}"
        words = f"{_more(1 / found.ratio)} tokens a second ({band})"
        chance = found.faster_chance
    else:
        band = f"80 % band {_more(lower)} to {_more(upper)}"
        words = f"{_more(found.ratio)} time a token ({band})"
        chance = 1 - found.faster_chance
    sure = "told apart" if found.told_apart else "NOT told apart from the model's error"
    faster = "faster" if found.ratio < 1 else "slower"
    return f"{words}: {sure}, {faster} with a chance of {_chance(chance)}."


def _more(factor: float) -> str:
    return f"{(factor - 1) * 100:+.1f} %"


def _chance(chance: float) -> str:
    return "over 99 %" if chance > 0.99 else f"{chance * 100:.0f} %"


def _mfu_of(before: Priced, after: Priced) -> str:
    """The quantity's name, with the peak that both are a share of."""
    peaks = {one.case.training.peak_words for one in (before, after)}
    return f"MFU of {peaks.pop()}" if len(peaks) == 1 else "MFU, each of its own peak"


def _totals(before: Priced, after: Priced) -> list[tuple[str, str, str, str]]:
    one, other = before.estimate, after.estimate
    rows = [
        _row(
            "tokens/s",
            f"{one.tokens_per_second:,.0f}",
            f"{other.tokens_per_second:,.0f}",
            _more(other.tokens_per_second / one.tokens_per_second),
        ),
        _row(
            _mfu_of(before, after),
            format_percent(one.mfu_fraction),
            format_percent(other.mfu_fraction),
            f"{100 * (other.mfu_fraction - one.mfu_fraction):+.1f} pts",
        ),
    ]
    tokens = after.case.training.tokens or before.case.training.tokens
    if tokens is not None:
        times = before.seconds_for(tokens), after.seconds_for(tokens)
        rows.append(_seconds(f"{format_count(tokens)} tokens", *times))
        hours = before.gpu_hours_for(tokens), after.gpu_hours_for(tokens)
        rows.append(
            _row("GPU hours", *map(format_gpu_hours, hours), f"{hours[1] - hours[0]:+,.0f}")
        )
        rows += _money(before.cost_for(tokens), after.cost_for(tokens))
    return rows


def _money(before: float | None, after: float | None) -> list[tuple[str, str, str, str]]:
    """What the training costs, where that is known of both."""
    if before is None or after is None:
        return []
    more = f"{'+' if after >= before else '-'}{format_money(abs(after - before))}"
    return [_row("cost", format_money(before), format_money(after), more)]


def _row(*cells: str) -> tuple[str, str, str, str]:
    name, before, after, change = cells
    return name, before, after, change


def _seconds(name: str, before: float, after: float) -> tuple[str, str, str, str]:
    larger = max(abs(before), abs(after))
    change = after - before
    sign = "+" if change > 0 else ""
    return _row(
        name,
        format_seconds(before, beside=larger),
        format_seconds(after, beside=larger),
        f"{sign}{format_seconds(change)}" if abs(change) > LEAST_SECONDS else "0",
    )


def _time(found: Difference) -> list[tuple[str, str, str, str]]:
    before = sum(term.before for term in found.time)
    after = sum(term.after for term in found.time)
    ordered = sorted(found.time, key=lambda term: -max(abs(term.before), abs(term.after)))
    return [
        _seconds("step", before, after),
        *(_seconds(f"  {term.name}", term.before, term.after) for term in ordered),
    ]


def _memory(found: Difference) -> list[tuple[str, str, str, str]]:
    """The peak, and those of its parts that change."""
    whole = Term(
        name="memory",
        before=sum(term.before for term in found.memory),
        after=sum(term.after for term in found.memory),
    )
    parts = sorted(found.memory, key=lambda term: -abs(term.change))
    return [
        _bytes(whole.name, whole),
        *(_bytes(f"  {term.name}", term) for term in parts if term.change),
    ]


def _bytes(name: str, term: Term) -> tuple[str, str, str, str]:
    change = term.change
    signed = f"{'-' if change < 0 else '+'}{format_gib(abs(change))}" if change else "0"
    return _row(name, format_gib(term.before), format_gib(term.after), signed)


def what_if_json(answer: WhatIf) -> str:
    """What `what-if --json` prints."""
    inputs = answer.inputs
    after = answer.same or answer.best
    changed = changed_inputs(answer.before.case, after.case) if after else ()
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "model": model_document(inputs.model),
            "cluster": cluster_document(inputs.cluster),
            "training": training_document(inputs.training),
            "changed": [asdict(one) for one in changed],
            "plan": priced_document(answer.before),
            "same_layout": _compared(answer.before, answer.same),
            "same_layout_problem": answer.same_problem or None,
            "best": _compared(answer.before, answer.best),
            "same_is_best": answer.is_same,
            "sources": dict(inputs.sources),
            "assumptions": list(inputs.assumptions),
            "warnings": list(inputs.warnings),
            "rules": rules_document(inputs.rules),
        },
        indent=2,
        allow_nan=False,
    )


def _compared(before: Priced, after: Priced | None) -> ComparedJson | None:
    if after is None:
        return None
    return {
        **priced_document(after),
        "difference": difference_document(difference(before, after)),
    }


class PricedJson(TypedDict):
    """A layout and its prediction."""

    layout: LayoutJson
    estimate: EstimateJson
    seconds_to_train: float | None
    """Null: the tokens to train are not known."""
    gpu_seconds_to_train: float | None
    cost_to_train: float | None
    """In dollars. Null: tokens or price are not known."""


class ChangeOfTermJson(TypedDict):
    """Beside the fields of a term."""

    change: float


TermJson = Annotated[dict[str, Any], Term, ChangeOfTermJson]


class DifferenceJson(TypedDict):
    """What another layout, or another input, changes."""

    time_seconds: list[TermJson]
    memory_bytes: list[TermJson]
    ratio: float
    """Time of a token after over that before: below 1 is faster."""
    error_fraction: float
    """80 % half-width of that ratio."""
    faster_chance: float
    """That the second takes less time for a token than the first."""
    told_apart: bool
    """The model can tell which is the faster."""
    first: str
    """The part of the step that changes most."""


class ComparedJson(PricedJson):
    """The same beside another."""

    difference: DifferenceJson


def priced_document(one: Priced) -> PricedJson:
    """A layout and its prediction."""
    tokens = one.case.training.tokens
    layout = named_stages(model=one.case.model, layout=one.case.layout)
    return {
        "layout": layout_document(layout),
        "estimate": estimate_document(one.estimate),
        "seconds_to_train": None if tokens is None else one.seconds_for(tokens),
        "gpu_seconds_to_train": None if tokens is None else one.gpu_seconds_for(tokens),
        "cost_to_train": None if tokens is None else one.cost_for(tokens),
    }


def difference_document(found: Difference) -> DifferenceJson:
    """A difference as JSON has it."""
    return {
        "time_seconds": [_term(term) for term in found.time],
        "memory_bytes": [_term(term) for term in found.memory],
        "ratio": found.ratio,
        "error_fraction": found.error_fraction,
        "faster_chance": found.faster_chance,
        "told_apart": found.told_apart,
        "first": found.first.name,
    }


def _term(term: Term) -> dict[str, Any]:
    return {**asdict(term), "change": term.change}

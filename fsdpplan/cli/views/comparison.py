"""Plans or questions side by side: a column each, and in which they differ first."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.views.answer import fits_words
from fsdpplan.cli.views.difference import (
    changed_words,
    difference_document,
    priced_document,
    verdict,
)
from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    cluster_document,
    model_document,
    rules_document,
    training_document,
)
from fsdpplan.report.side_by_side import Compared, compare_report
from fsdpplan.report.values import Report
from fsdpplan.search.advice.difference import Priced, changed_inputs, difference
from fsdpplan.search.advice.words import degrees, policy
from fsdpplan.units import (
    BILLION,
    format_count,
    format_gib,
    format_gpu_hours,
    format_money,
    format_percent,
    format_seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One of those that are compared."""

    name: str
    """A letter."""
    inputs: Inputs
    priced: Priced | None = None
    """Its layout; None where nothing fits."""
    file: str | None = None
    """The saved plan; None: a question that was searched."""
    problem: str = ""
    """Why nothing fits."""


def compare_screen(entries: Sequence[Entry], *, width: int) -> str:
    """What `compare` prints."""
    fitting = [entry for entry in entries if entry.priced is not None]
    return blocks(
        "\n".join(_heading(entry, width) for entry in entries),
        _table(fitting, width) if fitting else "",
        *(_beside(fitting[0], other, width) for other in fitting[1:]),
        listed("Assumed of all", _shared(entries), width=width),
        listed("Of each", _warnings(entries), width=width),
    )


def _heading(entry: Entry, width: int) -> str:
    if entry.priced is None:
        answer = entry.problem
    else:
        layout = entry.priced.case.layout
        answer = f"{degrees(layout)}; {policy(layout)}"
    return "\n".join(
        (
            wrapped(_question(entry), width=width, first=f"{entry.name}  "),
            wrapped(answer, width=width, first="   "),
        )
    )


def _question(entry: Entry) -> str:
    inputs = entry.inputs
    cluster, training = inputs.cluster, inputs.training
    file = f"{entry.file}, " if entry.file else ""
    return (
        f"{file}{inputs.model.name} on {cluster.gpus:,} x {cluster.device.name} ({cluster.name}), "
        f"{training.global_batch:,} x {training.seq_len:,} tokens a step, {training.precision}"
    )


def _table(entries: Sequence[Entry], width: int) -> str:
    """A line a quantity; where columns do not fit, each names its values."""
    found = [entry.priced for entry in entries if entry.priced is not None]
    rows = [(name, *(value(one) for one in found)) for name, value in QUANTITIES.items()]
    tokens = {one.case.training.tokens for one in found} - {None}
    for number in sorted(tokens, key=str):
        assert number is not None
        rows.append(
            (
                f"{format_count(number)} tokens",
                *(format_seconds(one.seconds_for(number)) for one in found),
            )
        )
        rows.append(("GPU hours", *(format_gpu_hours(one.gpu_hours_for(number)) for one in found)))
        costs = [one.cost_for(number) for one in found]
        if any(cost is not None for cost in costs):
            rows.append(("cost", *("" if one is None else format_money(one) for one in costs)))
    headers = ("", *(entry.name for entry in entries))
    align = ("left", *("right" for _ in entries))
    return table(rows, headers=headers, align=align, width=width)


def _step_band(one: Priced) -> str:
    step = one.estimate.step_seconds
    lower, upper = (format_seconds(end, beside=step.expected) for end in (step.lower, step.upper))
    return f"{lower.split()[0]} to {upper}"


def _memory(one: Priced) -> str:
    memory = one.estimate.memory
    return format_gib(round(memory.peak_device_bytes * memory.expected_over_predicted))


def _billion_hours(one: Priced) -> str:
    return f"{one.token_seconds * one.case.cluster.gpus * BILLION / 3600:,.2f}"


def _mfu(one: Priced) -> str:
    formats = dict.fromkeys(each.precision for _, each in one.case.training.phases)
    return f"{format_percent(one.estimate.mfu_fraction)} of {'/'.join(formats)}"


QUANTITIES: dict[str, Callable[[Priced], str]] = {
    "step": lambda one: format_seconds(one.estimate.step_seconds.expected),
    "80 % band": _step_band,
    "tokens/s": lambda one: f"{one.estimate.tokens_per_second:,.0f}",
    "per GPU": lambda one: f"{one.estimate.tokens_per_second_per_gpu:,.0f}",
    "MFU": _mfu,
    "memory": _memory,
    "fits": lambda one: fits_words(one.estimate.memory).removeprefix("fits ") or "not known",
    "GPU h/1e9 tokens": _billion_hours,
}
"""What is shown of each, by its name."""


def _beside(first: Entry, other: Entry, width: int) -> str:
    return wrapped(_beside_words(first, other), width=width)


def _beside_words(first: Entry, other: Entry) -> str:
    """In which inputs they differ, by how much, and by which term most."""
    assert first.priced is not None
    assert other.priced is not None
    found = difference(first.priced, other.priced)
    changed = changed_inputs(first.priced.case, other.priced.case)
    inputs = "; ".join(map(changed_words, changed)) or "no input differs"
    term = found.first
    more = "more" if term.change > 0 else "less"
    largest = (
        f" Of a step, {term.name} differ{'' if term.name.endswith('s') else 's'} most: "
        f"{format_seconds(abs(term.change))} {more}."
        if term.change
        else ""
    )
    return f"{other.name} beside {first.name}: {verdict(found)}{largest} Inputs: {inputs}."


def compared_report(entries: Sequence[Entry]) -> Report:
    """The same as a page."""
    fitting = [entry for entry in entries if entry.priced is not None]
    return compare_report(
        [
            Compared(
                name=entry.name,
                what=_question(entry),
                priced=entry.priced,
                problem=entry.problem,
            )
            for entry in entries
        ],
        verdicts=[_beside_words(fitting[0], other) for other in fitting[1:]],
        assumptions=_shared(entries),
        warnings=_warnings(entries),
    )


def _shared(entries: Sequence[Entry]) -> list[str]:
    """Assumptions of all that were searched."""
    first, *others = (entry.inputs.assumptions for entry in entries)
    return [text for text in first if all(text in other for other in others)]


def _warnings(entries: Sequence[Entry]) -> list[str]:
    """Of each, and what was assumed of it alone."""
    shared = _shared(entries)
    return [
        f"{entry.name}: {text}"
        for entry in entries
        for text in (
            *entry.inputs.warnings,
            *(text for text in entry.inputs.assumptions if text not in shared),
        )
    ]


def compare_json(entries: Sequence[Entry]) -> str:
    """What `compare --json` prints."""
    fitting = [entry for entry in entries if entry.priced is not None]
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "compared": [_document(entry) for entry in entries],
            "differences": [_pair(fitting[0], other) for other in fitting[1:]],
        },
        indent=2,
        allow_nan=False,
    )


def _document(entry: Entry) -> dict[str, Any]:
    inputs, priced = entry.inputs, entry.priced
    return {
        "name": entry.name,
        "file": entry.file,
        "model": model_document(inputs.model),
        "cluster": cluster_document(inputs.cluster),
        "training": training_document(inputs.training),
        **({"layout": None, "estimate": None} if priced is None else priced_document(priced)),
        "problem": entry.problem or None,
        "sources": dict(inputs.sources),
        "assumptions": list(inputs.assumptions),
        "warnings": list(inputs.warnings),
        "rules": rules_document(inputs.rules),
    }


def _pair(first: Entry, other: Entry) -> dict[str, Any]:
    assert first.priced is not None
    assert other.priced is not None
    changed = changed_inputs(first.priced.case, other.priced.case)
    return {
        "from": first.name,
        "to": other.name,
        "changed": [asdict(one) for one in changed],
        **difference_document(difference(first.priced, other.priced)),
    }

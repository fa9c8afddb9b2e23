"""What a step and its peak follow, from both sides, and what most deserves a measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdpplan.cli.resolve.inputs import Inputs
from fsdpplan.cli.views.difference import priced_document
from fsdpplan.cli.views.render import blocks, listed, table, wrapped
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    cluster_document,
    model_document,
    training_document,
)
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.advice.measurement import Means, Measurement, band_fraction
from fsdpplan.search.advice.sensitivity import (
    LEAST_ELASTICITY,
    Moved,
    Sensitivity,
    evidence_of,
    field_words,
    held_fraction,
    value_words,
)
from fsdpplan.search.advice.words import degrees, policy
from fsdpplan.units import format_gib, format_percent, format_seconds

HIDDEN = 2.0
"""Times what its slope says that an unknown moves the step where that is not all it may do."""

MOST_KINKS = 6
"""On a screen."""

LEAST_HELD = 5e-3
"""Share of a step that goes by what is no input, for which that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A layout, and what it follows."""

    inputs: Inputs
    subject: Priced
    found: tuple[Sensitivity, ...]
    measurements: tuple[Measurement, ...]
    plan: str
    """The saved plan, as it is typed."""

    @property
    def sources(self) -> dict[str, str]:
        """Where each input came from."""
        return dict(self.inputs.sources)


def sensitivity_screen(answer: Followed, *, width: int) -> str:
    """What `what-if --sensitivities` prints."""
    one, inputs = answer.subject, answer.inputs
    cluster = inputs.cluster
    heading = (
        f"{inputs.model.name} on {cluster.gpus:,} x {cluster.device.name}: "
        f"{degrees(one.case.layout)}; {policy(one.case.layout)}"
    )
    return blocks(
        wrapped(heading, width=width),
        wrapped(_summary(one), width=width),
        _smooth(answer, width),
        _kinks(answer, width),
        _counted(answer, width),
        _measured(answer, width),
        listed("Warnings", inputs.warnings, width=width),
    )


def _summary(one: Priced) -> str:
    memory = one.estimate.memory
    room = available_bytes(cluster=one.case.cluster, training=one.case.training)
    more = room / memory.peak_device_bytes - 1
    words = f"{format_percent(more)} more would fit" if more >= 0 else "it does not fit"
    return (
        f"Step {format_seconds(one.estimate.step_seconds.expected)}, peak "
        f"{format_gib(memory.peak_device_bytes)} of {format_gib(room)}: {words}. Of this layout, "
        "which stays:"
    )


def _smooth(answer: Followed, width: int) -> str:
    """What 1 % of each input changes, the most telling first: of the step, and of the peak."""
    smooth = sorted((one for one in answer.found if not one.counted), key=_order)
    steps = [one for one in smooth if _strength(one) >= LEAST_ELASTICITY]
    peaks = [one for one in smooth if abs(one.memory) >= LEAST_ELASTICITY]
    held = held_fraction(answer.found)
    left = len(smooth) - len({one.field for one in (*steps, *peaks)})
    said = f"{left} others change step and peak by less than 0.005 % each."
    if held >= LEAST_HELD:
        said += (
            f" {format_percent(held)} of the step go by NCCL's own times and caps, which are no "
            "inputs."
        )
    return blocks(
        _inputs("the step, by", steps, answer, width),
        _inputs("the peak, by", peaks, answer, width),
        wrapped(said, width=width),
    )


def _inputs(what: str, found: Sequence[Sensitivity], answer: Followed, width: int) -> str:
    is_peak = "peak" in what
    rows = [
        (
            field_words(one.field),
            value_words(one.field, one.value),
            evidence_of(answer.sources.get(one.field)),
            _percent(one.more, 1, is_peak),
            _percent(one.less, -1, is_peak),
        )
        for one in found
    ]
    if not rows:
        return ""
    return table(
        rows,
        headers=(what, "is", "rests on", "1 % more", "1 % less"),
        align=("left", "right", "left", "right", "right"),
        width=width,
    )


def _strength(one: Sensitivity) -> float:
    return max((abs(side.step) for side in one.sides), default=0.0)


def _order(one: Sensitivity) -> tuple[float, float, str]:
    return -round(_strength(one), 6), -abs(one.memory), one.field


def _percent(side: Moved | None, percent: int, is_peak: bool) -> str:
    """What so many percent of the input change the step or the peak by, at the slope of this
    side."""
    if side is None:
        return "-"
    return f"{percent * (side.memory if is_peak else side.step):+.3f} %"


def _kinks(answer: Followed, width: int) -> str:
    """Inputs whose slope is another one within 10 % of them, the largest differences first."""
    lines: list[tuple[float, str]] = []
    for one in answer.found:
        if one.counted or _strength(one) < LEAST_ELASTICITY:
            continue
        name = field_words(one.field)
        if one.has_kink and one.more is not None and one.less is not None:
            apart = abs(one.more.step - one.less.step)
            lines.append((apart, f"{name}: at a kink, where both sides differ"))
            continue
        for side, near, far in (
            ("more", one.more, one.far_more),
            ("less", one.less, one.far_less),
        ):
            if near is not None and far is not None and _bends(near.step, far.step):
                slope, change = far.factor**near.step - 1, far.step_factor - 1
                words = (
                    f"{name}: 10 % {side} changes the step by {100 * change:+.2f} %, where the "
                    f"slope says {100 * slope:+.2f} %"
                )
                lines.append((abs(near.step - far.step), words))
    lines.sort(key=lambda pair: -pair[0])
    return listed("Kinks near", (words for _, words in lines[:MOST_KINKS]), width=width)


def _bends(near: float, far: float) -> bool:
    """By more than the curve of a step that is a part of the input and a rest."""
    return abs(far - near) > 0.2 * max(abs(near), abs(far)) and abs(far - near) > LEAST_ELASTICITY


def _counted(answer: Followed, width: int) -> str:
    """What is counted, by its least legal step either way."""
    case, peak = answer.subject.case, answer.subject.estimate.memory.peak_device_bytes
    room = available_bytes(cluster=case.cluster, training=case.training)
    rows = [
        (
            field_words(one.field),
            f"{one.value:,.0f} -> {one.value * side.factor:,.0f}",
            f"{100 * (side.step_factor - 1):+.1f} %",
            f"{100 * (side.token_factor - 1):+.1f} %",
            f"{100 * (side.memory_factor - 1):+.1f} %",
            "too large" if side.memory_factor * peak > room else "",
        )
        for one in answer.found
        if one.counted
        for side in one.sides
    ]
    if not rows:
        return ""
    return table(
        rows,
        headers=("counted", "", "step", "time a token", "peak", ""),
        align=("left", "left", "right", "right", "right", "left"),
        width=width,
    )


def _measured(answer: Followed, width: int) -> str:
    """Which unknown is worth a measurement, and what to type."""
    worth = [one for one in answer.measurements if one.gain > 0]
    now = f"The step is known to within {format_percent(band_fraction(answer.subject.case))} (80 %)"
    learned = answer.subject.estimate.learned is not None
    if learned:
        now += ", your runs left out"
    if not worth and answer.inputs.cluster.device.kind == "cpu":
        words = "fsdpplan calibrate measures these processes; what its fits leave over is left then"
        return wrapped(f"{now}; {words}.", width=width)
    if not worth:
        return wrapped(f"{now}; nothing that calibrate measures narrows it.", width=width)
    rows = [
        (
            one.unknown.name,
            format_percent(one.error_fraction),
            format_percent(one.moves_fraction),
            format_percent(band_fraction(answer.subject.case, [one])),
        )
        for one in worth
    ]
    return blocks(
        wrapped(f"{now}. What is worth measuring, the worthiest first:", width=width),
        table(
            rows,
            headers=("unknown", "known to", "moves the step", "band then"),
            align=("left", "right", "right", "right"),
            width=width,
        ),
        listed("Beyond the band", _hidden(answer, worth), width=width),
        listed(
            "Measured by",
            (
                f"{command_of(means, answer.plan)}: {format_percent(band)}"
                for means, band in by_means(answer)
            ),
            width=width,
        ),
    )


def _hidden(answer: Followed, worth: Sequence[Measurement]) -> list[str]:
    """Unknowns that hide now, and would show where they are worse than taken: the band counts what
    shows."""
    slopes = {one.field: abs(one.step) for one in answer.found}
    return [
        f"{one.unknown.name}: hardly shows in the step as it is taken, and would where it is worse"
        for one in worth
        if one.unknown.fields
        and one.moves_fraction
        > HIDDEN * one.error_fraction * sum(slopes.get(field, 0.0) for field in one.unknown.fields)
    ]


def by_means(answer: Followed) -> list[tuple[Means, float]]:
    """Each means of measuring, the best first, and the band once all that it measures is known."""
    worth = [one for one in answer.measurements if one.gain > 0]
    names = dict.fromkeys(one.unknown.means for one in worth)
    bands = {
        means: band_fraction(
            answer.subject.case, [one for one in worth if _is_measured(one, means)]
        )
        for means in names
    }
    return sorted(bands.items(), key=lambda pair: pair[1])


def _is_measured(one: Measurement, means: Means) -> bool:
    """Two nodes measure what one does, too."""
    own = one.unknown.means
    return own == means or (means == "calibrate between nodes" and own == "calibrate")


def command_of(means: Means, plan: str) -> str:
    """What to type."""
    match means:
        case "calibrate":
            return f"fsdpplan calibrate --plan {plan}, on one node"
        case "calibrate between nodes":
            return f"fsdpplan calibrate --plan {plan} --nodes 2, in an allocation of two"
        case "run":
            return f"fsdpplan run {plan}, which the next plan learns from"


def sensitivity_json(answer: Followed) -> str:
    """What `what-if --sensitivities --json` prints."""
    inputs = answer.inputs
    case = answer.subject.case
    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "model": model_document(inputs.model),
            "cluster": cluster_document(inputs.cluster),
            "training": training_document(inputs.training),
            **priced_document(answer.subject),
            "available_bytes": available_bytes(cluster=case.cluster, training=case.training),
            "sensitivities": [_document(one, answer.sources) for one in answer.found],
            "held_fraction": held_fraction(answer.found),
            "band_fraction": band_fraction(case),
            "measurements": [_measurement(one, answer) for one in answer.measurements],
            "measured_by": [
                {"command": command_of(means, answer.plan), "band_fraction": band}
                for means, band in by_means(answer)
            ],
            "warnings": list(inputs.warnings),
        },
        indent=2,
        allow_nan=False,
    )


def _document(one: Sensitivity, sources: dict[str, str]) -> dict[str, Any]:
    source = sources.get(one.field)
    return {
        "field": one.field,
        "value": one.value,
        "counted": one.counted,
        "evidence": evidence_of(source),
        "source": source,
        "more": _side(one.more),
        "less": _side(one.less),
        "far_more": _side(one.far_more),
        "far_less": _side(one.far_less),
        "kink": one.has_kink,
    }


def _side(side: Moved | None) -> dict[str, float] | None:
    if side is None:
        return None
    return {
        "factor": side.factor,
        "step_elasticity": side.step,
        "token_elasticity": side.token,
        "peak_elasticity": side.memory,
        "step_factor": side.step_factor,
        "peak_factor": side.memory_factor,
    }


def _measurement(one: Measurement, answer: Followed) -> dict[str, Any]:
    return {
        "name": one.unknown.name,
        "error": one.unknown.kind,
        "fields": list(one.unknown.fields),
        "error_fraction": one.error_fraction,
        "measured_error_fraction": one.measured_error_fraction,
        "moves_fraction": one.moves_fraction,
        "gain": one.gain,
        "band_fraction": band_fraction(answer.subject.case, [one]),
        "command": command_of(one.unknown.means, answer.plan),
    }

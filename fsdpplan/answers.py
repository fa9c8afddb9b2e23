"""What the functions of `import fsdpplan` answer beside plans: values that print as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf
from typing import Any, TypeVar

from fsdpplan.cost import bill as bills
from fsdpplan.cost import goodput as goodputs
from fsdpplan.cost.reshard import Moved
from fsdpplan.search.advice import why as reasons
from fsdpplan.search.advice.difference import (
    Changed,
    Difference,
    Priced,
    changed_inputs,
    difference,
)
from fsdpplan.search.advice.field_rules import RULES
from fsdpplan.search.advice.measurement import Measurement
from fsdpplan.search.advice.sensitivity import Sensitivity, held_fraction
from fsdpplan.search.advice.words import degrees
from fsdpplan.search.scaling import Knee, Rate, knee
from fsdpplan.spec.plan import BrokenRule, Case, Interval, Plan, Terms
from fsdpplan.spec.shown import Row, as_html, as_text
from fsdpplan.units import (
    format_gb,
    format_gib,
    format_gpu_hours,
    format_kwh,
    format_money,
    format_percent,
    format_seconds,
)
from fsdpplan.validate.check.conditions import Checked, value_words
from fsdpplan.validate.check.lock import Differs

T = TypeVar("T")

MOST_ROWS = 10
"""Of one kind that are shown; the fields of an answer have all."""


class Shown:
    """A value that is looked at as a table, in a terminal and in a notebook."""

    __slots__ = ()

    def shown(self) -> tuple[str, list[Row]]:
        """Title and rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return as_text(*self.shown())

    def _repr_html_(self) -> str:
        return as_html(*self.shown())


def _name(one: Priced) -> str:
    cluster = one.case.cluster
    return f"{one.case.model.name} on {cluster.gpus} x {cluster.device.name}"


def like(kind: Callable[..., T], value: Any, **more: Any) -> T:
    """A `kind` with the fields of `value`, and `more`."""
    return kind(**{one.name: getattr(value, one.name) for one in fields(value)}, **more)


def _pair(one: Priced, other: Priced | None) -> list[Row]:
    """What people look at first, of one and of the other."""
    found = [each for each in (one, other) if each is not None]
    rates = [each.estimate.tokens_per_second for each in found]
    peaks = [each.estimate.memory.peak_device_bytes for each in found]
    return [
        ("layout", *(degrees(each.case.layout) for each in found)),
        ("step", *(format_seconds(each.estimate.step_seconds.expected) for each in found)),
        ("tokens/s", *(f"{rate:,.0f}" for rate in rates)),
        ("MFU", *(format_percent(each.estimate.mfu_fraction) for each in found)),
        ("memory", *(format_gib(peak) for peak in peaks)),
    ]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Two priced layouts, which may be of two questions."""

    before: Priced
    """The first plan, predicted again."""
    after: Priced
    """The second one."""

    @property
    def difference(self) -> Difference:
        """By terms, with the band of their ratio and whether they can be told apart."""
        return difference(self.before, self.after)

    @property
    def changed(self) -> tuple[Changed, ...]:
        """The inputs that they do not share."""
        return changed_inputs(self.before.case, self.after.case)

    def shown(self) -> tuple[str, list[Row]]:
        """Both, and the terms of the step that change."""
        found = self.difference
        terms = sorted(found.time, key=lambda term: -abs(term.change))
        told = "told apart" if found.told_apart else "not told apart from the model's error"
        title = f"{_name(self.before)}, then {_name(self.after)}: {told}"
        rows: list[Row] = [("", "before", "after"), *_pair(self.before, self.after)]
        rows += [
            (f"  {term.name}", format_seconds(term.before), format_seconds(term.after))
            for term in terms
            if term.change
        ]
        return title, rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WhatIf(Shown):
    """A plan under other inputs."""

    before: Priced
    """The plan as it is, predicted by this version."""
    same: Priced | None
    """Its layout under them; None where it cannot be kept."""
    same_problem: str
    """Why it cannot be kept; empty where it can."""
    best: Plan | None
    """The best plan then; None where nothing fits."""

    @property
    def after(self) -> Priced | None:
        """The best layout then."""
        best = self.best
        return None if best is None else Priced(case=best.case, estimate=best.estimate)

    def shown(self) -> tuple[str, list[Row]]:
        """Before, and the best then."""
        after = self.after
        then = "nothing fits then" if after is None else f"then {_name(after)}"
        heads = ("", "before") if after is None else ("", "before", "best then")
        rows: list[Row] = [heads, *_pair(self.before, after)]
        if self.same_problem:
            rows.append(("same layout", self.same_problem))
        elif self.same is not None:
            step = format_seconds(self.same.estimate.step_seconds.expected)
            rows.append(("same layout", f"{step} a step then"))
        return f"{_name(self.before)}, {then}", rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One number of GPUs."""

    gpus: int
    plan: Plan | None
    """The best there; None where nothing fits, or the batch does not suit them."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep(Shown):
    """How a training scales."""

    name: str
    """The model and the machines."""
    points: tuple[Point, ...]
    """One a number of GPUs, the fewest first."""

    @property
    def knee(self) -> Knee | None:
        """Where more GPUs end to pay; None where nothing fits."""
        return knee(
            [
                Rate(gpus=one.gpus, tokens_per_second=one.plan.estimate.tokens_per_second)
                for one in self.points
                if one.plan is not None
            ]
        )

    def shown(self) -> tuple[str, list[Row]]:
        """A row a point."""
        found, rows = self.knee, list[Row]()
        for one in self.points:
            if one.plan is None:
                rows.append((str(one.gpus), one.problem))
                continue
            estimate = one.plan.estimate
            rows.append(
                (
                    f"{one.gpus}{' knee' if found and found.gpus == one.gpus else ''}",
                    f"{one.plan.training.global_batch}",
                    format_seconds(estimate.step_seconds.expected),
                    f"{estimate.tokens_per_second:,.0f}",
                    format_percent(estimate.mfu_fraction),
                    degrees(one.plan.layout),
                )
            )
        return self.name, [("GPUs", "batch", "step", "tokens/s", "MFU", "layout"), *rows]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replanned(Shown):
    """A plan for other GPUs, from which a run of the old one goes on."""

    before: Priced
    """The old plan, predicted by this version."""
    plan: Plan
    """For the other GPUs."""
    moved: Moved
    """What saving and reading the checkpoint moves; `moved.seconds(20e9)`: at 20 GB/s storage."""

    @property
    def keeps_batch(self) -> bool:
        """Whether tokens of a step, and so the schedule, stay."""
        return self.before.case.training.global_batch == self.plan.training.global_batch

    def shown(self) -> tuple[str, list[Row]]:
        """Both, and the checkpoint."""
        after = Priced(case=self.plan.case, estimate=self.plan.estimate)
        batches = [one.case.training.global_batch for one in (self.before, after)]
        rows: list[Row] = [("", "before", "after"), *_pair(self.before, after)]
        rows.append(("global batch", *(f"{batch:,}" for batch in batches)))
        saved, read = format_gb(self.moved.saved_bytes), format_gb(self.moved.read_bytes)
        rows.append(("checkpoint", f"{saved} saved", f"{read} read"))
        return f"{_name(self.before)}, then {_name(after)}", rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Check(Shown):
    """A plan held against conditions and its lock; true where all hold."""

    conditions: tuple[Checked, ...]
    """Each with its values, and whether it holds."""
    differs: tuple[Differs, ...]
    """From the lock; what one side does not know is among it."""

    @property
    def holds(self) -> bool:
        """Whether all conditions do, and nothing differs."""
        same = all(one.is_unknown for one in self.differs)
        return same and all(one.holds for one in self.conditions)

    def __bool__(self) -> bool:
        return self.holds

    def shown(self) -> tuple[str, list[Row]]:
        """A row a condition, with the values that decided, and one a difference."""
        rows: list[Row] = []
        for one in self.conditions:
            values = (value for part in one.compared for value in part.values)
            words = ", ".join(f"{name} {value_words(value, kind)}" for name, value, kind in values)
            rows.append((one.text, "holds" if one.holds else "FALSE", words))
        for each in self.differs:
            how = "not known" if each.is_unknown else "differs"
            rows.append((each.name, how, f"{each.before} -> {each.after}"))
        return "all holds" if self.holds else "not all holds", rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Why(Shown, reasons.Why):
    """Why a layout that has what was asked for is not recommended: the best `with_it` beside the
    `first`, and what each input by itself would have to be (`turned`)."""

    @property
    def difference(self) -> Difference | None:
        """From the first to the best with it; None where there is none, or they are the same."""
        best = self.with_it.best
        return None if best is None or self.has_it else difference(self.first, best)

    def shown(self) -> tuple[str, list[Row]]:
        """Both, and the nearest thresholds."""
        having, found = self.with_it, self.difference
        title = f"Why{'' if self.has_it else ' not'} {self.wanted.words}: {_name(self.first)}"
        other = None if found is None else having.best
        heads = ("", "first") if other is None else ("", "first", "with it")
        rows: list[Row] = [heads, *_pair(self.first, other)]
        if found is not None:
            terms = sorted(found.time, key=lambda term: -abs(term.change))[:MOST_ROWS]
            rows += [
                (f"  {term.name}", format_seconds(term.before), format_seconds(term.after))
                for term in terms
                if term.change
            ]
            rows.append(("told apart", "yes" if found.told_apart else "no, a tie"))
        elif having.problem:
            rows.append(("with it", having.problem))
        elif having.needed_bytes is not None and having.available_bytes is not None:
            needed, there = format_gib(having.needed_bytes), format_gib(having.available_bytes)
            rows.append(("with it", f"nothing fits: the nearest needs {needed} of {there}"))
        until = "first no longer" if self.has_it else "first"
        thresholds = [(one.knob, each) for one in self.turned for each in one.thresholds]
        for knob, each in thresholds[:MOST_ROWS]:
            now, then = (knob.words(value) for value in (knob.now, each.far.value))
            rows.append((knob.name, f"{until} at {then}; now {now}"))
        return title, rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sensitivities(Shown):
    """How the step and the peak of a plan's layout follow each input."""

    case: Case
    """What was followed."""
    found: tuple[Sensitivity, ...]
    """Each input, from both sides."""
    measurements: tuple[Measurement, ...]
    """What deserves to be measured, the worthiest first."""

    def __getitem__(self, field: str) -> Sensitivity:
        for one in self.found:
            if one.field == field:
                return one
        raise KeyError(field)

    @property
    def held_fraction(self) -> float:
        """Share of the step that goes by times and rates that are no inputs."""
        return held_fraction(self.found)

    def shown(self) -> tuple[str, list[Row]]:
        """The inputs that count most, and what to measure."""
        cluster = self.case.cluster
        title = f"What 1 % more changes: {self.case.model.name} on {cluster.gpus} GPUs"
        rows: list[Row] = [("", "step", "peak")]
        strongest = sorted(self.found, key=lambda one: (-abs(one.step), -abs(one.memory)))
        rows += [
            (one.field, f"{one.step:+.3f} %", f"{one.memory:+.3f} %")
            for one in strongest[:MOST_ROWS]
        ]
        for each in [one for one in self.measurements if one.gain > 0][:3]:
            known = format_percent(each.error_fraction)
            rows.append(("to measure", f"{each.unknown.name}, known to {known}"))
        return title, rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bill(Shown, bills.Bill):
    """What a whole training takes in time, money and energy, each with its 80 % band."""

    terms: Terms
    """Price, draw and the rest that it follows from."""

    def shown(self) -> tuple[str, list[Row]]:
        """A row of each that was asked."""
        rows: list[Row] = [("", "expected", "lower", "upper")]
        rows.append(("time", *_banded(self.seconds, format_seconds)))
        rows.append(("GPU hours", *_banded(self.gpu_hours, format_gpu_hours)))
        if self.cost is not None:
            rows.append(("cost", *_banded(self.cost, format_money)))
        if self.energy_kwh is not None:
            rows.append(("energy", *_banded(self.energy_kwh, format_kwh)))
        if self.co2_kg is not None:
            rows.append(("CO2", *_banded(self.co2_kg, _kilograms)))
        if self.deadline_chance is not None and self.terms.deadline_seconds is not None:
            span = format_seconds(self.terms.deadline_seconds)
            chance = format_percent(self.deadline_chance)
            rows.append(("deadline", f"{span}, met with a chance of {chance}"))
        return f"{self.steps:,} steps on {self.gpus:,} GPUs", rows


def _banded(value: Interval, words: Callable[..., str]) -> tuple[str, ...]:
    """All in one unit."""
    each = (value.expected, value.lower, value.upper)
    return tuple(words(number, beside=value.expected) for number in each)


def _kilograms(kilograms: float, *, beside: float) -> str:
    del beside
    return f"{kilograms:,.0f} kg"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Goodput(Shown, goodputs.Goodput):
    """What failures leave of a run's time, and how often to save."""

    reliability: goodputs.Reliability
    """How its machines fail, as it was taken."""
    sources: tuple[tuple[str, str], ...]
    """(`mtbf`, `storage`, `save` or `restart`; what says it)."""

    def shown(self) -> tuple[str, list[Row]]:
        """The share that is kept, and where the rest goes."""
        kept, shares = self.fraction, self.shares
        band = f"{format_percent(kept.lower)} to {format_percent(kept.upper)}"
        mtbf = "none" if self.mtbf_seconds == inf else f"one in {format_seconds(self.mtbf_seconds)}"
        size, stop = format_gb(self.checkpoint_bytes), format_seconds(self.blocking_seconds)
        rows: list[Row] = [
            ("goodput", f"{format_percent(kept.expected)} ({band})"),
            ("starting again", f"{100 * shares.restarting:.2f} %"),
            ("steps done again", f"{100 * shares.redone:.2f} %"),
            ("saving", f"{100 * shares.saving:.2f} %"),
            ("failures", mtbf),
            ("save each", f"{self.every_steps:,} steps, {format_seconds(self.interval_seconds)}"),
            ("checkpoint", f"{size}, training stops for {stop}"),
            ("restart", format_seconds(self.restart_seconds)),
        ]
        if self.spares is not None:
            rows.append(("spare nodes", f"{self.spares}"))
        return "What failures leave", rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rules(Shown):
    """The rules of the field that a plan breaks; true where it breaks none."""

    broken: tuple[BrokenRule, ...]
    """What puts the run at risk first, then by what it costs."""

    def __bool__(self) -> bool:
        return not self.broken

    def shown(self) -> tuple[str, list[Row]]:
        """Each with its number, its limit and what to do."""
        rows: list[Row] = [("rule", "number", "limit")] if self.broken else []
        for one in self.broken[:MOST_ROWS]:
            limit = f"{one.limit:.3g}" if one.limit else "-"
            rows += [(one.rule, f"{one.number:.3g}", limit), ("  do", one.advice)]
        return f"{len(self.broken)} of {len(RULES)} rules of the field are broken", rows

"""What the functions of `import fsdpplan` answer beside plans: values that print as tables."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.reshard import Moved
from fsdpplan.search.advice.difference import (
    Changed,
    Difference,
    Priced,
    changed_inputs,
    difference,
)
from fsdpplan.search.advice.words import degrees
from fsdpplan.search.scaling import Knee, Rate, knee
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.shown import Row, as_html, as_text
from fsdpplan.units import format_gb, format_gib, format_percent, format_seconds
from fsdpplan.validate.check.conditions import Checked, value_words
from fsdpplan.validate.check.lock import Differs


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
    after: Priced

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

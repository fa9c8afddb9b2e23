"""Sensitivity: how a step, and the peak of memory, follow each input of the cost model.

Of one layout, which stays: what another layout would do is a search. A derivative is taken from
both sides, as an elasticity

    e = d log(step) / d log(input)

1 % more of the input changes the step by e %. Both sides differ at a kink, of which the model has
many: a maximum of two streams, NCCL's choice of a protocol, a share that cannot exceed 1. Inputs
that are counted move by the least step that leaves the layout legal.

Euler: a step takes k times as long if all times are k times as long and all rates 1/k. So

    sum over times of e - sum over rates of e = 1

less what goes by times and rates that are no inputs: NCCL's own, in `cost/network/collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from math import log
from typing import Any, Literal

from fsdpplan.cost.estimate import estimate
from fsdpplan.errors import SpecError
from fsdpplan.search.advice.difference import kept_layout
from fsdpplan.search.rules.legality import legal_layout_problem
from fsdpplan.spec.cluster import Cluster, Device, DeviceFit, Level
from fsdpplan.spec.plan import Case
from fsdpplan.units import format_bandwidth, format_gib, format_seconds

STEP_FRACTION = 1e-5
"""By which an input is moved for a derivative: the rest of the series is that much of it, and what
rounding leaves is a thousandth of that."""

FAR_FRACTION = 0.1
"""By which it is moved to see whether a kink is near."""

LEAST_ELASTICITY = 5e-3
"""Of what is shown by itself: 1 % of it changes the step by 0.005 %."""

SMOOTH = 1e-3
"""By less than this share of an elasticity both sides differ where there is no kink."""

FACTORS = (9 / 8, 5 / 4, 3 / 2, 2.0)
"""What numbers that are counted are multiplied by, and divided: the first that is legal."""

NOT_PRICED = frozenset({"peak_memory_stack_fraction", "peak_memory_base_fraction"})
"""Errors among the fitted numbers of a device."""

Evidence = Literal["calibrated", "typed", "fitted", "relative", "datasheet", "guessed"]
"""What a value rests on: measured on the machine, said by the user, fitted to measurements of
others or to those of a relative, printed by a maker, or reasoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What another value of an input makes of the plan's layout."""

    factor: float
    """Of the input."""
    step_factor: float
    """Of the step."""
    token_factor: float
    """Of the time of a token."""
    memory_factor: float
    """Of the fullest device's peak."""

    @property
    def step(self) -> float:
        """Elasticity of the step."""
        return log(self.step_factor) / log(self.factor)

    @property
    def token(self) -> float:
        """Elasticity of the time of a token."""
        return log(self.token_factor) / log(self.factor)

    @property
    def memory(self) -> float:
        """Elasticity of the peak."""
        return log(self.memory_factor) / log(self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Of one layout to one input."""

    field: str
    """Where it stands: `cluster.levels.nvlink.latency_seconds`, as in a plan's sources."""
    value: float
    """What it is."""
    more: Moved | None
    """A little more of it; None where there cannot be more."""
    less: Moved | None
    """A little less."""
    far_more: Moved | None = None
    """10 % more; None of what is counted, too."""
    far_less: Moved | None = None
    """10 % less."""
    counted: bool = False
    """Moves by whole steps."""

    @property
    def sides(self) -> tuple[Moved, ...]:
        """Those that there are."""
        return tuple(side for side in (self.more, self.less) if side is not None)

    @property
    def time_degree(self) -> int:
        """1 of a time, -1 of a rate, 0 of what has no seconds in it."""
        if self.field.endswith("_per_second"):
            return -1
        return int(self.field.endswith("_seconds"))

    @property
    def step(self) -> float:
        """Elasticity of the step, in the mean of both sides."""
        return _mean([side.step for side in self.sides])

    @property
    def memory(self) -> float:
        """The same of the peak."""
        return _mean([side.memory for side in self.sides])

    @property
    def has_kink(self) -> bool:
        """Whether the two sides of the step differ by more than its curve makes of them."""
        if self.more is None or self.less is None or self.counted:
            return False
        one, other = self.more.step, self.less.step
        return abs(one - other) > max(SMOOTH * max(abs(one), abs(other)), 10 * STEP_FRACTION)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def sensitivities(
    case: Case,
    *,
    resized: Callable[[int], Cluster] | None = None,
    among: Collection[str] | None = None,
) -> tuple[Sensitivity, ...]:
    """Of `case` to each of its inputs that is not 0, or to those `among` them; `resized`: its
    machines with another number of GPUs, None where only these are known."""
    before = _outcome(case)
    smooth = [
        Sensitivity(
            field=field,
            value=value,
            more=_moved(case, field, 1 + STEP_FRACTION, before),
            less=_moved(case, field, 1 - STEP_FRACTION, before),
            far_more=_moved(case, field, 1 + FAR_FRACTION, before),
            far_less=_moved(case, field, 1 - FAR_FRACTION, before),
        )
        for field, value in rates_and_constants(case)
        if among is None or field in among
    ]
    counted = [
        Sensitivity(
            field=field,
            value=value,
            more=_counted(case, field, value, [value * by for by in FACTORS], before, resized),
            less=_counted(case, field, value, [value / by for by in FACTORS], before, resized),
            counted=True,
        )
        for field, value in counts(case)
        if among is None or field in among
    ]
    return (*smooth, *counted)


def held_fraction(found: tuple[Sensitivity, ...]) -> float:
    """Share of the step that goes by times and rates that are no inputs."""
    return 1 - sum(one.time_degree * one.step for one in found if not one.counted)


def rates_and_constants(case: Case) -> Iterator[tuple[str, float]]:
    """The field and value of each input that is no count: data sheets, links, what was fitted."""
    cluster, device = case.cluster, case.cluster.device
    yield from _floats("cluster.device", device, Device)
    yield from _floats("cluster.device.fit", device.fit, DeviceFit)
    for level in cluster.levels:
        yield from _floats(f"cluster.levels.{level.name}", level, Level)
    if cluster.host_memory_bytes_per_second is not None:
        yield "cluster.host_memory_bytes_per_second", cluster.host_memory_bytes_per_second


COUNTED_FIELDS = frozenset(
    {"memory_bytes", "multiprocessors", "ports", "domain_gpus", "whole_gpus"}
)
"""Of a device or a level: numbers that are counted, or that no price follows."""


def _floats(prefix: str, value: object, kind: Any) -> Iterator[tuple[str, float]]:
    for one in fields(kind):
        number = getattr(value, one.name)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and number and one.name not in COUNTED_FIELDS | NOT_PRICED:
            yield f"{prefix}.{one.name}", number


def counts(case: Case) -> Iterator[tuple[str, int]]:
    """The field and value of each input that is counted."""
    yield "training.global_batch", case.training.global_batch
    yield "training.seq_len", case.training.seq_len
    if case.training.mean_document_tokens is not None:
        yield "training.mean_document_tokens", case.training.mean_document_tokens
    yield "cluster.gpus", case.cluster.gpus
    yield "layout.micro_batch", case.layout.micro_batch


def with_value(case: Case, field: str, value: float) -> Case:
    """`case` with another value of an input that is no count. Raises SpecError where that cannot
    be."""
    *rooms, name = field.split(".")[1:]
    cluster = case.cluster
    match rooms:
        case ["device", "fit"]:
            fit = _with_number(cluster.device.fit, name, value)
            changed = replace(cluster, device=replace(cluster.device, fit=fit))
        case ["device"]:
            changed = replace(cluster, device=_with_number(cluster.device, name, value))
        case ["levels", level_name]:
            levels = tuple(
                _with_number(level, name, value) if level.name == level_name else level
                for level in cluster.levels
            )
            changed = replace(cluster, levels=levels)
        case _:
            changed = _with_number(cluster, name, value)
    return replace(case, cluster=changed)


def _with_number(owner: Any, name: str, value: float) -> Any:
    is_whole = isinstance(getattr(owner, name), int)
    return replace(owner, **{name: round(value) if is_whole else value})


def with_count(
    case: Case, field: str, value: int, *, resized: Callable[[int], Cluster] | None = None
) -> Case | None:
    """`case` with another number of what is counted, and its layout as far as that can stay; None
    where it is not legal then. The global batch stays, but where it is what is changed."""
    training, layout = case.training, case.layout
    if field == "layout.micro_batch":
        number, left = divmod(layout.micro_batch * layout.num_microbatches, value)
        if left:
            return None
        other = replace(case, layout=replace(layout, micro_batch=value, num_microbatches=number))
        return other if legal_layout_problem(other) is None else None
    try:
        if field == "cluster.gpus":
            if resized is None:
                return None
            other = replace(case, cluster=resized(value))
        else:
            name = field.removeprefix("training.")
            other = replace(case, training=_with_number(training, name, value))
    except SpecError:
        return None
    kept = kept_layout(case, other).layout
    return None if kept is None else replace(other, layout=kept)


@dataclass(frozen=True, slots=True)
class _Outcome:
    step_seconds: float
    tokens: int
    peak_bytes: int


def _outcome(case: Case) -> _Outcome:
    found = estimate(case)
    return _Outcome(
        found.time.total_seconds, case.training.tokens_per_step, found.memory.peak_device_bytes
    )


def _beside(before: _Outcome, after: _Outcome, factor: float) -> Moved:
    step = after.step_seconds / before.step_seconds
    return Moved(
        factor=factor,
        step_factor=step,
        token_factor=step * before.tokens / after.tokens,
        memory_factor=after.peak_bytes / before.peak_bytes,
    )


def _moved(case: Case, field: str, factor: float, before: _Outcome) -> Moved | None:
    value = dict(rates_and_constants(case))[field]
    try:
        other = with_value(case, field, value * factor)
    except SpecError:  # such as a share above 1
        return None
    return _beside(before, _outcome(other), factor)


def _counted(
    case: Case,
    field: str,
    value: float,
    others: list[float],
    before: _Outcome,
    resized: Callable[[int], Cluster] | None,
) -> Moved | None:
    """The first of `others` that is whole, and legal."""
    for number in others:
        if number != int(number) or number < 1:
            continue
        other = with_count(case, field, int(number), resized=resized)
        if other is not None:
            return _beside(before, _outcome(other), number / value)
    return None


def evidence_of(source: str | None) -> Evidence:
    """What a value rests on, by the words of its source in a plan."""
    words = source or ""
    if "fsdpplan calibrate" in words:
        return "calibrated"
    if words.startswith("flag "):
        return "typed"
    if "not fitted" in words or "reasoned" in words:
        return "guessed"
    if words.startswith("taken over from "):
        return "relative"
    return "fitted" if "fsdpplan.validate.fit" in words else "datasheet"


def field_words(field: str) -> str:
    """An input by its field, as people read it: `nvlink port bandwidth`."""
    *rooms, name = field.split(".")
    for ending in ("_bytes_per_second", "_per_second", "_seconds"):
        name = name.removesuffix(ending)
    level = f"{rooms[2]} " if rooms[1:2] == ["levels"] else ""
    return level + name.replace("_", " ").replace(" flops", " FLOP/s")


def value_words(field: str, value: float) -> str:
    """An input's value in its unit."""
    if field.endswith("flops_per_second"):
        return f"{value / 1e12:,.0f} T" if value >= 1e13 else f"{value / 1e12:.3g} T"
    if field.endswith("_bytes_per_second"):
        return format_bandwidth(value)
    if field.endswith("_seconds"):
        return format_seconds(value)
    if field.endswith("_bytes"):
        return format_gib(value)
    return f"{value:,.4g}"

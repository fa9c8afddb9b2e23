"""Why not this one: the best layout that has what was asked for, beside the best of all, and the
inputs under which it would be the one that is recommended.

A threshold is solved for one input at a time, the others as they are. At a point, it is asked which
layout a search puts first, and whether that one has what was asked for:

1. Both ends of the input's range are searched.
2. Between them, layouts that some search has listed (the pool) are priced on a coarse grid, and the
   step of the grid nearest to the present value at which the answer changes is halved by the pool.
3. Both sides of what is left are searched, without pool. What such a search finds enters the pool,
   and the halving begins again, until searches on both sides, no further apart than `CLOSE`, give
   different answers. So a threshold that is said was planned on both of its sides.

Sequences, batches and GPUs are searched at each doubling, without a pool. That an answer is "no"
needs no search of all layouts, but at the sides of a threshold, whose answers are shown: where all
that has it is further behind some layout of the pool than any tie goes, nothing that has it is
first.

No bound is known between grid points that were not searched: an island of the opposite answer that
is narrower than a step of the grid, of layouts that no search at the ends lists, would be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any

from fsdpplan.cost.estimate import estimate, step_time
from fsdpplan.cost.memory.peak import rank_memory
from fsdpplan.errors import SpecError
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.bounds.frontier import REACH
from fsdpplan.search.bounds.pricing import any_below
from fsdpplan.search.enumerate import divisors
from fsdpplan.search.order import Entry, in_order, seconds
from fsdpplan.search.pins import Pins
from fsdpplan.search.question import Question, SearchResult
from fsdpplan.search.recommend import difference_of, recommend
from fsdpplan.search.rules.legality import legal_layout_problem, question_problem
from fsdpplan.search.space import Space
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.layout import Layout
from fsdpplan.units import format_bandwidth, format_gib, format_seconds

CLOSE = 1.02
"""The two sides of a threshold are at most this factor apart."""

LINKS_FACTOR, RATES_FACTOR, MEMORY_FACTOR = 16.0, 8.0, 4.0
"""A link, a rate of a GPU and its memory are looked at from that part of their present value up to
so many times that: further off no machine is."""

GRID_POINTS = 5
"""At which the pool is priced on each side of the present value, evenly on a logarithmic scale."""

DOUBLINGS = 3
"""Of sequences, batches and GPUs, and as many halvings."""

MOST_ROUNDS = 8
"""Searches of both sides of a threshold before what is left between them is said as it is."""

NUMBERS = ("data_parallel", "num_microbatches")
"""Numbers of a layout that follow from its degrees and its batch, by which it can be asked for."""

LEAST_SEQ_LEN = 512
MOST_SEQ_LEN = 2**20
MOST_GPUS = 16_384
GPU_MEMORY = "GPU memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a layout should have."""

    words: str
    pins: Pins
    split: tuple[str, ...] = ()
    """Axes that should have more than one rank, however many."""

    numbers: tuple[tuple[str, int], ...] = ()
    """(a number that follows from its degrees and its batch, its value), by `NUMBERS`."""

    def allows(self, layout: Layout) -> bool:
        """Whether `layout` has it."""
        return (
            self.pins.allows(layout)
            and all(_ranks(layout, axis) > 1 for axis in self.split)
            and all(getattr(layout, name) == value for name, value in self.numbers)
        )

    def freed(self, pins: Pins) -> Pins:
        """`pins` without those of what is asked for: what it is compared with may have them
        otherwise."""
        named = {*self.pins.given(), *self.split}
        if "data_parallel" in dict(self.numbers):
            named |= {"dp_replicate", "dp_shard"}
        return Pins(**{name: value for name, value in pins.given().items() if name not in named})

    def questions(self, asked: Question) -> Iterator[Question]:
        """Questions whose layouts are those of `asked` that have it; a few may not."""
        pins = {**self.freed(asked.pins).given(), **self.pins.given()}
        for degrees in self._degrees(asked):
            if all(pins.get(axis, degree) == degree for axis, degree in degrees.items()):
                yield replace(asked, pins=Pins(**{**pins, **degrees}))

    def _degrees(self, asked: Question) -> Iterator[dict[str, Any]]:
        """What to pin in turn of degrees that are not said by number."""
        ranks = dict(self.numbers).get("data_parallel")
        if ranks is not None:
            yield from ({"dp_shard": n, "dp_replicate": ranks // n} for n in divisors(ranks))
        elif self.split:
            if self.split[0] == "ep" and asked.training.traits.spreads_experts:
                yield {"ep": 1, "experts_over_tp": True}
            yield from ({self.split[0]: n} for n in divisors(asked.cluster.gpus)[1:])
        else:
            yield {}


def _ranks(layout: Layout, axis: str) -> int:
    """Ranks of an axis; of experts those of tensor parallelism too, where they have whole ones."""
    ranks: int = layout.expert_ranks if axis == "ep" else getattr(layout, axis)
    return ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class With:
    """The best layout with what was asked for."""

    best: Priced | None
    """None where none is legal, or none fits."""
    problem: str = ""
    """Why no layout that has it can be trained, whatever it needs."""
    needed_bytes: int | None = None
    """Peak of the nearest that is legal, where none fits."""
    available_bytes: int | None = None
    nearest: Layout | None = None
    listed: tuple[Layout, ...] = ()
    """All with it that a search lists."""


def searched(asked: Question) -> SearchResult:
    """What a search says of a question."""
    return recommend(
        model=asked.model,
        cluster=asked.cluster,
        training=asked.training,
        pins=asked.pins,
        learner=asked.learner,
    )


def problem_of(asked: Question) -> str | None:
    """Why nothing can be trained, whatever its layout."""
    return question_problem(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
    )


def _priced(asked: Question, entry: Entry) -> Priced:
    return Priced(case=asked.case(entry[0]), estimate=entry[1])


def with_it(asked: Question, wanted: Wanted) -> With:
    """The best layout that has it, as a search would recommend it, or why there is none."""
    entries, misses, problems = _listed_with(asked, wanted)
    order = in_order(
        entries, difference=difference_of(asked.cluster, asked.learner), cluster=asked.cluster
    )
    if order is not None:
        listed = tuple(layout for layout, _ in entries)
        return With(best=_priced(asked, order.entries[0]), listed=listed)
    if misses:
        nearest = min(misses, key=lambda one: one[0])
        return With(
            best=None,
            needed_bytes=nearest[0],
            available_bytes=asked.available_bytes,
            nearest=nearest[1],
        )
    fallback = f"no degrees with it multiply to {asked.cluster.gpus} GPUs"
    return With(best=None, problem=problems[0] if problems else fallback)


def _listed_with(
    asked: Question, wanted: Wanted
) -> tuple[list[Entry], list[tuple[int, Layout]], list[str]]:
    """What searches list that has it; what came nearest to fitting; what was not legal."""
    entries: list[Entry] = []
    misses: list[tuple[int, Layout]] = []
    problems: list[str] = []
    for question in wanted.questions(asked):
        problem = problem_of(question)
        if problem is not None:
            problems.append(problem)
            continue
        result = searched(question)
        entries += [
            (one.layout, one.estimate) for one in result.ranked if wanted.allows(one.layout)
        ]
        if result.nearest_miss is not None:
            misses.append((result.nearest_miss.needed_bytes, result.nearest_miss.layout))
        elif not result.ranked and result.example:
            problems.append(result.example)
    return entries, misses, problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """An input that is turned by itself."""

    name: str
    unit: str
    """`B/s`, `s`, `B`, `FLOP/s`, or empty: a number."""
    now: float
    at: Callable[[float], Question]
    """The question with another value. Raises SpecError where there is none such."""
    factor: float = LINKS_FACTOR
    """It is looked at up to so many times its present value, and down to that part of it."""
    is_rate: bool = False
    """It makes nothing legal, nor fit."""
    steps: tuple[float, ...] = ()
    """Values that it can have, of a number; empty: all of that range."""

    @property
    def range(self) -> tuple[float, float]:
        """Least and most that is looked at."""
        if self.steps:
            return min(*self.steps, self.now), max(*self.steps, self.now)
        return self.now / self.factor, self.now * self.factor

    def words(self, value: float) -> str:
        """A value of it with its unit."""
        match self.unit:
            case "B/s":
                return format_bandwidth(value)
            case "B":
                return format_gib(value)
            case "s":
                return format_seconds(value)
            case "FLOP/s":
                return f"{value / 1e12:,.4g} TFLOP/s"
        return f"{value:,.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a threshold, as searches found it."""

    value: float
    first: Priced | None
    """What is recommended there."""
    has_it: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """Where the answer changes."""

    near: Side
    """The side of the present value: the answer there is that of today."""
    far: Side
    """The other one."""
    lasts: bool | None = None
    """Whether the answer at the end of the range is that of the far side; None: not asked."""

    @property
    def is_above(self) -> bool:
        """Whether the input has to grow."""
        return self.far.value > self.near.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """What turning one input does."""

    knob: Knob
    thresholds: tuple[Threshold, ...]
    """The nearest below and above the present value; empty: the answer stays as it is."""
    searches: int
    """How often all layouts, or those that have it, were searched."""


def knobs(asked: Question, resized: Callable[[int], Cluster] | None) -> tuple[Knob, ...]:
    """The inputs that are turned; GPUs only where it is known how others would be joined."""
    cluster, training = asked.cluster, asked.training
    found = [*_link_knobs(asked)]
    device = cluster.device

    def of_device(change: Callable[[float], Device]) -> Callable[[float], Question]:
        return lambda value: replace(asked, cluster=replace(cluster, device=change(value)))

    peak = device.peak_flops_per_second(training.precision)
    found += [
        Knob(
            name=GPU_MEMORY,
            unit="B",
            now=device.memory_bytes,
            factor=MEMORY_FACTOR,
            at=of_device(lambda value: replace(device, memory_bytes=round(value))),
        ),
        Knob(
            name=f"{training.precision} FLOP/s of a GPU",
            unit="FLOP/s",
            is_rate=True,
            now=peak,
            factor=RATES_FACTOR,
            at=of_device(lambda value: _as_fast(device, value / peak)),
        ),
        Knob(
            name="memory bandwidth of a GPU",
            unit="B/s",
            is_rate=True,
            now=device.memory_bandwidth_bytes_per_second,
            factor=RATES_FACTOR,
            at=of_device(lambda v: replace(device, memory_bandwidth_bytes_per_second=v)),
        ),
        Knob(
            name="sequence length",
            unit="",
            now=training.seq_len,
            at=lambda v: replace(asked, training=replace(training, seq_len=int(v))),
            steps=_doubled(training.seq_len, LEAST_SEQ_LEN, MOST_SEQ_LEN),
        ),
        Knob(
            name="global batch",
            unit="",
            now=training.global_batch,
            at=lambda v: replace(asked, training=replace(training, global_batch=int(v))),
            steps=_doubled(training.global_batch, 1, 2**30),
        ),
    ]
    if resized is not None:
        found.append(
            Knob(
                name="GPUs",
                unit="",
                now=cluster.gpus,
                at=lambda value: replace(asked, cluster=resized(int(value))),
                steps=_doubled(cluster.gpus, 1, MOST_GPUS),
            )
        )
    return tuple(found)


def _link_knobs(asked: Question) -> Iterator[Knob]:
    """Bandwidth of each level, as a GPU has it, and the latency of the outermost."""
    cluster, below = asked.cluster, 1
    for index, level in enumerate(cluster.levels if cluster.gpus > 1 else ()):
        where = "between nodes" if cluster.joins_nodes(level) else "within a node"
        share = level.ports / below
        below = level.domain_gpus

        def at(value: float, name: str, index: int = index) -> Question:
            levels = list(cluster.levels)
            levels[index] = replace(levels[index], **{name: value})  # type: ignore[arg-type]
            return replace(asked, cluster=replace(cluster, levels=tuple(levels)))

        yield Knob(
            name=f"bandwidth of {level.name} {where}, each GPU",
            unit="B/s",
            is_rate=True,
            now=share * level.port_bandwidth_bytes_per_second,
            at=lambda value, at=at, share=share: at(  # type: ignore[misc]
                value / share, "port_bandwidth_bytes_per_second"
            ),
        )
        if level is cluster.levels[-1] and level.latency_seconds:
            yield Knob(
                name=f"latency of {level.name} {where}",
                unit="s",
                is_rate=True,
                now=level.latency_seconds,
                at=lambda value, at=at: at(value, "latency_seconds"),  # type: ignore[misc]
            )


def _as_fast(device: Device, factor: float) -> Device:
    """With that much of its rates in all formats."""
    fp8 = device.peak_fp8_flops_per_second
    return replace(
        device,
        peak_bf16_flops_per_second=factor * device.peak_bf16_flops_per_second,
        peak_fp16_flops_per_second=factor * device.peak_fp16_flops_per_second,
        peak_fp32_flops_per_second=factor * device.peak_fp32_flops_per_second,
        peak_fp8_flops_per_second=None if fp8 is None else factor * fp8,
    )


def _doubled(now: int, least: int, most: int) -> tuple[float, ...]:
    """Halves, as long as they are whole, and doubles."""
    halves = (now // 2**n for n in range(1, DOUBLINGS + 1) if now % 2**n == 0)
    doubles = (now * 2**n for n in range(1, DOUBLINGS + 1))
    return tuple(sorted(float(one) for one in (*halves, *doubles) if least <= one <= most))


@dataclass(slots=True)
class _Points:
    """Answers of one knob, and the pool of layouts that searches have listed."""

    knob: Knob
    wanted: Wanted
    pool: dict[Layout, None]
    today: Side
    sides: dict[float, Side] = field(default_factory=dict)
    all_searched: set[float] = field(default_factory=set)
    """Values at which all layouts were."""
    fitting: dict[Layout, bool] = field(default_factory=dict)
    """Whether layouts are legal and fit, whatever a rate is."""
    guesses: dict[tuple[float, int], bool] = field(default_factory=dict)
    """By value, and how many layouts the pool had."""
    searches: int = 0

    def searched(self, value: float) -> Side:
        """The answer at `value`: by what beats all that has it, or by a search of all layouts."""
        if value not in self.sides:
            asked = self._asked(value)
            beaten_by = None if asked is None else self._beaten_by(asked)
            if beaten_by is None:
                return self.planned(value)
            self.sides[value] = Side(value=value, first=beaten_by, has_it=False)
        return self.sides[value]

    def planned(self, value: float) -> Side:
        """The answer of a search of all layouts at `value`."""
        if value not in self.all_searched:
            self.sides[value] = self._planned(value)
            self.all_searched.add(value)
        return self.sides[value]

    def _asked(self, value: float) -> Question | None:
        """The question there; None where there are no such machines, or nothing can be trained."""
        try:
            asked = self.knob.at(value)
        except SpecError:
            return None
        return asked if problem_of(asked) is None else None

    def _planned(self, value: float) -> Side:
        asked = self._asked(value)
        if asked is None:
            return Side(value=value, first=None, has_it=False)
        self.searches += 1
        ranked = searched(asked).ranked
        self.pool |= dict.fromkeys(one.layout for one in ranked)
        if not ranked:
            return Side(value=value, first=None, has_it=False)
        found = ranked[0]
        return Side(
            value=value,
            first=_priced(asked, (found.layout, found.estimate)),
            has_it=self.wanted.allows(found.layout),
        )

    def _beaten_by(self, asked: Question) -> Priced | None:
        """A layout of the pool that beats all that have what is asked for by more than any tie
        goes. What runs say of those is not bounded: where there are some, all are searched."""
        others = [one for one in self._pooled(asked) if not self.wanted.allows(one[0])]
        if asked.learner is not None or not others:
            return None
        fastest = min(others, key=seconds)
        self.searches += 1
        for question in self.wanted.questions(asked):
            if problem_of(question) is None:
                nearest = any_below(Space(question), REACH * seconds(fastest))
                if nearest is not None:
                    self.pool[nearest[0]] = None
                    return None
        return _priced(asked, fastest)

    def _pooled(self, asked: Question) -> list[Entry]:
        """Of the pool's layouts that are legal and fit, those within a tie of the fastest, with
        what they take."""
        there = [one for one in self.pool if self._fits(asked, one)]
        if asked.learner is not None:
            return [(one, asked.learner.corrected(one, estimate(asked.case(one)))) for one in there]
        times = {one: step_time(asked.case(one)).time.total_seconds for one in there}
        most = REACH * min(times.values(), default=0.0)
        return [(one, estimate(asked.case(one))) for one, time in times.items() if time <= most]

    def _fits(self, asked: Question, layout: Layout) -> bool:
        """Whether a layout is legal and fits; asked once where the input is a rate."""
        known = self.fitting if self.knob.is_rate else {}
        if layout not in known:
            case = asked.case(layout)
            known[layout] = (
                legal_layout_problem(case) is None
                and rank_memory(case).peak_device_bytes <= asked.available_bytes
            )
        return known[layout]

    def guessed(self, value: float) -> bool:
        """What the pool alone says; of what was searched, that."""
        if value in self.sides:
            return self.sides[value].has_it
        key = (value, len(self.pool))
        if key not in self.guesses:
            asked = self.knob.at(value)
            order = in_order(
                self._pooled(asked),
                difference=difference_of(asked.cluster, asked.learner),
                cluster=asked.cluster,
            )
            self.guesses[key] = order is not None and self.wanted.allows(order.entries[0][0])
        return self.guesses[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """Why a layout that has what was asked for is not the one that is recommended, or why it is."""

    wanted: Wanted
    """What was asked for."""
    first: Priced
    """What is recommended, whatever it has."""
    with_it: With
    """The best that has it, or why there is none."""
    turned: tuple[Turned, ...]
    """Inputs by themselves; empty where none was asked for."""

    @property
    def has_it(self) -> bool:
        """Whether the recommended layout has it."""
        return self.wanted.allows(self.first.case.layout)


def why(
    asked: Question,
    wanted: Wanted,
    *,
    resized: Callable[[int], Cluster] | None,
    say: Callable[[str], None],
) -> Why | None:
    """The best with it beside the best of all, and what each input would have to be; None where
    nothing fits at all. `asked` fixes nothing of what is wanted; `say` is told what is searched."""
    found = searched(asked)
    if not found.ranked:
        return None
    best = _priced(asked, (found.ranked[0].layout, found.ranked[0].estimate))
    having = with_it(asked, wanted)
    pool = (*(one.layout for one in found.ranked), *having.listed)
    today = Side(value=0.0, first=best, has_it=wanted.allows(best.case.layout))
    every = [knob for knob in knobs(asked, resized) if _may_turn(knob, having)]
    answers = []
    for number, knob in enumerate(every, start=1):
        say(f"{knob.name} ({number} of {len(every)})")
        answers.append(turned(knob, wanted, today, pool))
    return Why(wanted=wanted, first=best, with_it=having, turned=tuple(answers))


def _may_turn(knob: Knob, having: With) -> bool:
    """Whether an input can change the answer: links and rates make nothing legal, nor fit."""
    if having.best is not None or knob.steps:
        return True
    return not having.problem and knob.name == GPU_MEMORY


def turned(knob: Knob, wanted: Wanted, today: Side, pool: tuple[Layout, ...]) -> Turned:
    """The nearest thresholds of one input; `today`: the answer at its present value, `pool`: what
    searches there have listed."""
    points = _Points(
        knob=knob,
        wanted=wanted,
        pool=dict.fromkeys(pool),
        today=replace(today, value=knob.now),
        sides={knob.now: replace(today, value=knob.now)},
        all_searched={knob.now},
    )
    find = _step_threshold if knob.steps else _solved
    found = [find(points, up) for up in (False, True)]
    return Turned(
        knob=knob,
        thresholds=tuple(one for one in found if one is not None),
        searches=points.searches,
    )


def _step_threshold(points: _Points, up: bool) -> Threshold | None:
    """The nearest value of a number at which the answer is another one."""
    knob = points.knob
    steps = [v for v in knob.steps if (v > knob.now) == up]
    near = points.today
    for value in sorted(steps, key=lambda v: abs(v - knob.now)):
        side = points.planned(value)
        if side.has_it != points.today.has_it:
            return Threshold(near=near, far=side)
        near = side
    return None


def _solved(points: _Points, up: bool) -> Threshold | None:
    """The nearest threshold on one side of the present value, searched on both of its sides."""
    knob, today = points.knob, points.today
    factors = (knob.factor ** (n / GRID_POINTS) for n in range(1, GRID_POINTS + 1))
    grid = [knob.now * factor if up else knob.now / factor for factor in factors]
    points.searched(grid[-1])
    for _ in range(MOST_ROUNDS):
        values = [knob.now, *grid]
        flip = next((i for i, v in enumerate(grid) if points.guessed(v) != today.has_it), None)
        if flip is None:
            return None
        if points.searched(grid[flip]).has_it != today.has_it:
            found = _halved(points, values[flip], grid[flip])
            if found is not None:
                last = points.searched(grid[-1])
                return replace(found, lasts=last.has_it == found.far.has_it)
    return None


def _halved(points: _Points, near: float, far: float) -> Threshold | None:
    """Between two values, where the pool says that `far` has the other answer."""
    today = points.today.has_it
    if points.planned(far).has_it == today:
        return None
    if points.planned(near).has_it != today:  # the pool was wrong about it: it is further in
        return _halved(points, points.knob.now, near)
    for _ in range(MOST_ROUNDS):
        if max(near, far) <= CLOSE * min(near, far):
            break
        low, high = near, far
        while max(low, high) > CLOSE * min(low, high):
            middle = sqrt(low * high)
            low, high = (low, middle) if points.guessed(middle) != today else (middle, high)
        for value in (high, low):
            if value in (near, far):
                continue
            if points.planned(value).has_it != today:
                far = value
            else:
                near = value
                break
    return Threshold(near=points.planned(near), far=points.planned(far))

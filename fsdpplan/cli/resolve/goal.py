"""What a training takes in time, money and energy, and the answer that is best by an objective: one
number of GPUs, or the best of several.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import cache

from fsdpplan.cli import working
from fsdpplan.cli.options.files import EvidenceOptions, LedgerOptions
from fsdpplan.cli.options.goal import DEFAULT_CHANCE, BillOptions, PriceOptions
from fsdpplan.cli.options.layout import LayoutOptions
from fsdpplan.cli.options.question import (
    ClusterOptions,
    ModelOptions,
    TorchOptions,
    TrainingOptions,
)
from fsdpplan.cli.options.scaling import Counts
from fsdpplan.cli.resolve import Resolved, flag
from fsdpplan.cli.resolve.cluster import larger_clusters, node_gpus, resolve_cluster
from fsdpplan.cli.resolve.failures import reliability_of
from fsdpplan.cli.resolve.found import Found, searched
from fsdpplan.cli.resolve.inputs import Inputs, Known, case_of, question_of, resolve_around
from fsdpplan.cli.resolve.model import resolve_model
from fsdpplan.cli.resolve.torch import resolve_torch
from fsdpplan.cost.bill import Bill, bill, chance_in_time, least_seconds
from fsdpplan.cost.goodput import goodput
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files.prices import price_of, require_provider
from fsdpplan.files.profiles.catalogue import load_node, profile_names
from fsdpplan.run.known import known_draw
from fsdpplan.search.objective import OBJECTIVES, Objective, Offer, best, frontier, leaner
from fsdpplan.search.question import LEAST_GAIN_FRACTION, ObjectiveName
from fsdpplan.search.scaling import doublings
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Draw, Failures, RankedLayout, Terms
from fsdpplan.spec.training import TorchRelease
from fsdpplan.topology import probe
from fsdpplan.units import format_percent

MOST_GPUS = 4096
"""More are not looked at where the number is left open."""
AGED_DAYS = 90
"""A price that was read longer ago is warned of."""
FREE = ("cost", "energy", "fewest-gpus")
"""Objectives for which the number of GPUs is looked for where it is not said."""
ENERGY = ("node_watts", "pue", "co2_per_kwh")
"""Options that ask for the energy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked beside the question."""

    bill: BillOptions
    objective: ObjectiveName | None = None
    today: date
    failures: Failures | None = None
    """What was said of how the machines fail; None: nothing."""
    ledger: LedgerOptions | None = None
    """Where own runs say how long saves take."""

    @property
    def chance(self) -> float:
        """With which the deadline is to be met."""
        return self.bill.deadline_chance or DEFAULT_CHANCE

    @property
    def name(self) -> ObjectiveName:
        """The objective that was typed; else that of every search, but where a deadline says how
        fast is fast enough."""
        if self.objective is not None or self.bill.deadline is None:
            return self.objective or "throughput"
        has_price = self.bill.price is not None or self.bill.provider is not None
        return "cost" if has_price else "fewest-gpus"

    @property
    def best_by(self) -> Objective:
        """What it makes least."""
        return OBJECTIVES[self.name]

    @property
    def is_open(self) -> bool:
        """Whether the number of GPUs is looked for where it is not said."""
        has_deadline = self.bill.deadline is not None and self.objective != "headroom"
        return self.objective in FREE or has_deadline


def require_whole(goal: Goal, training: TrainingOptions, *, counts: int) -> None:
    """Raise SpecError where an option lacks what it is about; `counts`: numbers of GPUs, 0 where
    they are looked for."""
    given = goal.bill
    for field in fields(given):
        if getattr(given, field.name) is not None and training.tokens is None:
            raise SpecError(
                f"{flag(field.name)} is of a whole training: say its tokens, such as --tokens 2T"
            )
    require_one_price(given)
    if given.deadline_chance is not None and given.deadline is None:
        raise SpecError("--deadline-chance is of a deadline: give one, such as --deadline 14d")
    needs = goal.best_by.needs if goal.objective else ()
    if "tokens" in needs and training.tokens is None:
        raise SpecError(
            f"--objective {goal.objective} is of a whole training: say its tokens, such as "
            "--tokens 2T"
        )
    if "price" in needs and given.price is None and given.provider is None:
        raise SpecError(
            f"--objective {goal.objective} needs the price of a GPU hour: type --price 2.10, or "
            "--provider lambda"
        )
    if "counts" in needs and counts == 1:
        raise SpecError(
            f"--objective {goal.objective} chooses among numbers of GPUs, and --gpus says one: "
            "type a range such as --gpus 8:512, or leave it out"
        )
    if "one count" in needs and counts > 1:
        raise SpecError(
            f"--objective {goal.objective} compares layouts on one number of GPUs: type one, such "
            "as --gpus 64"
        )


def require_one_price(given: PriceOptions) -> None:
    """Raise SpecError where two prices are said, or one of a provider that has none."""
    if given.price is not None and given.provider is not None:
        raise SpecError("--price and --provider contradict each other: give one of them")
    if given.provider is not None:
        require_provider(given.provider)


def with_epochs(training: TrainingOptions, options: BillOptions) -> TrainingOptions:
    """The tokens of all passes."""
    if options.epochs is None or training.tokens is None:
        return training
    return replace(training, tokens=math.ceil(training.tokens * options.epochs))


def terms_of(goal: Goal, cluster: Cluster, *, known: Terms | None = None) -> Resolved[Terms]:
    """What is known of money and energy on these machines: what is typed, over `known`, what a plan
    says. Raises SpecError where what is asked for is not known."""
    asked, known = goal.bill, known or Terms()
    price = price_per_gpu_hour(asked, cluster, today=goal.today, known=known.price)
    draw = _draw(goal, cluster, known)
    terms = Terms(
        price=price.value,
        draw=draw.value,
        pue=asked.pue or known.pue,
        co2_grams_per_kwh=_typed(asked.co2_per_kwh, known.co2_grams_per_kwh),
        deadline_seconds=_typed(asked.deadline, known.deadline_seconds),
        deadline_chance=_typed(asked.deadline_chance, known.deadline_chance),
    )
    unsaid = draw.value is not None and draw.value != known.draw and asked.pue is None
    return Resolved(
        value=terms,
        assumptions=(
            *price.assumptions,
            *draw.assumptions,
            *(["energy of the nodes alone, without their cooling (--pue)"] if unsaid else []),
        ),
        warnings=price.warnings,
    )


def _typed(typed: float | None, known: float | None) -> float | None:
    return known if typed is None else typed


def price_per_gpu_hour(
    given: PriceOptions, cluster: Cluster, *, today: date, known: float | None = None
) -> Resolved[float | None]:
    """In dollars: what is typed, over `known`. Raises SpecError where a provider has no price of
    these GPUs."""
    provider = given.provider
    if provider is None:
        return Resolved(value=_typed(given.price, known))
    row = price_of(provider, cluster.device.name)
    age = row.age_days(today)
    said = (
        f"${row.usd_per_gpu_hour:,.2f} a GPU hour, on demand at {provider} ({row.offer}): read on "
        f"{row.read_on}, {age:,} days ago (--price)"
    )
    theirs = _cloud_of(cluster)
    doubts = []
    if theirs is not None and theirs != provider:
        doubts.append(
            f"{cluster.name} is a machine of {theirs}, and the price is one of {provider}: name a "
            f"machine of {provider} by --hardware, or the price of {theirs} by --provider {theirs}"
        )
    aged = f"the price of {provider} is {age:,} days old: see {row.page}, and type it as --price"
    return Resolved(
        value=row.usd_per_gpu_hour,
        assumptions=(said,),
        warnings=(*doubts, *((aged,) if age > AGED_DAYS else ())),
    )


def _cloud_of(cluster: Cluster) -> str | None:
    """Whose machines they are; None where that is not known. One node has no network to say so."""
    network = cluster.network
    if network is None and cluster.name in profile_names("node"):
        network = load_node(cluster.name).network
    return None if network is None else network.provider


def _draw(goal: Goal, cluster: Cluster, known: Terms) -> Resolved[Draw | None]:
    if goal.bill.node_watts is not None:
        return Resolved(value=Draw(node_watts=goal.bill.node_watts))
    asked = any(getattr(goal.bill, name) is not None for name in ENERGY)
    if known.draw is not None or (not asked and goal.objective != "energy"):
        return Resolved(value=known.draw)
    draw, said = known_draw(cluster)
    return Resolved(value=draw, assumptions=(said,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """An answer that was looked at."""

    inputs: Inputs
    found: Found
    offer: Offer

    @property
    def first(self) -> RankedLayout:
        """The layout of it."""
        return self.found.result.ranked[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best of what was tried."""

    goal: Goal
    terms: Resolved[Terms]
    tried: tuple[Tried, ...]
    chosen: int | None
    """None: none meets the deadline."""
    frontier: tuple[int, ...]
    """Of those tried, what no other one beats."""
    left_out: tuple[tuple[int, str], ...] = ()
    """(GPUs, why nothing came of it)."""

    @property
    def best(self) -> Tried:
        """The chosen one."""
        assert self.chosen is not None
        return self.tried[self.chosen]


def bill_of(inputs: Inputs, one: RankedLayout, terms: Terms) -> Bill | None:
    """What the training takes with that layout."""
    return bill(case_of(inputs, one.layout), one.estimate, terms)


def _tried(goal: Goal, inputs: Inputs, found: Found, terms: Terms) -> Tried:
    kept = _kept_fractions(goal, inputs, found)
    found = _most_kept_first(_in_time_first(goal, inputs, found, terms), kept)
    first, memory = found.result.ranked[0], inputs.cluster.device.memory_bytes
    peak = first.estimate.memory
    offer = Offer(
        gpus=inputs.cluster.gpus,
        tokens_per_second=first.estimate.tokens_per_second,
        free_bytes=memory - peak.peak_device_bytes * peak.expected_over_predicted,
        kept_fraction=kept.get(first.layout, 1.0),
        bill=bill_of(inputs, first, terms),
    )
    return Tried(inputs=inputs, found=found, offer=offer)


def _in_time_first(goal: Goal, inputs: Inputs, found: Found, terms: Terms) -> Found:
    """`found`, where the first is too late but another one is not with that one first: a layout is
    preferred to a faster one that is not told apart, but not at the price of the deadline."""
    ranked = found.result.ranked
    chances = [chance_in_time(bill_of(inputs, one, terms)) for one in ranked]
    able = [index for index, chance in enumerate(chances) if chance >= goal.chance]
    if goal.bill.deadline is None or not able or able[0] == 0:
        return found
    return _with_first(found, able[0], "the first that ends in time")


def _kept_fractions(goal: Goal, inputs: Inputs, found: Found) -> dict[Layout, float]:
    """Of each layout's time, what failures leave; empty where nobody asked."""
    if goal.objective != "goodput":
        return {}
    fails = reliability_of(inputs.cluster, goal.failures, ledger=goal.ledger).value
    return {
        one.layout: goodput(case_of(inputs, one.layout), one.estimate, fails).fraction.expected
        for one in found.result.ranked
    }


def _most_kept_first(found: Found, kept: Mapping[Layout, float]) -> Found:
    """`found`, where the first is one that gets further because failures take less of its time: of
    others the order of the search holds."""
    if not kept:
        return found
    ranked = found.result.ranked
    rates = [kept[one.layout] * one.estimate.tokens_per_second for one in ranked]
    least = kept[ranked[0].layout] * (1 + LEAST_GAIN_FRACTION)
    able = [0, *(index for index, one in enumerate(ranked) if kept[one.layout] > least)]
    most = max(able, key=lambda index: rates[index])
    if most == 0:
        return found
    words = (
        f"{format_percent(kept[ranked[most].layout])} of its time is kept, of the fastest "
        f"{format_percent(kept[ranked[0].layout])}"
    )
    return _with_first(found, most, words)


def _with_first(found: Found, index: int, reason: str) -> Found:
    """`found`, where a layout that stands further down is first, for that reason."""
    ranked = found.result.ranked
    order = [index, *(other for other in range(len(ranked)) if other != index)]
    rank = {old + 1: new for new, old in enumerate(order, start=1)}
    said = {index: reason}
    result, listed = found.result, found.result.listed
    next_run = listed.next_run
    listed = replace(
        listed,
        ranked=tuple(
            replace(ranked[old], rank=rank[old + 1], reason=said.get(old, ranked[old].reason))
            for old in order
        ),
        errors=tuple(listed.errors[old] for old in order),
        tied=(),
        fastest_rank=None if listed.fastest_rank is None else rank[listed.fastest_rank],
        next_run=None if next_run is None else replace(next_run, rank=rank[next_run.rank]),
    )
    return replace(found, result=replace(result, listed=listed))


def answered(goal: Goal, inputs: Inputs, found: Found, terms: Resolved[Terms]) -> Answer:
    """On one number of GPUs, where `found` is not empty."""
    tried = [_tried(goal, inputs, found, terms.value)]
    if goal.objective == "headroom":
        tried += [_tried(goal, inputs, one, terms.value) for one in _leaner(inputs, tried[0])]
    return _answer(goal, terms, tried, ())


def shared_words(goal: Goal, answer: Answer) -> tuple[str, ...]:
    """What is to be said of how the best was found."""
    gpus = answer.best.offer.gpus
    numbers = len({one.offer.gpus for one in answer.tried}) + len(answer.left_out)
    if numbers > 1:
        batch = answer.best.inputs.training.global_batch
        return (
            f"{gpus:,} GPUs, of {numbers} numbers that were tried, each with a global batch of "
            f"{batch:,} sequences (--gpus, --global-batch)",
        )
    if goal.objective in ("cost", "energy"):
        return (
            f"on {gpus:,} GPUs the fastest layout is the cheapest, and draws least: price and "
            "power are those of the machines, whatever the layout (--gpus 8:512 compares numbers)",
        )
    return ()


def _answer(
    goal: Goal,
    terms: Resolved[Terms],
    tried: Sequence[Tried],
    left_out: tuple[tuple[int, str], ...],
) -> Answer:
    objective, offers = goal.best_by, [one.offer for one in tried]
    return Answer(
        goal=goal,
        terms=terms,
        tried=tuple(tried),
        chosen=best(offers, objective, chance=goal.chance),
        frontier=frontier(offers, objective.axis, objective.beside),
        left_out=left_out,
    )


def _leaner(inputs: Inputs, first: Tried) -> Iterator[Found]:
    """What `recommend` says with less and less memory to fill."""
    started = time.perf_counter()
    for result in leaner(question_of(inputs), first.found.result):
        yield Found(result=result, seconds=time.perf_counter() - started)
        started = time.perf_counter()


def on_the_best(
    goal: Goal,
    counts: Counts | None,
    *,
    model: ModelOptions,
    cluster: ClusterOptions,
    training: TrainingOptions,
    layout: LayoutOptions,
    torch: TorchOptions,
    evidence: EvidenceOptions,
) -> Answer:
    """On the best of several numbers of GPUs: those of a list, or powers of two of whole nodes.

    The global batch is one for all, that of the least number, so that all train the same.
    Raises NoFeasibleLayout where nothing fits.
    """
    the_model = resolve_model(model)

    @cache
    def release() -> Resolved[TorchRelease]:
        return resolve_torch(torch)

    def inputs_on(gpus: int, batch: int | None) -> Inputs:
        machines = replace(cluster, gpus=gpus)
        return resolve_around(
            Known(
                model=the_model,
                cluster=resolve_cluster(machines),
                larger=larger_clusters(machines),
            ),
            training=replace(training, global_batch=batch),
            layout=layout,
            torch=release,
            evidence=evidence,
        )

    batch = training.global_batch
    tried: list[Tried] = []
    left_out: list[tuple[int, str]] = []
    terms: Resolved[Terms] | None = None
    refused: SpecError | None = None
    numbers = _numbers(counts, cluster)
    for gpus in numbers:
        try:
            inputs = inputs_on(gpus, training.global_batch)
            batch = batch or inputs.training.global_batch
            if inputs.training.global_batch != batch:
                inputs = inputs_on(gpus, batch)
            terms = terms or terms_of(goal, inputs.cluster)
            if gpus < numbers[-1] and _cannot_end(goal, inputs):
                left_out.append((gpus, "too late even at the peak rate of its GPUs"))
                continue
            working.say(f"searching: {gpus:,} GPUs ({numbers.index(gpus) + 1} of {len(numbers)})")
            found = searched(inputs)
        except SpecError as error:
            refused = refused or error
            left_out.append((gpus, str(error)))
            continue
        if found.result.ranked:
            tried.append(_tried(goal, inputs, found, terms.value))
        else:
            left_out.append((gpus, "nothing fits"))
    if terms is None and refused is not None:
        raise refused
    if terms is None or not tried:
        raise NoFeasibleLayout(
            f"no layout of {the_model.value.name} fits on any of {_shown(left_out)} GPUs: type "
            "other --gpus, or take GPUs with more memory",
            rejected={},
        )
    return _answer(goal, terms, tried, tuple(left_out))


def _cannot_end(goal: Goal, inputs: Inputs) -> bool:
    """Whether no layout can end in time with a chance of a half or more, at an MFU of 1: that is
    not searched."""
    least = least_seconds(inputs.model, inputs.cluster, inputs.training)
    deadline = goal.bill.deadline
    return None not in (least, deadline) and goal.chance >= 0.5 and least > deadline  # type: ignore[operator]


def _shown(numbers: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{gpus:,}" for gpus, _ in numbers)


def _numbers(counts: Counts | None, cluster: ClusterOptions) -> tuple[int, ...]:
    if counts is not None and not counts.is_range:
        return counts.numbers
    here = len(probe.visible_gpus()) if cluster.hardware is None else 0
    asked = counts or Counts(numbers=(1, MOST_GPUS), is_range=True)
    return numbers_of(asked, here or node_gpus(cluster) or 1)


def numbers_of(asked: Counts, node: int, machine: str = "") -> tuple[int, ...]:
    """The numbers of GPUs of a list, or of a range on nodes of so many GPUs; `machine` names these
    where there are several kinds. Raises SpecError for a range without any."""
    if not asked.is_range:
        return asked.numbers
    least, most = asked.numbers
    found = doublings(least, most, node)
    if not found:
        of = f" of {machine}" if machine else ""
        raise SpecError(
            f"--gpus {least}:{most} holds no power of two of the {node} GPUs of a node{of}: type a "
            "wider range, or the numbers themselves"
        )
    return found

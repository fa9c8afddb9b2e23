"""Remedies: what to change where nothing can be planned, each one tried before it is said.

A remedy is a question that was searched until a layout was found that is legal and fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import inf

from fsdpplan.cost.band import peak_log_error
from fsdpplan.cost.memory.peak import available_bytes, rank_memory
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.errors import SpecError
from fsdpplan.search.bounds.leanest import Leanest
from fsdpplan.search.defaults import legal_global_batch
from fsdpplan.search.pins import Pins, default_global_batch, pin_flag
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend
from fsdpplan.search.rules.legality import legal_layout_problem, question_problem
from fsdpplan.search.space import Space
from fsdpplan.spec.adapters import USUAL_ALPHA, Adapters
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import GradientSync, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, RankedLayout
from fsdpplan.spec.training import Training

LEAST_HEADROOM, LEAST_CHANCE = 0.02, 0.7
"""What is still said to who has no other way: past either, a run is a matter of luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Other inputs, and what to type for them."""

    words: str
    cluster: Cluster
    training: Training
    layout: Layout


def changes(model: Model, asked: Change) -> Iterator[Change]:
    """Other policies on the same GPUs after which the closest layout fits, cheapest first."""
    return (change for change in _policies(asked) if _fits(model, change))


def _fits(model: Model, change: Change) -> bool:
    case = Case(model=model, cluster=change.cluster, training=change.training, layout=change.layout)
    available = available_bytes(cluster=change.cluster, training=change.training)
    return legal_layout_problem(case) is None and rank_memory(case).peak_device_bytes <= available


def _full(layout: Layout) -> Layout:
    return replace(layout, activation_checkpointing="full", checkpoint_blocks="all")


def _single(layout: Layout) -> Layout:
    """With all recomputed, and one sequence at a time."""
    whole = layout.micro_batch * layout.num_microbatches
    return replace(_full(layout), micro_batch=1, num_microbatches=whole)


def _policies(asked: Change) -> Iterator[Change]:
    """Policies that cost time and change nothing of what is trained."""
    layout = asked.layout
    full, single = _full(layout), _single(layout)
    yield replace(asked, words="use --activation-checkpointing full", layout=full)
    words = "use --micro-batch 1 with --activation-checkpointing full"
    yield replace(asked, words=words, layout=single)
    if layout.pp == 1:
        for sync in ("every", "reduce_scatter_only"):
            synced = replace(single, gradient_sync=sync)
            yield replace(asked, words=f"use --gradient-sync {sync}", layout=synced)
        yield from _sharding_changes(replace(asked, layout=single))


def less_asked(training: Training, cluster: Cluster) -> Iterator[tuple[str, Training]]:
    """(what to type, the training after it): shorter sequences, then less room: less head-room, and
    a smaller chance to fit where that is what refuses."""
    seq_len = training.seq_len
    while seq_len > 512:
        seq_len //= 2
        yield f"use --seq-len {seq_len}", replace(training, seq_len=seq_len)
    values: dict[str, float] = {}
    if training.headroom_fraction > LEAST_HEADROOM:
        values["headroom_fraction"] = LEAST_HEADROOM
    if training.fits_fraction > LEAST_CHANCE and peak_log_error(cluster.device):
        values["fits_fraction"] = LEAST_CHANCE
    if values:
        flags = " ".join(
            f"--{name.removesuffix('_fraction')} {100 * value:.0f}%"
            for name, value in values.items()
        )
        yield f"plan with less room: {flags}", replace(training, **values)  # type: ignore[arg-type]


def _sharding_changes(asked: Change) -> Iterator[Change]:
    """Reshard always, then shard over all ranks."""
    layout = asked.layout
    sync: GradientSync = "last" if layout.pp > 1 else "every"
    always = replace(layout, reshard_after_forward="always", gradient_sync=sync)
    if layout.sharding == "fsdp":
        yield replace(asked, words="use --reshard-after-forward always", layout=always)
    if layout.data_parallel > 1:
        ranks = layout.data_parallel
        flat = replace(always, sharding="fsdp", dp_replicate=1, dp_shard=ranks)
        yield replace(asked, words=f"shard over all ranks: --dp-shard {ranks}", layout=flat)


def with_gpus(cluster: Cluster, gpus: int) -> Cluster:
    """The same devices, more of them; only memory and legality are asked of it."""
    *inner, outer = cluster.levels
    outer = replace(outer, domain_gpus=max(outer.domain_gpus, gpus), whole_gpus=None)
    return replace(
        cluster,
        gpus=gpus,
        gpus_per_node=cluster.gpus_per_node if cluster.nodes > 1 else gpus,
        levels=(*inner, outer),
    )


def recipes(training: Training) -> Iterator[tuple[str, Training]]:
    """(what to type, the training after it): formats and optimizers that need less memory, or whose
    states may be on the host, those that change least first."""
    fewer: dict[str, dict[str, object]] = {}
    if training.precision == "fp8" and not training.fp8_all_gather:
        fewer["use --fp8-all-gather"] = {"fp8_all_gather": True}
    if training.optimizer == "adamw":
        fewer["use --optimizer adamw_8bit"] = {"optimizer": "adamw_8bit"}
    if training.optimizer == "adamw_8bit":  # which has no kernel for the host
        fewer["use --optimizer adamw"] = {"optimizer": "adamw"}
    if training.param_dtype == "fp32" and training.precision == "bf16":
        half: dict[str, object] = {"param_dtype": "bf16"}
        fewer["use --param-dtype bf16"] = half
        if training.optimizer == "adamw":
            words = "use --optimizer adamw_8bit --param-dtype bf16"
            fewer[words] = {"optimizer": "adamw_8bit", **half}
    if training.adapters is not None and training.adapters.base == "bf16":
        fewer["use --base nf4"] = {"adapters": replace(training.adapters, base="nf4")}
    for words, values in fewer.items():
        try:
            yield words, replace(training, **values)  # type: ignore[arg-type]
        except SpecError:  # which the runtime does not have
            continue


LEAST_BYTES_A_PARAMETER = 8
"""Of state on all devices together, whatever the recipe: fewer than hold that need no search."""

LEAST_FROZEN_BYTES = 0.5
"""The same of a frozen model, in 4 bits."""

MOST_GPUS = 16_384
MOST_SEARCHES = 24
"""Larger clusters that are searched before it is given up."""

_FLAG = re.compile(r"--([a-z][a-z-]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What could not be planned."""

    question: Question
    larger: Callable[[int], Cluster] | None = None
    """The same machines with another number of GPUs; raises SpecError where there are none such.
    None: only their devices are known."""

    @property
    def has_usual_batch(self) -> bool:
        """The batch is the default one, which follows the number of GPUs."""
        training, gpus = self.question.training, self.question.cluster.gpus
        return training.global_batch == default_global_batch(seq_len=training.seq_len, gpus=gpus)


def first_fit(asked: Question) -> Layout | None:
    """Any layout that is legal and fits, as the search itself finds them: with the usual settings,
    or where none does with rare ones."""
    problem = question_problem(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
    )
    if problem is not None:
        return None
    space = Space(asked)
    for d in space.spreads():
        if space.floors.at_first_sight(d) == inf:
            space.rule_out_spread(d)
        elif found := next(space.layouts(d), None):
            return found
    return Leanest(space).fitting()


def remedy(asked: Asked, closest: Layout | None) -> str | None:
    """The cheapest change that was found to work, as what to type; None where none was found.
    `closest`: the layout that comes nearest to fitting, where any is legal.

    What costs only time comes first, then what was pinned, then the recipe, then what is asked for,
    and GPUs that nobody has last.
    """
    question = asked.question
    training, cluster = question.training, question.cluster
    found = (
        _policies_that_fit(asked, closest) if closest else _batches(asked),
        _without_pins(asked),
        _trained(asked, recipes(training)),
        _trained(asked, less_asked(training, cluster)) if closest else iter(()),
        _more_gpus(asked),
    )
    return next(chain.from_iterable(found), None)


USUAL_RANK = 16
"""Of adapters that are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Adapters in place of the whole model, with what comes of them."""

    words: str
    """What to type."""
    first: RankedLayout


def with_adapters(question: Question) -> Iterator[Tuned]:
    """Adapters that fit where the whole model does not, over a base of 16 bits, then of 4; each as
    the search finds it under the same pins. None where they are asked for already, or nobody trains
    them."""
    training = question.training
    if training.adapters is not None:
        return
    wanted = Adapters(rank=USUAL_RANK, alpha=float(USUAL_ALPHA * USUAL_RANK))
    recipe = {
        "param_dtype": "fp32",
        "optimizer": "adamw_8bit" if training.optimizer == "adamw_8bit" else "adamw",
    }
    changed = "".join(
        f" --{name.replace('_', '-')} {value}"
        for name, value in recipe.items()
        if getattr(training, name) != value
    )
    for base, flag in (("bf16", ""), ("nf4", " --base nf4")):
        try:
            tuned = replace(training, adapters=replace(wanted, base=base), **recipe)  # type: ignore[arg-type]
        except SpecError:  # of another program, or format
            return
        found = recommend(
            model=question.model,
            cluster=question.cluster,
            training=tuned,
            pins=question.pins,
            limit=1,
        )
        if found.ranked:
            yield Tuned(words=f"--lora {wanted.rank}{flag}{changed}", first=found.ranked[0])


def _policies_that_fit(asked: Asked, closest: Layout) -> Iterator[str]:
    """Other policies on the same GPUs with which a layout was found."""
    question = asked.question
    as_asked = Change(
        words="", cluster=question.cluster, training=question.training, layout=closest
    )
    for change in changes(question.model, as_asked):
        pins, dropped = _pins_of(change, question.pins)
        if first_fit(replace(question, pins=pins)) is not None:
            yield change.words + (f", without {' '.join(dropped)}" if dropped else "")


def _pins_of(change: Change, pins: Pins) -> tuple[Pins, list[str]]:
    """The pins after the change was typed, and the flags that have to go for it."""
    named = {flag.replace("-", "_") for flag in _FLAG.findall(change.words)}
    kept = {
        name: value for name, value in pins.given().items() if getattr(change.layout, name) == value
    }
    typed = {
        field.name: getattr(change.layout, field.name)
        for field in fields(Pins)
        if field.name in named
    }
    dropped = [pin_flag(name) for name in pins.given() if name not in kept and name not in typed]
    return Pins(**{**kept, **typed}), dropped


def _trained(asked: Asked, others: Iterator[tuple[str, Training]]) -> Iterator[str]:
    """What to type for other trainings with which a layout was found, under the pins and then
    without."""
    question = asked.question
    for words, training in others:
        for pins in dict.fromkeys((question.pins, Pins())):
            if first_fit(replace(question, training=training, pins=pins)) is not None:
                yield words + ("" if pins == question.pins else _all_flags(question.pins))


def _batches(asked: Asked) -> Iterator[str]:
    question = asked.question
    batch = legal_global_batch(
        model=question.model,
        cluster=question.cluster,
        training=question.training,
        pins=question.pins,
        usual=question.training.global_batch,
    )
    other = replace(question, training=replace(question.training, global_batch=batch))
    if batch != question.training.global_batch and first_fit(other) is not None:
        yield f"use --global-batch {batch}"


def _without_pins(asked: Asked) -> Iterator[str]:
    """One pin less, then none."""
    given = asked.question.pins.given()
    fewer = [{name} for name in given] + ([set(given)] if len(given) > 1 else [])
    for left_out in fewer:
        pins = Pins(**{name: value for name, value in given.items() if name not in left_out})
        if first_fit(replace(asked.question, pins=pins)) is not None:
            yield f"leave out {' '.join(pin_flag(name) for name in given if name in left_out)}"
            return


def _more_gpus(asked: Asked) -> Iterator[str]:
    """The fewest more GPUs of the same kind, whole nodes of them, that are found to do."""
    question = asked.question
    for cluster in _larger(asked):
        batch = _batch_on(asked, cluster)
        changed = "" if asked.has_usual_batch else f" with --global-batch {batch}"
        training = replace(question.training, global_batch=batch)
        same = batch == question.training.global_batch
        for pins in dict.fromkeys((question.pins, Pins())):
            other = replace(question, cluster=cluster, training=training, pins=pins)
            if first_fit(other) is None:
                continue
            dropped = "" if pins == question.pins else _all_flags(question.pins)
            yield f"use --gpus {cluster.gpus}{'' if same else changed}{dropped}"
            return


def _all_flags(pins: Pins) -> str:
    return f", without {' '.join(pin_flag(name) for name in pins.given())}"


def _batch_on(asked: Asked, cluster: Cluster) -> int:
    question = asked.question
    usual = None if asked.has_usual_batch else question.training.global_batch
    return legal_global_batch(
        model=question.model,
        cluster=cluster,
        training=question.training,
        pins=Pins(),
        usual=usual,
    )


def _larger(asked: Asked) -> Iterator[Cluster]:
    """Larger clusters, the smallest first: those that hold the state, and so many at the most."""
    question, cluster = asked.question, asked.question.cluster
    room = available_bytes(cluster=cluster, training=question.training)
    each = LEAST_BYTES_A_PARAMETER if question.training.adapters is None else LEAST_FROZEN_BYTES
    state = round(each * parameter_count(question.model))
    least = max(cluster.gpus + 1, -(-state // max(1, room)))
    gpus, tried = cluster.gpus, 0
    while tried < MOST_SEARCHES and (gpus := _next_count(gpus, cluster)) <= MOST_GPUS:
        if gpus < least:
            continue
        try:
            larger = asked.larger(gpus) if asked.larger else with_gpus(cluster, gpus)
        except SpecError:
            continue
        if larger.gpus == gpus:
            tried += 1
            yield larger


def _next_count(gpus: int, cluster: Cluster) -> int:
    """One node more; inside a node, and in large clusters, in greater steps."""
    if cluster.nodes == 1 and gpus < 8:
        return 1 << gpus.bit_length()
    node = cluster.gpus_per_node if cluster.nodes > 1 else 8
    nodes = gpus // node
    return (nodes + max(1, nodes // 8)) * node

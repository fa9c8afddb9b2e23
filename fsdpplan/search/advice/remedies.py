"""Remedies: what to change where nothing can be planned, each one tried before it is said.

A remedy is a question that was searched until a layout was found that is legal and fits. The
cheapest come first: policies, then the training, then the batch and pins, then more GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from math import inf

from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.errors import SpecError
from fsdpplan.search.advice.remedy import Change, changes, offloaded, with_gpus
from fsdpplan.search.defaults import default_global_batch
from fsdpplan.search.pins import Pins, pin_flag
from fsdpplan.search.question import Question
from fsdpplan.search.rules.legal_batch import legal_global_batch
from fsdpplan.search.rules.legality import question_problem
from fsdpplan.search.space import Space
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model

LEAST_BYTES_A_PARAMETER = 8
"""Of state on all devices together, whatever the recipe: fewer than hold that need no search."""

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
    """Any layout that is legal and fits, as the search itself finds them."""
    problem = question_problem(
        model=asked.model, cluster=asked.cluster, training=asked.training, pins=asked.pins
    )
    if problem is not None:
        return None
    space = Space(asked)
    hopeful = (d for d in space.spreads() if space.floors.at_first_sight(d) < inf)
    return next((layout for d in hopeful for layout in space.layouts(d)), None)


def remedy(asked: Asked, closest: Layout | None) -> str | None:
    """The cheapest change that was found to work, as what to type; None where none was found.
    `closest`: the layout that comes nearest to fitting, where any is legal."""
    here = _tried(asked, changes, closest) if closest else _batches(asked)
    found = next(here, None) or next(_without_pins(asked), None)
    if found is not None:
        return found
    more = next(_more_gpus(asked), None)
    host = next(_tried(asked, offloaded, closest), None) if closest else None
    said = [words for words in (more, host) if words is not None]
    return "; or, much slower, ".join(said) if said else None


Changes = Callable[[Model, Change], Iterator[Change]]


def _tried(asked: Asked, kinds: Changes, closest: Layout) -> Iterator[str]:
    """Changes on the same GPUs after which a layout was found."""
    question = asked.question
    as_asked = Change(
        words="", cluster=question.cluster, training=question.training, layout=closest
    )
    for change in kinds(question.model, as_asked):
        pins, dropped = _pins_of(change, question.pins)
        other = replace(question, training=change.training, pins=pins)
        if first_fit(other) is not None:
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
    state = LEAST_BYTES_A_PARAMETER * parameter_count(question.model)
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

"""What a search finds for the inputs, and the plan that is made of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from fsdpplan.cli import working
from fsdpplan.cli.resolve.inputs import (
    Inputs,
    assumed_host,
    case_of,
    refuse_question,
    slower_words,
)
from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.memory.peak import available_bytes
from fsdpplan.run.plans import new_plan
from fsdpplan.search.advice.alternatives import RecommendedPlan, advice
from fsdpplan.search.advice.difference import Priced
from fsdpplan.search.advice.field_rules import broken_rules
from fsdpplan.search.question import SearchResult
from fsdpplan.search.recommend import recommend
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan, RankedLayout, assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search found, and how long it took."""

    result: SearchResult
    seconds: float


def searched(inputs: Inputs) -> Found:
    """The ranked layouts, of which there may be none. Raises SpecError where there cannot be any,
    whatever the machines."""
    refuse_question(inputs)
    started = time.perf_counter()
    result = recommend(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        pins=inputs.pins,
        learner=inputs.learner,
    )
    return Found(result=result, seconds=time.perf_counter() - started)


def advised(inputs: Inputs, found: Found) -> Inputs:
    """`inputs` with what the best layout assumes, and warnings on machines that cost more than they
    bring."""
    working.say("looking at what other machines would bring")
    chosen = found.result.ranked[0]
    job = RecommendedPlan(
        model=inputs.model, cluster=inputs.cluster, training=inputs.training, best=chosen
    )
    said = (*advice(job, parts=inputs.parts), *slower_words(inputs, chosen.layout))
    taken = assumed(inputs.assumptions, model=inputs.model, layout=chosen.layout)
    of_host = assumed_host(chosen.layout.offload, inputs.cluster)
    return replace(
        inputs,
        assumptions=tuple(dict.fromkeys((*taken, *of_host))),
        warnings=(*inputs.warnings, *said),
        rules=broken_rules(case_of(inputs, chosen.layout), chosen.estimate),
    )


def plan_of(inputs: Inputs, result: SearchResult, chosen: RankedLayout) -> Plan:
    """The plan that runs `chosen`."""
    return new_plan(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        chosen=chosen,
        ranked=result.ranked,
        sources=inputs.sources,
        assumptions=inputs.assumptions,
        warnings=inputs.warnings,
        rules=inputs.rules,
        failures=inputs.failures,
        terms=inputs.terms,
    )


def priced(inputs: Inputs, layout: Layout) -> Priced:
    """`layout` with its prediction, as runs say where there are any."""
    case = case_of(inputs, layout)
    found = estimate(case)
    if inputs.learner is not None:
        found = inputs.learner.corrected(layout, found)
    return Priced(case=case, estimate=found, price_per_gpu_hour=inputs.price_per_gpu_hour)


def best_of(inputs: Inputs, found: Found) -> Priced | None:
    """The first of what was found."""
    ranked = found.result.ranked
    if not ranked:
        return None
    return Priced(
        case=case_of(inputs, ranked[0].layout),
        estimate=ranked[0].estimate,
        price_per_gpu_hour=inputs.price_per_gpu_hour,
    )


def fits(one: Priced) -> bool:
    """Whether the fullest GPU has room for it, as much as a plan must leave."""
    available = available_bytes(cluster=one.case.cluster, training=one.case.training)
    return one.estimate.memory.peak_device_bytes <= available

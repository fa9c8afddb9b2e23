"""From inputs to an answer: the search, its refusal when nothing fits, the plan and the JSON."""

from __future__ import annotations

import json
import platform
import shlex
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fsdpplan import __version__
from fsdpplan.cli.inputs import Inputs
from fsdpplan.cli.options import DEFAULT_PLAN
from fsdpplan.cli.resolve_layout import the_layout
from fsdpplan.cli.screen_answer import fits_words, too_unsure
from fsdpplan.cost.memory import available_bytes
from fsdpplan.cost.peak_band import peak_factor
from fsdpplan.cost.pipeline_stages import named_stages
from fsdpplan.cost.step import estimate
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    cluster_document,
    estimate_document,
    layout_document,
    model_document,
    needed_document,
    training_document,
    write_plan,
)
from fsdpplan.search.alternatives import Job, advice
from fsdpplan.search.ladder import leaner_layouts
from fsdpplan.search.legality import legal_layout_problem, question_problem
from fsdpplan.search.pins import Pins, changed_pins
from fsdpplan.search.question import Question
from fsdpplan.search.recommend import recommend
from fsdpplan.search.remedies import Asked, remedy
from fsdpplan.search.result import NearestMiss, SearchResult
from fsdpplan.search.words import describe
from fsdpplan.spec.case import Case
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan, RankedLayout
from fsdpplan.spec.torch_features import slower_without
from fsdpplan.units import format_gib, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search found, and how long it took."""

    result: SearchResult
    seconds: float


def search(inputs: Inputs) -> Found:
    """The ranked layouts. Raises NoFeasibleLayout with the nearest miss when there are none."""
    _refuse_question(inputs)
    started = time.perf_counter()
    result = recommend(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        pins=inputs.pins,
        learner=inputs.learner,
    )
    seconds = time.perf_counter() - started
    if not result.ranked:
        raise NoFeasibleLayout(_nothing(inputs, result), rejected=dict(result.rejected))
    return Found(result=result, seconds=seconds)


def advised(inputs: Inputs, found: Found) -> Inputs:
    """`inputs` with warnings on machines that cost more than they bring."""
    chosen = found.result.ranked[0]
    job = Job(model=inputs.model, cluster=inputs.cluster, training=inputs.training, best=chosen)
    said = (*advice(job, parts=inputs.parts), *_slower(inputs, chosen.layout))
    return replace(inputs, warnings=(*inputs.warnings, *said))


def _slower(inputs: Inputs, layout: Layout) -> tuple[str, ...]:
    """What the release of torch makes slower than predicted."""
    return tuple(
        f"torch {inputs.training.torch} has no {feature.name} ({feature.since} has): the trainer "
        f"{feature.done_without}, and {feature.slower}"
        for feature in slower_without(_case(inputs, layout))
    )


def _case(inputs: Inputs, layout: Layout) -> Case:
    return Case(model=inputs.model, cluster=inputs.cluster, training=inputs.training, layout=layout)


def _refuse_question(inputs: Inputs) -> None:
    """Raise SpecError where no layout at all could be trained."""
    problem = question_problem(
        model=inputs.model, cluster=inputs.cluster, training=inputs.training, pins=inputs.pins
    )
    if problem is not None:
        raise SpecError(problem)


def _nothing(inputs: Inputs, result: SearchResult) -> str:
    what = f"{inputs.model.name} on {inputs.cluster.gpus} x {inputs.cluster.device.name}"
    reasons = rejections(result.rejected)
    if result.nearest_miss is None:
        advice = f"; {result.example}" if result.example else ""
        counts = reasons or "no degrees multiply to the GPUs"
        return f"no layout of {what} is legal: {counts}{advice}; {_remedy(inputs, None)}"
    return f"no layout of {what} fits: {_miss(inputs, result.nearest_miss)} (searched: {reasons})"


def _remedy(inputs: Inputs, closest: Layout | None) -> str:
    """What to type, tried by a search of its own."""
    question = Question(
        model=inputs.model, cluster=inputs.cluster, training=inputs.training, pins=inputs.pins
    )
    found = remedy(Asked(question=question, larger=inputs.larger), closest)
    return found or "GPUs with more memory are needed: more of these do not help"


def rejections(rejected: tuple[tuple[str, int], ...]) -> str:
    """Why layouts were rejected, and how many."""
    return "; ".join(f"{reason} ({count:,})" for reason, count in rejected)


def _miss(inputs: Inputs, miss: NearestMiss) -> str:
    factor = peak_factor(inputs.cluster.device)
    needed, available = round(factor * miss.needed_bytes), round(factor * miss.available_bytes)
    return (
        f"the nearest ({describe(miss.layout, inputs.cluster)}) needs "
        f"{format_gib(needed)} of {format_gib(available)} per GPU, "
        f"{format_gib(needed - available)} too much; {_remedy(inputs, miss.layout)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayout:
    """One layout and its prediction."""

    inputs: Inputs
    layout: Layout
    estimate: Estimate
    available_bytes: int
    """The highest peak that is planned with, by head-room and chance to fit."""

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has room for it, as much as a plan must leave."""
        return self.estimate.memory.peak_device_bytes <= self.available_bytes


def one_layout(inputs: Inputs) -> OneLayout:
    """The layout that the pins name and its prediction. Raises SpecError where it is illegal."""
    cluster, training = inputs.cluster, inputs.training
    _refuse_question(inputs)
    found = the_layout(inputs.pins, cluster=cluster, training=training)
    layout = found.value
    case = _case(inputs, layout)
    problem = legal_layout_problem(case)
    if problem is not None:
        raise SpecError(problem)
    found_estimate = estimate(case)
    if inputs.learner is not None:
        found_estimate = inputs.learner.corrected(layout, found_estimate)
    return OneLayout(
        inputs=replace(
            inputs,
            assumptions=(*inputs.assumptions, *found.assumptions),
            warnings=(*inputs.warnings, *_slower(inputs, layout)),
        ),
        layout=layout,
        estimate=found_estimate,
        available_bytes=available_bytes(cluster=cluster, training=training),
    )


def nearest_that_fits(one: OneLayout) -> tuple[str, Estimate] | None:
    """What to change of a layout that does not fit, and what comes of it: of leaner layouts of the
    same ranks, the fastest of those with the fewest changes; else what the search puts first."""
    inputs = one.inputs
    plan = Plan(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        layout=one.layout,
        estimate=one.estimate,
        alternatives=(),
        sources=(),
        assumptions=(),
        warnings=(),
        versions=(),
    )
    rungs = leaner_layouts(plan, needed_bytes=None)
    if rungs:
        nearest = min(rungs, key=lambda rung: rung.words.count("--"))
        return nearest.words, nearest.estimate
    found = recommend(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        pins=Pins(),
        limit=1,
        learner=inputs.learner,
    )
    if not found.ranked:
        return None
    first = found.ranked[0]
    return changed_pins(one.layout, first.layout), first.estimate


def too_large(one: OneLayout) -> str:
    """That the layout does not fit, and what to type for one that does."""
    inputs, memory = one.inputs, one.estimate.memory
    factor = peak_factor(inputs.cluster.device)
    needed, available = (
        round(factor * memory.peak_device_bytes),
        round(factor * one.available_bytes),
    )
    short = f"{format_gib(needed - available)} too much"
    if unsure := too_unsure(memory, inputs.training, inputs.cluster):
        short = f"{fits_words(memory)}, where {unsure}"
    nearest = nearest_that_fits(one)
    if nearest is None:
        free = replace(inputs, pins=Pins())
        advice = f"nor does any other here; with fsdpplan recommend: {_remedy(free, one.layout)}"
    else:
        words, estimated = nearest
        step = format_seconds(estimated.step_seconds.expected)
        peak = format_gib(round(factor * estimated.memory.peak_device_bytes))
        advice = f"the nearest that fits: {words} ({step} a step, {peak})"
    room = f"{format_gib(needed)} of {format_gib(available)}"
    return f"the layout needs {room} per GPU, {short}; {advice}"


NOT_SAVED = "not saved; fsdpplan emit-launch and fsdpplan run read what is saved without --no-save"


def save(inputs: Inputs, result: SearchResult, path: Path) -> str:
    """Save the best plan; what to say about it."""
    chosen = result.ranked[0]
    write_plan(plan_of(inputs, result, chosen), path)
    shown = "" if path == Path(DEFAULT_PLAN) else f" {shlex.quote(str(path))}"
    if not chosen.estimate.runnable:
        return (
            f"saved as {path}; fsdpplan's own trainer is FSDP2's, not "
            f"{inputs.training.traits.words}: launch a program of yours by fsdpplan "
            f"emit-launch{shown} --script train.py"
        )
    if inputs.training.program != "reference":
        return f"saved as {path}; next: fsdpplan emit-launch{shown} --script train.py > job.sbatch"
    return (
        f"saved as {path}; next: fsdpplan emit-launch{shown} > job.sbatch, or fsdpplan run{shown}"
    )


def plan_of(inputs: Inputs, result: SearchResult, chosen: RankedLayout) -> Plan:
    """The plan that runs `chosen`; it names the blocks of each stage, which its programs read."""
    return Plan(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        layout=named_stages(model=inputs.model, layout=chosen.layout),
        estimate=chosen.estimate,
        alternatives=tuple(
            replace(one, layout=named_stages(model=inputs.model, layout=one.layout))
            for one in result.ranked
        ),
        sources=inputs.sources,
        assumptions=inputs.assumptions,
        warnings=inputs.warnings,
        versions=(("fsdpplan", __version__), ("python", platform.python_version())),
    )


def recommend_json(inputs: Inputs, found: Found) -> str:
    """What `recommend --json` prints."""
    result = found.result
    next_run = result.listed.next_run
    return _dumps(
        {
            **_inputs_document(inputs),
            "plans": [
                {
                    "rank": ranked.rank,
                    "layout": layout_document(ranked.layout),
                    "torch_needed": needed_document(_case(inputs, ranked.layout)),
                    "estimate": estimate_document(ranked.estimate),
                    "reason": ranked.reason,
                    "behind_fastest_fraction": result.behind_fastest(ranked),
                    "difference_error_fraction": error,
                }
                for ranked, error in zip(result.ranked, result.listed.errors, strict=True)
            ],
            "fastest_rank": result.listed.fastest_rank,
            "not_told_apart": list(result.listed.tied),
            "next_run": None if next_run is None else asdict(next_run),
            "search": {
                "candidates": result.candidates,
                "feasible": result.feasible,
                "priced": result.priced,
                "pruned": result.pruned,
                "rejected": dict(result.rejected),
                "seconds": found.seconds,
            },
            **_said(inputs),
        }
    )


def estimate_json(one: OneLayout) -> str:
    """What `estimate --json` prints: the estimate's fields beside the layout."""
    return _dumps(
        {
            **_inputs_document(one.inputs),
            "layout": layout_document(one.layout),
            "torch_needed": needed_document(_case(one.inputs, one.layout)),
            **estimate_document(one.estimate),
            "available_bytes": one.available_bytes,
            "fits": one.fits,
            **_said(one.inputs),
        }
    )


def _inputs_document(inputs: Inputs) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": model_document(inputs.model),
        "cluster": cluster_document(inputs.cluster),
        "training": training_document(inputs.training),
    }


def _said(inputs: Inputs) -> dict[str, Any]:
    return {
        "sources": dict(inputs.sources),
        "assumptions": list(inputs.assumptions),
        "warnings": list(inputs.warnings),
    }


def _dumps(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False)

"""From inputs to an answer: the search, its refusal when nothing fits, the plan and the JSON."""

from __future__ import annotations

import json
import platform
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdpplan import __version__
from fsdpplan.cli.inputs import Inputs
from fsdpplan.cli.options import DEFAULT_PLAN
from fsdpplan.cli.resolve_layout import the_layout
from fsdpplan.cost.memory import available_bytes
from fsdpplan.cost.step import estimate
from fsdpplan.errors import NoFeasibleLayout, SpecError
from fsdpplan.files.plans import (
    SCHEMA_VERSION,
    cluster_document,
    estimate_document,
    layout_document,
    model_document,
    training_document,
    write_plan,
)
from fsdpplan.search.alternatives import Job, advice
from fsdpplan.search.legality import legal_layout_problem, question_problem
from fsdpplan.search.recommend import recommend
from fsdpplan.search.result import NearestMiss, SearchResult
from fsdpplan.search.words import describe
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan, RankedLayout
from fsdpplan.units import format_gib


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
    )
    seconds = time.perf_counter() - started
    if not result.ranked:
        raise NoFeasibleLayout(_nothing(inputs, result), rejected=dict(result.rejected))
    return Found(result=result, seconds=seconds)


def advised(inputs: Inputs, found: Found) -> Inputs:
    """`inputs` with warnings on machines that cost more than they bring."""
    chosen = found.result.ranked[0]
    job = Job(model=inputs.model, cluster=inputs.cluster, training=inputs.training, best=chosen)
    said = advice(job, parts=inputs.parts)
    return replace(inputs, warnings=(*inputs.warnings, *said))


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
        return (
            f"no layout of {what} is legal: {counts}{advice}; "
            f"{'pin less of the layout, or ' if inputs.pins.given() else ''}use another "
            "--global-batch or other --gpus"
        )
    return f"no layout of {what} fits: {_miss(inputs, result.nearest_miss)} (searched: {reasons})"


def rejections(rejected: tuple[tuple[str, int], ...]) -> str:
    """Why layouts were rejected, and how many."""
    return "; ".join(f"{reason} ({count:,})" for reason, count in rejected)


def _miss(inputs: Inputs, miss: NearestMiss) -> str:
    short = format_gib(miss.needed_bytes - miss.available_bytes)
    return (
        f"the nearest ({describe(miss.layout, inputs.cluster)}) needs "
        f"{format_gib(miss.needed_bytes)} of {format_gib(miss.available_bytes)} per GPU, "
        f"{short} too much; {miss.remedy}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLayout:
    """One layout and its prediction."""

    inputs: Inputs
    layout: Layout
    estimate: Estimate
    available_bytes: int
    """Device memory less head-room."""

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU has room for it."""
        return self.estimate.memory.peak_device_bytes <= self.available_bytes


def one_layout(inputs: Inputs) -> OneLayout:
    """The layout that the pins name and its prediction. Raises SpecError where it is illegal."""
    model, cluster, training = inputs.model, inputs.cluster, inputs.training
    _refuse_question(inputs)
    found = the_layout(inputs.pins, cluster=cluster, training=training)
    layout = found.value
    problem = legal_layout_problem(model=model, cluster=cluster, training=training, layout=layout)
    if problem is not None:
        raise SpecError(problem)
    return OneLayout(
        inputs=replace(inputs, assumptions=(*inputs.assumptions, *found.assumptions)),
        layout=layout,
        estimate=estimate(model=model, cluster=cluster, training=training, layout=layout),
        available_bytes=available_bytes(cluster=cluster, training=training),
    )


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
    return (
        f"saved as {path}; next: fsdpplan emit-launch{shown} > job.sbatch, or fsdpplan run{shown}"
    )


def plan_of(inputs: Inputs, result: SearchResult, chosen: RankedLayout) -> Plan:
    """The plan that runs `chosen`."""
    return Plan(
        model=inputs.model,
        cluster=inputs.cluster,
        training=inputs.training,
        layout=chosen.layout,
        estimate=chosen.estimate,
        alternatives=result.ranked,
        sources=inputs.sources,
        assumptions=inputs.assumptions,
        warnings=inputs.warnings,
        versions=(("fsdpplan", __version__), ("python", platform.python_version())),
    )


def recommend_json(inputs: Inputs, found: Found) -> str:
    """What `recommend --json` prints."""
    result = found.result
    return _dumps(
        {
            **_inputs_document(inputs),
            "plans": [
                {
                    "rank": ranked.rank,
                    "layout": layout_document(ranked.layout),
                    "estimate": estimate_document(ranked.estimate),
                    "reason": ranked.reason,
                }
                for ranked in result.ranked
            ],
            "not_told_apart": list(result.tied),
            "search": {
                "candidates": result.candidates,
                "feasible": result.feasible,
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

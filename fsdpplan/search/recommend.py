"""Recommend: price every legal layout that fits, and rank them.

Legality comes before memory, memory before time, and each is skipped where a cheaper bound has
already decided: a layout whose state alone is too large, one whose compute alone is slower than
what its degrees already reach, or one that differs from a fitting layout only by more
recomputation. The bounds are exact, so the order of the search never changes the winner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fsdpplan.cost.memory import available_bytes
from fsdpplan.cost.shards import stage_elements
from fsdpplan.cost.step import (
    estimate,
    least_seconds,
    pipeline_ranks,
    rank_memory,
)
from fsdpplan.search.enumerate import (
    Degrees,
    degrees,
    layout_of,
    micro_batches,
    reshard_policies,
    schedules,
    sync_policies,
)
from fsdpplan.search.legality import first_problem
from fsdpplan.search.pins import Pins
from fsdpplan.search.reasons import reason_against, reason_for
from fsdpplan.search.remedy import nearest_miss
from fsdpplan.search.result import NearestMiss, SearchResult
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.estimate import Estimate
from fsdpplan.spec.layout import ActivationCheckpointing, Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import RankedLayout
from fsdpplan.spec.training import Training

STATE_BYTES_PER_PARAMETER = 12
"""Parameters and AdamW moments in fp32: alive in every phase of the step."""

SIMPLER_WINS_FRACTION = 0.03
"""Closer than this the model cannot tell layouts of different kinds apart (its band is wider), and
the one with fewer kinds of parallelism is taken: no sharding, tensor or pipeline parallelism for a
gain that may not be there."""

CHECKPOINTING: tuple[ActivationCheckpointing, ...] = ("none", "op", "full")
"""In the order of growing recomputation and shrinking memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is asked: the inputs of the search."""

    model: Model
    cluster: Cluster
    training: Training
    pins: Pins

    @property
    def available_bytes(self) -> int:
        """Device memory less head-room."""
        return available_bytes(cluster=self.cluster, training=self.training)


@dataclass(slots=True)
class Tally:
    """What the search has seen so far; private to one call."""

    candidates: int = 0
    feasible: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    closest: tuple[int, Layout] | None = None

    def reject(self, reason: str, number: int = 1) -> None:
        """Count `number` layouts as rejected."""
        self.candidates += number
        self.rejected[reason] += number

    def too_large(self, problem: Problem, layout: Layout, *, at_least_bytes: int) -> None:
        """Count a layout that does not fit, and remember the one that comes closest."""
        self.reject("does not fit in device memory")
        if self.feasible or (self.closest and at_least_bytes >= self.closest[0]):
            return
        needed_bytes = _peak_bytes(problem, layout)
        if self.closest is None or needed_bytes < self.closest[0]:
            self.closest = (needed_bytes, layout)


def recommend(
    *, model: Model, cluster: Cluster, training: Training, pins: Pins, limit: int = 10
) -> SearchResult:
    """The `limit` best ways to spread the ranks, each with its best policies, fastest first.

    Layouts that differ only in policies (micro-batch, resharding, synchronisation, schedule,
    checkpointing) are one entry. The best data-parallel and the best runnable layouts are always
    among the ranked.
    """
    problem = Problem(model=model, cluster=cluster, training=training, pins=pins)
    tally = Tally()
    groups = [_fitting_group(problem, d, tally) for d in degrees(cluster=cluster, pins=pins)]
    found = _price(problem, [group for group in groups if group], limit)
    ranked = _rank(found, limit)
    return SearchResult(
        ranked=ranked,
        candidates=tally.candidates,
        feasible=tally.feasible,
        rejected=tuple(tally.rejected.most_common()),
        nearest_miss=None if ranked else _miss(problem, tally),
    )


def _fitting_group(problem: Problem, d: Degrees, tally: Tally) -> list[tuple[float, Layout]]:
    """(least seconds, layout) of what fits with these degrees, most promising first."""
    reason = _hopeless(problem, d)
    if reason:
        tally.reject(reason)
        return []
    group = [(_least_seconds(problem, layout), layout) for layout in _fitting(problem, d, tally)]
    return sorted(group, key=lambda pair: pair[0])


def _price(
    problem: Problem, groups: list[list[tuple[float, Layout]]], limit: int
) -> list[tuple[Layout, Estimate]]:
    """The best of each group that can be among the first `limit`, or is data-parallel."""
    found: list[tuple[Layout, Estimate]] = []
    times: list[float] = []
    for group in sorted(groups, key=lambda group: group[0][0]):
        floor, layout = group[0]
        beaten = len(times) >= limit and floor > max(
            times[limit - 1], times[0] * (1 + SIMPLER_WINS_FRACTION)
        )
        if beaten and not _is_data_parallel(layout):
            continue
        best = _best_of_group(problem, group)
        found.append(best)
        times = sorted([*times, best[1].step_seconds.expected])
    return found


def _best_of_group(problem: Problem, group: list[tuple[float, Layout]]) -> tuple[Layout, Estimate]:
    """The fastest layout of a group; those whose least time is already beaten are not priced."""
    best: tuple[Layout, Estimate] | None = None
    for floor, layout in group:
        if best and floor > best[1].step_seconds.expected:
            break
        result = estimate(
            model=problem.model,
            cluster=problem.cluster,
            training=problem.training,
            layout=layout,
        )
        if best is None or _sort_key((layout, result)) < _sort_key(best):
            best = (layout, result)
    assert best is not None
    return best


def _least_seconds(problem: Problem, layout: Layout) -> float:
    return least_seconds(
        model=problem.model,
        cluster=problem.cluster,
        training=problem.training,
        layout=layout,
    )


def _rank(found: list[tuple[Layout, Estimate]], limit: int) -> tuple[RankedLayout, ...]:
    ordered = sorted(found, key=_sort_key)
    if not ordered:
        return ()
    bound = ordered[0][1].step_seconds.expected * (1 + SIMPLER_WINS_FRACTION)
    close = [entry for entry in ordered if entry[1].step_seconds.expected <= bound]
    first = min(close, key=lambda entry: (_kinds(entry[0]), _sort_key(entry)))
    rest = [entry for entry in ordered if entry is not first]
    kept = [first, *rest][:limit]
    for wanted in (lambda e: _is_data_parallel(e[0]), lambda e: e[1].runnable):
        if not any(wanted(entry) for entry in kept):
            kept += [entry for entry in rest[limit - 1 :] if wanted(entry)][:1]
    return tuple(
        RankedLayout(
            rank=rank,
            layout=layout,
            estimate=result,
            reason=reason_for(kept) if rank == 1 else reason_against((layout, result), first),
        )
        for rank, (layout, result) in enumerate(kept, start=1)
    )


def _is_data_parallel(layout: Layout) -> bool:
    return layout.tp == layout.pp == layout.cp == 1


def _kinds(layout: Layout) -> int:
    """Kinds of parallelism beyond whole copies: fewer is simpler."""
    return sum((layout.tp > 1, layout.pp > 1, layout.cp > 1, layout.sharding == "fsdp"))


def _sort_key(entry: tuple[Layout, Estimate]) -> tuple[float, int, str]:
    """Time, then memory, then a stable text: no tie is left to the order of the search."""
    layout, result = entry
    return (result.step_seconds.expected, result.memory.peak_allocated_bytes, repr(layout))


def _hopeless(problem: Problem, d: Degrees) -> str | None:
    """Why no layout with these degrees can work, whatever its policies."""
    innermost = problem.cluster.levels[0].domain_gpus
    if d.tp > innermost and problem.pins.tp is None:
        return "tp leaves the fastest links"
    if problem.training.global_batch % d.data_parallel:
        return "global batch is not a multiple of the data-parallel ranks"
    if d.pp * (problem.pins.virtual_stages or 1) > problem.model.layers:
        return "more pipeline stages than blocks"
    if problem.training.global_batch // d.data_parallel < d.pp:
        return "fewer micro-batches than pipeline stages"
    return None


def _fitting(problem: Problem, d: Degrees, tally: Tally) -> Iterator[Layout]:
    """Layouts with these degrees that are legal and fit, without the dominated ones."""
    too_large: set[tuple[object, ...]] = set()
    for policies in _policies(problem, d):
        fits_with_less = is_too_large = False
        several = policies.num_microbatches > 1
        family = (
            policies.schedule,
            policies.virtual_stages,
            policies.reshard_after_forward,
            policies.gradient_sync,
            several,
        )
        if family in too_large:  # a smaller micro-batch already failed with all its modes
            tally.reject("does not fit in device memory", len(_modes(problem.pins)))
            continue
        for mode in _modes(problem.pins):
            layout = replace(policies, activation_checkpointing=mode)
            if fits_with_less:  # recomputing more only costs time
                tally.candidates += 1
                tally.feasible += 1
                continue
            broken = first_problem(
                model=problem.model,
                cluster=problem.cluster,
                training=problem.training,
                layout=layout,
            )
            if broken:
                tally.reject(broken.reason)
                continue
            needed = _needed_bytes(problem, layout)
            if needed > problem.available_bytes:
                tally.too_large(problem, layout, at_least_bytes=needed)
                is_too_large = True
                continue
            fits_with_less = True
            tally.candidates += 1
            tally.feasible += 1
            yield layout
        if several and is_too_large and not fits_with_less:
            too_large.add(family)


def _modes(pins: Pins) -> tuple[ActivationCheckpointing, ...]:
    return (pins.activation_checkpointing,) if pins.activation_checkpointing else CHECKPOINTING


def _policies(problem: Problem, d: Degrees) -> Iterator[Layout]:
    """Layouts with these degrees, without activation checkpointing."""
    pins, cluster, training = problem.pins, problem.cluster, problem.training
    compiled = cluster.device.kind == "cuda" if pins.compile is None else pins.compile
    for micro_batch in micro_batches(training=training, data_parallel=d.data_parallel, pins=pins):
        num_microbatches = max(1, training.global_batch // (d.data_parallel * micro_batch))
        for schedule, virtual_stages in schedules(
            d=d, model=problem.model, num_microbatches=num_microbatches, pins=pins
        ):
            for reshard in reshard_policies(d=d, cluster=cluster, pins=pins):
                for sync in sync_policies(d=d, num_microbatches=num_microbatches, pins=pins):
                    yield layout_of(
                        d,
                        micro_batch=micro_batch,
                        num_microbatches=num_microbatches,
                        reshard=reshard,
                        sync=sync,
                        schedule=schedule,
                        virtual_stages=virtual_stages,
                        checkpointing="none",
                        compiled=compiled,
                    )


def _needed_bytes(problem: Problem, layout: Layout) -> int:
    """Device memory of the fullest rank, or a lower bound that is already too large."""
    stage = pipeline_ranks(problem.model, layout)[0]
    elements = stage_elements(model=problem.model, stage=stage, tp=layout.tp)
    shard_ranks = layout.shard_ranks if layout.sharding == "fsdp" else 1
    state = STATE_BYTES_PER_PARAMETER * elements // shard_ranks
    if state > problem.available_bytes:
        return state
    return _peak_bytes(problem, layout)


def _peak_bytes(problem: Problem, layout: Layout) -> int:
    """Device memory of the fullest rank."""
    memory = rank_memory(
        model=problem.model,
        cluster=problem.cluster,
        training=problem.training,
        layout=layout,
    )
    return memory.peak_device_bytes


def _miss(problem: Problem, tally: Tally) -> NearestMiss | None:
    if tally.closest is None:
        return None
    _, layout = tally.closest
    return nearest_miss(
        model=problem.model,
        cluster=problem.cluster,
        training=problem.training,
        layout=layout,
        pins=problem.pins,
    )

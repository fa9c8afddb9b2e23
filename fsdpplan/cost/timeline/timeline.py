"""Timeline: the predicted step of one rank of each pipeline stage, event by event.

The sums are those of the estimate: of the events of the compute stream by term, of collectives by
the rows of the communication. On the rank that the estimate is about, that is; what other ranks of
a pipeline compute is stretched as far as it runs beside what that rank computes, and what is left
is their bubble.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fsdpplan.cost.estimate import StepTime, step_time
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.timeline.data_parallel import (
    fsdp_lanes,
    replica_lanes,
    tp_gradient_sent,
)
from fsdpplan.cost.timeline.events import COMPUTE, Detail, Event, Timeline
from fsdpplan.cost.timeline.lanes import (
    Lanes,
    Sent,
    beside_events,
    main_events,
    queued,
    relabel,
    sent_calls,
    stretched,
    warped_events,
)
from fsdpplan.cost.timeline.memory import memory_points
from fsdpplan.cost.timeline.pipeline import pipeline_lanes
from fsdpplan.cost.traffic.fsdp import scale_calls
from fsdpplan.cost.traffic.rank import norm_calls, optimizer_calls
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Case

DETAILED_MICROBATCHES = 4
"""So many are shown kernel by kernel, and the last one; the others pass by pass."""


def step_timeline(
    case: Case,
    *,
    detail: Detail = "kernels",
    detailed: int = DETAILED_MICROBATCHES,
    memory: bool = True,
) -> Timeline:
    """The predicted step of a legal case. Micro-batches behind the first `detailed`, but the last
    one, are shown pass by pass. A run whose precision changes has a step for each of `case.phases`.
    """
    if case.training.precision_switch != "none":
        raise SpecError(
            "a run whose precision changes in the middle has two kinds of step: ask for one of "
            "the case's phases"
        )
    step = step_time(case)
    time = step.time
    stages = pipeline_ranks(model=case.model, layout=case.layout)
    rank, all_lanes = _laid_out(case, stages, detail=detail, detailed=detailed)
    for lanes, stage in zip(all_lanes, stages, strict=True):
        _behind_passes(case, stage, lanes, step)
    main = all_lanes[rank]
    _own_waits(main, step)
    computed = sum(
        one.raw_seconds + one.added_seconds for one in main.main if one.term == "compute"
    )
    seconds, warp = stretched(main, factor=time.compute_seconds / computed)
    events: list[Event] = []
    for number, lanes in enumerate(all_lanes):
        own = (
            main_events(lanes, seconds, number)
            if number == rank
            else warped_events(lanes, warp, number, end=time.total_seconds)
        )
        own += beside_events(lanes, warp, number)
        events += _by_stream(own, end=time.total_seconds)
    whole = time.total_seconds
    if not memory:
        return Timeline(step_seconds=whole, rank=rank, events=tuple(events))
    actions = [
        [(warp.at(begin, is_end=False), warp.at(end, is_end=True)) for begin, end in lanes.actions]
        for lanes in all_lanes
    ]
    points = memory_points(case, events, actions=actions, end=whole)
    return Timeline(step_seconds=whole, rank=rank, events=tuple(events), memory=points)


def _laid_out(
    case: Case, stages: tuple[Stage, ...], *, detail: Detail, detailed: int
) -> tuple[int, list[Lanes]]:
    """The rank that the estimate is about, and all ranks in the clock of the played passes."""
    if case.layout.pp > 1:
        return pipeline_lanes(case, detail=detail, detailed=detailed)
    lanes = fsdp_lanes if case.layout.sharding == "fsdp" else replica_lanes
    return 0, [lanes(case, stages[0], detail=detail, detailed=detailed)]


def _behind_passes(case: Case, stage: Stage, lanes: Lanes, step: StepTime) -> None:
    """What a rank does when all passes are over: it waits for a link that is not through yet, then
    for exchanges that the optimizer needs, and the optimizer, with the gradient norm's collectives
    beside it."""
    if case.layout.pp == 1:
        for sent in tp_gradient_sent(case, stage):
            lanes.insert_wait(sent, "tp")
    for calls in optimizer_calls(case, stage):
        sent = sent_calls(
            calls,
            case.cluster,
            stream=calls.collective,
            name=f"{calls.collective} of whole matrices",
            count=calls.count,
        )
        lanes.insert_wait(sent, calls.collective)
    lanes.wait(step.queued_seconds, step.full_level, inserted=True)
    lanes.add(
        step.time.optimizer_seconds,
        f"{case.training.optimizer} step",
        "optimizer",
        "optimizer",
        sent=tuple(_step_sent(case, stage)),
        inserted=True,
    )


def _step_sent(case: Case, stage: Stage) -> Iterator[Sent]:
    """Small collectives of the step as a whole."""
    layout = case.layout
    if layout.sharding in ("fsdp", "ddp"):
        for calls in norm_calls(case, stage):
            if calls.group.ranks > 1:
                axis = calls.group.axis
                stream = axis if axis in ("tp", "pp") else calls.collective
                yield sent_calls(calls, case.cluster, stream=stream, name="gradient norm")
    if layout.sharding == "fsdp":
        for calls in scale_calls(case, stage):
            if calls.group.ranks > 1:
                name = "scales of parameters"
                yield sent_calls(calls, case.cluster, stream=calls.collective, name=name)


def _own_waits(lanes: Lanes, step: StepTime) -> None:
    """What a pipeline rank waits for longer than its own collectives take is another rank's, and a
    bubble: the estimate counts it there. What waits for a full link is its own."""
    waits = [
        at
        for at, one in enumerate(lanes.main)
        if one.term == "exposed" and one.cause != step.full_level
    ]
    exposed = sum(lanes.main[at].raw_seconds + lanes.main[at].added_seconds for at in waits)
    others = exposed + step.queued_seconds - step.time.exposed_communication_seconds
    if others > 1e-12 * step.time.total_seconds:
        relabel(lanes, others, to="bubble", cause="", candidates=reversed(waits))


def _by_stream(events: list[Event], *, end: float) -> list[Event]:
    """Stream by stream, in order of time."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[event.stream].append(event)
    ordered = list(found.pop(COMPUTE, ()))
    for stream in sorted(found):
        ordered += queued(found[stream], end=end)
    return ordered

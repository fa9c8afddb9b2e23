"""Overlay: a predicted step and a measured one, kind by kind and on one time axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdpplan.cost.schedule.stages import pipeline_ranks
from fsdpplan.cost.timeline.events import Timeline
from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.cost.traffic.rank import step_calls
from fsdpplan.errors import SpecError
from fsdpplan.run.trace.chrome import rank_stage, stage_rank, trace_document, trace_events
from fsdpplan.run.trace.explain import WAITING, Explanation, Kinds, explanations
from fsdpplan.run.trace.measured import (
    AxisOf,
    MeasuredStep,
    Row,
    TraceEvent,
    group_axes,
    measured_step,
)
from fsdpplan.spec.plan import Case

ALL_MICROBATCHES = 2**31
"""Of an overlay: kinds of kernels are told apart in each of them."""

EXPOSED, IDLE = "exposed communication", "idle"

LEAST_CALL = 1.5
"""How much longer than the median of its like a call must be to be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One kind of a step's parts."""

    name: str
    predicted_seconds: float
    measured_seconds: float
    predicted_calls: int = 0
    measured_calls: int = 0
    predicted_exposed_seconds: float = 0.0
    """Of a collective."""
    measured_exposed_seconds: float = 0.0
    slowest: str = ""
    """The call that differs most from its own prediction, where both have as many; else the one
    that stands out among the measured ones; empty: none does."""

    @property
    def seconds(self) -> float:
        """Measured less predicted."""
        return self.measured_seconds - self.predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """A measured step beside its prediction."""

    rank: int
    """Of the job."""
    stage: int
    """Its pipeline stage."""
    predicted: MeasuredStep
    measured: MeasuredStep
    differences: tuple[Difference, ...]
    """The largest first."""
    timeline: Timeline
    stages: int
    """Of the pipeline."""
    explanations: tuple[Explanation, ...] = ()
    """Inputs that explain them, the best first; empty: none, or it was not asked."""


def axis_groups(case: Case, stage: int) -> dict[str, tuple[int, ...]]:
    """For each axis that calls collectives, the ranks of the group of the stage's first rank."""
    return groups_of_rank(case, stage, stage_rank(case.layout, stage))


def groups_of_rank(case: Case, stage: int, rank: int) -> dict[str, tuple[int, ...]]:
    """The same of any rank of the job."""
    found: dict[str, tuple[int, ...]] = {}
    held = pipeline_ranks(model=case.model, layout=case.layout)[stage]
    for call in step_calls(case, held):
        group = call.group
        first = rank - rank // group.stride % group.ranks * group.stride
        members = tuple(first + at * group.stride for at in range(group.ranks))
        if len(members) > len(found.get(group.axis, ())):
            found[group.axis] = members
    return found


def overlaid(
    case: Case,
    trace: Mapping[str, Any],
    *,
    rank: int | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Overlay:
    """The measured step of a trace beside the predicted one, with what explains the differences;
    `rank`: whose trace it is, where that does not say."""
    found = compared(case, trace, rank=rank, say=say)
    explained = explanations(
        case,
        found.stage,
        predicted=_kinds(found.predicted),
        measured=_kinds(found.measured),
        say=say,
    )
    return replace(found, explanations=tuple(explained))


def compared(
    case: Case,
    trace: Mapping[str, Any],
    *,
    rank: int | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Overlay:
    """The same without a search for what explains them."""
    of = _rank(case, trace, rank)
    _require_kernels(trace)
    stage = rank_stage(case.layout, of)
    say("the predicted step")
    timeline = step_timeline(case, detailed=ALL_MICROBATCHES)
    groups = groups_of_rank(case, stage, of)
    document = trace_document(timeline, case.layout, name="", groups=groups, ranks=(stage,))
    predicted = measured_step(document, axis_of=_axis_of(document, groups, {}))
    calls = {name: len(row.calls) for name, row in predicted.rows.items()}
    axes: dict[str, list[str]] = {}
    for row in predicted.rows.values():
        if row.axis:
            axes.setdefault(row.kind, []).append(row.axis)
    say("the measured step")
    measured = measured_step(
        trace,
        axis_of=_axis_of(trace, groups, axes),
        expected_calls=calls,
        pid=_own_pid(trace, of, case),
    )
    return Overlay(
        rank=of,
        stage=stage,
        predicted=predicted,
        measured=measured,
        differences=_differences(predicted, measured),
        timeline=timeline,
        stages=case.layout.pp,
    )


def _rank(case: Case, trace: Mapping[str, Any], rank: int | None) -> int:
    """Whose trace it is; SpecError where that is no rank of the plan."""
    about = trace.get("distributedInfo") or {}
    world = case.layout.world
    found = rank if rank is not None else about.get("rank", 0)
    size = about.get("world_size", world)
    if size != world:
        raise SpecError(
            f"the trace is of a job of {size} ranks, the plan of {world}: give the plan that the "
            "job ran, its folder has it as plan.json"
        )
    if not isinstance(found, int) or not 0 <= found < world:
        raise SpecError(
            f"rank {found} is none of the plan's {world}: give --rank with one from 0 to "
            f"{world - 1}"
        )
    return found


def _own_pid(trace: Mapping[str, Any], rank: int, case: Case) -> Any:
    """The process of a rank in a trace of several, which are predictions; None: there is one."""
    if not trace.get("predicted"):
        return None
    return stage_rank(case.layout, rank_stage(case.layout, rank))


def _require_kernels(trace: Mapping[str, Any]) -> None:
    """Raise SpecError for a prediction whose kernels are not all shown."""
    if trace.get("predicted") and any(
        event.get("args", {}).get("kind") in ("forward", "recompute", "backward")
        for event in trace["traceEvents"]
    ):
        raise SpecError(
            "the trace is a prediction that shows some micro-batches pass by pass, and kernels are "
            "compared: write it again with a larger --micro-batches"
        )


def _axis_of(
    trace: Mapping[str, Any],
    groups: Mapping[str, Sequence[int]],
    axes: Mapping[str, Sequence[str]],
) -> AxisOf:
    """By the group that an event names; without one by what collectives are predicted."""
    from fsdpplan.trainer.watch.trace import NOT_OF_A_STEP

    known = group_axes(trace, groups)
    described = {
        str(one.get("pg_name", "")): str(one.get("pg_desc", ""))
        for one in trace.get("distributedInfo", {}).get("pg_config", ())
    }
    by_size: dict[int, list[str]] = {}
    for axis, ranks in groups.items():
        by_size.setdefault(len(ranks), []).append(axis)

    def axis_of(collective: str, event: TraceEvent) -> str | None:
        about = event.get("args", {})
        name = str(about.get("Process Group Name", ""))
        words = described.get(name, str(about.get("Process Group Description", "")))
        if words in NOT_OF_A_STEP:
            return None
        wanted = axes.get(collective, ())
        size = about.get("Group size")
        candidates = known.get(name) or by_size.get(size if isinstance(size, int) else 0, [])
        both = [axis for axis in candidates if axis in wanted] or list(candidates)
        if len(both) == 1 or known.get(name):
            return both[0]
        return wanted[0] if len(wanted) == 1 else "unknown"

    return axis_of


def _kinds(step: MeasuredStep) -> Kinds:
    """Seconds by kind."""
    found = {name: row.seconds for name, row in step.rows.items()}
    return {**found, WAITING: step.exposed_seconds + step.idle_seconds}


def _differences(predicted: MeasuredStep, measured: MeasuredStep) -> tuple[Difference, ...]:
    nothing = Row("")
    found = []
    for name in dict.fromkeys([*predicted.rows, *measured.rows]):
        one, other = predicted.rows.get(name, nothing), measured.rows.get(name, nothing)
        found.append(
            Difference(
                name=name,
                predicted_seconds=one.seconds,
                measured_seconds=other.seconds,
                predicted_calls=len(one.calls),
                measured_calls=len(other.calls),
                predicted_exposed_seconds=one.exposed_seconds,
                measured_exposed_seconds=other.exposed_seconds,
                slowest=_slowest(one, other),
            )
        )
    for name, before, after in (
        (EXPOSED, predicted.exposed_seconds, measured.exposed_seconds),
        (IDLE, predicted.idle_seconds, measured.idle_seconds),
    ):
        found.append(Difference(name=name, predicted_seconds=before, measured_seconds=after))
    return tuple(sorted(found, key=lambda one: -abs(one.seconds)))


def _slowest(predicted: Row, measured: Row) -> str:
    """The call that is furthest behind, by the order of calls where both have as many."""
    if not measured.axis or not measured.calls:
        return ""
    number = len(measured.calls)
    if len(predicted.calls) == number:
        gaps = [
            after - before
            for (before, _), (after, _) in zip(predicted.calls, measured.calls, strict=True)
        ]
        at = max(range(number), key=lambda index: gaps[index])
        usual = sorted(gaps)[number // 2]
        if number < 3 or gaps[at] <= LEAST_CALL * max(usual, 0.0) + 1e-9:
            return ""
        return f"call {at + 1} of {number}, {predicted.calls[at][1]}"
    seconds = [each for each, _ in measured.calls]
    at = max(range(number), key=lambda index: seconds[index])
    if number < 3 or seconds[at] <= LEAST_CALL * sorted(seconds)[number // 2]:
        return ""
    return f"call {at + 1} of {number}"


def overlay_document(found: Overlay, case: Case, trace: Mapping[str, Any]) -> dict[str, Any]:
    """The predicted and the measured step as one trace, beginning at the same moment; processes of
    the measured one have other numbers."""
    begin = found.measured.span[0] * 1e6
    end = found.measured.span[1] * 1e6
    processes: dict[Any, int] = {}
    first = 1_000_000

    def moved(event: TraceEvent) -> dict[str, Any]:
        number = processes.setdefault(event.get("pid"), first + len(processes))
        return {**event, "pid": number}

    events: list[dict[str, Any]] = list(
        trace_events(found.timeline, case.layout, ranks=(found.stage,))
    )
    names = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "M":
            names.append(moved(event))
            continue
        when = _inside(event, begin, end)
        if when is not None:
            events.append({**moved(event), "ts": when})
    events += [_measured_name(event) for event in names if event["pid"] in processes.values()]
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "traceName": "predicted beside measured",
        "traceEvents": events,
    }


def _inside(event: TraceEvent, begin: float, end: float) -> float | None:
    """When an event begins in the step, in microseconds; None: not in it."""
    try:
        start = float(event["ts"])
    except (KeyError, TypeError, ValueError):
        return None
    return start - begin if begin - 1e-3 <= start < end else None


def _measured_name(event: dict[str, Any]) -> dict[str, Any]:
    about = event.get("args", {})
    if event.get("name") == "process_name":
        return {**event, "args": {"name": f"{about.get('name', 'process')} (measured)"}, "ts": 0}
    if event.get("name") == "process_sort_index":
        return {**event, "args": {"sort_index": event["pid"]}, "ts": 0}
    return {**event, "ts": 0}

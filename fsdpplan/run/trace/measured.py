"""Measured: one step of a trace, by what its kernels, operators and collectives do.

    step = computed + exposed + idle

A device computes where a kernel runs that is no collective's; a collective is exposed where it runs
and no such kernel does; the rest is idle. On CPUs operators of the thread that trains stand for
kernels, and gloo's own threads for collectives. A prediction is read by the same rules from the
trace that it is written as, so what they make of names and overlaps cancels in a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.run.trace.chrome import group_description

TraceEvent = Mapping[str, Any]
Span = tuple[float, float]
"""From when to when, in seconds."""

MARKS = ("ProfilerStep#", "Optimizer.step#")
"""What begins a step, or ends one: of `profiler.step()`, and of the optimizer's hook."""


@dataclass(slots=True)
class Row:
    """What all kernels, or collectives, of one kind take in a step."""

    kind: str
    axis: str = ""
    """Of a collective; `unknown` where a trace does not say its group."""
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    calls: list[tuple[float, str]] = field(default_factory=list)
    """(seconds, name) of each, in order of time."""

    @property
    def name(self) -> str:
        """As it is listed."""
        return f"{self.kind} over {self.axis}" if self.axis else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step of one rank."""

    seconds: float
    chosen: str
    """Which step of the trace it is, in words."""
    span: Span
    """From when to when it is in the trace's clock."""
    rows: dict[str, Row]
    """By name: kinds of work, then collectives."""
    exposed_seconds: float
    idle_seconds: float
    steps: int = 1
    """Steps that its numbers are the mean of."""


AxisOf = Callable[[str, TraceEvent], str | None]
"""(collective, event) -> its axis; None of what is no part of a step, such as a vote to stop."""


def spans_of(document: Mapping[str, Any]) -> list[TraceEvent]:
    """The events of a trace that last, with numbers for when."""
    return [
        event
        for event in document["traceEvents"]
        if event.get("ph") == "X" and "ts" in event and "dur" in event
    ]


def measured_step(
    document: Mapping[str, Any],
    *,
    axis_of: AxisOf,
    expected_calls: Mapping[str, int] | None = None,
    pid: Any = None,
) -> MeasuredStep:
    """One step of a trace: of marked ones that with the median length; without marks all of it, as
    so many steps as its collectives are more than the `expected_calls` of one."""
    from fsdpplan.trainer.watch.trace import ON_DEVICE, with_groups

    events = [event for event in spans_of(document) if pid is None or event.get("pid") == pid]
    events = with_groups(document, events)
    on_device = [event for event in events if event.get("cat") in ON_DEVICE]
    if on_device:
        return _of_device(events, on_device, axis_of, expected_calls or {})
    return _of_host(events, axis_of, expected_calls or {})


def _start(event: TraceEvent) -> float:
    return float(event["ts"]) * 1e-6


def _span(event: TraceEvent) -> Span:
    start = _start(event)
    return start, start + float(event["dur"]) * 1e-6


@dataclass(frozen=True, slots=True)
class _Window:
    name: str
    begin: float
    end: float


def _windows(events: Sequence[TraceEvent]) -> list[_Window]:
    """Marked steps. Of the optimizer's marks each ends one, which begins where the one before it
    ended, the first with the trace."""
    steps = [e for e in events if str(e.get("name", "")).startswith(MARKS[0])]
    on_device = [e for e in steps if e.get("cat") == "gpu_user_annotation"]
    if steps:
        return [_Window(str(e["name"]), *_span(e)) for e in on_device or steps]
    updates = sorted(
        (_span(e) for e in events if str(e.get("name", "")).startswith(MARKS[1])),
        key=lambda span: span[1],
    )
    if not updates:
        return []
    begun = [_start(e) for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    first = min(begun, default=updates[0][0])
    ends = [first, *(end for _, end in updates)]
    return [
        _Window(f"step {number} of the trace", begin, end)
        for number, (begin, end) in enumerate(pairwise(ends), start=1)
    ]


def _median(windows: Sequence[_Window]) -> _Window:
    length = median_low([one.end - one.begin for one in windows])
    return next(one for one in windows if one.end - one.begin == length)


def _said(window: _Window, windows: Sequence[_Window]) -> str:
    if len(windows) == 1:
        return f"{window.name}, the only one that is marked"
    return f"{window.name}, the median of {len(windows)} that are marked"


def _of_device(
    events: Sequence[TraceEvent],
    on_device: Sequence[TraceEvent],
    axis_of: AxisOf,
    expected: Mapping[str, int],
) -> MeasuredStep:
    """By the kernels and copies of a device."""
    from fsdpplan.trainer.watch.kinds import is_nccl, kernel_kind

    windows = _windows(events)
    chosen, own, span = "the whole trace, which marks no step", list(on_device), None
    if windows:
        window = _median(windows)
        chosen = _said(window, windows)
        own, span = _members(events, on_device, window)
        if not own:
            raise SpecError(
                f"the trace has no kernel in {window.name}: give one of more steps, or one made "
                "with ProfilerActivity.CUDA"
            )
    begin = min(_start(event) for event in own) if span is None else span[0]
    end = max(_span(event)[1] for event in own) if span is None else span[1]
    rows: dict[str, Row] = {}
    collectives: list[tuple[Row, TraceEvent]] = []
    computed: list[Span] = []
    for event in sorted(own, key=_start):
        name = str(event["name"])
        if is_nccl(name):
            collective = _collective_of(event)
            axis = axis_of(collective, event)
            if axis is not None:
                collectives.append((_row(rows, collective, axis), event))
            continue
        row = _row(rows, kernel_kind(name))
        _count(row, event, name)
        computed.append(_span(event))
    for row, event in collectives:
        about = event.get("args", {})
        _count(row, event, str(about.get("for") or about.get("Collective name") or event["name"]))
    return _step(
        rows,
        computed,
        [(row, _span(event)) for row, event in collectives],
        (begin, end),
        chosen=chosen,
        steps=1 if windows else _steps(rows, expected),
    )


def _collective_of(event: TraceEvent) -> str:
    from fsdpplan.trainer.watch.kinds import nccl_collective
    from fsdpplan.trainer.watch.trace import COLLECTIVES

    about = event.get("args", {})
    named = str(about.get("Collective name", "")).removesuffix("_")
    if named in COLLECTIVES:
        return COLLECTIVES[named]
    return nccl_collective(str(event["name"])) or "collective"


def _members(
    events: Sequence[TraceEvent], on_device: Sequence[TraceEvent], window: _Window
) -> tuple[list[TraceEvent], Span | None]:
    """The kernels of a step. A device is behind its host: where the mark is the host's, they are
    those whose launches are in it."""
    launched = {
        _correlation(event): _start(event)
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and _correlation(event) is not None
    }
    found = []
    for event in on_device:
        when = launched.get(_correlation(event), _start(event))
        if window.begin - 1e-9 <= when < window.end - 1e-9:
            found.append(event)
    return found, None if launched else (window.begin, window.end)


def _correlation(event: TraceEvent) -> int | None:
    """What a kernel and its launch have in common."""
    found = event.get("args", {}).get("correlation")
    return found if isinstance(found, int) else None


def _row(rows: dict[str, Row], kind: str, axis: str = "") -> Row:
    row = Row(kind, axis)
    return rows.setdefault(row.name, row)


def _count(row: Row, event: TraceEvent, name: str) -> None:
    seconds = float(event["dur"]) * 1e-6
    row.seconds += seconds
    row.calls.append((seconds, name))


def _steps(rows: Mapping[str, Row], expected: Mapping[str, int]) -> int:
    """Steps in a trace without marks, by how often it has each collective."""
    ratios = [
        len(row.calls) / expected[name]
        for name, row in rows.items()
        if expected.get(name) and row.axis
    ]
    return max(1, round(median_low(ratios))) if ratios else 1


def _step(
    rows: dict[str, Row],
    computed: Iterable[Span],
    collectives: Sequence[tuple[Row, Span]],
    span: Span,
    *,
    chosen: str,
    steps: int,
) -> MeasuredStep:
    from fsdpplan.trainer.watch.trace import Interval, outside, union

    busy = union(Interval(*one) for one in computed)
    for row, (start, end) in collectives:
        row.exposed_seconds += outside(Interval(start, end), busy)
    both = union([*busy, *(Interval(*one) for _, one in collectives)])
    whole = Interval(*span)
    rounding = 1e-9 * (span[1] - span[0])
    idle = _some(outside(whole, both), rounding)
    exposed = _some(outside(whole, busy) - idle, rounding)
    if steps > 1:
        chosen = f"the mean of {steps} steps, by how often collectives are called"
        for row in rows.values():
            row.seconds /= steps
            row.exposed_seconds /= steps
            row.calls = row.calls[: len(row.calls) // steps]
    return MeasuredStep(
        seconds=(span[1] - span[0]) / steps,
        chosen=chosen,
        span=span,
        rows=rows,
        exposed_seconds=exposed / steps,
        idle_seconds=idle / steps,
        steps=steps,
    )


def _some(seconds: float, rounding: float) -> float:
    return seconds if seconds > rounding else 0.0


_INHERITED = ("optimizer", "attention", "matmul", "copy", "collective")
"""What an operator is a part of decides what it is."""


def _of_host(
    events: Sequence[TraceEvent], axis_of: AxisOf, expected: Mapping[str, int]
) -> MeasuredStep:
    """By the operators of the thread that trains, and gloo's spans."""
    from fsdpplan.trainer.watch.kinds import is_gloo

    threads: dict[Any, int] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and str(event["name"]).startswith("aten::"):
            threads[event.get("tid")] = threads.get(event.get("tid"), 0) + 1
    if not threads:
        raise SpecError(
            "the trace has no kernel and no operator of torch's: give one that torch.profiler "
            "made with ProfilerActivity.CPU, or CUDA"
        )
    trains = max(threads, key=lambda tid: threads[tid])
    own = [event for event in events if event.get("tid") == trains]
    windows = _windows(own)
    chosen = "the whole trace, which marks no step"
    operators = [event for event in own if event.get("cat") == "cpu_op"]
    span = (min(map(_start, operators)), max(_span(event)[1] for event in operators))
    if windows:
        window = _median(windows)
        chosen, span = _said(window, windows), (window.begin, window.end)
    rows: dict[str, Row] = {}
    computed: list[Span] = []
    for kind, name, start, end in _segments(own):
        start, end = max(start, span[0]), min(end, span[1])
        if end <= start or kind in ("host", "collective"):
            continue
        row = _row(rows, kind)
        row.seconds += end - start
        row.calls.append((end - start, name))
        computed.append((start, end))
    gloo = sorted((e for e in events if is_gloo(str(e.get("name", "")))), key=_start)
    collectives = []
    for event, collective in zip(gloo, _carried(own, gloo), strict=True):
        start, end = _span(event)
        axis = axis_of(collective, event)
        if axis is None or not span[0] <= start < span[1]:
            continue
        row = _row(rows, collective, axis)
        _count(row, event, collective)
        collectives.append((row, (start, min(end, span[1]))))
    steps = 1 if windows else _steps(rows, expected)
    return _step(rows, computed, collectives, span, chosen=chosen, steps=steps)


def _carried(operators: Sequence[TraceEvent], gloo: Sequence[TraceEvent]) -> list[str]:
    """What each of gloo's spans is of, by the operators that asked for them: both are in the same
    order. Gloo reduces whole where it is asked to scatter."""
    from fsdpplan.trainer.watch.kinds import GLOO_CARRIES

    asked: dict[str, list[str]] = {}
    for event in sorted(operators, key=_start):
        word = str(event.get("name", "")).removeprefix("c10d::")
        if word in GLOO_CARRIES:
            span, collective = GLOO_CARRIES[word]
            asked.setdefault(span, []).append(collective)
    names = [str(event["name"]).partition(":")[2] for event in gloo]
    found, places = [], dict.fromkeys(asked, 0)
    for name in names:
        own = asked.get(name, [])
        if len(own) != names.count(name):  # some began before the trace, or came from elsewhere
            found.append(name)
            continue
        found.append(own[places[name]])
        places[name] += 1
    return found


def _segments(events: Sequence[TraceEvent]) -> list[tuple[str, str, float, float]]:
    """(kind, operator, start, end) of a thread's time in operators, the innermost deciding, but for
    what belongs to an outer one."""
    from fsdpplan.trainer.watch.kinds import operator_kind

    known: dict[str, str] = {}

    def kind_of(event: TraceEvent) -> str:
        name = str(event["name"])
        if event.get("cat") == "user_annotation":
            return "optimizer" if name.startswith(MARKS[1]) else ""
        if name not in known:
            known[name] = operator_kind(name)
        return known[name]

    stack: list[tuple[float, str, str]] = []
    found: list[tuple[str, str, float, float]] = []
    clock = 0.0

    def until(moment: float) -> None:
        nonlocal clock
        while stack and stack[-1][0] <= moment:
            end, kind, name = stack.pop()
            if end > clock:
                found.append((kind, name, clock, end))
                clock = end
        if stack and moment > clock:
            found.append((stack[-1][1], stack[-1][2], clock, moment))
        clock = max(clock, moment)

    for event in sorted(events, key=lambda one: (_start(one), -float(one["dur"]))):
        if event.get("cat") not in ("cpu_op", "user_annotation"):
            continue
        kind = kind_of(event)
        if not kind:
            continue
        start, end = _span(event)
        until(start)
        outer = stack[-1] if stack else None
        if outer is not None and outer[1] in _INHERITED:
            kind, name = outer[1], outer[2]
        else:
            name = str(event["name"])
        stack.append((end, kind, name))
    until(float("inf"))
    return [one for one in found if one[3] != float("inf")]


def group_axes(
    document: Mapping[str, Any], groups: Mapping[str, Sequence[int]]
) -> dict[str, list[str]]:
    """Process group, by its name in a trace, to the axes of a plan with the same ranks, or, where
    the trace does not list them, with the name that a device mesh gives."""
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for axis, ranks in groups.items():
        by_ranks.setdefault(tuple(ranks), []).append(axis)
    found: dict[str, list[str]] = {}
    for one in document.get("distributedInfo", {}).get("pg_config", ()):
        name, ranks = str(one.get("pg_name", "")), tuple(one.get("ranks") or ())
        described = str(one.get("pg_desc", ""))
        named = [axis for axis in groups if described == group_description(axis)]
        axes = named or by_ranks.get(ranks, [])
        if axes:
            found[name] = axes
    return found

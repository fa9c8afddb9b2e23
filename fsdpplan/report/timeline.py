"""Timeline: what runs when in a predicted step, on each stream of a rank of each pipeline stage,
and the schedule of all stages beside each other with their bubbles.

A pass is one span: short waits inside of it belong to it. What is left of a long step is cut to its
beginning, as much as keeps the page small, and the page says how much that is. Times are whole
numbers of ticks, a millionth of what is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdpplan.cost.timeline.events import COMPUTE, STREAMS, Event, Timeline
from fsdpplan.cost.timeline.timeline import step_timeline
from fsdpplan.errors import SpecError
from fsdpplan.report.values import Block, Chart, Note, Notes, Section, Table, cell
from fsdpplan.search.advice.words import schedule_words
from fsdpplan.spec.plan import Case, Plan
from fsdpplan.units import format_percent, format_seconds

MOST_SPANS = 6000
"""In the drawing of all stages."""
MOST_STREAM_SPANS = 8000
"""In those of the streams, all stages together."""
MOST_STAGES = 16
"""Of which the streams are shown."""
SHORT_FRACTION = 1 / 200
"""Of a step: shorter waits are drawn as part of the pass that they interrupt."""
TICKS = 1_000_000

_KINDS = (
    ("forward", 0),
    ("recompute", 4),
    ("backward", 2),
    ("waits for communication", 5),
    ("bubble", 8),
    ("communication", 1),
    ("optimizer and the rest", 3),
    ("host copies", 6),
)
"""What a span is, and its colour."""
_FORWARD, _RECOMPUTE, _BACKWARD, _WAITS, _BUBBLE, _COMMUNICATION, _REST, _HOST = range(len(_KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A step of a plan, laid out by this version."""

    case: Case
    """The plan's, or its first part where the precision changes in mid-run."""
    line: Timeline
    """On a rank of each stage: pass by pass, and without a pipeline block by block in the first
    micro-batch."""
    note: Note | None = None
    """What stands between it and the plan's numbers."""


def laid_out(plan: Plan) -> LaidOut | None:
    """The plan's step; None where its layout is not one that is laid out."""
    case = plan.case if plan.training.precision_switch == "none" else plan.case.phases[0][1]
    try:
        line = step_timeline(case, detail="blocks" if case.layout.pp == 1 else "passes", detailed=1)
    except SpecError:  # a layout that no rule allows, of a table or another program
        return None
    return LaidOut(case=case, line=line, note=_note(plan, line.step_seconds))


def _note(plan: Plan, predicted: float) -> Note | None:
    if plan.training.precision_switch != "none":
        words = f"The precision changes in mid-run; this is a step in {plan.training.precision}."
        return Note(text=words)
    saved = plan.estimate.time.total_seconds
    if abs(predicted - saved) > 1e-6 * saved:
        made = dict(plan.versions).get("fsdpplan", "another version")
        return Note(
            tone="watch",
            text=f"The plan was predicted by fsdpplan {made}; what is drawn here is worked out by "
            f"this one, which predicts {format_seconds(predicted)} for a step, not "
            f"{format_seconds(saved)}.",
            advice="Plan again to have both agree.",
        )
    learned = plan.estimate.step_seconds.expected
    if abs(learned - saved) > 1e-6 * saved:
        return Note(
            text=f"Your runs make the step {format_seconds(learned)}; what is drawn here is the "
            f"step without them, {format_seconds(saved)}."
        )
    return None


def timeline_sections(laid: LaidOut | None) -> tuple[Section, ...]:
    """The schedule of a pipeline, and the streams of its ranks."""
    if laid is None:
        return ()
    schedule = (_schedule_section(laid),) if laid.case.layout.pp > 1 else ()
    return (*schedule, _streams_section(laid))


def _schedule_section(laid: LaidOut) -> Section:
    layout, line = laid.case.layout, laid.line
    bubbles = [
        line.term_seconds(rank).get("bubble", 0.0) / line.step_seconds for rank in range(layout.pp)
    ]
    parts = ""
    if layout.virtual_stages > 1:
        parts = f", of which each has {layout.virtual_stages} parts of the model,"
    idle = (
        f"between {format_percent(min(bubbles))} and {format_percent(max(bubbles))}"
        if max(bubbles) - min(bubbles) > 5e-4
        else format_percent(max(bubbles))
    )
    return Section(
        name="schedule",
        title="Pipeline schedule",
        says=f"{layout.pp} stages{parts} take {layout.num_microbatches} micro-batches a step by "
        f"{schedule_words(layout.schedule)}; of the step, a stage waits for others {idle}.",
        blocks=(*_notes(laid), _schedule_chart(laid)),
    )


def _notes(laid: LaidOut) -> tuple[Block, ...]:
    return () if laid.note is None else (Notes((laid.note,)),)


def _schedule_chart(laid: LaidOut) -> Chart:
    line, layout = laid.line, laid.case.layout
    lanes = [
        _lane(f"stage {rank + 1}", line.of(rank, COMPUTE), line.step_seconds)
        for rank in range(layout.pp)
    ]
    end = _end(lanes, line.step_seconds, most=MOST_SPANS)
    part = "" if end == line.step_seconds else f" Shown is {_part(end, line.step_seconds)}."
    return Chart(
        name="schedule",
        kind="spans",
        title="What each stage does",
        says="Time goes to the right; grey is waiting for another stage, the bubble. Waits of less "
        f"than a {round(1 / SHORT_FRACTION)}th of the step are inside of passes.{part}",
        data=_drawn(lanes, end),
        table=_terms_table(line, [(lane.name, rank) for rank, lane in enumerate(lanes)]),
    )


def _part(end: float, step_seconds: float) -> str:
    return f"its beginning, {format_seconds(end)} of {format_seconds(step_seconds)}"


def _terms_table(line: Timeline, ranks: Sequence[tuple[str, int]]) -> Table:
    terms = ("compute", "exposed", "bubble", "optimizer", "host")
    sums = [(name, line.term_seconds(rank)) for name, rank in ranks]
    used = [term for term in terms if any(one.get(term) for _, one in sums)]
    words = {"exposed": "waits for communication", "host": "host copies"}
    return Table(
        caption="What each stage does in a step, in numbers",
        columns=("", *(words.get(term, term) for term in used), "bubble of the step"),
        rows=tuple(
            (
                name,
                *(cell(one.get(term, 0.0), "seconds") for term in used),
                cell(one.get("bubble", 0.0) / line.step_seconds, "fraction"),
            )
            for name, one in sums
        ),
        folded=True,
    )


def _streams_section(laid: LaidOut) -> Section:
    chart, hidden = _streams_chart(laid)
    return Section(
        name="timeline",
        title="Timeline of a step",
        says="What one rank does at once: kernels on the compute stream, and beside them what it "
        f"sends and gets. {hidden}",
        blocks=(*(() if laid.case.layout.pp > 1 else _notes(laid)), chart),
    )


def _streams_chart(laid: LaidOut) -> tuple[Chart, str]:
    line, layout = laid.line, laid.case.layout
    own = [(STREAMS[stream], events) for stream, events in line.streams(line.rank).items()]
    busy = sum(event.seconds for _, events in own[1:] for event in events)
    waits = line.term_seconds().get("exposed", 0.0)
    hidden = "It sends nothing."
    if busy:
        hidden = (
            f"Streams beside the compute stream are busy for {format_seconds(busy)} together; "
            f"computing waits for them {format_seconds(waits)}."
        )
    return Chart(
        name="timeline",
        kind="spans",
        title="Streams of one rank" + (" of each stage" if layout.pp > 1 else ""),
        says=f"{len(own)} streams are in use on the rank that computes most.",
        data=_choices(laid),
        table=Table(
            caption="Streams of the rank that computes most, in numbers",
            columns=("stream", "busy", "of the step"),
            rows=tuple(
                (
                    name,
                    cell(_busy(events), "seconds"),
                    cell(_busy(events) / line.step_seconds, "fraction"),
                )
                for name, events in own
            ),
            folded=True,
        ),
    ), hidden


def _busy(events: Iterable[Event]) -> float:
    return sum(one.seconds for one in events if one.term not in ("exposed", "bubble"))


def _choices(laid: LaidOut) -> dict[str, Any]:
    """Drawings to choose from: of a pipeline a rank of each stage, else a micro-batch block by
    block and the whole step."""
    layout, line = laid.case.layout, laid.line
    if layout.pp > 1:
        ranks = _spread(layout.pp, line.rank)
        drawings = [_choice(laid, rank, most=MOST_STREAM_SPANS // len(ranks)) for rank in ranks]
        return {"choices": drawings, "chosen": ranks.index(line.rank)}
    first = max(one.end_seconds for one in line.events if one.micro_batch == 0)
    one_batch = _lanes(line, 0, by_block=True)
    words = "The first micro-batch" if layout.num_microbatches > 1 else "The step"
    blocks = {"name": f"{words}, block by block", **_drawn(one_batch, first)}
    return {"choices": [blocks, _choice(laid, 0, most=MOST_STREAM_SPANS // 2)], "chosen": 0}


def _spread(stages: int, main: int) -> list[int]:
    """Stages to choose from: all, or some from first to last with the one that computes most."""
    if stages <= MOST_STAGES:
        return list(range(stages))
    some = {round(at * (stages - 1) / (MOST_STAGES - 2)) for at in range(MOST_STAGES - 1)}
    return sorted(some | {main})


def _choice(laid: LaidOut, rank: int, *, most: int) -> dict[str, Any]:
    line = laid.line
    lanes = _lanes(line, rank)
    end = _end(lanes, line.step_seconds, most=most)
    words = ["The whole step, pass by pass"]
    if laid.case.layout.pp > 1:
        words = [f"Stage {rank + 1}" + (" (computes most)" if rank == line.rank else "")]
    if end < line.step_seconds:
        words.append(_part(end, line.step_seconds))
    return {"name": ": ".join(words), **_drawn(lanes, end)}


@dataclass(frozen=True, slots=True)
class _Span:
    """What is drawn as one: a pass, a wait, a collective."""

    kind: int
    name: str
    start: float
    end: float
    micro_batch: int | None
    stage: int | None


@dataclass(frozen=True, slots=True)
class _Lane:
    """A row of a drawing."""

    name: str
    spans: tuple[_Span, ...]


def _lanes(line: Timeline, rank: int, *, by_block: bool = False) -> list[_Lane]:
    return [
        _lane(STREAMS[stream], events, line.step_seconds, by_block=by_block)
        for stream, events in line.streams(rank).items()
    ]


def _lane(
    name: str, events: Sequence[Event], step_seconds: float, *, by_block: bool = False
) -> _Lane:
    """Events as spans; those of one pass, or of a block in it, that follow one another are one."""
    spans: list[_Span] = []
    names: list[str] = []
    key: tuple[object, ...] = ()
    for event in events:
        kind = _kind(event)
        short = kind == _WAITS and event.seconds < SHORT_FRACTION * step_seconds
        block = event.block if by_block else None
        of_pass = (event.micro_batch, event.stage, block, event.direction)
        follows = bool(spans) and event.start_seconds - spans[-1].end < 1e-5 * step_seconds
        if follows and key[1:] == of_pass and event.micro_batch is not None:
            last = spans[-1]
            if key[0] == kind or (short and key[0] not in (_WAITS, _BUBBLE)):
                if event.name not in names and not short:
                    names.append(event.name)
                spans[-1] = replace(last, end=event.end_seconds, name=_joined(names))
                continue
        key, names = (kind, *of_pass), [event.name]
        spans.append(
            _Span(
                kind=kind,
                name=event.name,
                start=event.start_seconds,
                end=event.end_seconds,
                micro_batch=event.micro_batch,
                stage=event.stage,
            )
        )
    return _Lane(name, tuple(spans))


def _joined(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"


def _kind(event: Event) -> int:
    if event.term == "beside":
        return _COMMUNICATION
    if event.term == "exposed":
        return _WAITS
    if event.term == "bubble":
        return _BUBBLE
    if event.term == "host":
        return _HOST
    if event.term != "compute":
        return _REST
    if "recompute" in (event.kind, event.direction):
        return _RECOMPUTE
    return {"forward": _FORWARD, "backward": _BACKWARD}.get(event.direction, _REST)


def _end(lanes: Sequence[_Lane], step_seconds: float, *, most: int) -> float:
    """Until when there are no more than `most` spans on all lanes together."""
    starts = sorted(span.start for lane in lanes for span in lane.spans)
    return step_seconds if len(starts) <= most else starts[most]


def _drawn(lanes: Sequence[_Lane], end: float) -> dict[str, Any]:
    """What the drawing takes, up to a moment."""
    tick = end / TICKS
    shown = [(at, span) for at, lane in enumerate(lanes) for span in lane.spans if span.start < end]
    kinds = sorted({span.kind for _, span in shown})
    names: dict[str, int] = {}
    spans: list[list[int]] = []
    for at, span in shown:
        start, stop = (round(min(moment, end) / tick) for moment in (span.start, span.end))
        name = names.setdefault(span.name, len(names))
        row = [at, start, stop - start, kinds.index(span.kind), name]
        if span.micro_batch is not None:
            row += [span.micro_batch] + ([] if span.stage is None else [span.stage])
        spans.append(row)
    return {
        "unit": "seconds",
        "tick": tick,
        "lanes": [lane.name for lane in lanes],
        "kinds": [_KINDS[kind][0] for kind in kinds],
        "colors": [_KINDS[kind][1] for kind in kinds],
        "names": list(names),
        "spans": spans,
    }

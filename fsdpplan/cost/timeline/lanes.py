"""Lanes: streams while a step is laid out, in the clock of the played passes, and from that clock
to the one of the whole step.

Playing lays out passes and collectives; what the estimate adds to them afterwards
(gradients added up, what overlapped collectives and the slowest device take from kernels, the
optimizer) has no place in its clock. A `Warp` gives it one: time in which the rank that the
estimate is about computes is stretched, what is added is put in between, and all else keeps its
length. Since nothing gets shorter, the order of events stands, on all ranks; a collective keeps its
own seconds and ends when it ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fsdpplan.cost.timeline.events import COMPUTE, Event, Kind, Term, Traffic
from fsdpplan.cost.timeline.pieces import Direction, Piece
from fsdpplan.cost.traffic.calls import BlockCall, Calls, group_level, group_seconds
from fsdpplan.spec.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A collective on a stream beside the compute stream."""

    stream: str
    name: str
    seconds: float
    traffic: Traffic | None = None
    kind: Kind = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a stretch of a lane belongs to."""

    direction: Direction = ""
    micro_batch: int | None = None
    stage: int | None = None
    block: int | None = None


NO_MARK = Mark()


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Something on the compute stream."""

    name: str
    kind: Kind
    term: Term
    raw_seconds: float
    """In the clock of the played passes; 0 of what it does not know."""
    added_seconds: float = 0.0
    """What it takes where it is not played."""
    mark: Mark = NO_MARK
    cause: str = ""
    sent: tuple[Sent, ...] = ()
    """Collectives that end with it, the last one last."""


@dataclass(slots=True, kw_only=True)
class Beside:
    """A collective that ends at a moment of that clock."""

    raw_end: float
    sent: Sent
    mark: Mark = NO_MARK


@dataclass(slots=True, kw_only=True)
class Lanes:
    """What one rank does, while it is laid out."""

    main: list[Stretch] = field(default_factory=list)
    """One after another, from 0."""
    beside: list[Beside] = field(default_factory=list)
    clock: float = 0.0
    """End of the compute stream so far."""
    actions: list[tuple[float, float]] = field(default_factory=list)
    """From when to when each action of a pipeline's schedule goes on, in the same clock."""
    least: float = 0.0
    """What takes no longer is rounding, and nothing."""

    def add(
        self,
        seconds: float,
        name: str,
        kind: Kind,
        term: Term,
        *,
        mark: Mark = NO_MARK,
        cause: str = "",
        sent: tuple[Sent, ...] = (),
        inserted: bool = False,
    ) -> None:
        """The next on the compute stream; nothing where it takes no time and sends nothing.
        `inserted`: it is not played, so the clock stands still."""
        if seconds > (0.0 if inserted else self.least) or sent:
            taken = max(0.0, seconds)
            self.main.append(
                Stretch(
                    name=name,
                    kind=kind,
                    term=term,
                    raw_seconds=0.0 if inserted else taken,
                    added_seconds=taken if inserted else 0.0,
                    mark=mark,
                    cause=cause,
                    sent=sent,
                )
            )
            self.clock += 0.0 if inserted else taken

    def wait(
        self,
        seconds: float,
        cause: str,
        *,
        mark: Mark = NO_MARK,
        sent: tuple[Sent, ...] = (),
        inserted: bool = False,
    ) -> None:
        """For a collective."""
        name = f"waits for {cause}"
        self.add(
            seconds, name, "wait", "exposed", mark=mark, cause=cause, sent=sent, inserted=inserted
        )

    def pieces(
        self, pieces: Iterable[Piece], cluster: Cluster, mark: Mark, *, prefix: str = ""
    ) -> None:
        """A pass, piece by piece."""
        for piece in pieces:
            block = mark.block if piece.block is None else piece.block
            own = replace(mark, direction=piece.direction, block=block)
            if not piece.calls:
                name = f"{prefix}.{piece.name}" if prefix else piece.name
                self.add(piece.seconds, name, piece.kind, "compute", mark=own)
            else:
                where = prefix or ("" if piece.block is None else f"layers.{piece.block}")
                sent = tuple(sent_call(call, cluster, where) for call in piece.calls)
                self.wait(piece.seconds, piece.calls[0].group.axis, mark=own, sent=sent)

    def insert_wait(self, sent: Sent, cause: str, *, mark: Mark = NO_MARK) -> None:
        """For a collective beside which nothing runs."""
        self.wait(sent.seconds, cause, mark=mark, sent=(sent,), inserted=True)

    def send(self, raw_end: float, sent: Sent, mark: Mark = NO_MARK) -> None:
        """A collective that ends then."""
        self.beside.append(Beside(raw_end=raw_end, sent=sent, mark=mark))

    def send_all(self, sents: Sequence[Sent], raw_end: float, mark: Mark = NO_MARK) -> float:
        """Several, one after another, the last of which ends then; when the first begins."""
        for sent in reversed(sents):
            self.send(raw_end, sent, mark)
            raw_end -= sent.seconds
        return raw_end

    def take(self, part: Lanes) -> None:
        """What was laid out apart, behind all that is here."""
        self.main += part.main
        self.beside += part.beside

    def later(self, micro_batch: int, seconds: float, others: Mapping[str, float]) -> Lanes:
        """The same for another micro-batch, so much later; `others`: of some streams by as much."""
        return Lanes(
            main=[
                replace(one, mark=replace(one.mark, micro_batch=micro_batch)) for one in self.main
            ],
            beside=[
                replace(
                    one,
                    raw_end=one.raw_end + others.get(one.sent.stream, seconds),
                    mark=replace(one.mark, micro_batch=micro_batch),
                )
                for one in self.beside
            ],
            clock=self.clock + seconds,
        )

    def repeat(
        self,
        part: Lanes,
        micro_batches: range,
        seconds: float,
        *,
        whole: int,
        others: Mapping[str, float] | None = None,
    ) -> None:
        """`part` again for each of `micro_batches`, each so much later than the one before it, and
        pass by pass from number `whole` on; `others`: of some streams by as much."""
        in_passes = part.by_pass() if micro_batches else part
        for again, number in enumerate(micro_batches, start=1):
            own = {stream: again * each for stream, each in (others or {}).items()}
            of = part if number < whole else in_passes
            self.take(of.later(number, again * seconds, own))

    def by_pass(self) -> Lanes:
        """The same with all of a pass that is alike as one."""
        main: dict[tuple[object, ...], Stretch] = {}
        sent: dict[tuple[object, ...], list[Sent]] = {}
        for one in self.main:
            way: Direction = "forward" if one.mark.direction == "forward" else "backward"
            is_kernel = one.term == "compute"
            kind: Kind = one.mark.direction or one.kind if is_kernel else one.kind
            key = (way, kind, one.term, one.cause, one.raw_seconds == 0 < one.added_seconds)
            mark = replace(one.mark, direction=way, block=None)
            if key not in main:
                main[key] = replace(
                    one,
                    name=str(kind) if is_kernel else one.name,
                    kind=kind,
                    mark=replace(mark, direction=one.mark.direction or way),
                    raw_seconds=0.0,
                    added_seconds=0.0,
                )
            held = main[key]
            held.raw_seconds += one.raw_seconds
            held.added_seconds += one.added_seconds
            sent.setdefault(key, []).extend(one.sent)
        for of, sents in sent.items():
            main[of].sent = _summed(sents)
        order = {"forward": 0, "recompute": 1, "backward": 1}
        stretches = sorted(main.values(), key=lambda one: order.get(one.mark.direction, 1))
        return Lanes(main=stretches, beside=_beside_by_pass(self.beside), clock=self.clock)


def _summed(sents: Iterable[Sent]) -> tuple[Sent, ...]:
    """Equal kinds of collectives as one."""
    found: dict[tuple[object, ...], Sent] = {}
    for sent in sents:
        row = sent.traffic.row if sent.traffic else ()
        key = (sent.stream, sent.kind, row)
        if key not in found:
            found[key] = replace(sent, name=sent.name.split(" (")[0])
            continue
        held = found[key]
        traffic = held.traffic
        if traffic is not None and sent.traffic is not None:
            traffic = replace(
                traffic,
                count=traffic.count + sent.traffic.count,
                bytes=traffic.bytes + sent.traffic.bytes,
            )
        found[key] = replace(held, seconds=held.seconds + sent.seconds, traffic=traffic)
    return tuple(found.values())


def _beside_by_pass(beside: Iterable[Beside]) -> list[Beside]:
    """Collectives of one pass as one for each kind, which ends with the last of them."""
    groups: dict[tuple[object, ...], list[Beside]] = {}
    for one in beside:
        row = one.sent.traffic.row if one.sent.traffic else ()
        way = "forward" if one.mark.direction == "forward" else "backward"
        groups.setdefault((way, one.sent.stream, one.sent.kind, row), []).append(one)
    return [
        replace(
            alike[-1],
            raw_end=max(one.raw_end for one in alike),
            sent=_summed(one.sent for one in alike)[0],
            mark=replace(alike[-1].mark, block=None),
        )
        for alike in groups.values()
    ]


def sent_call(call: BlockCall, cluster: Cluster, where: str) -> Sent:
    """Calls inside a block, one after another."""
    name = f"{call.collective} ({where})" if where else call.collective
    return sent_calls(call, cluster, stream=call.group.axis, name=name, count=call.count)


def sent_calls(calls: Calls, cluster: Cluster, *, stream: str, name: str, count: int = 1) -> Sent:
    """`count` of equal calls, one after another."""
    group = calls.group
    once = group_seconds(cluster, group, calls.collective, calls.call_bytes, calls.leaving_share)
    return Sent(
        stream=stream,
        name=name,
        seconds=count * once,
        traffic=Traffic(
            collective=calls.collective,
            axis=group.axis,
            ranks=group.ranks,
            level=group_level(cluster, group),
            dtype=calls.dtype,
            count=count,
            bytes=count * calls.call_bytes,
        ),
    )


ALIKE = 1e-12
"""Share of a step within which two moments are the same: rounding."""


@dataclass(frozen=True, slots=True)
class Warp:
    """From the clock of the played passes to that of the step, by what one rank does."""

    raw: tuple[float, ...]
    """Moments, not falling; the same one several times where something is put in."""
    final: tuple[float, ...]

    def at(self, moment: float, *, is_end: bool) -> float:
        """When that is; of what begins at a moment where something is put in, behind it, of what
        ends there before it."""
        raw, final = self.raw, self.final
        rounding = ALIKE * raw[-1]
        first = bisect_left(raw, moment - rounding)
        behind = bisect_right(raw, moment + rounding)
        if first < behind:
            return final[first if is_end else behind - 1]
        before = first - 1
        if before < 0:
            return final[0]
        if behind >= len(raw):
            return final[-1] + moment - raw[-1]
        spanned = raw[before + 1] - raw[before]
        share = (moment - raw[before]) / spanned if spanned else 1.0
        return final[before] + min(1.0, max(0.0, share)) * (final[before + 1] - final[before])


def stretched(lanes: Lanes, *, factor: float) -> tuple[list[float], Warp]:
    """Final seconds of what is on the compute stream, and the way of all other moments there:
    computation takes `factor` times as long."""
    seconds, raw, final = [], [0.0], [0.0]
    for one in lanes.main:
        scale = factor if one.term == "compute" else 1.0
        taken = scale * (one.raw_seconds + one.added_seconds)
        if one.term == "optimizer":
            taken = one.added_seconds
        seconds.append(taken)
        raw.append(raw[-1] + one.raw_seconds)
        final.append(final[-1] + taken)
    return seconds, Warp(tuple(raw), tuple(final))


def main_events(lanes: Lanes, seconds: Sequence[float], rank: int) -> list[Event]:
    """The compute stream of the rank that the warp is made from, and what ends with it."""
    events, clock = [], 0.0
    for one, taken in zip(lanes.main, seconds, strict=True):
        events += _stretch_events(one, rank, clock, taken)
        clock += taken
    return events


def warped_events(lanes: Lanes, warp: Warp, rank: int, *, end: float) -> list[Event]:
    """The compute stream of another rank: what is between its events is a bubble. What is put in
    behind all that is played ends with the step, on all ranks."""
    events, raw, clock = [], 0.0, 0.0
    behind = max((at for at, one in enumerate(lanes.main) if one.raw_seconds), default=-1)
    left = sum(one.added_seconds for one in lanes.main[behind + 1 :])
    for at, one in enumerate(lanes.main):
        begin, until = raw, raw + one.raw_seconds
        raw = until
        if one.raw_seconds:
            start, stop = warp.at(begin, is_end=False), warp.at(until, is_end=True)
        else:
            start = end - left if at > behind else max(clock, warp.at(begin, is_end=True))
            stop = start + one.added_seconds
            left -= one.added_seconds if at > behind else 0.0
        start, stop = max(start, clock), max(stop, start, clock)
        events += _gap(rank, clock, start)
        events += _stretch_events(one, rank, start, stop - start)
        clock = stop
    return [*events, *_gap(rank, clock, end)]


def _gap(rank: int, start: float, end: float) -> list[Event]:
    if end - start <= 0:
        return []
    return [
        Event(
            rank=rank,
            stream=COMPUTE,
            name="bubble",
            kind="bubble",
            term="bubble",
            start_seconds=start,
            seconds=end - start,
        )
    ]


def _stretch_events(one: Stretch, rank: int, start: float, seconds: float) -> list[Event]:
    events = []
    mark = one.mark
    if seconds > 0:
        events.append(
            Event(
                rank=rank,
                stream=COMPUTE,
                name=one.name,
                kind=one.kind,
                term=one.term,
                start_seconds=start,
                seconds=seconds,
                direction=mark.direction,
                micro_batch=mark.micro_batch,
                stage=mark.stage,
                block=mark.block,
                cause=one.cause,
            )
        )
    end = start + seconds
    for sent in reversed(one.sent):
        events.append(_sent_event(sent, rank, end, mark))
        end -= sent.seconds
    return events


def _sent_event(sent: Sent, rank: int, end: float, mark: Mark) -> Event:
    return Event(
        rank=rank,
        stream=sent.stream,
        name=sent.name,
        kind=sent.kind,
        term="beside",
        start_seconds=end - sent.seconds,
        seconds=sent.seconds,
        direction=mark.direction,
        micro_batch=mark.micro_batch,
        stage=mark.stage,
        block=mark.block,
        traffic=sent.traffic,
    )


def beside_events(lanes: Lanes, warp: Warp, rank: int) -> list[Event]:
    """What runs on other streams, by the end that each has."""
    return [
        _sent_event(one.sent, rank, warp.at(one.raw_end, is_end=True), one.mark)
        for one in lanes.beside
        if one.sent.seconds > 0
    ]


def queued(events: list[Event], *, end: float) -> list[Event]:
    """The events of one stream one after another: each as late as the one before it ends, but all
    within the step. Ends that playing only approximates may overlap by a little."""
    ordered = sorted(events, key=lambda event: event.end_seconds)
    starts, clock = [], 0.0
    for event in ordered:
        clock = max(clock, event.start_seconds)
        starts.append(clock)
        clock += event.seconds
    limit = end
    for at in range(len(ordered) - 1, -1, -1):
        starts[at] = min(starts[at], limit - ordered[at].seconds)
        limit = starts[at]
    return [
        event if event.start_seconds == start else replace(event, start_seconds=start)
        for event, start in zip(ordered, starts, strict=True)
    ]


Relabelled = Literal["exposed", "bubble"]


def relabel(
    lanes: Lanes,
    amount: float,
    *,
    to: Relabelled,
    cause: str,
    candidates: Iterable[int],
) -> float:
    """Let `amount` seconds of those stretches of the compute stream that `candidates` name, in
    their order, be something else: a wait for `cause`, or a bubble. What was not found of it."""
    cuts: dict[int, float] = {}
    for at in candidates:
        if amount <= 0:
            break
        taken = min(amount, lanes.main[at].raw_seconds + lanes.main[at].added_seconds)
        if taken > 0:
            cuts[at] = taken
            amount -= taken
    made: list[Stretch] = []
    for at, one in enumerate(lanes.main):
        if at not in cuts:
            made.append(one)
            continue
        made += _cut(one, cuts[at], to=to, cause=cause)
    lanes.main[:] = made
    return amount


def _cut(one: Stretch, seconds: float, *, to: Relabelled, cause: str) -> list[Stretch]:
    """`seconds` of it, the last ones, under another name."""
    is_added = one.added_seconds > 0
    whole = one.added_seconds if is_added else one.raw_seconds
    kind: Kind = "wait" if to == "exposed" else "bubble"
    name = f"waits for {cause}" if to == "exposed" else "bubble"
    named = replace(one, name=name, kind=kind, term=to, cause=cause)
    left = whole - seconds
    if left <= 0:
        return [named]
    if is_added:
        return [
            replace(one, added_seconds=left, sent=()),
            replace(named, added_seconds=seconds),
        ]
    return [replace(one, raw_seconds=left, sent=()), replace(named, raw_seconds=seconds)]

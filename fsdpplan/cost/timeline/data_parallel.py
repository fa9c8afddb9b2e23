"""Data parallelism laid out: all micro-batches of a rank that is in no pipeline, as its program is
played.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from fsdpplan.cost.kernels.gradients import gradient_seconds
from fsdpplan.cost.model.shards import (
    Stage,
    gradient_syncs,
    unit_cases,
)
from fsdpplan.cost.play.clocks import Clocks
from fsdpplan.cost.read.passes import fsdp_micro_batch, fsdp_passes, plain_seconds, replica_batch
from fsdpplan.cost.step import replica
from fsdpplan.cost.step.fsdp import (
    UPDATE,
    backward_pass,
    early_micro_batch,
    forward_pass,
    with_seconds,
)
from fsdpplan.cost.step.program import Cause, Op, Run, operations
from fsdpplan.cost.step.replica import ReplicaBatch
from fsdpplan.cost.timeline.events import Detail
from fsdpplan.cost.timeline.lanes import Lanes, Mark, Sent, sent_calls
from fsdpplan.cost.timeline.pieces import (
    EMBEDDING,
    NO_PASSES,
    Direction,
    Passes,
    Piece,
    block_pieces,
    end_pieces,
    own_blocks,
)
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.cost.traffic.fsdp import Unit as MovedUnit
from fsdpplan.cost.traffic.fsdp import UnitCalls, fsdp_units
from fsdpplan.cost.traffic.rank import tp_gradient_calls, tp_pass_calls
from fsdpplan.cost.traffic.replica import parameter_calls, replica_buckets
from fsdpplan.spec.plan import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An FSDP unit: what it computes in a micro-batch, and what moves its parameters."""

    name: str
    """As torch names it: of blocks `layers.0, layers.1`; of the root nothing."""
    blocks: tuple[tuple[int, Passes], ...] = ()
    """Number and passes of each block."""
    ends: Passes = NO_PASSES
    """Of embedding, head and loss."""
    gathers: tuple[Sent, ...] = ()
    regathers: tuple[Sent, ...] = ()
    scatters: tuple[Sent, ...] = ()
    reduces: tuple[Sent, ...] = ()


def _named(label: str, unit: str) -> str:
    """As torch's record_function names what FSDP does for a unit (torch 2.13
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `_with_fqn`)."""
    return f"{label} ({unit})" if unit else label


def _moved_unit(case: Case, name: str, calls: UnitCalls) -> Unit:
    """A unit that computes nothing yet."""

    def sent(of: tuple[Calls, ...], label: str) -> tuple[Sent, ...]:
        return tuple(
            sent_calls(call, case.cluster, stream=call.collective, name=_named(label, name))
            for call in of
            if call.group.ranks > 1
            for _ in range(call.count)
        )

    gathered, reduced = "FSDP::all_gather", "FSDP::post_backward_reduce"
    return Unit(
        name=name,
        gathers=sent(calls.gather, gathered),
        regathers=sent(calls.regather, gathered),
        scatters=sent(calls.reduce_scatter, reduced),
        reduces=sent(calls.all_reduce, reduced),
    )


def stage_units(case: Case, stage: Stage, *, detail: Detail, first_block: int = 0) -> list[Unit]:
    """The units of one virtual stage in the order of forward: that of the embedding before those of
    blocks, that of the head behind them, and the root last of all."""
    moved = fsdp_units(case, stage)
    done, units = 0, []
    for unit, parts in moved.blocks:
        own = [block_pieces(each) for each, blocks in unit_cases(case, unit) for _ in range(blocks)]
        if detail != "kernels":
            own = [each.merged() for each in own]
        for _ in range(unit.number):
            numbers = range(first_block + done, first_block + done + unit.blocks)
            name = ", ".join(f"layers.{number}" for number in numbers)
            made = _moved_unit(case, name, parts.calls)
            blocks = zip(numbers, own, strict=True)
            units.append(replace(made, blocks=tuple(blocks)))
            done += unit.blocks

    def end(name: str, of: MovedUnit, computed: Stage | None) -> Unit:
        made = _moved_unit(case, name, of.calls)
        return made if computed is None else replace(made, ends=end_pieces(case, computed))

    if not (moved.tables.is_there or moved.head.is_there):
        return [*units, end("", moved.root, stage)]
    tables, head = replace(stage, has_head=False), replace(stage, has_embedding=False)
    if moved.tables.is_there:
        units.insert(0, end("tok_embeddings", moved.tables, tables))
    if moved.head.is_there:
        units.append(end("norm, output", moved.head, head))
    return [*units, end("", moved.root, None)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSeconds:
    """What gradients cost beside the products that make them, in the backward passes that add to
    earlier ones; of one micro-batch in its own."""

    first: int
    """Micro-batch from which on they do."""
    each: float

    @classmethod
    def of(cls, case: Case, stages: Iterable[Stage]) -> GradientSeconds:
        """Of the rank that keeps most."""
        number = case.layout.num_microbatches
        whole = max(gradient_seconds(case, held) for held in dict.fromkeys(stages))
        return cls(first=min(1, number - 1), each=whole / max(1, number - 1))

    def put(self, lanes: Lanes, mark: Mark) -> None:
        """Behind a backward pass."""
        if mark.micro_batch is not None and mark.micro_batch >= self.first:
            what = "gradients added"
            lanes.add(self.each, what, "gradients", "compute", mark=mark, inserted=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """What all micro-batches of a rank under FSDP have in common."""

    case: Case
    units: list[Unit]
    on_host: tuple[float, ...]
    """Seconds of a copy of each unit's shard, with offload."""


_Lay = Callable[[Lanes, Mark], None]
"""Lays out the pass of a mark, as it is played."""


def fsdp_lanes(case: Case, stage: Stage, *, detail: Detail, detailed: int) -> Lanes:
    """All micro-batches under FSDP."""
    batch = fsdp_micro_batch(case, stage)
    last = with_seconds(batch, upload=0.0, download=0.0, adding=0.0)
    early = early_micro_batch(last, case.layout)
    is_offloaded = case.layout.offload == "cpu"
    uploads = (unit.upload for unit, alike in batch.all_runs for _ in range(alike))
    shape = _Units(
        case=case,
        units=stage_units(case, stage, detail=detail),
        on_host=(*uploads, batch.root.upload),
    )
    clocks, end = Clocks(), case.layout.num_microbatches - 1

    def lay(part: Lanes, mark: Mark) -> None:
        runs = forward_pass if mark.direction == "forward" else backward_pass
        for op in operations(runs(last if mark.micro_batch == end else early)):
            _lay(shape, part, clocks, op, mark)

    host_seconds = fsdp_passes(case, stage).host_seconds if is_offloaded else 0.0
    lanes = _laid_out(
        case, stage, lay, clocks, detail=detail, detailed=detailed, host_seconds=host_seconds
    )
    _lay(shape, lanes, clocks, UPDATE, Mark(direction="backward", micro_batch=end))
    return lanes


def _laid_out(
    case: Case,
    stage: Stage,
    lay: _Lay,
    clocks: Clocks,
    *,
    detail: Detail,
    detailed: int,
    host_seconds: float = 0.0,
) -> Lanes:
    """All micro-batches, of which all but the first and the last are alike. Those behind the first
    `detailed` are shown pass by pass, but the last. `host_seconds`: what a step waits for copies
    from and to the host, and for what that adds."""
    number = case.layout.num_microbatches
    gradients, ends = GradientSeconds.of(case, (stage,)), ends_sent(case, stage)

    def micro_batch(index: int) -> Lanes:
        part = Lanes(clock=clocks.compute)
        directions: tuple[Direction, Direction] = ("forward", "backward")
        for direction, sents in zip(directions, ends, strict=True):
            mark = Mark(direction=direction, micro_batch=index)
            lay(part, mark)
            if direction == "backward":
                gradients.put(part, mark)
            for sent in sents:
                part.insert_wait(sent, "tp", mark=mark)
        if host_seconds:
            each, what = host_seconds / number, "copies from and to the host"
            part.add(each, what, "host", "host", mark=mark, inserted=True)
        return part

    whole = detailed if detail != "passes" else 0
    lanes, part = Lanes(), Lanes()
    shown, advance, later = 0, 0.0, 0.0
    alike = (index + 1 for index in clocks.rounds(number - 2))
    for index in chain((0,), alike, (number - 1,) if number > 1 else ()):
        lanes.repeat(part, range(shown, index), advance, whole=whole, others={"all_reduce": later})
        compute, replicate = clocks.compute, clocks.last["replicate"]
        part = micro_batch(index)
        is_whole = index < whole or (index == number - 1 and detail != "passes")
        lanes.take(part if is_whole else part.by_pass())
        advance, later = clocks.compute - compute, clocks.last["replicate"] - replicate
        shown = index + 1
    lanes.clock = clocks.compute
    return lanes


def ends_sent(case: Case, stage: Stage) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
    """Tensor parallelism around the blocks in one micro-batch, in (forward, backward): of each two
    equal calls one in each; an odd one in forward, where the loss is."""
    forward, backward = list[Sent](), list[Sent]()
    for calls in tp_pass_calls(case, stage):
        count = calls.count // case.layout.num_microbatches
        for number, found in ((count - count // 2, forward), (count // 2, backward)):
            if number:
                name = f"{calls.collective} (embedding, head, loss)"
                found.append(sent_calls(calls, case.cluster, count=number, stream="tp", name=name))
    return tuple(forward), tuple(backward)


def tp_gradient_sent(case: Case, stage: Stage) -> tuple[Sent, ...]:
    """Gradients of norms, reduced over tensor parallelism behind all passes."""
    return tuple(
        sent_calls(
            calls,
            case.cluster,
            stream="tp",
            name=f"{calls.collective} (gradients of norms)",
            count=calls.count,
        )
        for calls in tp_gradient_calls(case, stage)
    )


def _lay(shape: _Units, part: Lanes, clocks: Clocks, op: Op, mark: Mark) -> None:
    """An operation as it is played: what the compute stream waits for, and what it does then; of
    another stream when it ends."""
    unit, copied = shape.units[op.unit], shape.on_host[op.unit]
    for cause, seconds in _waits(clocks, op):
        part.wait(seconds, cause, mark=mark)
    end = clocks.last[op.stream]
    match op.name:
        case "gather" | "regather":
            sents = unit.gathers if op.name == "gather" else unit.regathers
            begin = part.send_all(sents, end, mark)
            _copy(part, "upload", copied, begin, unit, mark)
        case "copy_out":
            name = _named("FSDP::all_gather_copy_out", unit.name)
            part.add(op.seconds, name, "copy", "compute", mark=mark)
        case "forward":
            _forward(shape, part, unit, mark)
        case "backward":
            _backward(shape, part, unit, op.seconds, mark)
        case "copy_in":
            name = _named("FSDP::post_backward_reduce", unit.name)
            part.add(op.seconds, name, "copy", "compute", mark=mark)
        case "reduce_scatter":
            part.send_all(unit.scatters, end, mark)
            if not unit.reduces:
                _copy(part, "download", copied, end + copied, unit, mark)
        case "all_reduce":
            part.send_all(unit.reduces, end, mark)
            _copy(part, "download", copied, end + copied, unit, mark)
    if op.stream == "compute":
        part.clock = end


def _waits(clocks: Clocks, op: Op) -> list[tuple[Cause, float]]:
    """Let an operation be done, and what the compute stream waits for before it."""
    waited = dict(clocks.waited)
    clocks.do(op)
    return [(cause, seconds - waited[cause]) for cause, seconds in clocks.waited.items()]


def _copy(
    part: Lanes,
    way: Literal["upload", "download"],
    seconds: float,
    end: float,
    unit: Unit,
    mark: Mark,
) -> None:
    """Of a unit's shard from the host, or of its gradient there."""
    if seconds:
        part.send(end, Sent(stream=way, name=unit.name or "root", seconds=seconds, kind=way), mark)


def _forward(shape: _Units, part: Lanes, unit: Unit, mark: Mark) -> None:
    for number, passes in unit.blocks:
        own = replace(mark, block=number)
        part.pieces(passes.forward, shape.case.cluster, own, prefix=f"layers.{number}")
    part.pieces(unit.ends.forward, shape.case.cluster, mark)


def _backward(shape: _Units, part: Lanes, unit: Unit, seconds: float, mark: Mark) -> None:
    begin = part.clock
    part.pieces(unit.ends.backward, shape.case.cluster, mark)
    for number, passes in reversed(unit.blocks):
        own = replace(mark, block=number)
        part.pieces(passes.backward, shape.case.cluster, own, prefix=f"layers.{number}")
    flat = begin + seconds - part.clock
    if flat > 1e-9 * seconds:  # FSDP1 concatenates the gradients of a flat parameter
        part.add(flat, f"{unit.name} gradients", "gradients", "compute", mark=mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """What all micro-batches of a rank with whole parameters have in common."""

    case: Case
    batch: ReplicaBatch
    passes: Passes
    gathers: tuple[tuple[Sent, ...], ...]
    """Of the updated parameters of each bucket."""
    reductions: tuple[tuple[Sent, ...], ...]


def replica_lanes(case: Case, stage: Stage, *, detail: Detail, detailed: int) -> Lanes:
    """All micro-batches under DDP, ZeRO-1 or ZeRO-2, or on one rank."""
    batch = replica_batch(case, stage, plain_seconds(case, stage))
    shape = _Replica(
        case=case,
        batch=batch,
        passes=stage_passes(case, stage, detail=detail),
        gathers=_shared_out(parameter_sent(case, stage), len(batch.buckets)),
        reductions=tuple(bucket_sent(case, stage)),
    )
    number = case.layout.num_microbatches
    clocks, reduces_all = Clocks(), gradient_syncs(case.layout) == number

    def lay(part: Lanes, mark: Mark) -> None:
        if mark.direction == "forward":
            runs = replica.forward_pass(batch, is_first=mark.micro_batch == 0)
            _lay_pass(shape, part, clocks, runs, shape.passes.forward, mark)
            return
        runs = replica.backward_pass(batch, reduces=reduces_all or mark.micro_batch == number - 1)
        _lay_pass(shape, part, clocks, runs, shape.passes.backward, mark)

    return _laid_out(case, stage, lay, clocks, detail=detail, detailed=detailed)


def _shared_out(sents: Sequence[Sent], number: int) -> tuple[tuple[Sent, ...], ...]:
    """Collectives in the order in which forward needs them, as evenly as they go over so many
    buckets in the order of backward."""
    return tuple(
        tuple(sents[len(sents) * at // number : len(sents) * (at + 1) // number])
        for at in range(number - 1, -1, -1)
    )


def _lay_pass(
    shape: _Replica,
    part: Lanes,
    clocks: Clocks,
    runs: tuple[Run, ...],
    pieces: Sequence[Piece],
    mark: Mark,
) -> None:
    """A pass as it is played. A kernel that begins before a wait is not interrupted by it."""
    computed = laid = 0.0
    left = deque(pieces)
    for op in operations(runs):
        for cause, seconds in _waits(clocks, op):
            share = shape.batch.scatter_share if cause == "reduction" else 0.0
            part.wait(share * seconds, "reduce_scatter", mark=mark)
            whole = "all_reduce" if cause == "reduction" else cause
            part.wait((1 - share) * seconds, whole, mark=mark)
        if op.stream == "shard":
            sents = shape.gathers if op.name == "gather" else shape.reductions
            part.send_all(sents[op.unit], clocks.last["shard"], mark)
            continue
        computed += op.seconds
        while left and laid < computed * (1 - 1e-9):
            laid += left[0].seconds
            part.pieces((left.popleft(),), shape.case.cluster, mark)
    part.pieces(left, shape.case.cluster, mark)


def stage_passes(case: Case, stage: Stage, *, detail: Detail, first_block: int = 0) -> Passes:
    """Both passes of a micro-batch through a stage, ends included."""
    own = [block_pieces(each) for each in own_blocks(case, stage)]
    if detail != "kernels":
        own = [each.merged() for each in own]
    ends = end_pieces(case, stage)
    blocks = [each.of_block(first_block + number) for number, each in enumerate(own)]
    first = tuple(piece for piece in ends.forward if piece.name == EMBEDDING)
    behind = tuple(piece for piece in ends.forward if piece.name != EMBEDDING)
    last = tuple(piece for piece in ends.backward if piece.name == EMBEDDING)
    before = tuple(piece for piece in ends.backward if piece.name != EMBEDDING)
    return Passes(
        forward=(*first, *chain.from_iterable(each.forward for each in blocks), *behind),
        backward=(
            *before,
            *chain.from_iterable(each.backward for each in reversed(blocks)),
            *last,
        ),
    )


def bucket_sent(case: Case, stage: Stage) -> Iterator[tuple[Sent, ...]]:
    """What reduces each bucket, in the order in which backward fills them."""
    for number, bucket in enumerate(replica_buckets(case, stage)):
        yield tuple(
            sent_calls(
                call,
                case.cluster,
                stream=call.collective,
                name=f"{call.collective} (bucket {number})",
            )
            for call in bucket.reduces
            if call.group.ranks > 1
        )


def parameter_sent(case: Case, stage: Stage) -> list[Sent]:
    """ZeRO's gathers of updated parameters, in the order in which forward needs them."""
    return [
        sent_calls(
            calls,
            case.cluster,
            stream="all_gather",
            name=f"{calls.collective} of updated parameters",
        )
        for calls in parameter_calls(case, stage)
        for _ in range(calls.count)
        if calls.group.ranks > 1
    ]

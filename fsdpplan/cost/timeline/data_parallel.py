"""Data parallelism laid out: all micro-batches of a rank that is in no pipeline.

FSDP's streams as `overlap/streams` simulates them, written down as they run; a test holds both
together, clock by clock. DDP, ZeRO-1 and ZeRO-2 as `overlap/exposed` prices them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isclose

from fsdpplan.cost.model.shards import (
    NOTHING,
    Stage,
    UnitSize,
    block_units,
    end_units,
    gradient_syncs,
    unit_cases,
)
from fsdpplan.cost.network.placement import (
    Group,
    expert_shard_group,
    regather_group,
    replicate_group,
    shard_group,
)
from fsdpplan.cost.overlap.exposed import (
    bucket_seconds,
    gather_waiting_seconds,
    reduction_exposed_seconds,
)
from fsdpplan.cost.overlap.passes import (
    early_micro_batch,
    fsdp_micro_batch,
    fsdp_passes,
    with_seconds,
)
from fsdpplan.cost.overlap.streams import MicroBatch, UnitSeconds, fsdp_timeline
from fsdpplan.cost.overlap.timing import gradient_seconds
from fsdpplan.cost.timeline.events import Detail
from fsdpplan.cost.timeline.lanes import Lanes, Mark, Sent, sent_calls
from fsdpplan.cost.timeline.pieces import (
    EMBEDDING,
    NO_PASSES,
    Passes,
    block_pieces,
    end_pieces,
    own_blocks,
)
from fsdpplan.cost.traffic.calls import Calls
from fsdpplan.cost.traffic.data_parallel import (
    buckets,
    is_reduced,
    parameter_calls,
    reductions,
    root_gathered_dtype,
)
from fsdpplan.cost.traffic.rank import tp_gradient_calls, tp_pass_calls
from fsdpplan.spec.plan import Case, Collective
from fsdpplan.spec.training import DTYPE_BYTES


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


def moved_unit(
    case: Case,
    name: str,
    sizes: Sequence[tuple[UnitSize, Group]],
    dtype: str,
    *,
    regathers: bool,
) -> Unit:
    """The collectives of a unit, of which experts may be sharded over fewer ranks."""
    training, layout = case.training, case.layout
    copies = replicate_group(layout)

    def sent(collective: Collective, group: Group, elements: int, of: str, label: str) -> Sent:
        calls = Calls(
            collective=collective,
            group=group,
            dtype=of,
            count=1,
            call_bytes=elements * DTYPE_BYTES[of],
        )
        return sent_calls(calls, case.cluster, stream=collective, name=_named(label, name))

    gathers, again, scatters, reduces = [], [], [], []
    for size, group in sizes:
        if size == NOTHING:
            continue
        elements, reduced = size.padded_elements, training.reduce_dtype
        if group.ranks > 1:
            gathers.append(sent("all_gather", group, elements, dtype, "FSDP::all_gather"))
            scatters.append(
                sent("reduce_scatter", group, elements, reduced, "FSDP::post_backward_reduce")
            )
        behind = regather_group(layout) if group == shard_group(layout) else group
        if regathers and layout.reshard_after_forward != "never" and behind.ranks > 1:
            again.append(sent("all_gather", behind, elements, dtype, "FSDP::all_gather"))
        if copies.ranks > 1:
            shard = elements // group.ranks
            reduces.append(sent("all_reduce", copies, shard, reduced, "FSDP::post_backward_reduce"))
    return Unit(
        name=name,
        gathers=tuple(gathers),
        regathers=tuple(again),
        scatters=tuple(scatters),
        reduces=tuple(reduces),
    )


def stage_units(case: Case, stage: Stage, *, detail: Detail, first_block: int = 0) -> list[Unit]:
    """The units of one virtual stage in the order of forward: that of the embedding before those of
    blocks, that of the head behind them, and the root last of all."""
    layout, ends = case.layout, end_units(case, stage)
    shard, experts = shard_group(layout), expert_shard_group(layout)
    done, units = 0, []
    for unit in block_units(case, stage):
        own = [block_pieces(each) for each, blocks in unit_cases(case, unit) for _ in range(blocks)]
        if detail != "kernels":
            own = [each.merged() for each in own]
        for _ in range(unit.number):
            numbers = range(first_block + done, first_block + done + unit.blocks)
            name = ", ".join(f"layers.{number}" for number in numbers)
            sizes = ((unit.size, shard), *((unit.experts, experts),) * unit.expert_blocks)
            dtype = case.training.gathered_dtype
            made = moved_unit(case, name, sizes, dtype, regathers=True)
            blocks = zip(numbers, own, strict=True)
            units.append(replace(made, blocks=tuple(blocks)))
            done += unit.blocks

    def end(name: str, size: UnitSize, of: Stage | None) -> Unit:
        dtype = root_gathered_dtype(case.training)
        made = moved_unit(case, name, ((size, shard),), dtype, regathers=False)
        return made if of is None else replace(made, ends=end_pieces(case, of))

    if ends.tables == NOTHING and ends.head == NOTHING:
        return [*units, end("", ends.root, stage)]
    tables, head = replace(stage, has_head=False), replace(stage, has_embedding=False)
    if ends.tables != NOTHING:
        units.insert(0, end("tok_embeddings", ends.tables, tables))
    if ends.head != NOTHING:
        units.append(end("norm, output", ends.head, head))
    return [*units, end("", ends.root, None)]


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


@dataclass(slots=True)
class _Clocks:
    """Where the streams are."""

    compute: float = 0.0
    shard: float = 0.0
    replicate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What all micro-batches of a rank have in common."""

    case: Case
    units: list[Unit]
    ends: tuple[tuple[Sent, ...], tuple[Sent, ...]]
    """Tensor parallelism around the blocks, in (forward, backward), all waited for."""
    host_seconds: float
    """What a micro-batch waits for copies from and to the host, and for what that adds."""
    gradients: GradientSeconds
    on_host: tuple[float, ...] = ()
    """Seconds of a copy of each unit's shard, with offload."""


def fsdp_lanes(case: Case, stage: Stage, *, detail: Detail, detailed: int) -> Lanes:
    """All micro-batches under FSDP. Of many equal ones two are laid out and the second repeated, as
    `fsdp_timeline` does; those behind the first `detailed` are shown pass by pass, but the last."""
    layout = case.layout
    number = layout.num_microbatches
    batch = fsdp_micro_batch(case, stage)
    last = with_seconds(batch, upload=0.0, download=0.0, adding=0.0)
    early = early_micro_batch(last, layout)
    host_seconds = fsdp_passes(case, stage).host_seconds if layout.offload == "cpu" else 0.0
    shape = _Shape(
        case=case,
        units=stage_units(case, stage, detail=detail),
        ends=ends_sent(case, stage),
        host_seconds=host_seconds / number,
        gradients=GradientSeconds.of(case, (stage,)),
        on_host=tuple(unit.upload for unit in (*batch.units, batch.root)),
    )
    lanes, part, clocks, before = Lanes(), Lanes(), _Clocks(), _Clocks()
    for index in range(min(2, number - 1)):
        before = replace(clocks)
        part = _micro_batch(shape, early, clocks, index, is_last=False)
        lanes.take(part if index < detailed and detail != "passes" else part.by_pass())
    advance = clocks.compute - before.compute
    later = clocks.replicate - before.replicate
    repeated = max(0, number - 3)
    whole = detailed if detail != "passes" else 0
    lanes.repeat(part, range(2, number - 1), advance, whole=whole, others={"all_reduce": later})
    clocks.compute += repeated * advance
    if repeated:
        clocks.shard += repeated * advance
        clocks.replicate += repeated * later
    part = _micro_batch(shape, last, clocks, number - 1, is_last=True)
    lanes.take(part if detail != "passes" else part.by_pass())
    lanes.clock = clocks.compute
    mark = Mark(direction="backward", micro_batch=number - 1)
    lanes.wait(clocks.shard - lanes.clock, "reduce_scatter", mark=mark)
    lanes.wait(clocks.replicate - lanes.clock, "all_reduce", mark=mark)
    expected = fsdp_timeline(early=early, last=last, num_microbatches=number).compute
    assert isclose(lanes.clock, expected, rel_tol=1e-9, abs_tol=1e-12)
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


def _micro_batch(
    shape: _Shape, batch: MicroBatch, clocks: _Clocks, index: int, *, is_last: bool
) -> Lanes:
    """One forward and backward pass, and the clocks behind it."""
    part = Lanes(clock=clocks.compute)
    _forward(shape, batch, part, clocks, Mark(direction="forward", micro_batch=index))
    for sent in shape.ends[0]:
        part.insert_wait(sent, "tp", mark=Mark(direction="forward", micro_batch=index))
    mark = Mark(direction="backward", micro_batch=index)
    _backward(shape, batch, part, clocks, mark, is_last=is_last)
    shape.gradients.put(part, mark)
    for sent in shape.ends[1]:
        part.insert_wait(sent, "tp", mark=mark)
    if shape.host_seconds:
        part.add(
            shape.host_seconds,
            "copies from and to the host",
            "host",
            "host",
            mark=mark,
            inserted=True,
        )
    clocks.compute = part.clock
    return part


def _gather(
    part: Lanes, sents: tuple[Sent, ...], end: float, mark: Mark, upload: float, name: str
) -> None:
    """All-gathers that end then, and the copy from the host before them."""
    begin = part.send_all(sents, end, mark)
    if upload:
        part.send(begin, Sent(stream="upload", name=name, seconds=upload, kind="upload"), mark)


def _forward(shape: _Shape, batch: MicroBatch, part: Lanes, clocks: _Clocks, mark: Mark) -> None:
    """As `overlap/streams`, `_forward`."""
    root, cluster = batch.root, shape.case.cluster
    *units, root_unit = shape.units
    clocks.shard = max(clocks.shard, part.clock) + root.gather
    _gather(part, root_unit.gathers, clocks.shard, mark, shape.on_host[-1], "root")
    part.wait(clocks.shard - part.clock, "all_gather", mark=mark)
    part.add(root.copy_out, "FSDP::all_gather_copy_out", "copy", "compute", mark=mark)
    freed_before = freed = part.clock
    for unit, seconds, upload in zip(units, batch.units, shape.on_host, strict=False):
        clocks.shard = max(clocks.shard, freed_before) + seconds.gather
        _gather(part, unit.gathers, clocks.shard, mark, upload, unit.name)
        part.wait(clocks.shard - part.clock, "all_gather", mark=mark)
        name = _named("FSDP::all_gather_copy_out", unit.name)
        part.add(seconds.copy_out, name, "copy", "compute", mark=mark)
        copied = part.clock
        for number, passes in unit.blocks:
            own = replace(mark, block=number)
            part.pieces(passes.forward, cluster, own, prefix=f"layers.{number}")
        part.pieces(unit.ends.forward, cluster, mark)
        part.clock = copied + seconds.forward
        freed_before, freed = freed, part.clock if batch.is_flat else copied
    begin = part.clock
    part.pieces(root_unit.ends.forward, cluster, mark)
    part.clock = begin + root.forward


def _backward(
    shape: _Shape,
    batch: MicroBatch,
    part: Lanes,
    clocks: _Clocks,
    mark: Mark,
    *,
    is_last: bool,
) -> None:
    """As `overlap/streams`, `_backward`."""
    root, cluster = batch.root, shape.case.cluster
    *units, root_unit = shape.units
    begin = part.clock
    part.pieces(root_unit.ends.backward, cluster, mark)
    part.clock = begin + root.backward
    regathered = reduced = 0.0
    seconds = batch.units
    if seconds and seconds[-1].regather:
        clocks.shard = regathered = max(clocks.shard, begin) + seconds[-1].regather
        _gather(part, units[-1].regathers, regathered, mark, shape.on_host[-2], units[-1].name)
    for at in range(len(seconds) - 1, -1, -1):
        one, unit = seconds[at], units[at]
        if one.regather:
            part.wait(regathered - part.clock, "all_gather", mark=mark)
            name = _named("FSDP::all_gather_copy_out", unit.name)
            part.add(one.copy_out, name, "copy", "compute", mark=mark)
        if at and seconds[at - 1].regather:
            clocks.shard = regathered = max(clocks.shard, part.clock) + seconds[at - 1].regather
            upload = shape.on_host[at - 1]
            _gather(part, units[at - 1].regathers, regathered, mark, upload, units[at - 1].name)
        begin = part.clock
        part.pieces(unit.ends.backward, cluster, mark)
        for number, passes in reversed(unit.blocks):
            own = replace(mark, block=number)
            part.pieces(passes.backward, cluster, own, prefix=f"layers.{number}")
        flat = begin + one.backward - part.clock
        if flat > 1e-9 * one.backward:  # FSDP1 concatenates the gradients of a flat parameter
            part.add(flat, f"{unit.name} gradients", "gradients", "compute", mark=mark)
        part.clock = begin + one.backward
        if one.reduce_scatter:
            if not batch.is_flat:
                part.wait(reduced - part.clock, "reduce_scatter", mark=mark)
            _reduce(shape, batch, part, clocks, (unit, one, shape.on_host[at]), mark)
            reduced = clocks.shard
        else:
            _reduce_alone(shape, part, unit, mark, is_last=is_last)
    if root.reduce_scatter:
        if not batch.is_flat:
            part.wait(reduced - part.clock, "reduce_scatter", mark=mark)
        _reduce(shape, batch, part, clocks, (root_unit, root, shape.on_host[-1]), mark)
    else:
        _reduce_alone(shape, part, root_unit, mark, is_last=is_last)


def _reduce(
    shape: _Shape,
    batch: MicroBatch,
    part: Lanes,
    clocks: _Clocks,
    of: tuple[Unit, UnitSeconds, float],
    mark: Mark,
) -> None:
    """Gradients copied, reduced over the shards, and over the copies of these."""
    unit, seconds, download = of
    name = _named("FSDP::post_backward_reduce", unit.name)
    part.add(seconds.copy_in, name, "copy", "compute", mark=mark)
    done = clocks.shard = max(clocks.shard, part.clock) + seconds.reduce_scatter
    part.send_all(unit.scatters, clocks.shard, mark)
    if seconds.all_reduce:
        done = clocks.replicate = max(clocks.shard, clocks.replicate) + seconds.all_reduce
        part.send_all(unit.reduces, clocks.replicate, mark)
        if batch.links_shared:
            clocks.shard = clocks.replicate
    if download:
        sent = Sent(stream="download", name=unit.name or "root", seconds=download, kind="download")
        part.send(done + download, sent, mark)


def _reduce_alone(shape: _Shape, part: Lanes, unit: Unit, mark: Mark, *, is_last: bool) -> None:
    """All-reduces of what no other rank has a shard of: the overlap model hides them."""
    if not unit.scatters and (is_last or shape.case.layout.gradient_sync == "every"):
        part.send_all(unit.reduces, part.clock + sum(one.seconds for one in unit.reduces), mark)


def replica_lanes(case: Case, stage: Stage, *, detail: Detail, detailed: int) -> Lanes:
    """All micro-batches under DDP, ZeRO-1 or ZeRO-2, or on one rank."""
    layout, training = case.layout, case.training
    number = layout.num_microbatches
    passes = stage_passes(case, stage, detail=detail)
    forward, backward = (sum(p.seconds for p in each) for each in (passes.forward, passes.backward))
    times, ends = bucket_seconds(case, stage), ends_sent(case, stage)
    once = reduction_exposed_seconds(times, training=training, backward_seconds=backward)
    gathering = gather_waiting_seconds(times, training=training, forward_seconds=forward)
    lanes = Lanes()
    gathers, gradients = parameter_sent(case, stage), GradientSeconds.of(case, (stage,))
    whole = detailed if detail != "passes" else 0
    for index in sorted({0, min(1, number - 1), number - 1}):
        part = Lanes(clock=lanes.clock)
        mark = Mark(direction="forward", micro_batch=index)
        if index == 0 and gathers:
            begun = gathering if not training.traits.overlaps_parameter_gather else 0.0
            part.wait(begun, "all_gather", mark=mark)
            clock = 0.0
            for sent in gathers:
                clock += sent.seconds
                part.send(clock, sent, mark)
            part.spread_wait(passes.forward, gathering - begun, "all_gather", case.cluster, mark)
        else:
            part.pieces(passes.forward, case.cluster, mark)
        for sent in ends[0]:
            part.insert_wait(sent, "tp", mark=mark)
        mark = replace(mark, direction="backward")
        begin = part.clock
        part.pieces(passes.backward, case.cluster, mark)
        gradients.put(part, mark)
        if times.fp32_bytes and (index == number - 1 or gradient_syncs(layout) == number):
            _reduce_buckets(case, stage, part, begin, mark)
            share = times.scatter_share
            part.wait(share * once, "reduce_scatter", mark=mark)
            part.wait((1 - share) * once, "all_reduce", mark=mark)
        for sent in ends[1]:
            part.insert_wait(sent, "tp", mark=mark)
        is_whole = index < whole or (index == number - 1 and detail != "passes")
        lanes.take(part if is_whole else part.by_pass())
        if index == 1:  # those between the second and the last are as the second
            lanes.repeat(part, range(2, number - 1), part.clock - lanes.clock, whole=whole)
            part.clock += max(0, number - 3) * (part.clock - lanes.clock)
        lanes.clock = part.clock
    return lanes


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


def bucket_sent(case: Case, stage: Stage) -> list[tuple[float, tuple[Sent, ...]]]:
    """(share of backward after which it is full, its reductions) of each bucket."""
    training, layout = case.training, case.layout
    if not is_reduced(layout):
        return []
    filled = buckets(case, stage)
    whole, done = sum(bucket.fp32_bytes for bucket in filled), 0
    found = []
    for number, bucket in enumerate(filled):
        done += bucket.fp32_bytes
        sents = tuple(
            sent_calls(
                Calls(
                    collective=collective,
                    group=group,
                    dtype=training.reduce_dtype,
                    count=1,
                    call_bytes=size,
                ),
                case.cluster,
                stream=collective,
                name=f"{collective} (bucket {number})",
            )
            for collective, group, size in reductions(bucket, training=training, layout=layout)
            if group.ranks > 1
        )
        found.append((done / whole, sents))
    return found


def _reduce_buckets(case: Case, stage: Stage, part: Lanes, begin: float, mark: Mark) -> None:
    """One after another, beside the backward pass from `begin` on, or behind it."""
    backward = part.clock - begin
    overlaps = case.training.traits.overlaps_reduction and not case.training.powersgd_rank
    clock = begin if overlaps else part.clock
    for share, sents in bucket_sent(case, stage):
        if overlaps:
            clock = max(clock, begin + share * backward)
        for sent in sents:
            clock += sent.seconds
            part.send(clock, sent, mark)


def parameter_sent(case: Case, stage: Stage) -> list[Sent]:
    """ZeRO's gathers of updated parameters, in the order in which forward needs them."""
    if not is_reduced(case.layout) or case.layout.sharding == "ddp":
        return []
    return [
        sent_calls(
            calls,
            case.cluster,
            stream="all_gather",
            name=f"{calls.collective} of updated parameters",
        )
        for calls in parameter_calls(case, stage, buckets(case, stage))
        for calls in (replace(calls, count=1),) * calls.count
        if calls.group.ranks > 1
    ]

"""FSDP's units: what moves the parameters of each in a micro-batch, and what that takes.

The collectives of a unit stand once, under the names of the operations of its program
(`fsdpplan.cost.step.fsdp`): the program takes their seconds, a step's traffic their number, a
timeline the calls themselves, and floors their sums over all units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter, mul
from typing import NamedTuple

from fsdpplan.cost.kernels.optimizer import adding_seconds, pinned_copy_seconds
from fsdpplan.cost.kernels.rates import memory_bytes_per_second
from fsdpplan.cost.model.formats import FP32_BYTES, Ways, formats, shard_ways
from fsdpplan.cost.model.params import block_tensors
from fsdpplan.cost.model.shards import (
    NOTHING,
    BlockUnit,
    Stage,
    UnitSize,
    block_kinds,
    block_units,
    end_units,
    gradient_syncs,
)
from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.cost.network.placement import (
    Group,
    expert_shard_group,
    regather_group,
    replicate_group,
    shard_group,
)
from fsdpplan.cost.schedule.order import layout_order
from fsdpplan.cost.step.fsdp import NO_SECONDS, UnitSeconds
from fsdpplan.cost.traffic.calls import (
    Calls,
    call_seconds,
    full_rate_bytes_per_second,
    group_level,
)
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Case, Collective
from fsdpplan.spec.training import DTYPE_BYTES, Training
from fsdpplan.spec.values import replace


def root_gathered_dtype(training: Training) -> str:
    """Embedding, norms and head are never gathered in fp8."""
    return "fp32" if training.traits.gathers_fp32 else training.activation_dtype


def copy_seconds(
    size: UnitSize, *, training: Training, device: Device, gathered_dtype: str | None = None
) -> tuple[float, float]:
    """(copy-out, copy-in) of one unit: read and write of its gathered parameters, and of its
    gradients into the reduce dtype.

    A flat parameter, as FSDP1 has it, is gathered in place, so nothing is copied out, and its
    gradients are divided by the ranks before the reduction.
    Source: torch 2.13 torch/distributed/fsdp/_flat_param.py and _runtime_utils.py.
    """
    memory = memory_bytes_per_second(device)
    element_bytes = DTYPE_BYTES[gathered_dtype or training.gathered_dtype]
    gradient_bytes = DTYPE_BYTES[root_gathered_dtype(training)]
    copied_in = gradient_bytes + DTYPE_BYTES[training.reduce_dtype]
    copy_in = copied_in * size.padded_elements / memory
    if training.traits.flat_parameters:
        return 0.0, copy_in
    return 2 * size.gathered_bytes(element_bytes) / memory, copy_in / CHUNK_CAT_SHARE


CHUNK_CAT_SHARE = 0.62
"""Rate of the kernel that copies gradients of many shapes into one buffer in another format, as a
share of that of element-wise kernels: 1.85 of 3.0 TB/s, in six profiled steps on an H100."""


def flat_gradient_seconds(size: UnitSize, *, training: Training, device: Device) -> float:
    """A flat parameter's gradients concatenated in backward: autograd's inverse of its split.

    37 `CatArrayBatchedCopy` kernels in a published profile of FSDP1 on 36 blocks; FSDP2 has none.
    """
    if not training.traits.flat_parameters:
        return 0.0
    element_bytes = DTYPE_BYTES[root_gathered_dtype(training)]
    return 2 * element_bytes * size.padded_elements / memory_bytes_per_second(device)


def _on_host(size: UnitSize, *, ranks: int, case: Case, regathers: bool) -> UnitSeconds:
    """Copies of a unit's shard, and what the host adds, where state lives on the host.

    One rank gathers nothing: the compute stream copies, before forward and before backward.
    """
    elements = size.shard_elements(ranks)
    of = formats(training=case.training, layout=case.layout)
    copied = pinned_copy_seconds(elements, case.cluster, element_bytes=of.kept_gradient)
    alone = ranks == 1
    return UnitSeconds(
        copy_out=copied * (2 if regathers else 1) if alone else 0.0,
        upload=0.0 if alone else copied,
        download=copied,
        adding=adding_seconds(elements, case.cluster, element_bytes=of.kept_gradient),
    )


def _alone(
    size: UnitSize, *, case: Case, gathered_dtype: str, regathers: bool, copy_out: float
) -> tuple[float, float]:
    """(copy-out, copy of reduced gradients) of a unit over one rank, which nothing is sent for.

    FSDP casts its shard and copies that into parameters on the compute stream, before forward and
    before backward, and copies the reduced gradients out, on the stream of reductions.

    Source: torch 2.13 `FSDPParamGroup.wait_for_unshard` and `foreach_reduce`, at a world size of 1;
    older releases call the collectives, which then copy.
    """
    training, layout = case.training, case.layout
    memory = memory_bytes_per_second(case.cluster.device)
    resident = formats(training=training, layout=layout).resident
    gathered = DTYPE_BYTES[gathered_dtype]
    cast = (resident + gathered) * size.padded_elements / memory if gathered != resident else 0.0
    reduced = 2 * DTYPE_BYTES[training.reduce_dtype] * size.padded_elements / memory
    return (copy_out + cast) * (2 if regathers else 1), reduced


class UnitCalls(NamedTuple):
    """The collectives of an FSDP unit, each once, under the names of the operations that move it in
    its program."""

    gather: tuple[Calls, ...] = ()
    reduce_scatter: tuple[Calls, ...] = ()
    all_reduce: tuple[Calls, ...] = ()
    """None without copies of the shards."""
    regather: tuple[Calls, ...] = ()
    """None where forward's copy is kept."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """An FSDP unit in a micro-batch that reduces everything, computation apart.

    (No slots: what a unit takes is asked of few of the thousands that a search makes.)
    """

    case: Case = field(compare=False)
    size: UnitSize
    """Nothing where there is no such unit."""
    group: Group
    """That it is sharded over."""
    gathered_dtype: str
    regathers: bool
    """In backward."""
    experts: Unit | None = None
    """Those of a block, gathered and reduced by themselves behind the rest."""
    expert_blocks: int = 0
    """Blocks of the unit that have such experts."""

    @property
    def is_there(self) -> bool:
        """Whether anything is in it."""
        return self.size != NOTHING

    @cached_property
    def calls(self) -> UnitCalls:
        """Its collectives."""
        own = self._own_calls() if self.is_there else UnitCalls()
        if self.experts is None:
            return own
        both = zip(own, self.experts.calls, strict=True)
        number = self.expert_blocks
        return UnitCalls(
            *((*calls, *(replace(call, count=number) for call in more)) for calls, more in both)
        )

    def _own_calls(self) -> UnitCalls:
        training, layout, group = self.case.training, self.case.layout, self.group
        gathered = self.size.gathered_bytes(DTYPE_BYTES[self.gathered_dtype])
        reduced = self.size.padded_elements * DTYPE_BYTES[training.reduce_dtype]
        again = regather_group(layout) if group == shard_group(layout) else group

        def calls(collective: Collective, over: Group, dtype: str, size: int) -> tuple[Calls, ...]:
            one = Calls(collective=collective, group=over, dtype=dtype, count=1, call_bytes=size)
            return (one,)

        copies, shards = replicate_group(layout), reduced // group.ranks
        dtype = "uint8" if self.size.has_bytes else self.gathered_dtype
        return UnitCalls(
            gather=calls("all_gather", group, dtype, gathered),
            reduce_scatter=calls("reduce_scatter", group, training.reduce_dtype, reduced)
            if reduced
            else (),
            all_reduce=calls("all_reduce", copies, training.reduce_dtype, shards)
            if reduced and layout.dp_replicate > 1
            else (),
            regather=calls("all_gather", again, dtype, gathered) if self.regathers else (),
        )

    @cached_property
    def seconds(self) -> UnitSeconds:
        """What its collectives and copies take."""
        own = self._own_seconds() if self.is_there else NO_SECONDS
        if self.experts is None:
            return own
        return _sum([(own, 1), (self.experts.seconds, self.expert_blocks)])

    def _own_seconds(self) -> UnitSeconds:
        case, size, ranks = self.case, self.size, self.group.ranks
        training, device = case.training, case.cluster.device
        copy_out, copy_in = copy_seconds(
            size, training=training, device=device, gathered_dtype=self.gathered_dtype
        )
        taken = {
            name: sum(call_seconds(call, case.cluster) for call in of)
            for name, of in zip(UnitCalls._fields, self._own_calls(), strict=True)
        }
        if case.layout.shard_ranks == 1:
            copy_out, copied = _alone(
                size,
                case=case,
                gathered_dtype=self.gathered_dtype,
                regathers=self.regathers,
                copy_out=copy_out,
            )
            # of one memory both take their time, whatever their streams
            copy_in, taken["reduce_scatter"] = copy_in + copied, device.fit.matmul_start_seconds
        seconds = UnitSeconds(
            backward=flat_gradient_seconds(size, training=training, device=device),
            copy_out=copy_out,
            copy_in=copy_in,
            **taken,
        )
        if case.layout.offload == "cpu":  # of streams and clocks of its own
            seconds = seconds.plus(_on_host(size, ranks=ranks, case=case, regathers=self.regathers))
        return seconds


@lru_cache(maxsize=65536)
def _unit(ways: Ways, size: UnitSize, group: Group, gathered_dtype: str, regathers: bool) -> Unit:
    return Unit(
        case=ways.case,
        size=size,
        group=group,
        gathered_dtype=gathered_dtype,
        regathers=regathers,
    )


_PARTS = attrgetter(*UnitSeconds.__slots__)


def _sum(units: list[tuple[UnitSeconds, int]]) -> UnitSeconds:
    """Of so many of each, one after another."""
    if not units:
        return NO_SECONDS
    numbers = [number for _, number in units]
    columns = zip(*(_PARTS(unit) for unit, _ in units), strict=True)
    sums = (sum(map(mul, numbers, column)) for column in columns)
    return UnitSeconds(**dict(zip(UnitSeconds.__slots__, sums, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Units:
    """The FSDP units of a stage in a micro-batch that reduces everything, computation apart.

    (No slots: of the thousands that a search makes, little is asked of most.)
    """

    case: Case
    blocks: tuple[tuple[BlockUnit, Unit], ...]
    """In the order of forward."""
    tables: Unit
    """Of the embedding alone; nothing, like the head's, where there is none."""
    head: Unit
    """Of the final norm and the head."""
    root: Unit
    """What is in no other unit."""

    @cached_property
    def _every(self) -> list[tuple[Unit, int]]:
        ends = [(end, 1) for end in (self.tables, self.head, self.root) if end.is_there]
        return [*ends, *((unit, of.number) for of, unit in self.blocks)]

    @cached_property
    def _seconds(self) -> list[tuple[UnitSeconds, int]]:
        return [(unit.seconds, number) for unit, number in self._every]

    @cached_property
    def total(self) -> UnitSeconds:
        """Of all units, one after another."""
        return _sum(self._seconds)

    @cached_property
    def copied(self) -> float:
        """What the compute stream copies in a micro-batch, and does for flat gradients."""
        return sum(
            number * (of.backward + of.copy_out * (2 if of.regather else 1))
            for of, number in self._seconds
        )

    @cached_property
    def uploaded(self) -> float:
        """What comes from the host in a micro-batch: each shard before each of its gathers."""
        return sum(number * of.upload * (2 if of.regather else 1) for of, number in self._seconds)

    @cached_property
    def copied_in(self) -> float:
        """What it copies for reductions beside that."""
        return sum(number * of.copy_in for of, number in self._seconds if of.reduce_scatter)

    @cached_property
    def disturbing(self) -> UnitSeconds:
        """Of the collectives of `total`, as much as takes its full share of kernels beside them."""
        cluster = self.case.cluster
        rate = full_rate_bytes_per_second(cluster.device)
        sums = dict.fromkeys(UnitCalls._fields, 0.0)
        for name, call, number in self._sent:
            wire = wire_bytes(
                collective=call.collective, gathered_bytes=call.call_bytes, ranks=call.group.ranks
            )
            taken = min(call_seconds(call, cluster), call.count * wire / rate)
            sums[name] += number * taken
        return UnitSeconds(**sums)

    @cached_property
    def links(self) -> tuple[tuple[str, UnitSeconds], ...]:
        """(level of the network, the collectives of `total` that pass it)."""
        cluster = self.case.cluster
        found: dict[str, dict[str, float]] = {}
        for name, call, number in self._sent:
            level = group_level(cluster, call.group)
            sums = found.setdefault(level, dict.fromkeys(UnitCalls._fields, 0.0))
            sums[name] += number * call_seconds(call, cluster)
        return tuple((level, UnitSeconds(**sums)) for level, sums in found.items())

    @property
    def _sent(self) -> Iterator[tuple[str, Calls, int]]:
        """(operation, calls of a unit, such units) of all of them."""
        for unit, number in self._every:
            for name, calls in zip(UnitCalls._fields, unit.calls, strict=True):
                for call in calls:
                    yield name, call, number

    @property
    def links_shared(self) -> bool:
        """HSDP: do its all-reduces use the links that the shard group uses?"""
        cluster, layout = self.case.cluster, self.case.layout
        if layout.dp_replicate == 1:
            return False
        shards = group_level(cluster, shard_group(layout))
        return shards == group_level(cluster, replicate_group(layout))

    @property
    def first_gathers(self) -> float:
        """Before anything is computed: of the root and the embedding, or of the root and the first
        unit of blocks."""
        first = self.tables
        if not first.is_there and self.blocks:
            first = self.blocks[0][1]
        return self.root.seconds.gather + first.seconds.gather

    @property
    def last_reduction(self) -> UnitSeconds:
        """Behind all that is computed: the embedding's, or the root's."""
        return (self.tables if self.tables.is_there else self.root).seconds


def fsdp_units(case: Case, stage: Stage) -> Units:
    """The units of a stage: the same for all micro-batches of layouts that shard alike."""
    return _units(shard_ways(case), stage)


@lru_cache(maxsize=32768)
def _units(ways: Ways, stage: Stage) -> Units:
    case = ways.case
    training, layout = case.training, case.layout
    shard, experts = shard_group(layout), expert_shard_group(layout)
    dtype, of_root = training.gathered_dtype, root_gathered_dtype(training)
    regathers = layout.reshard_after_forward != "never"
    blocks = []
    for of in block_units(case, stage):
        unit = _unit(ways, of.size, shard, dtype, regathers)
        if of.expert_blocks:
            own = _unit(ways, of.experts, experts, dtype, regathers)
            unit = replace(unit, experts=own, expert_blocks=of.expert_blocks)
        blocks.append((of, unit))
    ends = end_units(case, stage)
    return Units(
        case=case,
        blocks=tuple(blocks),
        tables=_unit(ways, ends.tables, shard, of_root, False),
        head=_unit(ways, ends.head, shard, of_root, False),
        root=_unit(ways, ends.root, shard, of_root, False),
    )


def fsdp_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """All-gathers, reduce-scatters and (HSDP) all-reduces of `fully_shard`.

    Each micro-batch gathers every unit in forward and, unless resharding is off, every unit of
    blocks again in backward. Under pipelining with reshard never, a step gathers once, or as
    often as torch drops a stage of many; blocks that are resharded also once for each forward
    pass, in the pass behind it.
    """
    training, layout = case.training, case.layout
    syncs = gradient_syncs(layout)
    if layout.pp > 1:
        syncs = reduced_rounds(training=training, layout=layout)
    whole = syncs if layout.gradient_sync == "every" else 1
    for piece in stage.pieces:
        gathers = of_blocks = layout.num_microbatches
        again = layout.num_microbatches if layout.pp == 1 else 0
        if layout.pp > 1:
            gathers = 1 if training.traits.keeps_stages else piece.gathers
            of_blocks = gathers + (layout.num_microbatches if layout.reshards_stages else 0)
        of = fsdp_units(case, piece)
        units = [(unit.calls, each.number, of_blocks) for each, unit in of.blocks]
        units += [(end.calls, 1, gathers) for end in (of.tables, of.head, of.root)]
        for unit, number, gathered in units:
            for same, times in zip(unit, (gathered, syncs, whole, again), strict=True):
                for call in same if times else ():
                    yield replace(call, count=call.count * number * times)
    yield from scale_calls(case, stage)


def scale_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """One all-reduce a step of the largest elements of all matrices, which give their scales where
    they are gathered in fp8."""
    if case.training.fp8_all_gather:
        yield Calls(
            collective="all_reduce",
            group=shard_group(case.layout),
            dtype="fp32",
            count=1,
            call_bytes=FP32_BYTES * _matrices(case.model, stage),
        )


def _matrices(model: Model, stage: Stage) -> int:
    """Matrices of all blocks of a stage; a mixture's few dense ones count as the others."""
    if not model.is_patterned:
        return stage.blocks * sum(tensor.is_matrix for tensor in block_tensors(model))
    kinds = block_kinds(model=model, stage=stage)
    return sum(n * tensor.is_matrix for kind, n in kinds for tensor in block_tensors(kind))


def reduced_rounds(*, training: Training, layout: Layout) -> int:
    """How often a step of a pipeline reduces the gradients of a stage: once, or after each round of
    micro-batches that goes through it."""
    if not training.traits.reduces_rounds:
        return 1
    return layout.num_microbatches // layout_order(layout).round_size

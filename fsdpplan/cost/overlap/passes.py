"""Passes: the time of all micro-batches on one rank, and what it waits for, without a pipeline.

FSDP timing: what one unit computes, copies and communicates in a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter, mul

from fsdpplan.cost.kernels.optimizer import adding_seconds, pinned_copy_seconds
from fsdpplan.cost.kernels.rates import memory_bytes_per_second
from fsdpplan.cost.model.formats import Ways, formats, shard_ways
from fsdpplan.cost.model.shards import (
    NOTHING,
    BlockUnit,
    Stage,
    UnitSize,
    block_cases,
    block_units,
    end_units,
    gradient_syncs,
    unit_cases,
)
from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.cost.network.placement import (
    Group,
    expert_shard_group,
    regather_group,
    replicate_group,
    shard_group,
)
from fsdpplan.cost.overlap.exposed import (
    ExposedSeconds,
    full_rate_bytes_per_second,
)
from fsdpplan.cost.overlap.timing import block_times, ends_seconds
from fsdpplan.cost.play.clocks import Played, played
from fsdpplan.cost.step.fsdp import NO_SECONDS, MicroBatch, UnitSeconds, fsdp_step
from fsdpplan.cost.step.replica import BucketSeconds, ReplicaBatch, replica_step
from fsdpplan.cost.traffic.calls import call_seconds, group_level, group_seconds
from fsdpplan.cost.traffic.data_parallel import (
    Bucket,
    UnitCalls,
    buckets,
    is_reduced,
    parameter_moves,
    reductions,
    root_gathered_dtype,
    size_calls,
    stage_tensors,
)
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case
from fsdpplan.spec.training import DTYPE_BYTES, Training
from fsdpplan.spec.values import replace


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
    return 2 * element_bytes * size.padded_elements / memory, copy_in / CHUNK_CAT_SHARE


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


_PARTS = attrgetter(*UnitSeconds.__slots__)


@dataclass(frozen=True)
class _Moved:
    """Parameters of a unit that are sharded over one group. (No slots: most is not asked for.)"""

    seconds: UnitSeconds
    calls: UnitCalls | None = None
    cluster: Cluster | None = None
    """Both None where there are no such parameters."""

    def times(self, number: int) -> UnitSeconds:
        """Of so many units, one after another."""
        return self.seconds if number == 1 else _sum([(self.seconds, number)])

    @cached_property
    def disturbing(self) -> UnitSeconds:
        """Of its collectives, as much as takes its full share from kernels beside them."""
        if self.calls is None or self.cluster is None:
            return NO_SECONDS
        rate = full_rate_bytes_per_second(self.cluster.device)
        found = {}
        for name, calls in self.calls._asdict().items():
            wire = sum(
                wire_bytes(
                    collective=call.collective,
                    gathered_bytes=call.call_bytes,
                    ranks=call.group.ranks,
                )
                for call in calls
            )
            taken = sum(call_seconds(call, self.cluster) for call in calls)
            found[name] = min(taken, wire / rate)
        return UnitSeconds(**found)


@lru_cache(maxsize=65536)
def _moved(
    ways: Ways, size: UnitSize, group: Group, gathered_dtype: str, regathers: bool
) -> _Moved:
    """Collectives and copies of parameters that are sharded over `group`; computation apart.

    What offload copies and adds is of streams and clocks of its own.
    """
    if size == NOTHING:
        return _Moved(NO_SECONDS)
    case = ways.case
    cluster, training, layout = case.cluster, case.training, case.layout
    device = cluster.device
    calls = size_calls(case, size, group, gathered_dtype, regathers=regathers)
    copy_out, copy_in = copy_seconds(
        size, training=training, device=device, gathered_dtype=gathered_dtype
    )
    gather, scatter, reduce, regather = (
        sum(call_seconds(call, cluster) for call in of) for of in calls
    )
    if layout.shard_ranks == 1:
        copy_out, copied = _alone(
            size,
            case=case,
            gathered_dtype=gathered_dtype,
            regathers=regathers,
            copy_out=copy_out,
        )
        # of one memory both take their time, whatever their streams
        copy_in, scatter = copy_in + copied, device.fit.matmul_start_seconds
    seconds = UnitSeconds(
        backward=flat_gradient_seconds(size, training=training, device=device),
        gather=gather,
        regather=regather,
        reduce_scatter=scatter,
        all_reduce=reduce,
        copy_out=copy_out,
        copy_in=copy_in,
    )
    if layout.offload == "cpu":
        seconds = seconds.plus(_on_host(size, ranks=group.ranks, case=case, regathers=regathers))
    return _Moved(seconds, calls, cluster)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """What FSDP moves and copies in a micro-batch that reduces everything, computation apart.

    (No slots: of the thousands that a search makes, little is asked of most.)
    """

    case: Case
    blocks: tuple[tuple[BlockUnit, _Moved, _Moved], ...]
    """Units of blocks, in the order of forward: what is sharded over the shard group, and the
    experts of one block that are sharded over other ranks."""
    ends: tuple[_Moved, _Moved, _Moved]
    """A unit of the embedding alone, one of the final norm and the head, and the root; nothing
    where there is none."""

    @cached_property
    def runs(self) -> tuple[tuple[BlockUnit, UnitSeconds], ...]:
        """Units of blocks, in the order of forward; experts are gathered and reduced behind the
        rest."""
        return tuple(
            (unit, own.seconds.plus(experts.times(unit.expert_blocks)))
            if unit.expert_blocks
            else (unit, own.seconds)
            for unit, own, experts in self.blocks
        )

    @property
    def tables(self) -> UnitSeconds:
        """Of a unit of the embedding alone; like the head's all 0 where there is none."""
        return self.ends[0].seconds

    @property
    def head(self) -> UnitSeconds:
        """Of a unit of the final norm and the head."""
        return self.ends[1].seconds

    @property
    def root(self) -> UnitSeconds:
        """Of what is in no other unit."""
        return self.ends[2].seconds

    @cached_property
    def total(self) -> UnitSeconds:
        """Of all units and the root, one after another."""
        return _sum(self._every)

    @property
    def _every(self) -> list[tuple[UnitSeconds, int]]:
        ends = [(end.seconds, 1) for end in self.ends]
        return [*ends, *((moved, unit.number) for unit, moved in self.runs)]

    @cached_property
    def copied(self) -> float:
        """What the compute stream copies in a micro-batch, and does for flat gradients."""
        return sum(
            number * (moved.backward + moved.copy_out * (2 if moved.regather else 1))
            for moved, number in self._every
        )

    @cached_property
    def uploaded(self) -> float:
        """What comes from the host in a micro-batch: each shard before each of its gathers."""
        return sum(
            number * moved.upload * (2 if moved.regather else 1) for moved, number in self._every
        )

    @cached_property
    def copied_in(self) -> float:
        """What it copies for reductions beside that."""
        return sum(number * moved.copy_in for moved, number in self._every if moved.reduce_scatter)

    @cached_property
    def disturbing(self) -> UnitSeconds:
        """Of the collectives of `total`, as much as takes its full share of kernels beside them."""
        return _sum(
            [
                *((end.disturbing, 1) for end in self.ends),
                *((own.disturbing, unit.number) for unit, own, _ in self.blocks),
                *(
                    (experts.disturbing, unit.number * unit.expert_blocks)
                    for unit, _, experts in self.blocks
                ),
            ]
        )

    @cached_property
    def links(self) -> tuple[tuple[str, UnitSeconds], ...]:
        """(level of the network, the collectives of `total` that pass it)."""
        cluster, layout = self.case.cluster, self.case.layout
        shard, own = shard_group(layout), expert_shard_group(layout)
        of_shard = [(end.seconds, 1) for end in self.ends]
        of_shard += [(one.seconds, unit.number) for unit, one, _ in self.blocks]
        of_own = [(one.seconds, unit.number * unit.expert_blocks) for unit, _, one in self.blocks]
        copies = group_level(cluster, replicate_group(layout))
        found = []
        for group, again, of in (
            (shard, regather_group(layout), of_shard),
            (own, own, of_own),
        ):
            moved = _sum(of) if of else NO_SECONDS
            scattered = UnitSeconds(gather=moved.gather, reduce_scatter=moved.reduce_scatter)
            found += [
                (group_level(cluster, group), scattered),
                (group_level(cluster, again), UnitSeconds(regather=moved.regather)),
                (copies, UnitSeconds(all_reduce=moved.all_reduce)),
            ]
        return tuple(found)

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
        unit = self.tables
        if unit == NO_SECONDS and self.runs:
            unit = self.runs[0][1]
        return self.root.gather + unit.gather

    @property
    def last_reduction(self) -> UnitSeconds:
        """Behind all that is computed: the embedding's, or the root's."""
        return self.root if self.tables == NO_SECONDS else self.tables


def fsdp_moves(case: Case, stage: Stage) -> Moves:
    """The moves of a stage's units: the same for all micro-batches of layouts that shard alike."""
    return _moves(shard_ways(case), stage)


@lru_cache(maxsize=32768)
def _moves(ways: Ways, stage: Stage) -> Moves:
    case = ways.case
    training, layout = case.training, case.layout
    regathers = layout.reshard_after_forward != "never"
    shard, experts = shard_group(layout), expert_shard_group(layout)
    dtype, of_root = training.gathered_dtype, root_gathered_dtype(training)
    ends = end_units(case, stage)
    return Moves(
        case=case,
        blocks=tuple(
            (
                unit,
                _moved(ways, unit.size, shard, dtype, regathers),
                _moved(ways, unit.experts, experts, dtype, regathers),
            )
            for unit in block_units(case, stage)
        ),
        ends=(
            _moved(ways, ends.tables, shard, of_root, False),
            _moved(ways, ends.head, shard, of_root, False),
            _moved(ways, ends.root, shard, of_root, False),
        ),
    )


def _sum(units: list[tuple[UnitSeconds, int]]) -> UnitSeconds:
    """Of so many of each, one after another."""
    numbers = [number for _, number in units]
    columns = zip(*(_PARTS(unit) for unit, _ in units), strict=True)
    sums = (sum(map(mul, numbers, column)) for column in columns)
    return UnitSeconds(**dict(zip(UnitSeconds.__slots__, sums, strict=True)))


def _computed_seconds(case: Case, unit: BlockUnit) -> UnitSeconds:
    """What a unit's blocks compute, and wait for inside: those that recompute and those that
    keep."""
    forward = backward = 0.0
    for own, blocks in unit_cases(case, unit):
        block = block_times(own)
        forward += blocks * block.forward_seconds
        backward += blocks * block.backward_seconds
    return UnitSeconds(forward=forward, backward=backward)


def fsdp_micro_batch(case: Case, stage: Stage) -> MicroBatch:
    """One micro-batch that reduces everything, for the stream simulation."""
    ends = end_units(case, stage)
    moves = fsdp_moves(case, stage)
    tables = head = UnitSeconds()
    root = moves.root
    if ends.tables == NOTHING and ends.head == NOTHING:
        root = root.plus(_end_seconds(case, stage))
    else:
        tables = moves.tables.plus(_end_seconds(case, replace(stage, has_head=False)))
        head = moves.head.plus(_end_seconds(case, replace(stage, has_embedding=False)))
    return MicroBatch(
        runs=tuple(
            (moved.plus(_computed_seconds(case, unit)), unit.number) for unit, moved in moves.runs
        ),
        tables=tables,
        head=head,
        root=root,
        links_shared=moves.links_shared,
        is_flat=case.training.traits.flat_parameters,
    )


def _end_seconds(case: Case, stage: Stage) -> UnitSeconds:
    """What embedding, head and loss of a stage compute."""
    forward, backward = ends_seconds(case, stage)
    return UnitSeconds(forward=forward, backward=backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """All forward and backward passes of a step on one rank."""

    busy_seconds: float
    """The compute stream's work, with what the collectives inside blocks expose."""
    exposed: ExposedSeconds
    """What data parallelism and pipeline messages add."""
    bubble_seconds: float = 0.0
    host_seconds: float = 0.0
    """What copies from and to the host and its additions add to all of that."""
    hidden_exchange_seconds: float = 0.0
    """What blocks alone would expose of exchanges among experts, and passes side by side do not."""
    pp_rank: int = 0
    """The rank that this is about: the busiest."""


def plain_seconds(case: Case, stage: Stage) -> tuple[float, float]:
    """(forward, backward) of one micro-batch on one rank, data-parallel collectives apart."""
    forward, backward = ends_seconds(case, stage)
    for own, blocks in block_cases(case, stage):
        block = block_times(own)
        forward += blocks * block.forward_seconds
        backward += blocks * block.backward_seconds
    return forward, backward


def fsdp_passes(case: Case, stage: Stage) -> Passes:
    """All micro-batches under FSDP, by its streams."""
    layout = case.layout
    batch = fsdp_micro_batch(case, stage)
    on_device = batch
    if layout.offload == "cpu":
        on_device = with_seconds(batch, upload=0.0, download=0.0, adding=0.0)
    step = played_step(early_micro_batch(on_device, layout), on_device, layout.num_microbatches)
    return Passes(
        host_seconds=max(0.0, _offloaded(batch, layout).seconds - step.seconds)
        if layout.offload == "cpu"
        else 0.0,
        busy_seconds=step.seconds - step.exposed,
        exposed=ExposedSeconds(
            all_gather=step.waited["all_gather"],
            reduce_scatter=step.waited["reduce_scatter"],
            all_reduce=step.waited["all_reduce"],
        ),
    )


@lru_cache(maxsize=8192)
def played_step(
    early: MicroBatch, last: MicroBatch, num_microbatches: int, first: MicroBatch | None = None
) -> Played:
    """A step's micro-batches played, as `fsdp_step` puts them together."""
    return played(fsdp_step(early=early, last=last, num_microbatches=num_microbatches, first=first))


def _offloaded(batch: MicroBatch, layout: Layout) -> Played:
    """The streams with what goes from and to the host: the first gradients of a step are copied
    there beside the passes, later ones are waited for and added."""
    copied = with_seconds(batch, adding=0.0)
    if not host_additions(layout):
        return played_step(early_micro_batch(copied, layout), copied, layout.num_microbatches)
    added = with_seconds(batch, download=0.0)
    return played_step(added, added, layout.num_microbatches, copied)


def host_additions(layout: Layout) -> int:
    """Micro-batches of a step whose gradients the host adds to earlier ones."""
    if layout.offload != "cpu" or gradient_syncs(layout) == 1:
        return 0
    is_partial = layout.gradient_sync == "reduce_scatter_only" and layout.dp_replicate > 1
    return 0 if is_partial else layout.num_microbatches - 1


def with_seconds(batch: MicroBatch, **seconds: float) -> MicroBatch:
    """The same with other `seconds` of every unit."""
    return replace(
        batch,
        runs=tuple((replace(unit, **seconds), number) for unit, number in batch.runs),
        tables=replace(batch.tables, **seconds),
        head=replace(batch.head, **seconds),
        root=replace(batch.root, **seconds),
    )


def early_micro_batch(batch: MicroBatch, layout: Layout) -> MicroBatch:
    """A micro-batch before the last one, by the synchronisation policy."""
    match layout.gradient_sync:
        case "every":
            return batch
        case "reduce_scatter_only":
            # without replicas a reduction is whole as it is, and goes to the host
            silenced = {"all_reduce": 0.0, **(_NO_COPIES if layout.dp_replicate > 1 else {})}
        case "last":
            silenced = {"all_reduce": 0.0, "reduce_scatter": 0.0, "copy_in": 0.0, **_NO_COPIES}
    return with_seconds(batch, **silenced)


_NO_COPIES = {"download": 0.0, "adding": 0.0}
"""Gradients that stay on the device."""


def replica_passes(case: Case, stage: Stage) -> Passes:
    """All micro-batches under DDP, ZeRO-1 or ZeRO-2, or on one rank."""
    layout = case.layout
    reduces_all = gradient_syncs(layout) == layout.num_microbatches
    batch = replica_batch(case, stage, plain_seconds(case, stage))
    step = played(
        replica_step(batch, num_microbatches=layout.num_microbatches, reduces_all=reduces_all)
    )
    share, reduced = scatter_share(batch), step.waited["reduction"]
    return Passes(
        busy_seconds=step.seconds - step.exposed,
        exposed=ExposedSeconds(
            all_gather=step.waited["all_gather"],
            reduce_scatter=share * reduced,
            all_reduce=(1 - share) * reduced,
        ),
    )


def scatter_share(batch: ReplicaBatch) -> float:
    """Part of the reductions' time that is reduce-scatters."""
    scatters = sum(bucket.reduce_scatter for bucket in batch.buckets)
    return scatters / batch.reduction if batch.reduction else 0.0


def replica_batch(case: Case, stage: Stage, seconds: tuple[float, float]) -> ReplicaBatch:
    """One micro-batch of `seconds`, (forward, backward), with all that it may gather and reduce."""
    training = case.training
    forward, backward = seconds
    return ReplicaBatch(
        forward=forward,
        backward=backward,
        buckets=bucket_seconds(case, stage),
        # PowerSGD's hook waits for the device at the end of each bucket, and backward with it
        overlaps_reduction=training.traits.overlaps_reduction and not training.powersgd_rank,
        overlaps_gather=training.traits.overlaps_parameter_gather,
    )


@lru_cache(maxsize=2048)
def bucket_seconds(case: Case, stage: Stage) -> tuple[BucketSeconds, ...]:
    """Each bucket of a rank, in the order in which backward fills them; none on one rank and under
    FSDP."""
    cluster, training, layout = case.cluster, case.training, case.layout
    if not is_reduced(layout):
        return ()
    filled = buckets(case, stage)
    whole = sum(bucket.fp32_bytes for bucket in filled)
    tensors = stage_tensors(model=case.model, stage=stage)

    def timed(bucket: Bucket) -> BucketSeconds:
        seconds = {"reduce_scatter": 0.0, "all_reduce": 0.0}
        for collective, group, size in reductions(bucket, training=training, layout=layout):
            seconds[collective] += group_seconds(cluster, group, collective, size)
        gather = 0.0
        if layout.sharding != "ddp":
            moves = parameter_moves(
                bucket, training=training, layout=layout, tensors=tensors, whole_bytes=whole
            )
            once = group_seconds(cluster, moves.group, moves.collective, moves.call_bytes)
            gather = moves.count * once
        return BucketSeconds(share=bucket.fp32_bytes / whole, gather=gather, **seconds)

    each = {bucket: timed(bucket) for bucket in dict.fromkeys(filled)}
    return tuple(each[bucket] for bucket in filled)

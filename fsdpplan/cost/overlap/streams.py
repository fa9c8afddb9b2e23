"""Overlap: FSDP2's streams simulated unit by unit; what stays exposed falls out.

Two clocks run: the compute stream and the communicator of the shard group, on which all-gathers
and reduce-scatters queue in the order in which they are issued, also from different streams (NCCL
runs one collective of a communicator at a time). HSDP's all-reduces have a third clock of their
own, unless they share the shard group's links.

* Forward: the host runs ahead, so unit i + 1 is gathered while unit i computes; two flat buffers
  are in use, so the gather of i + 2 waits for the copy-out of i.
* Backward: the gather of unit i - 1 is issued after the copy-out of i; the reduce-scatter of i
  after its computation; the compute stream waits for the reduce-scatter of i + 1 before it fills
  the next input buffer.
* A unit of the embedding is the first of them, one of final norm and head the last: neither is
  gathered again. What is in the root is gathered before all, and reduced behind them.

With offload, shards come from the host on a stream of their own, each before its gather, at most as
far ahead as the gather. Reduced gradients go to the host behind the reduction, on its stream. Where
there are gradients of an earlier micro-batch on the host, it waits for each copy and adds: until
then it starts nothing, and the device has nothing to do.

FSDP1 (`is_flat`) frees a unit when its computation is done, limits gathers to two units by that,
and divides and reduces gradients on a stream of their own.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard (`_fsdp_param_group.py`,
`_fsdp_collectives.py`) and torch/distributed/fsdp/_runtime_utils.py. Left out: the cast of the own
shard before a gather (1/n of it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Seconds of one FSDP unit in one micro-batch."""

    forward: float = 0.0
    backward: float = 0.0
    """Recomputation included."""
    gather: float = 0.0
    regather: float = 0.0
    """Gather in backward; 0 when forward's copy is kept."""
    reduce_scatter: float = 0.0
    """0 in a micro-batch that does not reduce."""
    all_reduce: float = 0.0
    copy_out: float = 0.0
    """From the flat buffer into parameters, on the compute stream."""
    copy_in: float = 0.0
    """From gradients into the reduce-scatter input, on the compute stream."""
    upload: float = 0.0
    """Its shard from the host, before each gather."""
    download: float = 0.0
    """Its reduced gradient to the host, behind the reduction; 0 where the host adds."""
    adding: float = 0.0
    """The host copies that gradient and adds it to an earlier one, and starts nothing meanwhile."""

    def plus(self, other: UnitSeconds) -> UnitSeconds:
        """One unit that does what both do."""
        return UnitSeconds(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            gather=self.gather + other.gather,
            regather=self.regather + other.regather,
            reduce_scatter=self.reduce_scatter + other.reduce_scatter,
            all_reduce=self.all_reduce + other.all_reduce,
            copy_out=self.copy_out + other.copy_out,
            copy_in=self.copy_in + other.copy_in,
            upload=self.upload + other.upload,
            download=self.download + other.download,
            adding=self.adding + other.adding,
        )


NO_SECONDS = UnitSeconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward through all units."""

    runs: tuple[tuple[UnitSeconds, int], ...]
    """(unit of blocks, how many in a row), in the order of forward."""
    root: UnitSeconds
    """Without units of its ends, its `forward` and `backward` are embedding, head and loss."""
    links_shared: bool
    """All-reduces use the same links as the shard group."""
    is_flat: bool = False
    """FSDP1's streams: a gather waits for the computation of the unit before the last, not for its
    copy-out, and nothing waits for a reduce-scatter but the optimizer."""
    tables: UnitSeconds = NO_SECONDS
    """The unit of the embedding; nothing where it is of the root."""
    head: UnitSeconds = NO_SECONDS
    """The unit of final norm and head, with the loss; likewise."""

    @property
    def all_runs(self) -> tuple[tuple[UnitSeconds, int], ...]:
        """All units but the root, in the order of forward."""
        first, last = ([(end, 1)] if end != NO_SECONDS else [] for end in (self.tables, self.head))
        return (*first, *self.runs, *last)

    @property
    def units(self) -> tuple[UnitSeconds, ...]:
        """Every unit but the root, in the order of forward."""
        return tuple(chain.from_iterable(repeat(unit, number) for unit, number in self.all_runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Clocks at the end of a micro-batch, and what the compute stream has waited for."""

    compute: float = 0.0
    shard: float = 0.0
    replicate: float = 0.0
    upload: float = 0.0
    """Copies from the host, which have a stream of their own."""
    download: float = 0.0
    """Copies to the host: they follow reductions on their stream, which the next one waits for."""
    gather_exposed: float = 0.0
    reduce_scatter_exposed: float = 0.0
    all_reduce_exposed: float = 0.0
    host_exposed: float = 0.0
    """While the host waits for a copy and adds."""

    @property
    def exposed(self) -> float:
        """All waiting."""
        reductions = self.reduce_scatter_exposed + self.all_reduce_exposed
        return self.gather_exposed + reductions + self.host_exposed


def run_micro_batch(batch: MicroBatch, start: Timeline) -> Timeline:
    """The clocks after one micro-batch that begins at `start`."""
    forward = _forward(batch, start)
    return _backward(batch, forward)


def pass_seconds(batch: MicroBatch) -> tuple[float, float]:
    """(forward, backward) of a micro-batch, each by itself, with nothing of its units gathered."""
    return _forward(batch, Timeline()).compute, _backward(batch, Timeline()).compute


def _forward(batch: MicroBatch, start: Timeline) -> Timeline:
    """The root first, then each unit, gathered ahead."""
    root, is_flat = batch.root, batch.is_flat
    # FSDP2 waits for the optimizer before it gathers the root
    upload = max(start.upload, start.compute) + root.upload
    shard = max(start.shard, upload) + root.gather
    wait = max(0.0, shard - start.compute)
    compute = max(start.compute, shard) + root.copy_out
    freed_before, freed = compute, compute
    for unit in batch.units:
        if unit.upload:
            upload = (upload if upload > freed_before else freed_before) + unit.upload
            shard = (shard if shard > upload else upload) + unit.gather
        else:
            shard = (shard if shard > freed_before else freed_before) + unit.gather
        if shard > compute:
            wait += shard - compute
            compute = shard
        copied = compute + unit.copy_out
        compute = copied + unit.forward
        freed_before, freed = freed, compute if is_flat else copied
    return replace(
        start,
        compute=compute + root.forward,
        shard=shard,
        upload=upload,
        gather_exposed=start.gather_exposed + wait,
    )


def _backward(batch: MicroBatch, start: Timeline) -> Timeline:
    """The gather of the last unit of blocks runs beside the head's backward, each other one beside
    the unit before it in backward."""
    root, units, is_flat = batch.root, batch.units, batch.is_flat
    shard, replicate = start.shard, start.replicate
    upload, download = start.upload, start.download
    compute = start.compute + root.backward
    regathered = reduced = 0.0
    if units and units[-1].regather:
        upload = max(upload, start.compute) + units[-1].upload
        regathered = shard = max(shard, upload) + units[-1].regather
    gather_wait = scatter_wait = host_wait = 0.0
    for index in range(len(units) - 1, -1, -1):
        unit = units[index]
        if unit.regather:
            if regathered > compute:
                gather_wait += regathered - compute
                compute = regathered
            compute += unit.copy_out
        if index and units[index - 1].regather:
            before = units[index - 1]
            issued = compute
            if before.upload:
                issued = upload = (upload if upload > compute else compute) + before.upload
            issued = shard if shard > issued else issued
            regathered = shard = issued + before.regather
        compute += unit.backward
        if unit.reduce_scatter:
            if reduced > compute and not is_flat:
                scatter_wait += reduced - compute
                compute = reduced
            compute += unit.copy_in
            if download > shard:  # the copy of the unit behind is on the reduction's stream
                shard = download
            if unit.all_reduce:
                shard, replicate = _reduce(batch, unit, compute, shard, replicate)
            else:
                shard = (shard if shard > compute else compute) + unit.reduce_scatter
            reduced = shard
            if unit.adding or unit.download:
                done = replicate if unit.all_reduce else shard
                begun = compute
                compute, download = _to_host(unit, done, compute, download)
                host_wait += compute - begun
    if root.reduce_scatter:
        wait = 0.0 if batch.is_flat else max(0.0, reduced - compute)
        scatter_wait += wait
        compute += wait + root.copy_in
        shard, replicate = _reduce(batch, root, compute, max(shard, download), replicate)
        done = replicate if root.all_reduce else shard
        begun = compute
        compute, download = _to_host(root, done, compute, download)
        host_wait += compute - begun
    return Timeline(
        compute=compute,
        shard=shard,
        replicate=replicate,
        upload=upload,
        download=download,
        gather_exposed=start.gather_exposed + gather_wait,
        reduce_scatter_exposed=start.reduce_scatter_exposed + scatter_wait,
        all_reduce_exposed=start.all_reduce_exposed,
        host_exposed=start.host_exposed + host_wait,
    )


def _reduce(
    batch: MicroBatch, unit: UnitSeconds, compute: float, shard: float, replicate: float
) -> tuple[float, float]:
    """Queue a reduce-scatter and its all-reduce; the new clocks of the two communicators."""
    shard = max(shard, compute) + unit.reduce_scatter
    if unit.all_reduce:
        replicate = max(shard, replicate) + unit.all_reduce
        if batch.links_shared:
            shard = replicate
    return shard, replicate


def _to_host(
    unit: UnitSeconds, done: float, compute: float, download: float
) -> tuple[float, float]:
    """The clocks of computation and of copies to the host after a reduction that is `done` then.

    Where there is a gradient to add to, the host waits for it and starts nothing else. What stays
    on the device moves neither clock.
    """
    if unit.adding:
        return max(compute, done, download) + unit.adding, download
    if unit.download:
        return compute, max(done, download) + unit.download
    return compute, download


def finish(timeline: Timeline) -> Timeline:
    """The optimizer waits for every reduction of the last micro-batch."""
    scatter_wait = max(0.0, timeline.shard - timeline.compute)
    compute = max(timeline.compute, timeline.shard)
    reduce_wait = max(0.0, timeline.replicate - compute, timeline.download - compute)
    return replace(
        timeline,
        compute=compute + reduce_wait,
        reduce_scatter_exposed=timeline.reduce_scatter_exposed + scatter_wait,
        all_reduce_exposed=timeline.all_reduce_exposed + reduce_wait,
    )


@lru_cache(maxsize=8192)
def fsdp_timeline(
    *,
    early: MicroBatch,
    last: MicroBatch,
    num_microbatches: int,
    first: MicroBatch | None = None,
) -> Timeline:
    """All micro-batches of a step; `early` describes all but the last, and but `first`, which is
    none of them if it is given.

    Of many equal micro-batches two are simulated and the second one repeated.
    """
    timeline = Timeline() if first is None else run_micro_batch(first, Timeline())
    others = num_microbatches - 1 - (first is not None)
    simulated = min(2, others)
    previous = timeline
    for _ in range(simulated):
        previous, timeline = timeline, run_micro_batch(early, timeline)
    timeline = _repeat(previous, timeline, others - simulated)
    return finish(run_micro_batch(last, timeline))


def _repeat(before: Timeline, after: Timeline, times: int) -> Timeline:
    """`after`, advanced `times` times by what lies between it and `before`."""
    if not times:
        return after
    return Timeline(
        compute=after.compute + times * (after.compute - before.compute),
        shard=after.shard + times * (after.compute - before.compute),
        upload=after.upload + times * (after.compute - before.compute),
        download=after.download + times * (after.compute - before.compute),
        # nothing waits for these before the last micro-batch: slow ones pile up
        replicate=after.replicate + times * (after.replicate - before.replicate),
        gather_exposed=after.gather_exposed
        + times * (after.gather_exposed - before.gather_exposed),
        reduce_scatter_exposed=after.reduce_scatter_exposed
        + times * (after.reduce_scatter_exposed - before.reduce_scatter_exposed),
        all_reduce_exposed=after.all_reduce_exposed,
        host_exposed=after.host_exposed + times * (after.host_exposed - before.host_exposed),
    )

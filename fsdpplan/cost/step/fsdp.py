"""FSDP: one micro-batch of `fully_shard` as a program, without a pipeline.

* Forward: the host runs ahead, so unit i + 1 is gathered while unit i computes; two flat buffers
  are in use, so the gather of i + 2 waits for the copy-out of i.
* Backward: the gather of unit i - 1 is issued after the copy-out of i; the reduce-scatter of i
  after its computation; the compute stream waits for the reduce-scatter of i + 1 before it fills
  the next input buffer.
* A unit of the embedding is the first of them, one of final norm and head the last: neither is
  gathered again. What is in the root is gathered before all, and reduced behind them.

HSDP's all-reduces have a communicator of their own, unless they share the shard group's links.

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

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from fsdpplan.cost.step.program import ROOT, Name, Op, Program, Repeat, Run, Stream, Wait, joined
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.values import replace


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


FOR_GATHER = (Wait("gather", "all_gather"),)
FOR_REGATHER = (Wait("regather", "all_gather"),)


def forward_pass(batch: MicroBatch) -> tuple[Run, ...]:
    """The root first, which waits for all that was computed before; then each unit, gathered
    ahead."""
    root = batch.root
    opening = (
        *_gather(root, "gather", Wait("compute"), ROOT),
        Op("copy_out", "compute", root.copy_out, FOR_GATHER),
    )
    runs = [Run(opening)]
    for unit, first, number in _numbered(batch):
        # two buffers are in use: the first two units wait for the root's alone
        alone = min(number, max(0, 2 - first))
        for at in range(first, first + alone):
            runs.append(Run(_unit_forward(unit, Wait("copy_out", back=at), at)))
        freed = Wait("forward" if batch.is_flat else "copy_out", back=1)
        if number > alone:
            at = first + alone
            runs.append(Run(_unit_forward(unit, freed, at), number - alone, stride=1))
    return (*runs, Run((Op("forward", "compute", root.forward),)))


def _unit_forward(unit: UnitSeconds, freed: Wait, at: int) -> tuple[Op, ...]:
    return (
        *_gather(unit, "gather", freed, at),
        Op("copy_out", "compute", unit.copy_out, FOR_GATHER, at),
        Op("forward", "compute", unit.forward, (), at),
    )


def backward_pass(batch: MicroBatch) -> tuple[Run, ...]:
    """The gather of the last unit of blocks runs beside the head's backward, each other one beside
    the unit before it in backward."""
    root, numbered = batch.root, list(_numbered(batch))
    opening: list[Op] = []
    if numbered and numbered[-1][0].regather:
        last, first, number = numbered[-1]
        opening += _gather(last, "regather", Wait("compute"), first + number - 1)
    runs = [Run((*opening, Op("backward", "compute", root.backward)))]
    for place in range(len(numbered) - 1, -1, -1):
        unit, first, number = numbered[place]
        if number > 1:
            ops = _unit_backward(batch, unit, unit, first + number - 1)
            runs.append(Run(ops, number - 1, stride=-1))
        behind = numbered[place - 1][0] if place else NO_SECONDS
        runs.append(Run(_unit_backward(batch, unit, behind, first)))
    return (*runs, Run(tuple(_reduce(batch, root, ROOT))))


def _unit_backward(
    batch: MicroBatch, unit: UnitSeconds, behind: UnitSeconds, at: int
) -> tuple[Op, ...]:
    """`behind`: the next one in backward, which is gathered beside this one."""
    ops: list[Op] = []
    if unit.regather:
        ops.append(Op("copy_out", "compute", unit.copy_out, FOR_REGATHER, at))
    if behind.regather:
        ops += _gather(behind, "regather", Wait("compute"), at - 1)
    ops.append(Op("backward", "compute", unit.backward, (), at))
    return (*ops, *_reduce(batch, unit, at))


def _gather(
    unit: UnitSeconds, name: Literal["gather", "regather"], after: Wait, at: int
) -> tuple[Op, ...]:
    """Its shard from the host, if it is there, and the gather."""
    seconds = unit.gather if name == "gather" else unit.regather
    gathering = Op(name, "shard", seconds, (after,), at)
    if not unit.upload:
        return (gathering,)
    upload = Op("upload", "upload", unit.upload, (after,), at)
    return (upload, gathering._replace(after=(Wait("upload"),)))


def _reduce(batch: MicroBatch, unit: UnitSeconds, at: int) -> Iterator[Op]:
    """Gradients copied together and reduced, over the shards and over the copies of these; then to
    the host, which waits for them if there are some to add them to."""
    if not unit.reduce_scatter:
        return
    names: tuple[Name, ...] = ("reduce_scatter", "all_reduce")
    last = () if batch.is_flat else names[: 1 + batch.links_shared]
    waits = tuple(Wait(name, "reduce_scatter") for name in last)
    yield Op("copy_in", "compute", unit.copy_in, waits, at)
    # a copy of the unit behind is on the reduction's stream
    issued = (Wait("copy_in"), Wait("download"))
    yield Op("reduce_scatter", "shard", unit.reduce_scatter, issued, at)
    done = Wait("reduce_scatter", "host")
    if unit.all_reduce:
        after = (Wait("reduce_scatter"),)
        holds: tuple[Stream, ...] = ("shard",) if batch.links_shared else ()
        yield Op("all_reduce", "replicate", unit.all_reduce, after, at, holds)
        done = Wait("all_reduce", "host")
    if unit.adding:
        yield Op("add", "compute", unit.adding, (done, Wait("download", "host")), at)
    elif unit.download:
        yield Op("download", "download", unit.download, (done,), at)


def _numbered(batch: MicroBatch) -> Iterator[tuple[UnitSeconds, int, int]]:
    """(unit, number of the first of them, how many in a row)."""
    runs = batch.all_runs
    firsts = accumulate((number for _, number in runs), initial=0)
    for (unit, number), first in zip(runs, firsts, strict=False):
        yield unit, first, number


def fsdp_step(
    *,
    early: MicroBatch,
    last: MicroBatch,
    num_microbatches: int,
    first: MicroBatch | None = None,
) -> Program:
    """All micro-batches of a step; `early` describes all but the last, and but `first`, which is
    none of them if it is given. The optimizer waits for every reduction of the last one."""
    others = num_microbatches - 1 - (first is not None)
    program: Program = () if first is None else micro_batch(first)
    if others > 0:
        program = (*program, Repeat(micro_batch(early), others))
    return (*program, *micro_batch(last), Run((UPDATE,)))


def micro_batch(batch: MicroBatch) -> tuple[Run, ...]:
    """Both passes of one."""
    return joined((*forward_pass(batch), *backward_pass(batch)))


UPDATE = Op(
    "update",
    "compute",
    0.0,
    (
        Wait("shard", "reduce_scatter"),
        Wait("replicate", "all_reduce"),
        Wait("download", "all_reduce"),
    ),
)
"""What follows the passes begins when every gradient is where it belongs."""

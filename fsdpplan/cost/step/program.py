"""Program: a step as a list of operations, each on a stream, each behind what it waits for.

Operations of one stream run in the order of the list. One that waits for another names what that
one does, and means the last of that name before it, or the last but one. So the list of a unit is
the same wherever the unit stands, equal units stand once, and a program knows no time: `play` finds
when each operation begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Stream = Literal["compute", "shard", "replicate", "upload", "download"]
"""Where operations queue: kernels; the communicator of the shard group, on which all-gathers and
reduce-scatters run one at a time, also from different streams (NCCL's order of issue); that of the
copies of shards; copies from and to the host."""

Name = Literal[
    "gather",
    "regather",
    "copy_out",
    "forward",
    "backward",
    "copy_in",
    "reduce_scatter",
    "all_reduce",
    "upload",
    "download",
    "add",
    "reduce",
    "reduced",
    "update",
]
"""What an operation does. `regather`: the gather for a backward pass; `add`: the host adds a
gradient to an earlier one, and starts nothing meanwhile; `reduce`: all collectives of a bucket;
`reduced`: a backward pass ends that waits for these; `update`: all that follows the passes."""

Cause = Literal["all_gather", "reduce_scatter", "all_reduce", "reduction", "host", ""]
"""What the compute stream waits for: a collective, those of buckets, or a copy to the host; empty:
nothing else."""

ROOT = -1
"""The unit that holds what no other has."""


class Wait(NamedTuple):
    """An operation waits for another one on another stream."""

    on: Name | Stream
    """The last operation of that name before it; of a stream: all that was issued there."""
    cause: Cause = ""
    """What the compute stream is said to wait for meanwhile."""
    back: int = 0
    """1: the last but one of that name."""


class Op(NamedTuple):
    """An operation of a step."""

    name: Name
    stream: Stream
    seconds: float
    after: tuple[Wait, ...] = ()
    unit: int = ROOT
    """Whose it is: the unit's number in the order of forward."""
    holds: tuple[Stream, ...] = ()
    """Other streams that do nothing else meanwhile."""


class Run(NamedTuple):
    """Operations that are done so many times, one unit after another."""

    ops: tuple[Op, ...]
    times: int = 1
    stride: int = 0
    """What each time adds to the number of the unit."""


class Repeat(NamedTuple):
    """A program that is done so many times, such as that of a micro-batch."""

    of: tuple[Run, ...]
    times: int


Program = tuple[Run | Repeat, ...]


def joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same with what is done once, one run behind another, as one."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1].times == run.times == 1:
            run = Run((*found.pop().ops, *run.ops))
        found.append(run)
    return tuple(found)


def operations(runs: tuple[Run, ...]) -> Iterator[Op]:
    """Each one, in order, with the number of its own unit."""
    for run in runs:
        for time in range(run.times):
            for op in run.ops:
                yield op if op.unit == ROOT else op._replace(unit=op.unit + time * run.stride)

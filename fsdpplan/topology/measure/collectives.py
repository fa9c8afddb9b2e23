"""Collectives: over each level of the network, each axis of the mesh and each pair of neighbours.

`gathered_bytes` is the full unsharded buffer: the output of an all-gather, the input of a
reduce-scatter, the buffer of an all-reduce, what one rank sends in all in an all-to-all, the
message of a send_recv in which every rank sends one to its neighbour, and of a broadcast.

Groups: which ranks talk with each other, for each level, each axis and each pair of neighbours.

Ranks are numbered node by node. Groups of one value work at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from fsdpplan.spec.measurement import GroupKind, MeasuredCall
from fsdpplan.spec.plan import Collective
from fsdpplan.topology.measure.clock import Call
from fsdpplan.topology.measure.ranks import Ranks, all_gather_function
from fsdpplan.topology.measure.runner import Cell, Seconds
from fsdpplan.topology.measure.settings import Axis
from fsdpplan.units import KIB, MIB

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Groups of equal shape that have no rank in common."""

    kind: GroupKind
    axis: str | None = None
    """Of `axis`: its name."""
    stride: int
    """Ranks between neighbours of a group."""
    members: tuple[tuple[int, ...], ...]
    """Ranks of each group."""

    @property
    def ranks(self) -> int:
        """Ranks of one group."""
        return len(self.members[0])

    @property
    def name(self) -> str:
        """For a person."""
        return self.axis or self.kind

    def of(self, rank: int) -> tuple[int, ...]:
        """The group of `rank`; empty where it has none."""
        return next((group for group in self.members if rank in group), ())


def level_groups(*, world: int, ranks_per_node: int) -> tuple[Groups, ...]:
    """Groups inside of nodes, across them and over all ranks; each set of groups once, none where
    there is nobody to talk to."""
    nodes = world // ranks_per_node
    inside = _tiling("inside", world=world, ranks=ranks_per_node, stride=1)
    across = _tiling("across", world=world, ranks=nodes, stride=ranks_per_node)
    everyone = _tiling("world", world=world, ranks=world, stride=1)
    return _new_ones((inside, across, everyone), known=())


def axis_groups(
    axes: Sequence[Axis], *, world: int, known: Sequence[Groups]
) -> tuple[tuple[Groups, ...], tuple[str, ...]]:
    """Groups of `axes` that are not `known` under another name; and in words, which axes do not
    fit these ranks."""
    fitting = [axis for axis in axes if world % (axis.ranks * axis.stride) == 0]
    groups = [
        _tiling("axis", world=world, ranks=axis.ranks, stride=axis.stride, axis=axis.name)
        for axis in fitting
    ]
    notes = tuple(
        f"axis {axis.name} is not measured: groups of {axis.ranks} ranks, {axis.stride} apart, do "
        f"not fit {world} ranks"
        for axis in axes
        if axis not in fitting
    )
    return _new_ones(groups, known=known), notes


def pair_rounds(*, world: int, ranks_per_node: int) -> tuple[Groups, ...]:
    """Every rank with the next one of its node, and with its like on the next node: first those
    that begin at even places, then the others, so that no rank is in two pairs at once."""
    nodes = world // ranks_per_node
    rounds = []
    for places, stride in ((ranks_per_node, 1), (nodes, ranks_per_node)):
        for first in (0, 1):
            starts = [
                rank
                for rank in range(world)
                if (place := rank // stride % places) % 2 == first and place + 1 < places
            ]
            members = tuple((start, start + stride) for start in starts)
            if members:
                rounds.append(Groups(kind="pair", stride=stride, members=members))
    return tuple(rounds)


def _tiling(
    kind: GroupKind, *, world: int, ranks: int, stride: int, axis: str | None = None
) -> Groups:
    """Groups of every `stride`-th rank that together are all ranks."""
    block = ranks * stride
    members = tuple(
        tuple(range(first, first + block, stride))
        for start in range(0, world, block)
        for first in range(start, start + stride)
    )
    return Groups(kind=kind, axis=axis, stride=stride, members=members)


def _new_ones(groups: Sequence[Groups], *, known: Sequence[Groups]) -> tuple[Groups, ...]:
    """Those with more than one rank, each set of ranks once."""
    seen = {one.members for one in known}
    new = []
    for one in groups:
        if one.ranks > 1 and one.members not in seen:
            seen.add(one.members)
            new.append(one)
    return tuple(new)


COARSE_BYTES = (64 * KIB, MIB, 16 * MIB)
"""Beside the smallest size."""
PAIR_BYTES = 64 * MIB
FIXED_BYTES = 256 * KIB
"""What a call costs at any size, in bytes: the order of latency times bandwidth. It keeps a slow
first message from ruling out large ones."""

Sizes = tuple[int, ...]


def call_cells(groups: Sequence[Groups], *, sizes: Sizes, ranks: Ranks) -> Iterator[Cell]:
    """All collectives over all `groups`; of a size, all before the next one."""
    joined = [(one, _process_group(one, ranks)) for one in groups]
    for size in sizes:
        for one, process_group in joined:
            for collective in get_args(Collective):
                yield _cell(
                    one,
                    collective,
                    size,
                    ranks,
                    process_group=process_group,
                    is_coarse=size == sizes[0] or size in COARSE_BYTES,
                )


def pair_cells(rounds: Sequence[Groups], *, sizes: Sizes, ranks: Ranks) -> Iterator[Cell]:
    """One large message each way in every pair, and a small one before it."""
    largest = min(PAIR_BYTES, sizes[-1])
    for size in sorted({sizes[0], min(MIB, largest), largest}):
        for one in rounds:
            yield _cell(one, "send_recv", size, ranks, process_group=None, is_coarse=size <= MIB)


def _process_group(groups: Groups, ranks: Ranks) -> dist.ProcessGroup | None:
    """Of this rank's group; None: the default one."""
    import torch.distributed as dist

    if groups.ranks == ranks.world:
        return None
    members = [list(group) for group in groups.members]
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(members)  # type: ignore[no-untyped-call]
    return own


def _cell(
    groups: Groups,
    collective: Collective,
    size: int,
    ranks: Ranks,
    *,
    process_group: dist.ProcessGroup | None,
    is_coarse: bool,
) -> Cell:
    element = 2 if ranks.device.type == "cuda" else 4
    elements = max(1, size // (element * groups.ranks)) * groups.ranks
    gathered_bytes = element * elements

    def prepare() -> Call:
        own = groups.of(ranks.rank)
        if not own:
            return lambda: None
        return _CALLS[collective](elements, own, ranks, process_group)

    where = f"{groups.name} {groups.members[0][0]}, {groups.members[0][1]}, ..."
    return Cell(
        name=f"{collective} {where if groups.kind == 'pair' else groups.name} {_shown(size)}",
        series=f"{collective} {groups.name} {groups.stride}",
        work=gathered_bytes + FIXED_BYTES,
        needed_bytes=3 * gathered_bytes,
        prepare=prepare,
        rows=lambda seconds: _rows(groups, collective, gathered_bytes, seconds),
        is_coarse=is_coarse,
        is_aligned=True,
    )


def _rows(
    groups: Groups, collective: Collective, gathered_bytes: int, seconds: Seconds
) -> Iterator[MeasuredCall]:
    """One row a group, with the times of its slowest rank."""
    for members in groups.members:
        slowest = map(max, zip(*(seconds[rank] for rank in members), strict=True))
        yield MeasuredCall(
            group=groups.kind,
            axis=groups.axis,
            collective=collective,
            first_rank=members[0],
            ranks=groups.ranks,
            stride=groups.stride,
            groups_at_once=len(groups.members),
            gathered_bytes=gathered_bytes,
            seconds=tuple(slowest),
        )


def _shown(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size / KIB:g} KiB"


Maker = Callable[[int, Sequence[int], Ranks, "dist.ProcessGroup | None"], Call]
"""(elements, ranks of this rank's group, this rank, its process group) to the call."""


def _buffer(elements: int, ranks: Ranks) -> torch.Tensor:
    import torch

    # CPU ranks reduce in fp32. Zeros stay what they are when they are added up.
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    return torch.zeros(elements, dtype=dtype, device=ranks.device)


def _all_gather(
    elements: int, members: Sequence[int], ranks: Ranks, group: dist.ProcessGroup | None
) -> Call:
    gather = all_gather_function()
    shard, whole = _buffer(elements // len(members), ranks), _buffer(elements, ranks)
    return lambda: gather(whole, shard, group=group)


def _reduce_scatter(
    elements: int, members: Sequence[int], ranks: Ranks, group: dist.ProcessGroup | None
) -> Call:
    import torch.distributed as dist

    # torch 2.13 gave it this name, and warns of the one before
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    shard, whole = _buffer(elements // len(members), ranks), _buffer(elements, ranks)
    return lambda: scatter(shard, whole, group=group)


def _all_reduce(
    elements: int, members: Sequence[int], ranks: Ranks, group: dist.ProcessGroup | None
) -> Call:
    import torch.distributed as dist

    buffer = _buffer(elements, ranks)
    return lambda: dist.all_reduce(buffer, group=group)


def _all_to_all(
    elements: int, members: Sequence[int], ranks: Ranks, group: dist.ProcessGroup | None
) -> Call:
    import torch.distributed as dist

    sent, received = _buffer(elements, ranks), _buffer(elements, ranks)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _broadcast(
    elements: int, members: Sequence[int], ranks: Ranks, group: dist.ProcessGroup | None
) -> Call:
    import torch.distributed as dist

    buffer = _buffer(elements, ranks)
    return lambda: dist.broadcast(buffer, src=members[0], group=group)


def _send_recv(
    elements: int, members: Sequence[int], ranks: Ranks, group: dist.ProcessGroup | None
) -> Call:
    """One message to the next rank of the group and one from the one before, at the same time."""
    import torch.distributed as dist

    place = members.index(ranks.rank)
    sent, received = _buffer(elements, ranks), _buffer(elements, ranks)
    operations = [
        dist.P2POp(dist.isend, sent, members[(place + 1) % len(members)], group=group),
        dist.P2POp(dist.irecv, received, members[place - 1], group=group),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


_CALLS: dict[Collective, Maker] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
    "broadcast": _broadcast,
}

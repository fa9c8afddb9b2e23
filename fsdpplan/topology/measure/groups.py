"""Groups: which ranks talk with each other, for each level, each axis and each pair of neighbours.

Ranks are numbered node by node. Groups of one value work at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdpplan.spec.measurement import GroupKind
from fsdpplan.topology.measure.settings import Axis


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

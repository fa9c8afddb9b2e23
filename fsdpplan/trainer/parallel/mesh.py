"""Meshes: which ranks work together on each axis, and where this rank stands.

Ranks are laid out as planned, outermost axis first: `pp, dp_replicate, dp_shard, cp, tp`. FSDP
shards over `dp_shard` and `cp` together, so the mesh of the parameters has one axis of both, called
`dp_shard`; routed experts live on a mesh of the same ranks in which that axis is split otherwise,
into `edp_shard` and `ep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import LayoutConfig
from ..shared import conventions

MESH_AXES = conventions.MESH_AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's coordinates, on each of MESH_AXES."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The meshes of a layout. An axis of one rank is left out, but for `dp_shard` under FSDP."""

    parameters: DeviceMesh
    """Axes `pp, dp_replicate, dp_shard, tp`; `dp_shard` has cp folded in."""
    experts: DeviceMesh | None
    """The same ranks as `pp, dp_replicate, edp_shard, ep, tp`; None without expert parallelism."""
    cp: DeviceMesh | None
    """One axis, `cp`: the ranks that share a sequence."""
    kept: DeviceMesh | None = None
    """The ranks of `fsdp` as groups x ranks of a group, which together keep a copy of a block's
    parameters after forward; None where `reshard_after_forward` is no number."""

    def axis(self, name: str) -> DeviceMesh | None:
        """The part of `parameters` along one axis; None where that has one rank."""
        return self.parameters[name] if name in (self.parameters.mesh_dim_names or ()) else None

    @property
    def tp(self) -> DeviceMesh | None:
        """Ranks that split each matrix."""
        return self.axis("tp")

    @property
    def pp(self) -> DeviceMesh | None:
        """Ranks that hold one stage each of the same replica."""
        return self.axis("pp")

    @property
    def fsdp(self) -> DeviceMesh:
        """What `fully_shard` takes: `dp_shard`, or `dp_replicate` x `dp_shard`."""
        return _data_axes(self.parameters, "dp_shard")

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """The same for routed experts, which expert-parallel ranks hold apart already."""
        return None if self.experts is None else _data_axes(self.experts, "edp_shard")


def build_meshes(layout: LayoutConfig, device_type: str) -> Meshes:
    """Make the process groups of `layout`; all ranks call this, outside of any fake mode."""
    outer = {"pp": layout.pp, "dp_replicate": layout.dp_replicate}
    sharded = {"dp_shard": layout.shard_ranks}
    expert_axes = {"edp_shard": layout.shard_ranks // layout.ep, "ep": layout.ep}
    inner = {"tp": layout.tp}
    return Meshes(
        parameters=_mesh({**outer, **sharded, **inner}, layout, device_type),
        experts=None
        if layout.ep == 1
        else _mesh({**outer, **expert_axes, **inner}, layout, device_type),
        cp=None if layout.cp == 1 else _context_mesh(layout, device_type),
        kept=_kept_mesh(layout, device_type),
    )


def place(layout: LayoutConfig, rank: int) -> Place:
    """The coordinates of `rank`: the innermost axis, tp, counts fastest."""
    coordinates = {}
    for axis in reversed(MESH_AXES):
        rank, coordinates[axis] = divmod(rank, getattr(layout, axis))
    return Place(**coordinates)


def batch_rank(layout: LayoutConfig, rank: int) -> int:
    """Which part of the batch `rank` trains on, of `layout.data_parallel`: the ranks of one
    pipeline, one sequence and one matrix share it."""
    here = place(layout, rank)
    return here.dp_replicate * layout.dp_shard + here.dp_shard


def _mesh(sizes: dict[str, int], layout: LayoutConfig, device_type: str) -> DeviceMesh:
    kept = {axis: size for axis, size in sizes.items() if size > 1}
    always = next(axis for axis in sizes if axis.endswith("dp_shard"))
    if layout.sharding == "fsdp" or not kept:
        kept = {axis: size for axis, size in sizes.items() if size > 1 or axis == always}
    assert prod(kept.values()) == layout.world
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _data_axes(mesh: DeviceMesh, shard_axis: str) -> DeviceMesh:
    replicates = "dp_replicate" in (mesh.mesh_dim_names or ())
    return mesh[("dp_replicate", shard_axis) if replicates else (shard_axis,)]


def _kept_mesh(layout: LayoutConfig, device_type: str) -> DeviceMesh | None:
    ranks = layout.reshard_after_forward
    if isinstance(ranks, str) or layout.sharding != "fsdp" or ranks >= layout.shard_ranks:
        return None
    groups = layout.dp_replicate * layout.shard_ranks // ranks
    assert groups * ranks == layout.world, "resharding to fewer ranks goes with data axes only"
    return init_device_mesh(device_type, (groups, ranks))


def _context_mesh(layout: LayoutConfig, device_type: str) -> DeviceMesh:
    """Groups of `cp` ranks that lie `tp` apart."""
    cp, tp = layout.cp, layout.tp
    groups = [
        [first + within + step * tp for step in range(cp)]
        for first in range(0, layout.world, cp * tp)
        for within in range(tp)
    ]
    mine, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    ranks = dist.get_process_group_ranks(mine)
    return DeviceMesh.from_group(mine, device_type, mesh=ranks, mesh_dim_names=("cp",))

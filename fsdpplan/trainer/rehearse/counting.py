"""Collectives that this rank calls: how often, with how many bytes, over whom, in what order."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..config import LayoutConfig
from ..parallel.mesh import Meshes
from ..private_torch import DispatchMode, asks_device, fake_device, group_of

RowKey = tuple[str, str, int, str]
"""(collective, axis, ranks, dtype)."""

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

SEVERAL_AXES = "several"
"""Axis of a group that crosses axes."""


@dataclass
class CollectiveRow:
    """All calls of one collective: number, and bytes of the full buffers."""

    count: int = 0
    bytes: int = 0


class Call(NamedTuple):
    """One call, as all ranks of its group must make it."""

    collective: str
    dtype: str
    bytes: int
    peer: int | None = None
    """The other rank of a message."""


class Axis(NamedTuple):
    """This rank's group along an axis."""

    name: str
    group_name: str
    ranks: frozenset[int]


class Operator(NamedTuple):
    """How to read a call of a collective operator."""

    collective: str
    group_argument: int
    payload: Callable[[Any, Any], Any]
    """The full buffer, of (arguments, result)."""
    peer_argument: int | None = None


def _first(args: Any, out: Any) -> Any:
    return args[0]


def _second(args: Any, out: Any) -> Any:
    return args[1]


def _result(args: Any, out: Any) -> Any:
    return out


OPERATORS = {
    "c10d::_allgather_base_": Operator("all_gather", 2, _first),
    "c10d::_reduce_scatter_base_": Operator("reduce_scatter", 2, _second),
    "c10d::allreduce_": Operator("all_reduce", 1, _first),
    "c10d::broadcast_": Operator("broadcast", 1, _first),
    "c10d::allgather_": Operator("all_gather", 2, lambda args, out: args[0][0]),
    "c10d::alltoall_base_": Operator("all_to_all", 2, _second),
    "c10d::alltoall_": Operator("all_to_all", 2, _second),
    "c10d::send": Operator("send", 1, _first, 2),
    "c10d::recv_": Operator("recv", 1, _first, 2),
    "_c10d_functional::all_gather_into_tensor": Operator("all_gather", 2, _result),
    "_c10d_functional::reduce_scatter_tensor": Operator("reduce_scatter", 3, _first),
    "_c10d_functional::all_reduce": Operator("all_reduce", 2, _first),
    "_c10d_functional::all_reduce_": Operator("all_reduce", 2, _first),
    "_c10d_functional::broadcast": Operator("broadcast", 2, _first),
    "_c10d_functional::all_to_all_single": Operator("all_to_all", 3, _first),
    "_dtensor::shard_dim_alltoall": Operator("all_to_all", 3, _first),
}
"""Operators of torch that communicate, by their name and the place of their arguments."""

SYNCHRONISE = {
    "c10d::barrier",
    "c10d::monitored_barrier_",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}
"""Operators of the same namespaces that carry nothing."""

NAMESPACES = {name.split("::")[0] for name in OPERATORS}


class CollectiveCounter(DispatchMode):
    """Counts collectives by (collective, axis, ranks, dtype), and keeps each group's calls in
    order."""

    def __init__(self, axes: Iterable[Axis]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = sorted(axes, key=lambda axis: len(axis.ranks))
        self.axis_of_group = {axis.group_name: axis.name for axis in self.axes}
        groups = collections.Counter(axis.group_name for axis in self.axes)
        self.shared = {axis.group_name for axis in self.axes if groups[axis.group_name] > 1}
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.rows: dict[RowKey, CollectiveRow] = collections.defaultdict(CollectiveRow)
        self.calls: dict[tuple[str, tuple[int, ...]], list[Call]] = collections.defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # first let DTensor become local operators
        if asks_device(func, args):
            return fake_device(args[0])
        out = func(*args, **(kwargs or {}))
        if func.namespace in NAMESPACES:
            self._count(func._schema.name, args, out)
        return out

    def _count(self, name: str, args: Any, out: Any) -> None:
        if name in SYNCHRONISE:
            return
        operator = OPERATORS[name]
        group = group_of(args[operator.group_argument])
        if group.size() == 1:
            return  # carries nothing; before torch 2.10 FSDP2 calls it all the same
        payload = operator.payload(args, out)
        tensors = [payload] if isinstance(payload, torch.Tensor) else payload
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        dtype = tensors[0].dtype
        dtype_name = DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
        axis = self._axis(group, operator.collective)
        row = self.rows[operator.collective, axis, group.size(), dtype_name]
        row.count += 1
        row.bytes += size
        ranks = dist.get_process_group_ranks(group)
        peer = None if operator.peer_argument is None else ranks[args[operator.peer_argument]]
        call = Call(operator.collective, dtype_name, size, peer)
        self.calls[axis, tuple(ranks)].append(call)

    def _axis(self, group: dist.ProcessGroup, collective: str) -> str:
        """The axis that holds all ranks of `group`: an integer reshard makes groups inside that of
        the shards; where experts are exchanged over all of them, torch has one group for both."""
        name = group.group_name
        if name in self.shared:
            axes = [axis.name for axis in self.axes if axis.group_name == name]
            is_exchange = collective == "all_to_all"
            return next((axis for axis in axes if (axis == "ep") == is_exchange), axes[0])
        if name not in self.axis_of_group:
            ranks = set(dist.get_process_group_ranks(group))
            axes = [axis.name for axis in self.axes if ranks <= axis.ranks]
            shards = [axis for axis in axes if axis.startswith("dp_shard")]
            self.axis_of_group[name] = (*shards, *axes, SEVERAL_AXES)[0]
        return self.axis_of_group[name]


def mesh_axes(mesh: DeviceMesh) -> list[Axis]:
    """This rank's groups along the axes of `mesh`."""
    groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    return [
        Axis(name, group.group_name, frozenset(dist.get_process_group_ranks(group)))
        for name, group in groups.items()
    ]


def layout_axes(meshes: Meshes, layout: LayoutConfig) -> list[Axis]:
    """The axes of all meshes, under the names that predictions give them."""
    sharded = "dp_shard" if layout.cp == 1 else "dp_shard*cp"
    names = {"dp_shard": sharded, "edp_shard": f"{sharded}/ep"}
    axes: dict[str, Axis] = {}
    for mesh in (meshes.parameters, meshes.experts, meshes.cp):
        for axis in [] if mesh is None else mesh_axes(mesh):
            name = names.get(axis.name, axis.name)
            axes.setdefault(name, axis._replace(name=name))
    return list(axes.values())

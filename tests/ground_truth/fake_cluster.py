"""One rank of any world on one CPU: real FSDP2 over a fake process group and fake tensors.

The only file of the project that touches private modules of torch:

* `torch.testing._internal.distributed.fake_pg`: a process group of any size in one process.
* `torch._subclasses.fake_tensor`: tensors without storage; shapes, dtypes and saved tensors are
  those of the real program.
* `torch.distributed._tools.fake_collectives`: which dispatcher calls are collectives.
* `torch.distributed.tensor._sharding_prop.detect_fake_mode`: sharding propagation runs operators
  at global shapes in the ambient fake mode, which would be counted as memory; it is given a mode
  of its own; it and the redistribution planner keep process groups in caches.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._sharding_prop as sharding_propagation
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_sharding_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

ALLOCATION_BYTES = 512
"""Granularity of the CUDA caching allocator."""

_PAYLOAD: dict[str, tuple[str, Any]] = {
    "allgather_base": ("all_gather", lambda args, out: args[0]),
    "reduce_scatter_base": ("reduce_scatter", lambda args, out: args[1]),
    "allreduce": ("all_reduce", lambda args, out: args[0][0]),
    "all_gather_into_tensor": ("all_gather", lambda args, out: out),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args, out: args[0]),
    "all_reduce": ("all_reduce", lambda args, out: args[0]),
}


@dataclass
class CollectiveRow:
    """All calls of one collective: number, and bytes of the full buffers."""

    count: int = 0
    bytes: int = 0


RowKey = tuple[str, str, int, str]
"""(collective, axis, ranks, dtype)."""

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "int64"}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by (collective, axis, ranks, dtype)."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.axis_ranks = axis_ranks(mesh)
        self.axis_of_group: dict[str, str] = {}
        self.rows: dict[RowKey, CollectiveRow] = collections.defaultdict(CollectiveRow)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # first let DTensor become local operators
        out = func(*args, **(kwargs or {}))
        if func in collective_ops and func not in sync_ops:
            name = func._overloadpacket.__name__.strip("_")
            collective, payload = _PAYLOAD.get(name, (name, lambda args, out: args[0]))
            tensor = payload(args, out)
            if isinstance(tensor, (list, tuple)):
                tensor = tensor[0]
            group = CollectiveOp.get_process_group(func, args)
            row = self.rows[collective, self._axis(group), group.size(), DTYPE_NAMES[tensor.dtype]]
            row.count += 1
            row.bytes += tensor.numel() * tensor.element_size()
        return out

    def _axis(self, group: dist.ProcessGroup) -> str:
        """The axis that holds all ranks of `group`: an integer reshard makes groups inside one."""
        if group.group_name not in self.axis_of_group:
            ranks = set(dist.get_process_group_ranks(group))
            axes = [axis for axis, members in self.axis_ranks.items() if ranks <= members]
            self.axis_of_group[group.group_name] = axes[0] if axes else "several"
        return self.axis_of_group[group.group_name]


def axis_ranks(mesh: DeviceMesh) -> dict[str, set[int]]:
    """The ranks of this rank's group on each axis of `mesh`, smallest first."""
    members = {
        axis: set(dist.get_process_group_ranks(mesh.get_group(axis)))
        for axis in mesh.mesh_dim_names or ()
    }
    return dict(sorted(members.items(), key=lambda item: len(item[1])))


class LiveBytes(TorchDispatchMode):
    """Bytes of live storages and their peak, rounded as the CUDA allocator rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[int, str, Any]] = {}
        self.total = 0
        self.peak = 0
        self.peak_tag = ""
        self.by_tag: collections.Counter[str] = collections.Counter()
        self.peak_by_tag: dict[str, int] = {}
        self.peak_in_tag: dict[str, int] = collections.defaultdict(int)
        self.tag = "forward"

    def _set(self, storage: Any) -> None:
        key = storage._cdata
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        old, tag, reference = self.live.get(key, (0, self.tag, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _, key=key: self._drop(key))
        self.live[key] = (size, tag, reference)
        self.total += size - old
        self.by_tag[tag] += size - old
        self.peak_in_tag[self.tag] = max(self.peak_in_tag[self.tag], self.total)
        if self.total > self.peak:
            self.peak, self.peak_by_tag, self.peak_tag = self.total, dict(self.by_tag), self.tag

    def _drop(self, key: int) -> None:
        size, tag, _ = self.live.pop(key, (0, self.tag, None))
        self.total -= size
        self.by_tag[tag] -= size

    def add(self, tag: str, *tensors: torch.Tensor) -> None:
        """Count tensors that were made before the mode was entered."""
        previous, self.tag = self.tag, tag
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.untyped_storage()._cdata not in self.live:
                self._set(local.untyped_storage())
        self.tag = previous

    def start_phase(self, tag: str) -> None:
        """Forget the peaks so far: a new step begins, in phase `tag`."""
        self.tag = tag
        self.peak_in_tag.clear()
        self.peak = self.peak_in_tag[tag] = self.total

    def __enter__(self) -> LiveBytes:
        self._mode, self._resize = active_fake_mode(), torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> None:
            self._resize(storage, size)  # FSDP frees by resizing to zero
            if storage._cdata in self.live or size:
                self._set(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        return super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as outside of the fake mode, where it makes a new tensor
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is self._mode:
            for leaf in tree_iter(out):
                if isinstance(leaf, torch.Tensor):
                    storage = leaf.untyped_storage()
                    if storage._cdata not in self.live:
                        self._set(storage)
        return out


@contextlib.contextmanager
def fake_world(ranks: int, *, rank: int = 0) -> Iterator[None]:
    """A process group of `ranks` of which this process is `rank`, alone.

    Meshes must be made in it but outside of the fake mode: they look into their rank tensor.
    """
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    original = sharding_propagation.detect_fake_mode
    sharding_propagation.detect_fake_mode = lambda *args, **kwargs: None
    try:
        yield
    finally:
        sharding_propagation.detect_fake_mode = original
        dist.destroy_process_group()
        # equal meshes of the next world would find this one's groups
        clear_sharding_cache()
        clear_redistribute_planner_cache()


def fake_tensors() -> FakeTensorMode:
    """Fake tensors on the CPU device that tolerate the mesh's real ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class _FusedRMSNorm(torch.autograd.Function):
    """Saves what CUDA's fused RMSNorm saves: input, weight and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        rstd = torch.empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


@contextlib.contextmanager
def cuda_like_norms() -> Iterator[None]:
    """Replace RMSNorm's composite CPU kernel, which saves two fp32 copies of its input.

    Under autocast to bf16, CUDA computes it in fp32 (torch 2.13, `AT_FORALL_FP32`).
    """
    module_forward, function = torch.nn.RMSNorm.forward, torch.nn.functional.rms_norm

    def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            x, weight = x.float(), weight.float()
        return _FusedRMSNorm.apply(x, weight, epsilon)

    def forward(self: torch.nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return rms_norm(x, self.normalized_shape, self.weight, self.eps)
        weight = self.weight.to_local(grad_placements=[Partial()])
        out = rms_norm(x.to_local(), self.normalized_shape, weight, self.eps)
        return DTensor.from_local(out, x.device_mesh, x.placements, run_check=False)

    torch.nn.RMSNorm.forward = forward  # type: ignore[method-assign]
    torch.nn.functional.rms_norm = rms_norm  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.RMSNorm.forward = module_forward  # type: ignore[method-assign]
        torch.nn.functional.rms_norm = function  # type: ignore[assignment]

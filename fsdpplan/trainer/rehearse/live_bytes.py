"""Memory without a device: bytes of the storages that live, and their peak."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from ..private_torch import DispatchMode, ambient_fake_mode, on_storage_resize, storage_key

ALLOCATION_BYTES = 512
"""Granularity of the CUDA caching allocator."""


class LiveBytes(DispatchMode):
    """Bytes of live storages and their peak, rounded as the CUDA allocator rounds.

    It counts what is made in the fake mode in which it was entered.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, tuple[int, Any]] = {}
        self.total = 0
        self.peak = 0
        self.phase = "start"
        self.peak_in_phase: dict[str, int] = collections.defaultdict(int)
        self._patches = ExitStack()

    def start_phase(self, phase: str) -> None:
        """Count the peak of what follows apart; what there was of this phase is forgotten."""
        self.phase = phase
        self.peak_in_phase[phase] = self.total

    def add(self, *tensors: Tensor) -> None:
        """Count tensors that were made before the mode was entered."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._see(local.untyped_storage())

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage_key(storage) not in self.live:
            self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
        size = -(-storage.nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
        old, reference = self.live.get(key, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _, key=key: self._drop(key))  # type: ignore[misc]
        self.live[key] = (size, reference)
        self.total += size - old
        if self.total > self.peak_in_phase[self.phase]:
            self.peak_in_phase[self.phase] = self.total

    def _drop(self, key: int) -> None:
        size, _ = self.live.pop(key, (0, None))
        self.total -= size

    def _resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        if storage_key(storage) in self.live or size_bytes:
            self._count(storage)

    def __enter__(self) -> LiveBytes:
        self._mode = ambient_fake_mode()
        self._patches.enter_context(on_storage_resize(self._resized))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as outside of the fake mode, where it makes no new tensor
        out = func(*args, **(kwargs or {}))
        if ambient_fake_mode() is self._mode:
            for leaf in (out,) if isinstance(out, Tensor) else tree_iter(out):
                for part in parts(leaf) if isinstance(leaf, Tensor) else ():
                    self._see(part.untyped_storage())
        return out


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that have the memory of `tensor`: itself, or those which one that only stands for
    others (torchao's moments in 8 bits) is made of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        yield from parts(getattr(tensor, name))

"""How long a rank works by itself, apart from what it waits for others.

A step takes all ranks equally long, since they wait for each other in every collective. What tells
them apart is the time of the data and that of a few blocks' forward passes, taken behind FSDP's
gathering and before its freeing. Ranks of one tensor-, context- or expert-parallel group wait for
each other inside of a block, too: there a slow rank shows as a slow group.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

MOST_TIMED_BLOCKS = 4
"""Enough to tell a slow device; two CUDA events a pass of each cost next to nothing."""


class OwnTime:
    """Times the first blocks of this rank, and its data."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self.data_seconds = 0.0
        """Of the newest step."""
        self._on_device = device.type == "cuda"
        self._began: dict[nn.Module, Any] = {}
        self._passes: list[tuple[Any, Any]] = []
        for block in list(blocks)[:MOST_TIMED_BLOCKS]:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end, prepend=True)

    def take(self) -> float:
        """Seconds since the last call; the device has done all of it by now."""
        if self._on_device:
            seconds = sum(began.elapsed_time(ended) for began, ended in self._passes) / 1000
        else:
            seconds = sum(ended - began for began, ended in self._passes)
        self._passes.clear()
        return self.data_seconds + float(seconds)

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin(self, block: nn.Module, _inputs: Any) -> None:
        self._began[block] = self._now()

    def _end(self, block: nn.Module, _inputs: Any, _output: Any) -> None:
        # a recomputation ends early, without this
        self._passes.append((self._began.pop(block), self._now()))

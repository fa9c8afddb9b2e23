"""The device of these tests: a CUDA device, or a CPU process that goes as far as one can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The first device that torch may use, or the CPU where it sees none."""
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def alone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device, for a program that no launcher started; group and memory are given back."""
    import gc

    import torch
    import torch.distributed as dist

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield device
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()

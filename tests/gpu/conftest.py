"""A CUDA device, or the reason why these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The first device that torch may use."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none here")
    return torch.device("cuda", 0)


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
    torch.cuda.empty_cache()

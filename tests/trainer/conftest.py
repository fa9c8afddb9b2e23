"""A process group of this process alone; and what torch warns itself of is no error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdpplan.trainer.torch_versions import own_warnings

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The warnings that the trainer keeps from its users."""
    for item in items:
        if item.path.is_relative_to(HERE):
            for message in own_warnings():
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of a program that no launcher started; its process group is left after."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()

"""Steps of a small FSDP2 model on gloo ranks, profiled: as they are, and with something slowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from fsdpplan.trainer.parallel.distributed import leave

BLOCKS, WIDTH, TOKENS = 4, 64, 32
SLEEP_SECONDS = 0.4
"""Far above what anything here takes, on a busy machine too."""


class Block(nn.Module):
    """A feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def late(call: Callable[..., Any], *, rank: int) -> Callable[..., Any]:
    """`call`, for which one rank comes late: the others wait in it."""

    def slept(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == rank:
            time.sleep(SLEEP_SECONDS)
        return call(*args, **kwargs)

    return slept


class Slept(torch.autograd.Function):
    """Nothing, but that one rank comes late in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(SLEEP_SECONDS)
        return gradients[0]


def late_in_backward(self: Block, x: torch.Tensor) -> torch.Tensor:
    """A block's forward whose backward is late on one rank: the others wait for its reduction."""
    return x + self.down(torch.nn.functional.gelu(Slept.apply(self.up(x))))


def often(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A linear layer that multiplies again and again on the rank that is traced, for which the
    other one waits: of two at work a busy machine would let one wait, too."""

    def again(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        wide = torch.ones(600, 600)
        with torch.no_grad():
            until = time.monotonic() + SLEEP_SECONDS / 4
            while dist.get_rank() == 0 and time.monotonic() < until:
                wide @ wide
        result: torch.Tensor = forward(self, x)
        return result

    return again


def profiled(path: Path, steps: int = 3) -> None:
    """A trace of this rank's steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(TOKENS, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
    if dist.get_rank() == 0:
        seen.export_chrome_trace(str(path))


def traces(out: Path) -> None:
    """One trace for each thing that is slowed, by its name."""
    forward = Block.forward
    profiled(out / "as_it_is.json")
    for name, owner, slowed in (
        ("all_gather", Block, late(forward, rank=1)),
        ("reduce_scatter", Block, late_in_backward),
        ("matmul", nn.Linear, often(nn.Linear.forward)),
        ("idle", Block, late(forward, rank=0)),
    ):
        with replaced(owner, "forward", slowed):
            profiled(out / f"{name}.json", steps=1)
    leave(0)

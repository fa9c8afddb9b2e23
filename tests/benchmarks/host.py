"""What the host does for `--offload cpu`, by bytes: copies, additions, the norm, AdamW.

    python tests/benchmarks/host.py [--threads 2] [--elements 33554432] [--repeats 9]

Prints the rate of each as a share of that of a plain copy between two warm tensors by all threads,
which is what memory gives. `fresh` is what one thread reaches that copies into pages never touched
before: what is behind a copy from the device into memory that is not pinned.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.optim.adamw import adamw

from fsdpplan.cost.kernels.optimizer import (
    ADAMW_BYTES_PER_PARAMETER,
    ADD_BYTES_PER_PARAMETER,
    NORM_BYTES_PER_PARAMETER,
    SCALE_BYTES_PER_PARAMETER,
)


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The shortest of several runs: others only take from a machine's memory."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)


def fresh_copy(source: torch.Tensor) -> None:
    """Into memory that the allocator has just asked the system for, and gives back."""
    torch.empty_like(source).copy_(source)


def main() -> None:
    options = argparse.ArgumentParser(description="host rates behind --offload cpu")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--elements", type=int, default=2**25)
    options.add_argument("--repeats", type=int, default=9)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    parameter, gradient, first, second = (torch.rand(given.elements) for _ in range(4))
    step = torch.ones(())

    def update() -> None:
        adamw(
            [parameter],
            [gradient],
            [first],
            [second],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-4,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
        )

    def rate(run: Callable[[], object], bytes_per_parameter: int) -> float:
        run()
        return bytes_per_parameter * given.elements / best_seconds(run, given.repeats)

    with torch.no_grad():
        copy = rate(lambda: first.copy_(second), 8)
        print(f"copy          {copy / 1e9:7.1f} GB/s by {given.threads} threads")
        for name, run, size in (
            ("add", lambda: first.add_(gradient), ADD_BYTES_PER_PARAMETER),
            ("norm", lambda: torch.linalg.vector_norm(gradient), NORM_BYTES_PER_PARAMETER),
            ("scale", lambda: gradient.mul_(0.999), SCALE_BYTES_PER_PARAMETER),
            ("adamw", update, ADAMW_BYTES_PER_PARAMETER),
        ):
            print(f"{name:13} {rate(run, size) / copy:7.2f} of that")
        torch.set_num_threads(1)
        alone = rate(lambda: first.copy_(second), 8)
        print(f"copy, alone   {alone / copy:7.2f} of that by one thread")
        fresh = rate(lambda: fresh_copy(second), 8)
        print(f"fresh         {fresh / alone:7.2f} of that, {fresh / 2e9:.1f} GB/s copied")


if __name__ == "__main__":
    main()

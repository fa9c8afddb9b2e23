"""Random numbers: every rank's generators, saved and restored.

The reference model draws them where it drops elements; the program that a user makes of it may
draw others.
"""

from __future__ import annotations

import json
import random
import zlib

import torch
from torch import Tensor


def generator_states() -> dict[str, Tensor]:
    """States of torch's generators and of Python's `random`, as bytes."""
    python = json.dumps(random.getstate()).encode()
    return torch_states() | {"python": torch.frombuffer(bytearray(python), dtype=torch.uint8)}


def torch_states() -> dict[str, Tensor]:
    """States of torch's generators alone; no device is waited for."""
    states = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["torch_cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: dict[str, Tensor]) -> None:
    """Go on where `generator_states` or `torch_states` was taken."""
    torch.set_rng_state(states["torch_cpu"])
    if "python" in states:
        version, inner, gauss = json.loads(bytes(states["python"].tolist()))
        random.setstate((version, tuple(inner), gauss))
    if "torch_cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["torch_cuda"])


def seed_generators(*, seed: int, step: int, rank: int) -> None:
    """Begin anew, with numbers that no other step or rank begins with."""
    number = zlib.crc32(f"{seed}:{step}:{rank}".encode())
    torch.manual_seed(number)
    random.seed(number)

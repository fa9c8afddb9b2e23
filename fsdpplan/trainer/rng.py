"""Random numbers: every rank's generators, saved and restored.

The reference model draws none while it trains; the program that a user makes of it may.
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
    states = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.frombuffer(bytearray(python), dtype=torch.uint8),
    }
    if torch.cuda.is_available():
        states["torch_cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: dict[str, Tensor]) -> None:
    """Go on where `generator_states` was taken."""
    torch.set_rng_state(states["torch_cpu"])
    version, inner, gauss = json.loads(bytes(states["python"].tolist()))
    random.setstate((version, tuple(inner), gauss))
    if "torch_cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["torch_cuda"])


def seed_generators(*, seed: int, step: int, rank: int) -> None:
    """Begin anew, with numbers that no other step or rank begins with."""
    number = zlib.crc32(f"{seed}:{step}:{rank}".encode())
    torch.manual_seed(number)
    random.seed(number)

"""Ports for processes that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """One that nobody listens at, below those that the kernel gives to whoever connects: such a one
    may be taken before the process is there."""
    while True:
        port = random.SystemRandom().randint(12_000, 31_999)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port

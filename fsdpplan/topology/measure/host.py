"""The host of a rank: its name, its processor, its free memory."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def host_name() -> str:
    """This node, by the name that Slurm knows it by, if it does."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def cpu_name() -> str:
    """Model of the processor; at least its architecture."""
    named = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return named[1].strip() if named else platform.machine()


def host_room_bytes() -> float:
    """Memory that this host, or the container that we are in, still has.

    Source: Linux Documentation, proc MemAvailable; cgroup-v2 memory.max and memory.current.
    """
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE)
    free = 1024.0 * int(available[1]) if available else float("inf")
    limit, used = (_text(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdecimal() and used.isdecimal():
        free = min(free, float(int(limit) - int(used)))
    return free


def _text(path: Path) -> str:
    """What a file of the kernel says; nothing where it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

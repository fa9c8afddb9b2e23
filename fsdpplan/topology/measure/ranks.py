"""Ranks: the processes that measure together, and how they agree.

The host of a rank: its name, its processor, its free memory.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fsdpplan.errors import LaunchError
from fsdpplan.topology.measure.settings import MeasuredDevice

if TYPE_CHECKING:
    import torch


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


TIMEOUT_SECONDS = 180.0
"""How long a rank waits for the others; those of its node end it sooner when one of them dies."""
TEXT_BYTES = 256
"""Of a text that ranks tell each other; longer ones are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among its like."""

    rank: int
    world: int
    ranks_per_node: int
    device: torch.device

    @property
    def talks(self) -> bool:
        """There is somebody to talk to."""
        return self.world > 1

    def largest(self, *values: float) -> tuple[float, ...]:
        """The largest of each value over all ranks."""
        import torch
        import torch.distributed as dist

        if not self.talks:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tuple(tensor.tolist())

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank; as many on each."""
        import torch

        if not self.talks:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        every = torch.empty(self.world * len(values), dtype=torch.float64, device=self.device)
        all_gather_function()(every, own)
        return [list(row) for row in every.view(self.world, len(values)).tolist()]

    def texts(self, text: str) -> list[str]:
        """The text of every rank."""
        data = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        rows = self.gathered([float(byte) for byte in data])
        return [bytes(map(int, row)).rstrip(b"\0").decode(errors="replace") for row in rows]

    def align(self) -> None:
        """Wait until all ranks are here: on a GPU its stream waits, not this program."""
        import torch
        import torch.distributed as dist

        if self.talks:
            dist.all_reduce(torch.zeros(1, device=self.device))

    def leave(self, exit_code: int) -> NoReturn:
        """End this process without the interpreter's own ending.

        A gloo thread may drop the last reference to a tensor while the interpreter shuts down,
        which aborts the process after all work is done (seen with torch 2.13).
        """
        import torch.distributed as dist

        if exit_code == 0 and self.talks:
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def all_gather_function() -> Callable[..., object]:
    """The all-gather into one tensor: torch 2.13 gave it a new name, and warns of the old one."""
    import torch.distributed as dist

    new: Callable[..., object] | None = getattr(dist, "all_gather_single", None)
    return new or dist.all_gather_into_tensor


def join(kind: MeasuredDevice) -> Ranks:
    """Take this process's device and join the process group that torchrun describes; none for a
    process that nobody else goes with."""
    import torch

    world = _whole("WORLD_SIZE", 1)
    local, ranks_per_node = _whole("LOCAL_RANK", 0), _whole("LOCAL_WORLD_SIZE", 1)
    nodes = _whole("GROUP_WORLD_SIZE", 1)
    if nodes * ranks_per_node != world:
        raise LaunchError(
            f"{world} processes on {nodes} nodes are not {ranks_per_node} on each: start as many "
            "on every node"
        )
    device = _device(kind, local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(rank=_whole("RANK", 0), world=world, ranks_per_node=ranks_per_node, device=device)
    if ranks.talks:
        _start(device)
    return ranks


def _start(device: torch.device) -> None:
    import torch.distributed as dist

    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    try:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise LaunchError(
            f"the processes cannot reach each other: {reason}: check that the nodes know each "
            "other's names, or name the interface between them in GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME"
        ) from error


def _device(kind: MeasuredDevice, local: int) -> torch.device:
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local >= count:
        raise LaunchError(
            f"{host_name()}: process {local} of this node has no GPU, torch finds {count}: start "
            "as many processes as there are GPUs, or measure CPU processes with --hardware cpu"
        )
    return torch.device("cuda", local)


def _whole(name: str, default: int) -> int:
    return int(os.environ.get(name, default))

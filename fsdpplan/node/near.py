"""Whether torchrun can keep each rank on the cores near its GPU: the exit code is 0 where it can.

torchrun itself ends a job where it cannot, and takes a GPU of which the kernel does not say where
it is for one at the first cores. So it is asked only where all of this holds: torch has the option,
its tool runs, GPUs are spread over several NUMA nodes, and the job may use all cores of each.

The text travels in the job script as that of `look` does, and under the same rules.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys

GPUS = "/proc/driver/nvidia/gpus"
"""A folder for each GPU, by its address on the bus."""
SYSTEM = "/sys"
TOOL = ["numactl", "--physcpubind=all", "true"]
"""What torchrun puts before a rank, and containers may forbid. Source: torch 2.13
numa/binding.py."""


def main() -> int:
    """The exit code; the one thing that is worth mending is said."""
    if not has_option() or not cores_are_ours(nodes_of_gpus()):
        return 1
    if tool_runs():
        return 0
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    print(
        f"fsdpplan: {here}: numactl does not run here, so ranks do not stay on the cores near "
        "their GPUs: have it installed",
        file=sys.stderr,
        flush=True,
    )
    return 1


def has_option() -> bool:
    """Whether torch has what --numa-binding needs, without importing it."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or []
    return any(os.path.exists(os.path.join(one, "numa", "binding.py")) for one in folders)


def nodes_of_gpus() -> set[int]:
    """NUMA nodes of the GPUs; empty where the kernel does not say it of each."""
    found = set()
    for gpu in os.listdir(GPUS) if os.path.isdir(GPUS) else []:
        said = text(f"{SYSTEM}/bus/pci/devices/{gpu}/numa_node")
        if not said.isdigit():
            return set()
        found.add(int(said))
    return found


def cores_are_ours(nodes: set[int]) -> bool:
    """Whether there are several nodes, and this process may run on all cores of each."""
    ours = os.sched_getaffinity(0)
    cores = [numbers(text(f"{SYSTEM}/devices/system/node/node{node}/cpulist")) for node in nodes]
    return len(nodes) > 1 and all(each and each <= ours for each in cores)


def tool_runs() -> bool:
    """Whether ranks can be started so."""
    try:
        return subprocess.run(TOOL, capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def numbers(ranges: str) -> set[int]:
    """The numbers of `0-2,7`."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def text(path: str) -> str:
    """A small file, or nothing."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())

"""The roll: what each rank says of itself, and who differs from the others and from the plan."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..config import PlanConfig
from .findings import Findings, hosts_words, may_leave_out, places_words

DRIVER_FILE = Path("/proc/driver/nvidia/version")
FREE_FRACTION = 0.9
"""A GPU with less free memory than this share of what the others have holds something else: their
own contexts differ by far less."""
MEMORY_TOLERANCE = 0.05
"""Drivers keep different parts of the same memory to themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """One rank, in its own words. None: it has no such thing."""

    rank: int
    host: str
    torch: str
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    device: str = "cpu"
    device_id: str | None = None
    """What tells a GPU from all others."""
    memory_bytes: int | None = None
    free_bytes: int | None = None
    multiprocessors: int | None = None


def host_name() -> str:
    """This node as its scheduler calls it, so that it can be left out by that name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def presence(device: torch.device, rank: int) -> Presence:
    """This rank."""
    if device.type != "cuda":
        return Presence(rank=rank, host=host_name(), torch=str(torch.__version__))
    properties = torch.cuda.get_device_properties(device)
    free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
    return Presence(
        rank=rank,
        host=host_name(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        driver=driver_version(),
        device=properties.name,
        device_id=str(properties.uuid),
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
        multiprocessors=properties.multi_processor_count,
    )


def driver_version(path: Path = DRIVER_FILE) -> str | None:
    """Version of NVIDIA's kernel module, in the first line that it shows; None: not shown."""
    try:
        line = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", f"{line} ")
    return found[1] if found else None


def judge_roll(roll: Sequence[Presence], plan: PlanConfig) -> Findings:
    """Who differs. Ranks of different torch, CUDA, NCCL or GPUs do not train together, a GPU that
    something else holds has too little memory, and two ranks cannot share one; drivers may differ,
    and are only told."""
    problems: list[str] = []
    bad: dict[str, str] = {}
    for what, value in _MUST_AGREE.items():
        text, blamed = _minority(roll, what, value)
        problems += [text] if text else []
        bad.update({host: text for host in blamed if host not in bad})
    for text, host in _crowded(roll):
        problems.append(text)
        if may_leave_out({*bad, host}, (one.host for one in roll)):
            bad.setdefault(host, text)
    shared = _shared(roll)
    problems += [shared] if shared else []
    drivers, _ = _minority(roll, "driver", lambda one: one.driver)
    beside = [drivers, *_unplanned(roll, plan)]
    return Findings(
        problem="; ".join(problems), bad=bad, warnings=tuple(text for text in beside if text)
    )


_MUST_AGREE: Mapping[str, Callable[[Presence], Any]] = {
    "torch": lambda one: one.torch,
    "CUDA": lambda one: one.cuda,
    "NCCL": lambda one: one.nccl,
    "GPU": lambda one: one.device,
}


def _minority(
    roll: Sequence[Presence], what: str, value: Callable[[Presence], Any]
) -> tuple[str, tuple[str, ...]]:
    """(what differs, hosts that differ from more than half of the ranks)."""
    counted = Counter(value(one) for one in roll)
    if len(counted) < 2:
        return "", ()
    (usual, count), *_ = counted.most_common()
    if 2 * count <= len(roll):
        values = [
            f"{what} {each or 'unknown'} on {hosts_words(o.host for o in roll if value(o) == each)}"
            for each in counted
        ]
        return f"ranks differ: {', '.join(values)}", ()
    others = [one for one in roll if value(one) != usual]
    hosts = dict.fromkeys(one.host for one in others)
    values = []
    for each in sorted({str(value(one) or "unknown") for one in others}):
        who = (one.host for one in others if str(value(one) or "unknown") == each)
        values.append(f"{what} is {each} on {hosts_words(who)}")
    text = f"{', '.join(values)}, and {usual or 'unknown'} on the others"
    return text, tuple(hosts) if may_leave_out(hosts, (one.host for one in roll)) else ()


def _crowded(roll: Sequence[Presence]) -> list[tuple[str, str]]:
    """GPUs whose memory something else holds, each with its host."""
    free = {one.rank: one.free_bytes for one in roll if one.free_bytes is not None}
    usual = median(free.values()) if free else 0
    return [
        (
            f"the GPU of rank {one.rank} on {one.host} has {_gib(free[one.rank])} free, others "
            f"{_gib(usual)}: something else holds it",
            one.host,
        )
        for one in roll
        if one.rank in free and free[one.rank] < FREE_FRACTION * usual
    ]


def _shared(roll: Sequence[Presence]) -> str:
    """Ranks that have one GPU together."""
    users: dict[tuple[str, str], list[int]] = {}
    for one in roll:
        if one.device_id is not None:
            users.setdefault((one.host, one.device_id), []).append(one.rank)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            return (
                f"{places_words(ranks, dict.fromkeys(ranks, host))} have one GPU together: start "
                "as many processes a node as it has GPUs, each with all GPUs visible"
            )
    return ""


def _unplanned(roll: Sequence[Presence], plan: PlanConfig) -> list[str]:
    """What the nodes are that the plan is not for."""
    planned, first = plan.cluster.device, roll[0]
    if planned.kind != "cuda":
        return []
    texts = []
    wanted = (planned.memory_bytes, planned.multiprocessors)
    memory_bytes, multiprocessors = first.memory_bytes, first.multiprocessors
    if wanted[0] and memory_bytes and abs(memory_bytes / wanted[0] - 1) > MEMORY_TOLERANCE:
        texts.append(f"{first.device} has {_gib(memory_bytes)}, not {_gib(wanted[0])}")
    if wanted[1] and multiprocessors and multiprocessors != wanted[1]:
        texts.append(f"{first.device} has {multiprocessors} multiprocessors, not {wanted[1]}")
    per_node = Counter(one.host for one in roll)
    odd = [host for host, ranks in per_node.items() if ranks != plan.cluster.gpus_per_node]
    if odd:
        texts.append(f"{per_node[odd[0]]} ranks run on {odd[0]}, not {plan.cluster.gpus_per_node}")
    return [f"the plan is for {planned.name}: {text}" for text in texts]


def versions(roll: Sequence[Presence]) -> dict[str, list[str]]:
    """What the ranks run on, each value once."""
    found: dict[str, set[str | None]] = {
        "torch": {one.torch for one in roll},
        "cuda": {one.cuda for one in roll},
        "nccl": {one.nccl for one in roll},
        "driver": {one.driver for one in roll},
        "device": {one.device for one in roll},
    }
    kept = {name: sorted(value for value in values if value) for name, values in found.items()}
    return {name: values for name, values in kept.items() if values}


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"

"""Try each axis of the mesh, and measure the links inside nodes and between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from .findings import Findings, hosts_words, may_leave_out, ranks_words, suspects
from .speed import Speed, pair_rounds

SUM_ELEMENTS = 1024
FIRST_BYTES = 64 * 1024
MOST_BYTES = {"cuda": 256 * 2**20, "cpu": 8 * 2**20}
TARGET_SECONDS = {"cuda": 0.01, "cpu": 0.02}
"""A call grows until it takes so long: slow links are measured with fewer bytes."""
REPETITIONS = 5
MOST_SECONDS = 1.0
"""Of all repetitions of a call together, where one does not take longer."""


def sum_over(group: dist.ProcessGroup, device: torch.device) -> tuple[bool, float]:
    """A tiny all-reduce: (whether the sum is right, seconds)."""
    began = time.perf_counter()
    ranks = dist.get_world_size(group)
    own = 1.0 + dist.get_rank(group)
    summed = torch.full((SUM_ELEMENTS,), own, dtype=torch.float64, device=device)
    dist.all_reduce(summed, group=group)
    expected = ranks * (ranks + 1) / 2
    return bool((summed == expected).all()), time.perf_counter() - began


def judge_sums(wrong: Sequence[Sequence[str]], groups: Sequence[dict[str, Any]]) -> Findings:
    """`wrong`: of each rank, the axes whose sums were wrong; `groups`: of each rank, its groups by
    axis with the hosts in it. A GPU or link that changes what it carries makes training wrong."""
    found = sorted({axis for axes in wrong for axis in axes})
    if not found:
        return Findings()
    axis = found[0]
    ranks = [rank for rank, axes in enumerate(wrong) if axis in axes]
    hosts = [host for rank in ranks for host in groups[rank][axis]]
    blamed: frozenset[str] = frozenset()
    for each in found:
        blamed |= suspects((of[each], each not in wrong[rank]) for rank, of in enumerate(groups))
    everybody = {host for of in groups for each in of.values() for host in each}
    text = f"the all-reduce over {axis} gives wrong sums on {ranks_words(ranks)}"
    few = sorted(blamed) if may_leave_out(blamed, everybody) else []
    return Findings(
        problem=f"{text}, among {hosts_words(hosts)}: a link or a GPU changes what it carries",
        bad={host: text for host in few},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Equal nodes whose ranks follow each other."""

    hosts: tuple[str, ...]
    per_node: int

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Nodes | None:
        """Of the host of each rank; None where ranks are spread otherwise."""
        names = tuple(dict.fromkeys(hosts))
        per_node = len(hosts) // len(names)
        expected = [name for name in names for _ in range(per_node)]
        return cls(hosts=names, per_node=per_node) if list(hosts) == expected else None


def measure(nodes: Nodes, device: torch.device) -> list[dict[str, Any]]:
    """Speeds of this rank's groups and pairs, as JSON; all ranks call this."""
    rank, world = dist.get_rank(), dist.get_world_size()
    node, local = divmod(rank, nodes.per_node)
    inside = list(range(node * nodes.per_node, (node + 1) * nodes.per_node))
    between = list(range(local, world, nodes.per_node))
    rows = []
    for where, ranks in (("inside", inside), ("between", between)):
        if len(ranks) > 1:
            hosts = sorted({nodes.hosts[each // nodes.per_node] for each in ranks})
            rows.append({"where": where, "hosts": hosts, "rate": _group_speed(ranks, device)})
    for pairs in pair_rounds(len(nodes.hosts)):
        partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}.get(node)
        if partner is None:
            _begin_together(device)
            continue
        hosts = sorted([nodes.hosts[node], nodes.hosts[partner]])
        rate = _pair_speed(partner * nodes.per_node + local, device)
        rows.append({"where": "pair", "hosts": hosts, "rate": rate})
    if device.type == "cuda":
        torch.cuda.empty_cache()  # training has other sizes, and a peak of its own
        torch.cuda.reset_peak_memory_stats(device)
    return rows


def gathered_speeds(rows: Sequence[Sequence[dict[str, Any]]]) -> list[Speed]:
    """The rows of all ranks, a group as slow as its slowest rank. All groups between nodes that
    work at once share adapters, and are one row here."""
    slowest: dict[tuple[str, tuple[str, ...]], float] = {}
    for row in (row for of_rank in rows for row in of_rank):
        key = (row["where"], tuple(row["hosts"]))
        slowest[key] = min(row["rate"], slowest.get(key, row["rate"]))
    return [
        Speed(where=where, hosts=hosts, bytes_per_second=rate)  # type: ignore[arg-type]
        for (where, hosts), rate in slowest.items()
    ]


def sent_bytes(device_kind: str, ranks: int) -> float:
    """What each rank sends in the largest call."""
    return MOST_BYTES[device_kind] * (ranks - 1) / ranks


def _group_speed(ranks: list[int], device: torch.device) -> float:
    """Bus bandwidth: the slower one of an all-gather and a reduce-scatter."""
    count = len(ranks)
    is_all = count == dist.get_world_size()
    group = None if is_all else dist.new_group(ranks, use_local_synchronization=True)

    def slowest(seconds: float) -> float:
        said = torch.tensor(seconds, device=device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
        return float(said)

    rates = [
        _bytes_per_second(partial(make, count, group, device), slowest, device)
        for make in (_all_gather, _reduce_scatter)
    ]
    if group is not None:
        dist.destroy_process_group(group)
    return min(rates) * (count - 1) / count


def _pair_speed(peer: int, device: torch.device) -> float:
    """Bytes per second each way, of one message to the peer and one from it."""

    def slowest(seconds: float) -> float:
        own, other = torch.full((1,), seconds, device=device), torch.zeros(1, device=device)
        _swap(own, other, peer)
        return max(float(own), float(other))

    def make(size: int) -> Callable[[], None]:
        sent, received = (torch.zeros(size // 4, device=device) for _ in range(2))
        return lambda: _swap(sent, received, peer)

    return _bytes_per_second(make, slowest, device)


def _swap(sent: torch.Tensor, received: torch.Tensor, peer: int) -> None:
    both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _bytes_per_second(
    make: Callable[[int], Callable[[], Any]],
    slowest: Callable[[float], float],
    device: torch.device,
) -> float:
    """Of the call that `make` makes of a number of bytes, which grows until it takes long enough;
    `slowest`: of one rank's seconds, those of the slowest one of the call. The median of a few
    calls, and of one where a call takes long."""
    size, most = FIRST_BYTES, MOST_BYTES[device.type]
    _timed(make(size), device)  # connects
    while True:
        seconds = max(slowest(_timed(make(size), device)), 1e-9)
        factor = TARGET_SECONDS[device.type] / seconds
        if size == most or factor < 2:
            break
        size = min(most, size * 2 ** min(6, int(factor).bit_length() - 1))
    call = make(size)
    _begin_together(device)
    repetitions = max(1, min(REPETITIONS, int(MOST_SECONDS / seconds)))
    return size / median(_timed(call, device) for _ in range(repetitions))


def _begin_together(device: torch.device) -> None:
    """Groups that share links are measured at the same time."""
    _synchronise(device)
    dist.all_reduce(torch.zeros(1, device=device))


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    _synchronise(device)
    began = time.perf_counter()
    call()
    _synchronise(device)
    return time.perf_counter() - began


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _buffers(size: int, ranks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    elements = max(1, size // (4 * ranks))
    return torch.zeros(elements, device=device), torch.zeros(elements * ranks, device=device)


def _all_gather(
    ranks: int, group: dist.ProcessGroup | None, device: torch.device, size: int
) -> Callable[[], Any]:
    # torch 2.13 gave it this name, and warns of the one before
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    shard, whole = _buffers(size, ranks, device)
    return lambda: gather(whole, shard, group=group)


def _reduce_scatter(
    ranks: int, group: dist.ProcessGroup | None, device: torch.device, size: int
) -> Callable[[], Any]:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    shard, whole = _buffers(size, ranks, device)
    return lambda: scatter(shard, whole, group=group)

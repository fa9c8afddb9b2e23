"""Artificial machines: what measuring would say of a machine that is exactly as the cost model has
it, with noise, wrong repeats and parts that are slow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp

from fsdpplan.cost.kernels.rates import matmul_seconds
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.measurement import (
    GroupKind,
    MeasuredAttention,
    MeasuredCall,
    MeasuredCopy,
    MeasuredLaunch,
    MeasuredMachine,
    MeasuredMatmul,
    MeasuredMemory,
    Measurement,
)
from fsdpplan.spec.plan import Collective
from fsdpplan.validate.calibrate.levels import predicted_call_seconds
from fsdpplan.validate.compare.measured_kernels import attention_seconds

COLLECTIVES: tuple[Collective, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "send_recv",
    "broadcast",
)
SIZES = tuple(2**power for power in range(10, 31, 2))
SHAPES = ((4096, 4096, 4096), (8192, 4096, 4096), (8192, 14336, 4096), (2048, 8192, 8192))


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How times come out."""

    noise: float = 0.02
    """Standard deviation of log time."""
    outliers: float = 0.05
    """Share of repeats that take two to ten times as long."""
    repeats: int = 25
    seed: int = 0

    def repeat(self) -> Callable[[float], tuple[float, ...]]:
        chance = random.Random(self.seed)

        def seconds(true: float) -> tuple[float, ...]:
            return tuple(
                true
                * exp(chance.gauss(0, self.noise))
                * (chance.uniform(2, 10) if chance.random() < self.outliers else 1)
                for _ in range(self.repeats)
            )

        return seconds


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is slow, by which factor."""

    ranks: dict[int, float] = field(default_factory=dict)
    """The device of a rank."""
    pairs: dict[tuple[int, int], float] = field(default_factory=dict)
    """The link between two neighbours; whatever group it is in waits for it."""
    levels: dict[str, float] = field(default_factory=dict)


def log_of(
    cluster: Cluster,
    *,
    clock: Clock = Clock(),
    faults: Faults = Faults(),
    sizes: tuple[int, ...] = SIZES,
    collectives: tuple[Collective, ...] = COLLECTIVES,
) -> tuple[Measurement, ...]:
    """All that calibrating `cluster` would measure."""
    return (
        machine_of(cluster),
        *device_rows(cluster, clock=clock, faults=faults),
        *call_rows(cluster, clock=clock, faults=faults, sizes=sizes, collectives=collectives),
    )


def machine_of(cluster: Cluster) -> MeasuredMachine:
    is_cpu = cluster.device.kind == "cpu"
    return MeasuredMachine(
        world=cluster.gpus,
        ranks_per_node=cluster.gpus_per_node,
        hosts=tuple(f"n{index:02}" for index in range(1, cluster.nodes + 1)),
        device_kind=cluster.device.kind,
        device_name="NVIDIA H100 80GB HBM3" if not is_cpu else "AMD EPYC 9B14",
        memory_bytes=None if is_cpu else cluster.device.memory_bytes,
        multiprocessors=None if is_cpu else cluster.device.multiprocessors,
        backend="gloo" if is_cpu else "nccl",
        torch="2.13.0",
        nccl=None if is_cpu else "2.27.3",
        date="2026-11-22T10:00:00Z",
    )


def device_rows(
    cluster: Cluster,
    *,
    clock: Clock = Clock(),
    faults: Faults = Faults(),
) -> Iterator[Measurement]:
    """Matmuls, memory, attention, launches and copies of every rank."""
    device, seconds = cluster.device, clock.repeat()
    dtypes = ("bf16", "fp32") if device.kind == "cpu" else ("bf16",)
    eight_bit = ("fp8",) if device.peak_fp8_flops_per_second is not None else ()
    memory = device.memory_bandwidth_bytes_per_second * device.fit.memory_fraction
    for rank in range(cluster.gpus):
        slow = faults.ranks.get(rank, 1.0)
        for m, n, k in SHAPES:
            for dtype in (*dtypes, *eight_bit):
                true = matmul_seconds(m=m, n=n, k=k, dtype=dtype, device=device)
                row = MeasuredMatmul(rank=rank, m=m, n=n, k=k, dtype=dtype, seconds=())
                yield replace(row, seconds=seconds(slow * true))
        for traffic_bytes in (2**26, 2**28, 2**30):
            times = seconds(slow * traffic_bytes / memory)
            yield MeasuredMemory(rank=rank, traffic_bytes=traffic_bytes, seconds=times)
        for seq_len in (2048, 8192):
            for direction in ("forward", "backward"):
                attention = MeasuredAttention(
                    rank=rank,
                    batch=1,
                    heads=32,
                    kv_heads=8,
                    seq_len=seq_len,
                    head_dim=128,
                    dtype="bf16",
                    direction=direction,
                    seconds=(),
                )
                true = attention_seconds(attention, device)
                yield replace(attention, seconds=seconds(slow * true))
        launch = 1000 * device.fit.kernel_launch_seconds
        yield MeasuredLaunch(rank=rank, kernels=1000, seconds=seconds(launch))
        if device.kind == "cuda":
            for direction in ("host_to_device", "device_to_host"):
                copied = 2**28
                rate = device.fit.host_link_fraction * device.host_link_bytes_per_second
                times = seconds(copied / rate)
                yield MeasuredCopy(
                    rank=rank, direction=direction, pinned=True, copied_bytes=copied, seconds=times
                )


def call_rows(
    cluster: Cluster,
    *,
    clock: Clock = Clock(),
    faults: Faults = Faults(),
    sizes: tuple[int, ...] = SIZES,
    collectives: tuple[Collective, ...] = COLLECTIVES,
) -> Iterator[MeasuredCall]:
    """Every collective on the ranks of each node, on like ranks of all nodes, on all; and a large
    message between neighbours, in a node and over nodes."""
    seconds = clock.repeat()
    world, per_node, nodes = cluster.gpus, cluster.gpus_per_node, cluster.nodes
    shapes: list[tuple[GroupKind, int, int, range]] = [
        ("inside", per_node, 1, range(0, world, per_node)),
        ("across", nodes, per_node, range(per_node)),
        ("world", world if nodes > 1 and per_node > 1 else 1, 1, range(1)),
    ]
    for kind, ranks, stride, firsts in shapes:
        for collective, size, first in product(collectives, sizes, firsts if ranks > 1 else ()):
            call = _call(kind, collective, first, ranks, stride, len(firsts), size)
            yield _timed(call, cluster, faults, seconds)
    for first in range(world):
        for stride, has_next in (
            (1, (first + 1) % per_node > 0),
            (per_node, first + per_node < world),
        ):
            if has_next:
                pair = _call("pair", "send_recv", first, 2, stride, world // 2, sizes[-3])
                yield _timed(pair, cluster, faults, seconds)


def _call(
    kind: GroupKind,
    collective: Collective,
    first_rank: int,
    ranks: int,
    stride: int,
    at_once: int,
    size: int,
) -> MeasuredCall:
    return MeasuredCall(
        group=kind,
        axis=None,
        collective=collective,
        first_rank=first_rank,
        ranks=ranks,
        stride=stride,
        groups_at_once=at_once,
        gathered_bytes=size,
        seconds=(),
    )


def _timed(
    call: MeasuredCall,
    cluster: Cluster,
    faults: Faults,
    seconds: Callable[[float], tuple[float, ...]],
) -> MeasuredCall:
    """`call` with its times: a group waits for the slowest link in it."""
    last = call.first_rank + (call.ranks - 1) * call.stride
    if call.group == "pair":
        within = [faults.pairs.get((call.first_rank, last), 1.0)]
    else:
        within = [
            factor
            for (one, other), factor in faults.pairs.items()
            if call.first_rank <= one and other <= last and (other - one) % call.stride == 0
        ]
    slowed = replace(
        cluster,
        levels=tuple(
            replace(
                level,
                port_bandwidth_bytes_per_second=level.port_bandwidth_bytes_per_second
                / faults.levels.get(level.name, 1.0),
            )
            for level in cluster.levels
        ),
    )
    slow = max([1.0, *within])
    return replace(call, seconds=seconds(slow * predicted_call_seconds(call, slowed)))

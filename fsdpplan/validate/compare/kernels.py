"""Kernels: tables of measured matmuls and collectives, and what the cost model says of each row."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from fsdpplan.cost.kernels.rates import matmul_flops, matmul_seconds, throttled_seconds
from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import group_placement
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.profiles.catalogue import load_node
from fsdpplan.files.runs.kernels import (
    TimedCollective,
    TimedMatmul,
    read_timed_collectives,
    read_timed_matmuls,
)
from fsdpplan.spec.cluster import Cluster, Device
from fsdpplan.spec.plan import Collective
from fsdpplan.validate.runs.fabric import request_for

SWEPT = ("A100-SXM4-80GB", "H100-SXM", "B200-SXM")
"""GPUs whose matmul shapes were swept, as the table names them."""

NODES = {
    "HGX A100": "dgx-a100-80g-hdr",
    "8x A100": "dgx-a100-80g-hdr",
    "HGX H100": "dgx-h100",
    "8x H100 NVSwitch": "dgx-h100",
    "8x H100 (AWS)": "p5-48xlarge",
    "p4de.24xlarge": "p4de-24xlarge",
    "a3-megagpu-8g": "gcp-a3-megagpu-8g",
    "a3-highgpu-8g": "gcp-a3-highgpu-8g",
    "PCIe": "pcie-8xl40s",
    "HGX B200": "dgx-b200",
    "Lambda 1-Click Cluster 8x B200": "dgx-b200",
    "Nebius 8x H100": "dgx-h100",
}
"""Node profile of each machine, as the table names them: words of its sources, which no profile
has."""

MOST_GPUS = {"PCIe": 2}
"""GPUs up to which the rows of a machine are read: four and eight L40S of that one met only at host
bridges and sockets, 4 and 12 times slower than two at a switch, which is no fact about L40S."""

COLLECTIVES: dict[str, Collective] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
    "broadcast": "broadcast",
}

CAST_BYTES_PER_ELEMENT = 5
"""Traffic of the dynamic cast that the fp8 rows include: the largest value is sought (2 bytes are
read), then each element is read again and written (2 + 1). Source: the collector of those rows runs
a TensorRT-LLM `Linear` without an input scale (collector/trtllm/collect_gemm.py)."""

CAST_START_SECONDS = {"h100-sxm-80g": 9e-6, "b200-sxm-180g": 14e-6}
"""What the two kernels of that cast take whatever their size, by device: the multiple of 1 us that
fits best beside the start of bf16 products, which have no cast. Like the bandwidth it belongs to
that program, on its two machines."""

OTHER_CAST_START_SECONDS = 1e-5
"""The same on a GPU that the program's rows do not have."""

CAST_BANDWIDTH_FRACTION = 0.6
"""Share of the memory bandwidth that those kernels reach: the multiple of 0.05 that fits both GPUs
best. It belongs to that program's kernels and is used for its rows alone."""

SMALLEST = 1024
"""Least m, n and k of the rows that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRow:
    """One measured product."""

    device: str
    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def sweep(self) -> str:
        """The rows that belong together."""
        return f"{self.device} {self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One measured collective."""

    source: str
    profile: str
    gpus: int
    nodes: int
    collective: Collective
    gathered_bytes: float
    seconds: float
    fastest_seconds: float | None
    """Of the source's own range; None where it gives none."""
    slowest_seconds: float | None

    @property
    def sweep(self) -> str:
        """The rows that belong together: one source on one machine."""
        return f"{self.source} {self.profile}"


Row = TypeVar("Row", MatmulRow, CollectiveRow)


def by_sweep(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each sweep, in their order."""
    sweeps: dict[str, list[Row]] = {}
    for row in rows:
        sweeps.setdefault(row.sweep, []).append(row)
    return sweeps


@lru_cache(maxsize=1)
def swept_devices() -> dict[str, str]:
    """Device profile of each GPU of `SWEPT`."""
    return {gpu: load_node(request_for(gpu).profile).device for gpu in SWEPT}


def read_matmuls(path: Path) -> tuple[MatmulRow, ...]:
    """The swept shapes with m, n, k >= 1024 on a GPU that has a profile."""
    return tuple(
        matmul_row(one, swept_devices()[one.gpu])
        for one in read_timed_matmuls(path)
        if one.gpu in SWEPT and min(one.m, one.n, one.k) >= SMALLEST
    )


def matmul_row(timed: TimedMatmul, device: str) -> MatmulRow:
    """A row of the table on a device of that profile."""
    seconds = matmul_flops(m=timed.m, n=timed.n, k=timed.k) / timed.flops_per_second
    return MatmulRow(
        device=device, dtype=timed.dtype, m=timed.m, n=timed.n, k=timed.k, seconds=seconds
    )


def read_collectives(path: Path) -> tuple[CollectiveRow, ...]:
    """All rows on a machine that has a profile."""
    return tuple(
        collective_row(one, NODES[one.node_type])
        for one in read_timed_collectives(path)
        if one.node_type in NODES and one.gpus <= MOST_GPUS.get(one.node_type, one.gpus)
    )


def collective_row(timed: TimedCollective, profile: str) -> CollectiveRow:
    """A row of the table on nodes of that profile."""
    collective, gpus, count = COLLECTIVES[timed.collective], timed.gpus, timed.bytes

    def seconds_at(bus_bytes_per_second: float) -> float:
        factor = {"all_reduce": 2.0, "send_recv": gpus / max(1, gpus - 1)}.get(collective, 1.0)
        return factor * count * (gpus - 1) / gpus / bus_bytes_per_second

    seconds = timed.seconds
    if seconds is None:
        assert timed.bus_bytes_per_second is not None
        seconds = seconds_at(timed.bus_bytes_per_second)
    band = re.search(r"range ([\d.]+)-([\d.]+)", timed.notes)
    return CollectiveRow(
        source=timed.source,
        profile=profile,
        gpus=gpus,
        nodes=timed.nodes,
        collective=collective,
        gathered_bytes=count,
        seconds=seconds,
        fastest_seconds=seconds_at(float(band[2]) * 1e9) if band else None,
        slowest_seconds=seconds_at(float(band[1]) * 1e9) if band else None,
    )


def predicted_matmul_seconds(row: MatmulRow, *, device: Device, with_cast: bool = True) -> float:
    """Time of the product, and of the cast in front of an fp8 one where the row includes it."""
    fresh = matmul_seconds(m=row.m, n=row.n, k=row.k, dtype=row.dtype, device=device)
    seconds = throttled_seconds(fresh, device)
    if row.dtype != "fp8" or not with_cast:
        return seconds
    memory = device.memory_bandwidth_bytes_per_second * CAST_BANDWIDTH_FRACTION
    cast = row.m * row.k * CAST_BYTES_PER_ELEMENT / memory
    return seconds + cast + CAST_START_SECONDS.get(row.device, OTHER_CAST_START_SECONDS)


def predicted_collective_seconds(row: CollectiveRow, *, cluster: Cluster) -> float:
    """Time of the call on the first ranks of `cluster`."""
    placement = group_placement(cluster=cluster, ranks=row.gpus, stride=1)
    return collective_seconds(
        collective=row.collective, gathered_bytes=row.gathered_bytes, placement=placement
    )


@lru_cache(maxsize=64)
def cluster_of(profile: str, gpus: int, nodes: int) -> Cluster:
    """The cluster that a row was measured on."""
    if gpus % nodes:
        raise SpecError(f"{gpus} GPUs do not fill {nodes} nodes: give a multiple")
    return load_cluster(profile, gpus=gpus, gpus_per_node=gpus // nodes).cluster

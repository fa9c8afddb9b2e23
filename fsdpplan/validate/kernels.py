"""Kernels: tables of measured matmuls and collectives, and what the cost model says of each row."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from fsdpplan.cost.collectives import Collective, collective_seconds
from fsdpplan.cost.matmul import matmul_flops, matmul_seconds
from fsdpplan.cost.placement import group_placement
from fsdpplan.errors import SpecError
from fsdpplan.files.clusters import load_cluster
from fsdpplan.files.table import read_text
from fsdpplan.spec.cluster import Cluster, Device

LIMIT_BYTES = 16 * 2**20

DEVICES = {
    "A100-SXM4-80GB": "a100-sxm-80g",
    "H100-SXM": "h100-sxm-80g",
    "B200-SXM": "b200-sxm-180g",
}
"""Device profile of each GPU whose matmul shapes were swept."""

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
}
"""Node profile of each machine, as the table names them."""

MOST_GPUS = {"PCIe": 2}
"""GPUs up to which the rows of a machine are read: four and eight L40S of that one met only at host
bridges and sockets, 4 and 12 times slower than two at a switch, which is no fact about L40S."""

COLLECTIVES: dict[str, Collective] = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}

CAST_BYTES_PER_ELEMENT = 5
"""Traffic of the dynamic cast that the fp8 rows include: the largest value is sought (2 bytes are
read), then each element is read again and written (2 + 1). Source: the collector of those rows runs
a TensorRT-LLM `Linear` without an input scale (collector/trtllm/collect_gemm.py)."""

CAST_KERNELS = 2
"""Kernels of that cast."""

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


def read_matmuls(path: Path) -> tuple[MatmulRow, ...]:
    """The swept shapes with m, n, k >= 1024 on a GPU that has a profile."""
    rows = []
    for row in _rows(path):
        m, n, k = (int(row[key]) for key in ("m", "n", "k"))
        if row["gpu"] in DEVICES and min(m, n, k) >= SMALLEST:
            seconds = matmul_flops(m=m, n=n, k=k) / (float(row["achieved_tflops"]) * 1e12)
            device = DEVICES[row["gpu"]]
            rows.append(
                MatmulRow(device=device, dtype=row["dtype"], m=m, n=n, k=k, seconds=seconds)
            )
    return tuple(rows)


def read_collectives(path: Path) -> tuple[CollectiveRow, ...]:
    """All rows on a machine that has a profile."""
    return tuple(
        _collective(row)
        for row in _rows(path)
        if row["node_type"] in NODES
        and int(row["gpus"]) <= MOST_GPUS.get(row["node_type"], int(row["gpus"]))
    )


def _collective(row: dict[str, str]) -> CollectiveRow:
    collective = COLLECTIVES[row["collective"]]
    gpus, count = int(row["gpus"]), float(row["bytes"])

    def seconds_at(bus_gigabytes: float) -> float:
        factor = {"all_reduce": 2.0, "send_recv": gpus / (gpus - 1)}.get(collective, 1.0)
        return factor * count * (gpus - 1) / gpus / (bus_gigabytes * 1e9)

    measured = row["time_us"]
    seconds = float(measured) * 1e-6 if measured else seconds_at(float(row["busbw_gbs"]))
    band = re.search(r"range ([\d.]+)-([\d.]+)", row["notes"])
    return CollectiveRow(
        source=row["source_id"],
        profile=NODES[row["node_type"]],
        gpus=gpus,
        nodes=int(row["nodes"]),
        collective=collective,
        gathered_bytes=count,
        seconds=seconds,
        fastest_seconds=seconds_at(float(band[2])) if band else None,
        slowest_seconds=seconds_at(float(band[1])) if band else None,
    )


def _rows(path: Path) -> Iterator[dict[str, str]]:
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="table")
    return iter(csv.DictReader(io.StringIO(text)))


def predicted_matmul_seconds(row: MatmulRow, *, device: Device) -> float:
    """Time of the product, and of the cast in front of it where the row includes one."""
    seconds = matmul_seconds(m=row.m, n=row.n, k=row.k, dtype=row.dtype, device=device)
    if row.dtype != "fp8":
        return seconds
    memory = device.memory_bandwidth_bytes_per_second * CAST_BANDWIDTH_FRACTION
    cast = row.m * row.k * CAST_BYTES_PER_ELEMENT / memory
    return seconds + cast + CAST_KERNELS * device.fit.matmul_start_seconds


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
        raise SpecError(f"{gpus} GPUs do not fill {nodes} nodes")
    return load_cluster(profile, gpus=gpus, gpus_per_node=gpus // nodes).cluster

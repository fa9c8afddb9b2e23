"""Measurement: what `calibrate` times on a machine, one value a row of its log.

Each holds the seconds of all its repeats, first to last, after warm-up; of a collective, those of
its slowest rank. Ranks are numbered node by node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdpplan.spec.plan import Collective

GroupKind = Literal["inside", "across", "world", "axis", "pair"]
"""Ranks of one node; one rank of each node; all; one axis of the plan's mesh; two ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """What was measured on; the first row of a log."""

    world: int
    ranks_per_node: int
    hosts: tuple[str, ...]
    """One a node, in the order of ranks."""
    device_kind: Literal["cuda", "cpu"]
    device_name: str
    """As the driver has it; of a CPU, its model."""
    memory_bytes: int | None
    """Memory that torch reports for one device; None for a CPU."""
    multiprocessors: int | None
    backend: Literal["nccl", "gloo"]
    torch: str
    nccl: str | None
    date: str
    """ISO, UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMatmul:
    """(m x k) @ (k x n)."""

    rank: int
    m: int
    n: int
    k: int
    dtype: Literal["bf16", "fp16", "fp32", "fp8"]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """An element-wise kernel that moves `traffic_bytes`, read and written."""

    rank: int
    traffic_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAttention:
    """Causal attention as torch dispatches it."""

    rank: int
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: Literal["bf16", "fp16", "fp32"]
    direction: Literal["forward", "backward"]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLaunch:
    """`kernels` tiny kernels in a row, from one eager program."""

    rank: int
    kernels: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCopy:
    """A copy between device and host."""

    rank: int
    direction: Literal["host_to_device", "device_to_host"]
    pinned: bool
    copied_bytes: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCall:
    """One collective on groups of equal shape, of which `groups_at_once` work at the same time."""

    group: GroupKind
    axis: str | None
    """Of `axis`: the mesh axis, such as `dp_shard`."""
    collective: Collective
    first_rank: int
    """First rank of the group whose seconds these are."""
    ranks: int
    stride: int
    """Ranks between neighbours of the group."""
    groups_at_once: int
    gathered_bytes: int
    """The full unsharded buffer, as everywhere."""
    seconds: tuple[float, ...]


Measurement = (
    MeasuredMachine
    | MeasuredMatmul
    | MeasuredMemory
    | MeasuredAttention
    | MeasuredLaunch
    | MeasuredCopy
    | MeasuredCall
)

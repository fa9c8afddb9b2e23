"""Offload: what stays on the device when FSDP2 keeps shards in host memory.

`CPUOffloadPolicy` keeps parameter shards, gradient shards and the optimizer in pinned host memory:
a unit's shard is copied to the device for its all-gather, its reduced gradient back to the host,
and the optimizer runs on the CPU. Source: torch 2.13 torch/distributed/fsdp/_fully_shard,
`FSDPParam.all_gather_inputs` and `foreach_reduce`.
"""

from __future__ import annotations

from fsdpplan.cost.memory.ledger import StateBytes
from fsdpplan.cost.memory.rank_quantities import RankSizes
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout

UNITS_IN_FLIGHT = 2
"""The unit at work and the one that is gathered, or reduced, beside it."""


def require_offloadable(layout: Layout) -> None:
    """Raise SpecError where nothing would be offloaded."""
    if layout.offload == "cpu" and layout.sharding != "fsdp":
        raise SpecError(
            f"offload cpu is that of FSDP2, which sharding {layout.sharding} is not: use "
            "--sharding fsdp, or --offload none"
        )


def staging_bytes(sizes: RankSizes) -> int:
    """fp32 shards of units on their way to or from the host."""
    unit = max(sizes.unit_blocks * sizes.shard_block_elements, sizes.shard_root_elements)
    return UNITS_IN_FLIGHT * unit * FP32_BYTES


def host_bytes(*, state: StateBytes, sizes: RankSizes, layout: Layout) -> int:
    """Parameters, gradients and optimizer state of one rank in host memory."""
    if layout.offload == "none":
        return 0
    elements = sizes.blocks * sizes.shard_block_elements + sizes.shard_root_elements
    return state.parameters + state.optimizer + FP32_BYTES * elements

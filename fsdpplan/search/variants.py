"""Variants: choices that change a layout's time but hardly its place in memory.

They are tried on layouts that can still come first, so that the search stays fast.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.search.fitting import Question
from fsdpplan.spec.layout import Layout

WRAP_BLOCKS = (2, 4)
"""Blocks an FSDP unit beside one: fewer and larger collectives for more memory."""

DDP_BUCKETS_BYTES = (100 * 2**20, 400 * 2**20)
"""Buckets of DDP beside its default."""


def overlapped(asked: Question, layout: Layout) -> tuple[Layout, ...]:
    """`layout` with tensor-parallel collectives beside their matmuls, where that can be had."""
    can_overlap = layout.compile or asked.training.traits.fused_kernels
    if layout.tp == 1 or not can_overlap or asked.pins.async_tp is not None:
        return ()
    return (replace(layout, async_tp=True),)


def buckets(asked: Question, layout: Layout) -> tuple[Layout, ...]:
    """`layout` with other buckets, where the user has not fixed them."""
    if layout.sharding == "fsdp" and asked.pins.wrap_blocks is None:
        stage_blocks = asked.model.layers // (layout.pp * layout.virtual_stages)
        return tuple(replace(layout, wrap_blocks=n) for n in WRAP_BLOCKS if n <= stage_blocks)
    is_ddp = layout.sharding == "ddp" and layout.dp_replicate > 1
    if is_ddp and asked.pins.ddp_bucket_bytes is None:
        return tuple(replace(layout, ddp_bucket_bytes=size) for size in DDP_BUCKETS_BYTES)
    return ()

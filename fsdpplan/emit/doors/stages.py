"""Which blocks each pipeline stage has, for programs that must be told."""

from __future__ import annotations

from itertools import accumulate

from fsdpplan.spec.layout import Layout


def stage_ranges(layout: Layout) -> tuple[range, ...]:
    """Numbers of the blocks of each stage, first stage to last."""
    blocks = layout.stage_blocks
    assert blocks, "a plan that is read names the blocks of its stages"
    ends = list(accumulate(blocks))
    return tuple(range(end - size, end) for size, end in zip(blocks, ends, strict=True))

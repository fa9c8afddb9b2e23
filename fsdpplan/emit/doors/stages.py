"""Which blocks each pipeline stage has, for programs that must be told."""

from __future__ import annotations

from itertools import accumulate
from math import floor

from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan

_ROUNDING = 1e-9


def stage_ranges(plan: Plan) -> tuple[range, ...]:
    """Numbers of the blocks of each stage of a dense model, first stage to last."""
    layout = plan.layout
    blocks = layout.stage_blocks or balanced_blocks(
        plan.model, stages=layout.pp * layout.virtual_stages
    )
    ends = list(accumulate(blocks))
    return tuple(range(end - size, end) for size, end in zip(blocks, ends, strict=True))


def balanced_blocks(model: Model, *, stages: int) -> tuple[int, ...]:
    """The split by which a plan without `stage_blocks` was priced.

        min over splits of max(n_1, ..., n_(S-1), n_S + head)
        head = V h / (matmul weights of a block)

    What may be left out anywhere is left out of the first stages. The same rule stands in the cost
    model and in the trainer; a test compares them.
    """
    layers, head = model.layers, model.vocab * model.hidden / _block_weights(model)
    loads = {float(n) for n in range(1, layers + 1)} | {n + head for n in range(1, layers + 1)}
    for load in sorted(loads):
        most, last = floor(load + _ROUNDING), max(1, floor(load - head + _ROUNDING))
        if most >= 1 and (stages - 1) * most + last >= layers:
            break
    blocks = [most] * (stages - 1) + [last]
    while sum(blocks) > layers:
        blocks[blocks.index(max(blocks))] -= 1
    return tuple(blocks)


def _block_weights(model: Model) -> int:
    """Weights of a dense block's matmuls."""
    attention = model.hidden * (2 * model.query_dim + 2 * model.kv_dim)
    return attention + model.hidden * model.ffn_hidden * (3 if model.is_gated else 2)

"""Traded heads: the calls of all-to-all attention, which the trainer's CPU processes run.

Torch's ring attention has kernels for CUDA only. On CPU ranks that share a sequence trade heads for
tokens around attention: queries, keys and values in one call, the outputs in another. Counts and
bytes equal those of the trainer (tests/trainer).

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3;
fsdpplan/trainer/parallel/context_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from fsdpplan.cost.model.formats import local_tokens
from fsdpplan.cost.network.placement import cp_group
from fsdpplan.cost.traffic.calls import BlockCall, Pass
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES

ALIBI_COLUMNS = 8
"""Columns that the trainer adds to queries and keys, whose product is the bias by distance."""


def traded_heads_calls(case: Case) -> Iterator[BlockCall]:
    """Two all-to-alls a pass, all exposed.

    Recomputation repeats them, but that of attention alone ends before the second.
    """
    training, layout = case.training, case.layout
    tokens = local_tokens(training=training, layout=layout)
    into, out = traded_widths(case.model, layout)
    passes: list[tuple[Pass, int]] = [("forward", into), ("forward", out)]
    if layout.activation_checkpointing != "none":
        passes.append(("recompute", into))
    if layout.activation_checkpointing in ("op", "full"):
        passes.append(("recompute", out))
    for when, width in (*passes, ("backward", out), ("backward", into)):
        yield BlockCall(
            when=when,
            collective="all_to_all",
            group=cp_group(layout),
            dtype=training.activation_dtype,
            call_bytes=tokens * width * DTYPE_BYTES[training.activation_dtype],
        )


def traded_widths(model: Model, layout: Layout) -> tuple[int, int]:
    """(widths of queries, keys and values together, width of the outputs) of one token on a rank.

    Keys and values of too few heads are repeated until the ranks divide them, and the g query heads
    of each made up by zeros for its copies to share; or heads are added with their groups, where
    that sends fewer queries:

        copies = cp / gcd(key heads, cp)
        heads = min(key heads * ceil(g / copies) * copies, ceil(key heads / cp) * cp * g)
    """
    heads = model.heads // layout.tp
    keys = heads if model.latent else model.kv_heads // layout.tp
    group, copies = heads // keys, layout.cp // gcd(keys, layout.cp)
    repeated, added = keys * _multiple(group, copies), _multiple(keys, layout.cp) * group
    heads, keys = (added, added // group) if added < repeated else (repeated, keys * copies)
    key_width = model.head_dim + (ALIBI_COLUMNS if model.positions == "alibi" else 0)
    value_width = model.value_dim // model.heads
    return heads * key_width + keys * (key_width + value_width), heads * value_width


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of

"""Norms of queries and of keys over all heads together, of which tensor parallelism splits.

Each rank has some heads' squares of a token; the ranks add up their sums, and in backward the
gradients of these. So fsdpplan/trainer/model/norms.py does it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.memory.sizes import local_tokens
from fsdpplan.cost.network.groups import tp_group
from fsdpplan.cost.traffic.calls import BlockCall, Pass
from fsdpplan.spec.case import Case
from fsdpplan.spec.training import DTYPE_BYTES


def all_heads_norm_calls(case: Case, passes: tuple[Pass, ...]) -> Iterator[BlockCall]:
    """One fp32 number a token for queries, and one for keys, in each of the forward `passes` and in
    backward."""
    model, layout = case.model, case.layout
    if not model.qk_norm or model.qk_norm_width != "all_heads" or model.latent:
        return
    for when in (*passes, "backward"):
        yield BlockCall(
            when=when,
            collective="all_reduce",
            group=tp_group(layout),
            dtype="fp32",
            count=2,
            call_bytes=DTYPE_BYTES["fp32"] * local_tokens(training=case.training, layout=layout),
        )

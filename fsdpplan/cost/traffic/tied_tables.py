"""Tied tables: what the two ends of a pipeline exchange so that their copies stay equal.

Priced for runtime fsdp2, whose trainer is ours; what others do of it is in what was fitted to them.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.cost.model.params import embedding_tensors
from fsdpplan.cost.model.shards import Stage, unit_size
from fsdpplan.cost.network.groups import pp_group
from fsdpplan.cost.schedule.actions import V_SCHEDULES
from fsdpplan.cost.traffic.calls import Calls, group_seconds
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import DTYPE_BYTES


def exchanges_tables(case: Case) -> bool:
    """Embedding and head share a table and lie on different ranks, of our trainer's."""
    layout = case.layout
    is_distant = layout.pp > 1 and layout.schedule not in V_SCHEDULES
    return case.model.tied_embeddings and is_distant and case.training.runtime == "fsdp2"


def table_gradient_bytes(*, model: Model, layout: Layout, rank: int = 0) -> int:
    """Reduced fp32 gradient of one rank's part of the table.

        4 * ceil(V / (tp n)) * h

    with n the ranks of a shard group: 1 where each rank keeps whole gradients. The last ranks of
    the group have less where n does not divide the rows.
    """
    ranks = layout.shard_ranks if layout.sharding in ("fsdp", "zero2") else 1
    table = unit_size(embedding_tensors(model)[:1], tp=layout.tp, shard_ranks=ranks)
    most = table.padded_elements // ranks
    before = (rank // layout.tp) % ranks * most
    return DTYPE_BYTES["fp32"] * max(0, min(most, table.elements - before))


def table_calls(case: Case, stage: Stage) -> Iterator[Calls]:
    """The gradient that an end of the pipeline sends to the other, once a step.

    Each adds what it receives to its own. Source: `fsdpplan.trainer.parallel.tied_tables`;
    Megatron-LM all-reduces over the two in the same place.
    """
    layout = case.layout
    one_end = stage.has_embedding != stage.has_head
    if one_end and exchanges_tables(case):
        yield Calls(
            collective="send_recv",
            group=pp_group(layout),
            dtype="fp32",
            count=1,
            call_bytes=table_gradient_bytes(model=case.model, layout=layout),
        )


def table_seconds(case: Case) -> float:
    """Time of the exchange, between the last backward pass and the gradient norm: all wait."""
    layout = case.layout
    if not exchanges_tables(case):
        return 0.0
    size = table_gradient_bytes(model=case.model, layout=layout)
    return group_seconds(case.cluster, pp_group(layout), "send_recv", size)

"""Start memory: the device's peaks before the first step, and while a checkpoint is written.

FSDP2 builds on the meta device, so only shards are ever made; the reference trainer draws each
parameter whole, one at a time, to fill them. FSDP1 makes a unit whole and flattens it. DDP makes
the model, then buckets for all gradients. Softwares with half-precision parameters make the masters
and gradient buffers of the ledger before they train.

A checkpoint by torch.distributed.checkpoint writes what the rank holds: its state dictionary refers
to shards and copies none on the device; FSDP1 gathers unit after unit for it.

Sources: fsdpplan.trainer.model.weights; torch 2.13 torch/distributed/checkpoint/state_dict.py,
torch/nn/parallel/distributed.py, torch/distributed/fsdp/_state_dict_utils.py.
"""

from __future__ import annotations

from functools import lru_cache

from fsdpplan.cost.memory.ledger import rank_state
from fsdpplan.cost.model.block_sizes import FP32_BYTES
from fsdpplan.cost.model.params import block_tensors, embedding_tensors, head_tensors
from fsdpplan.cost.model.shards import Stage, block_kinds, root_size, unit_size
from fsdpplan.spec.case import Case
from fsdpplan.spec.model import Model

DDP_BROADCAST_BYTES = 250 * 2**20
"""Parameters that DDP flattens together to broadcast them at its start."""


def initialization_peak_bytes(case: Case, stage: Stage) -> int:
    """Allocated at the highest point before the first step."""
    training, layout = case.training, case.layout
    state = rank_state(case, stage)
    if training.traits.half_parameters:
        return state.parameters + state.gradients + FP32_BYTES * state.optimizer_parameters
    whole = largest_tensor_bytes(model=case.model, stage=stage, tp=layout.tp, ep=layout.ep)
    if layout.sharding == "fsdp":
        if training.traits.flat_parameters:
            whole = 2 * largest_unit_bytes(case, stage)
        return whole if layout.offload == "cpu" else state.parameters + whole
    beside = max(whole, state.gradients + min(DDP_BROADCAST_BYTES, state.parameters))
    return state.parameters + beside


def checkpoint_peak_bytes(case: Case, stage: Stage) -> int:
    """Allocated at the highest point of a sharded checkpoint between two steps."""
    layout = case.layout
    state = rank_state(case, stage)
    kept = 0 if layout.offload == "cpu" else state.parameters + state.optimizer
    gathered = 0
    if layout.sharding == "fsdp" and case.training.traits.flat_parameters:
        gathered = largest_unit_bytes(case, stage)
    return kept + state.gradients + gathered


@lru_cache(maxsize=1024)
def largest_tensor_bytes(*, model: Model, stage: Stage, tp: int, ep: int) -> int:
    """fp32 bytes of the largest parameter of a rank before FSDP shards it."""
    tensors = [t for kind, _ in block_kinds(model=model, stage=stage) for t in block_tensors(kind)]
    tensors += embedding_tensors(model) if stage.has_embedding else ()
    tensors += head_tensors(model) if stage.has_head else ()
    alone = (unit_size((tensor,), tp=tp, shard_ranks=1, ep=ep).elements for tensor in tensors)
    return FP32_BYTES * max(alone, default=0)


def largest_unit_bytes(case: Case, stage: Stage) -> int:
    """fp32 bytes of the largest FSDP unit of a rank, whole."""
    model, layout = case.model, case.layout
    root = root_size(
        model=model,
        tp=layout.tp,
        shard_ranks=1,
        has_embedding=stage.has_embedding,
        has_head=stage.has_head,
    ).elements
    blocks = (
        min(layout.wrap_blocks, number)
        * unit_size(block_tensors(kind), tp=layout.tp, shard_ranks=1, ep=layout.ep).elements
        for kind, number in block_kinds(model=model, stage=stage)
    )
    return FP32_BYTES * max(root, *blocks, 0)

"""Pipeline weights: what a backward pass that is split into halves keeps between them.

The half by inputs hands its gradient on; the half by weights comes later and needs the gradient of
each layer's output beside the layer's input, so both stay until then. The first stage has no input
to differentiate by: its first half does nothing, and its second one is a whole backward pass.

Source: torch 2.13 torch/distributed/pipelining/_backward.py and stage.py (`backward_one_chunk`,
`backward_weight_one_chunk`); checked against its schedules under a fake process group.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from fsdpplan.cost.formats import formats, local_tokens
from fsdpplan.cost.params import block_tensors
from fsdpplan.cost.shards import Stage, stage_elements
from fsdpplan.spec.layout import Layout, Schedule
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

ALL_SPLIT_SCHEDULES: tuple[Schedule, ...] = ("interleaved_zero_bubble", "zbv")
"""Every backward pass is split; DualPipeV splits only the first and last ones of a rank."""


def split_backward_bytes(*, model: Model, training: Training, layout: Layout, stage: Stage) -> int:
    """What a pipeline rank holds more than its activations under split backward passes.

    Outputs' gradients of the waiting micro-batches; weights' gradients in the compute dtype, which
    the weights' half leaves beside the ones that FSDP2 accumulates, until the stage's next backward
    pass; and the gradient of each micro-batch's input.
    """
    if layout.schedule not in ALL_SPLIT_SCHEDULES:
        return 0
    of = formats(training=training, layout=layout)
    tokens = local_tokens(training=training, layout=layout)
    residual_tokens = -(-tokens // layout.tp) if layout.sequence_parallel else tokens
    waiting = stage.waiting_blocks * output_gradient_elements(
        model=model, tokens=tokens, residual_tokens=residual_tokens, tp=layout.tp
    )
    later = [piece for piece in stage.pieces if not piece.has_embedding]
    inputs = len(later) * layout.num_microbatches * residual_tokens * model.hidden
    weights = [stage_elements(model=model, stage=piece, tp=layout.tp) for piece in later]
    # the two arms of a V take turns; else a rank is at work in one stage for a round
    recent = sum(weights) if layout.schedule == "zbv" else max(weights, default=0)
    kept_twice = recent * of.gathered if of.reduced != of.gathered else 0
    return waiting * of.computed + inputs * of.residual + kept_twice


@lru_cache(maxsize=4096)
def output_gradient_elements(*, model: Model, tokens: int, residual_tokens: int, tp: int) -> int:
    """Elements of the gradients of all layers' outputs in one block: of matrices and of norms."""
    active = model.experts.active if model.experts else 0
    elements = 0
    for tensor in block_tensors(model):
        shape = tensor.local_shape(tp)
        if tensor.is_expert:
            elements += active * tokens * shape[-2] if len(shape) == 3 else 0
        elif tensor.is_matrix:
            elements += tokens * shape[0]
        elif "norm" in tensor.name:
            elements += residual_tokens * prod(shape)
    return elements

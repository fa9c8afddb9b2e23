"""Windows: which blocks' attention is given a mask of all scores, and what masks take.

PyTorch's kernel for windows looks at a window's tiles only. Where there is none, the trainer adds a
mask to the scores, one for all blocks of a model part and all micro-batches; kernels that take a
mask read keys and values of every query head.

Source: fsdpplan/trainer/model/attention.py; its steps' peaks
(tests/ground_truth/test_block_kinds.py).
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cost.memory.activations import (
    BlockActivations,
    block_activations,
    saved_bytes_by_mode,
)
from fsdpplan.cost.memory.backward_steps import WeightGradientsOf
from fsdpplan.cost.model.block_sizes import BlockShape
from fsdpplan.cost.model.formats import formats
from fsdpplan.cost.model.shards import Stage
from fsdpplan.cost.model.torch_traits import has_windowed_kernel
from fsdpplan.spec.case import Case
from fsdpplan.spec.layout import ActivationCheckpointing
from fsdpplan.spec.model import Model
from fsdpplan.spec.training import Training

WIDEST_HEAD, WIDTH_STEP = 256, 8
"""Heads that the kernel for windows takes, as in the trainer."""


def masked_share(*, model: Model, training: Training) -> float:
    """Share of the model's blocks whose attention is given a mask."""
    is_narrow = 0 < model.sliding_window < training.seq_len
    if not (is_narrow and training.traits.reference_decoder):
        return 0.0
    fits = model.head_dim <= WIDEST_HEAD and model.head_dim % WIDTH_STEP == 0
    has_kernel = has_windowed_kernel(training) and fits and not model.attention_sinks
    if has_kernel and training.activation_dtype != "fp32":
        return 0.0
    return model.windowed_blocks / model.layers


def mask_bytes(case: Case, stage: Stage) -> int:
    """What a pipeline rank holds of masks, from its first forward pass on: one a virtual stage.

    A sink is a token more that all see. Under context parallelism a rank has the mask of all ranks'
    tokens.
    """
    model, training = case.model, case.training
    if not masked_share(model=model, training=training):
        return 0
    width = training.seq_len + int(model.attention_sinks)
    parts = sum(piece.blocks > 0 for piece in stage.pieces)
    return parts * width * width * formats(training=training, layout=case.layout).computed


def mean_activations(
    shape: BlockShape,
    *,
    masked: float,
    mode: ActivationCheckpointing,
    weight_gradients: WeightGradientsOf,
    experts_reduction: int = 0,
) -> BlockActivations:
    """Activations of a block of a model of whose blocks the share `masked` has masks: what it keeps
    in the mean, what it needs beside that as the larger of both kinds."""
    kinds = [
        (
            block_activations(
                shape=one,
                mode=mode,
                weight_gradients=weight_gradients,
                experts_reduction=experts_reduction,
            ),
            share,
        )
        for one, share in ((shape, 1 - masked), (replace(shape, masked=True), masked))
        if share
    ]
    if len(kinds) == 1:
        return kinds[0][0]
    (plain, _), (wide, _) = kinds
    saved = round(sum(share * kind.saved_bytes for kind, share in kinds))
    return replace(
        plain,
        saved_bytes=saved,
        live_bytes=saved + max(kind.live_bytes - kind.saved_bytes for kind, _ in kinds),
        forward_transient_bytes=max(plain.forward_transient_bytes, wide.forward_transient_bytes),
        backward_peak_bytes=max(plain.backward_peak_bytes, wide.backward_peak_bytes),
        inputs_half_peak_bytes=max(plain.inputs_half_peak_bytes, wide.inputs_half_peak_bytes),
    )


def mean_saved_bytes(shape: BlockShape, *, masked: float) -> dict[ActivationCheckpointing, int]:
    """What `mean_activations` says that a block keeps in each mode, and no more."""
    plain = saved_bytes_by_mode(shape) if masked < 1 else {}
    if not masked:
        return plain
    wide = saved_bytes_by_mode(replace(shape, masked=True))
    if not plain:
        return wide
    return {mode: round((1 - masked) * plain[mode] + masked * wide[mode]) for mode in wide}

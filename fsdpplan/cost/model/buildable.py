"""Buildable: which models the reference decoder of `fsdpplan.trainer` can be.

The trainer refuses the others in words (trainer/parallel/support.py); a test holds both together.
"""

from __future__ import annotations

from fsdpplan.spec.model import Model


def trainer_builds(*, model: Model, seq_len: int) -> bool:
    """Whether the reference decoder has this shape for sequences of `seq_len` tokens.

    It is any shape that a model can have: but rotation turns pairs, and a position table ends.
    """
    if model.positions == "learned":
        return seq_len <= model.max_positions
    turned = model.latent.rope_head_dim if model.latent else model.head_dim
    return model.positions != "rope" or turned % 2 == 0

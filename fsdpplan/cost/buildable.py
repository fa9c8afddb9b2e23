"""Buildable: which models the reference decoder of `fsdpplan.trainer` can be.

The trainer refuses the others in words (trainer/config.py and support.py); a test holds the two
together.
"""

from __future__ import annotations

from fsdpplan.spec.model import Model


def trainer_builds(*, model: Model, seq_len: int) -> bool:
    """Whether the reference decoder has this shape for sequences of `seq_len` tokens.

    A window as long as the sequence is full causal attention, which it has.
    """
    return (
        model.experts is None
        and model.latent is None
        and model.mlp in ("swiglu", "gelu")
        and model.positions in ("rope", "learned")
        and model.qk_norm_width == "head"
        and model.norm_bias
        and not (model.post_norms or model.embedding_norm or model.attention_sinks)
        and (model.sliding_window == 0 or seq_len <= model.sliding_window)
    )

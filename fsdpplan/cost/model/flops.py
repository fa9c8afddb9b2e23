"""FLOPs: the useful work of a step, and what is executed.

One formula for MFU everywhere (planner, trainer, verification): six FLOPs a matmul weight and
token, the output head in and the embedding look-up out, of the routed experts the active ones,
plus causal attention.
"""

from __future__ import annotations

from fsdpplan.cost.model.params import matmul_parameter_count
from fsdpplan.spec.model import Model


def attention_span_tokens(*, seq_len: int, window: int = 0) -> float:
    """Keys that a query of causal attention meets, in the mean over a sequence.

        full: s / 2; windowed: w - w**2 / (2 s) where w < s

    The first w queries see a triangle, the others a band of w. Half of a diagonal counts.
    """
    if not 0 < window < seq_len:
        return seq_len / 2
    return window - window * window / (2 * seq_len)


def mean_attention_span_tokens(*, model: Model, seq_len: int) -> float:
    """`attention_span_tokens` in the mean over the blocks, windowed or not."""
    windowed = model.windowed_blocks
    full = model.layers - windowed
    spans = full * attention_span_tokens(seq_len=seq_len) + windowed * attention_span_tokens(
        seq_len=seq_len, window=model.sliding_window
    )
    return spans / model.layers


def attention_forward_flops_per_token(*, model: Model, seq_len: int) -> float:
    """FLOPs of causal attention in one block's forward, a token; the mean over blocks.

        2 FLOPs * span * (query_dim + value_dim), which is 2 * seq_len * query_dim
        without windows and with values as wide as keys

    The masked half of the score matrix is left out.
    """
    span = mean_attention_span_tokens(model=model, seq_len=seq_len)
    return 2.0 * span * (model.query_dim + model.value_dim)


def useful_flops_per_token(*, model: Model, seq_len: int) -> float:
    """FLOPs of forward and backward without recomputation, a token.

        6 * matmul parameters + 3 * layers * (causal attention forward)

    A multiplication and an addition a weight in forward, twice that in backward; the definition is
    commonly credited to PaLM (arXiv 2204.02311). Norms, rotations, activations, softmax and the
    loss are left out (below 1 % for hidden >= 1024).
    """
    attention = 3 * model.layers * attention_forward_flops_per_token(model=model, seq_len=seq_len)
    return 6.0 * matmul_parameter_count(model) + attention


def mfu_fraction(
    *,
    model: Model,
    seq_len: int,
    tokens_per_second_per_gpu: float,
    peak_flops_per_second: float,
) -> float:
    """Model FLOPs utilisation: useful FLOPs a second over the dense peak."""
    per_token = useful_flops_per_token(model=model, seq_len=seq_len)
    return per_token * tokens_per_second_per_gpu / peak_flops_per_second

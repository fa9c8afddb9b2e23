"""FLOPs: the useful work of a step, and what is executed.

One formula for MFU everywhere (planner, trainer, verification): six FLOPs a matmul weight and
token, the output head in and the embedding look-up out, plus causal attention.
"""

from __future__ import annotations

from fsdpplan.cost.params import matmul_parameter_count
from fsdpplan.spec.model import Model


def attention_forward_flops_per_token(*, model: Model, seq_len: int) -> float:
    """FLOPs of causal attention in one block's forward, a token.

        2 matmuls * 2 FLOPs * seq_len * query_dim / 2 = 2 * seq_len * query_dim

    Half of the score matrix is masked.
    """
    return 2.0 * seq_len * model.query_dim


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

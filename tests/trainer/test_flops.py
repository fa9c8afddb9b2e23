"""The MFU's FLOPs, against the planner's own count of matmul parameters."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpplan.cost.params import matmul_parameter_count
from fsdpplan.spec.model import Model
from fsdpplan.trainer.config import ModelConfig
from fsdpplan.trainer.flops import flops_per_token, matmul_parameters
from tests.trainer import plans

LLAMA_8B = {
    "layers": 32,
    "hidden": 4096,
    "ffn_hidden": 14336,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 128256,
    "qk_norm": False,
}


@pytest.mark.parametrize("model", [{}, plans.GPT2_STYLE, LLAMA_8B], ids=["tiny", "gpt2", "8b"])
def test_the_trainer_counts_as_the_planner(model: dict[str, Any]) -> None:
    fields = {**plans.MODEL, **model}
    assert matmul_parameters(ModelConfig(**fields)) == matmul_parameter_count(Model(**fields))


def test_eight_billion_parameters_at_8192_tokens() -> None:
    config = ModelConfig(**{**plans.MODEL, **LLAMA_8B})
    # 7,504,658,432 matmul parameters; attention 6 * 32 layers * 8192 * 4096
    assert matmul_parameters(config) == 7_504_658_432
    assert flops_per_token(config, seq_len=8192) == 6 * 7_504_658_432 + 6_442_450_944

"""The MFU's FLOPs, against the planner's own count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.estimate import trainer_builds
from fsdpplan.cost.model.params import matmul_parameter_count, useful_flops_per_token
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.spec.adapters import Adapters, adapted
from fsdpplan.spec.model import Model
from fsdpplan.trainer.config import AdaptersConfig, ModelConfig
from fsdpplan.trainer.model.flops import flops_per_token, matmul_parameters
from tests.strategies import any_models, models
from tests.trainer import plans


def require_equal_counts(model: Model, seq_len: int) -> None:
    config = plans.config_of_model(model)
    assert matmul_parameters(config) == matmul_parameter_count(model)
    expected = useful_flops_per_token(model=model, seq_len=seq_len)
    assert flops_per_token(config, seq_len=seq_len) == pytest.approx(expected, rel=1e-12)
    packed = useful_flops_per_token(model=model, seq_len=seq_len, document_tokens=500)
    found = flops_per_token(config, seq_len=seq_len, mean_document_tokens=500)
    assert found == pytest.approx(packed, rel=1e-12)


BUILT = [name for name in model_names() if trainer_builds(model=load_model(name), seq_len=8192)]


@pytest.mark.parametrize("name", BUILT)
def test_the_trainer_counts_each_model_of_the_catalogue_as_the_planner(name: str) -> None:
    require_equal_counts(load_model(name), seq_len=8192)


@given(any_models() | models(), st.sampled_from([32, 1024, 8192]))
def test_the_trainer_counts_any_shape_as_the_planner(model: Model, seq_len: int) -> None:
    require_equal_counts(model, seq_len)


def test_eight_billion_parameters_at_8192_tokens() -> None:
    config: ModelConfig = plans.config_of_model(load_model("llama-3.1-8b"))
    # 7,504,658,432 matmul parameters; attention 6 * 32 layers * 8192 * 4096
    assert matmul_parameters(config) == 7_504_658_432
    assert flops_per_token(config, seq_len=8192) == 6 * 7_504_658_432 + 6_442_450_944


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-large", "qwen3-8b"])
def test_frozen_weights_count_four_and_those_of_adapters_six(name: str) -> None:
    model, adapters = load_model(name), Adapters(rank=16, alpha=32.0)
    config = plans.config_of_model(model)
    expected = useful_flops_per_token(model=adapted(model, adapters, "bf16"), seq_len=2048)
    read = AdaptersConfig(rank=16, alpha=32.0, targets=adapters.targets)
    assert flops_per_token(config, seq_len=2048, adapters=read) == pytest.approx(expected)
    assert expected < 0.75 * useful_flops_per_token(model=model, seq_len=2048)

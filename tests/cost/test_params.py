"""Parameters: sums of the tensors that torch holds."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.params import (
    block_tensors,
    elements,
    embedding_tensors,
    head_tensors,
    matmul_parameter_count,
    parameter_count,
)
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.strategies import models


def test_the_golden_counts_of_gpt2() -> None:
    # transformers on the meta device; 774,030,080 is the count that its weights hold
    assert parameter_count(load_model("gpt2")) == 124_439_808
    assert parameter_count(load_model("gpt2-large")) == 774_030_080
    assert parameter_count(load_model("gpt2")) * 4 / 2**20 == pytest.approx(474.70, abs=0.005)


@settings(max_examples=25, deadline=None)
@given(models(max_layers=2))
def test_the_trainers_decoder_holds_the_same_tensors(model: Model) -> None:
    torch = pytest.importorskip("torch")
    from fsdpplan.trainer.model import Decoder, ModelConfig

    names = ModelConfig.__dataclass_fields__
    config = ModelConfig(**{key: value for key, value in asdict(model).items() if key in names})
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(p.numel() for p in decoder.parameters()) == parameter_count(model)
    expected = sorted(tensor.shape for tensor in block_tensors(model))
    assert sorted(tuple(p.shape) for p in decoder.layers["0"].parameters()) == expected


@given(models())
def test_the_whole_is_the_sum_of_its_parts(model: Model) -> None:
    blocks = model.layers * elements(block_tensors(model))
    ends = elements(embedding_tensors(model)) + elements(head_tensors(model))
    assert parameter_count(model) == blocks + ends


@given(models(), st.sampled_from([1, 2, 4, 8]))
def test_tensor_parallel_shards_cover_the_tensor(model: Model, tp: int) -> None:
    for tensor in block_tensors(model) + embedding_tensors(model) + head_tensors(model):
        local = 1
        for width in tensor.local_shape(tp):
            local *= width
        assert local * tp >= tensor.elements
        assert tp > 1 or local == tensor.elements
        if tensor.split == "none":
            assert local == tensor.elements


@given(models())
def test_tying_saves_one_table_and_no_work(model: Model) -> None:
    tied, untied = (replace(model, tied_embeddings=tie) for tie in (True, False))
    assert parameter_count(untied) - parameter_count(tied) == model.vocab * model.hidden
    assert matmul_parameter_count(tied) == matmul_parameter_count(untied)


@given(models())
def test_each_layer_adds_one_block(model: Model) -> None:
    deeper = replace(model, layers=model.layers + 1)
    block = elements(block_tensors(model))
    assert parameter_count(deeper) - parameter_count(model) == block
    assert matmul_parameter_count(model) < parameter_count(deeper) + model.vocab * model.hidden

"""Parameters: sums of the tensors that torch holds."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.model.params import (
    active_parameter_count,
    block_matmul_parameter_count,
    block_tensors,
    dense_view,
    elements,
    embedding_tensors,
    head_tensors,
    matmul_parameter_count,
    parameter_count,
)
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.strategies import any_models, mixtures, models


def test_the_golden_counts_of_gpt2() -> None:
    # transformers on the meta device; 774,030,080 is the count that its weights hold
    assert parameter_count(load_model("gpt2")) == 124_439_808
    assert parameter_count(load_model("gpt2-large")) == 774_030_080
    assert parameter_count(load_model("gpt2")) * 4 / 2**20 == pytest.approx(474.70, abs=0.005)


@settings(max_examples=25, deadline=None)
@given(models(max_layers=2))
def test_the_trainers_decoder_holds_the_same_tensors(model: Model) -> None:
    torch = pytest.importorskip("torch")
    from fsdpplan.trainer.model.decoder import Decoder, ModelConfig

    names = ModelConfig.__dataclass_fields__
    config = ModelConfig(**{key: value for key, value in asdict(model).items() if key in names})
    with torch.device("meta"):
        decoder = Decoder(config)
    assert sum(p.numel() for p in decoder.parameters()) == parameter_count(model)
    expected = sorted(tensor.shape for tensor in block_tensors(model))
    assert sorted(tuple(p.shape) for p in decoder.layers["0"].parameters()) == expected


@given(any_models())
def test_the_whole_is_the_sum_of_its_parts(model: Model) -> None:
    blocks = model.dense_blocks * elements(block_tensors(dense_view(model)))
    blocks += (model.layers - model.dense_blocks) * elements(block_tensors(model))
    ends = elements(embedding_tensors(model)) + elements(head_tensors(model))
    assert parameter_count(model) == blocks + ends


@given(any_models(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_parallel_shards_cover_the_tensor(model: Model, tp: int, ep: int) -> None:
    for tensor in block_tensors(model) + embedding_tensors(model) + head_tensors(model):
        local = prod(tensor.local_shape(tp, ep))
        over = (tp if tensor.split != "none" else 1) * (ep if tensor.is_expert else 1)
        assert local * over >= tensor.elements
        assert tp > 1 or ep > 1 or local == tensor.elements
        assert over > 1 or local == tensor.elements
        if tensor.is_expert and len(tensor.shape) == 3:
            assert tensor.local_shape(tp, ep)[0] == -(-tensor.shape[0] // ep)


@given(any_models(), st.sampled_from([1, 2, 3, 4, 7, 8]))
def test_tables_are_padded_to_what_tp_splits_evenly(model: Model, tp: int) -> None:
    tables = [t for t in embedding_tensors(model) + head_tensors(model) if model.vocab in t.shape]
    rows = {tensor.local_shape(tp)[0] for tensor in tables}
    assert rows == {model.vocab_rows(tp) // tp}


def test_experts_are_split_over_ep_and_each_over_tp() -> None:
    tensors = {tensor.name: tensor for tensor in block_tensors(load_model("gpt-oss-20b"))}
    assert tensors["experts.w1.weight"].local_shape(tp=4, ep=8) == (4, 720, 2880)
    assert tensors["experts.w2.weight"].local_shape(tp=4, ep=8) == (4, 2880, 720)
    assert tensors["experts.w1.bias"].local_shape(tp=4, ep=8) == (4, 720)
    assert tensors["experts.w2.bias"].local_shape(tp=4, ep=8) == (4, 2880)
    assert tensors["router.weight"].local_shape(tp=4, ep=8) == (32, 2880)
    assert tensors["sinks"].local_shape(tp=4) == (16,)


@given(any_models())
def test_tying_saves_one_table_and_no_work(model: Model) -> None:
    tied, untied = (replace(model, tied_embeddings=tie) for tie in (True, False))
    assert parameter_count(untied) - parameter_count(tied) == model.vocab * model.hidden
    assert matmul_parameter_count(tied) == matmul_parameter_count(untied)


@given(any_models())
def test_each_layer_adds_one_block(model: Model) -> None:
    deeper = replace(model, layers=model.layers + 1)
    block = elements(block_tensors(model))
    assert parameter_count(deeper) - parameter_count(model) == block
    assert matmul_parameter_count(model) < parameter_count(deeper) + model.vocab * model.hidden


@given(any_models())
def test_a_token_meets_all_of_a_dense_model_and_no_more_of_another(model: Model) -> None:
    active = active_parameter_count(model)
    assert active <= parameter_count(model)
    if model.experts is None or model.experts.active == model.experts.experts:
        assert active == parameter_count(model)
    assert matmul_parameter_count(model) <= active


@given(mixtures())
def test_one_more_active_expert_adds_its_weights_to_each_block(model: Model) -> None:
    assert model.experts is not None
    if model.experts.active == model.experts.experts:
        return
    one_more = replace(model, experts=replace(model.experts, active=model.experts.active + 1))
    assert parameter_count(one_more) == parameter_count(model)
    matrices = 3 if model.is_gated else 2
    weights = matrices * model.experts.hidden * model.hidden
    blocks = model.layers - model.dense_blocks
    added = matmul_parameter_count(one_more) - matmul_parameter_count(model)
    assert added == blocks * weights
    biases = (matrices - 1) * model.experts.hidden + model.hidden if model.experts.bias else 0
    added = active_parameter_count(one_more) - active_parameter_count(model)
    assert added == blocks * (weights + biases)


def test_mixtral_and_deepseek_by_hand() -> None:
    # attention 4096 * (2 * 4096 + 2 * 1024); two of eight experts of 3 * 4096 * 14336; router
    mixtral = load_model("mixtral-8x7b")
    block = 4096 * 10240 + 2 * 3 * 4096 * 14336 + 8 * 4096
    assert block_matmul_parameter_count(mixtral) == block
    assert matmul_parameter_count(mixtral) == 32 * block + 32000 * 4096
    # DeepSeek-V2-Lite: q, latents in, latents out, wo; the first block has 10944 for its network
    lite = load_model("deepseek-v2-lite")
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert block_matmul_parameter_count(dense_view(lite)) == attention + 3 * 2048 * 10944
    experts = 3 * 2048 * (6 * 1408 + 2816) + 64 * 2048
    assert block_matmul_parameter_count(lite) == attention + experts

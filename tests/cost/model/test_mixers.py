"""Mixers: parameters and FLOPs as transformers has them, and blocks of several kinds."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.block.products import block_products
from fsdpplan.cost.kernels.attention import attention_forward_seconds
from fsdpplan.cost.model.mixers import DELTA_CHUNK, state_flops_per_token
from fsdpplan.cost.model.params import (
    attention_forward_flops_per_token,
    attention_span_tokens,
    block_tensors,
    elements,
    kind_counts,
    kind_places,
    kind_views,
    matmul_parameter_count,
    parameter_count,
    useful_flops_per_token,
)
from fsdpplan.cost.model.shards import block_kinds, stage_elements, whole_model
from fsdpplan.cost.schedule.stages import pipeline_stages
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import DeltaRule, Experts, Indexer, LatentAttention, Mamba2, Model
from tests.cost.problems import DELTA, PATTERNED, SMALL, STATES, patterned_models
from tests.cost.works import H100, work

TINY = Model(
    name="tiny", layers=1, hidden=64, ffn_hidden=128, heads=4, kv_heads=2, head_dim=16, vocab=64
)
DELTA_TINY = DeltaRule(key_heads=2, value_heads=4, key_head_dim=16, value_head_dim=32)
MAMBA_TINY = Mamba2(heads=4, head_dim=16, groups=2, state=16, chunk=64)
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}


def counted(model_type: str, tokens: int, **values: Any) -> dict[str, int]:
    """FLOPs of a forward pass of transformers, in PyTorch alone, by kind of operator."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(model_type, **COMMON, **values)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


def test_the_delta_rule_multiplies_as_transformers_does() -> None:
    """But for the inverse of a chunk, which is made there by solving, and is not counted: here it
    is, and its two products."""
    model = replace(TINY, mixers="D", delta=DELTA_TINY)
    found = counted(
        "qwen3_next",
        256,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_only_layers=[0],
        num_experts=0,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
    )
    assert found["aten.mm"] == 2 * 256 * matmul_parameter_count(model)
    solved = 4 * (2 * DELTA_CHUNK * (16 + 32) + DELTA_CHUNK**2 / 3)
    assert found["aten.bmm"] == pytest.approx(256 * (state_flops_per_token(model) - solved))


def test_mamba_2_multiplies_as_transformers_does() -> None:
    """Which makes the products of a group for each of its heads, and passes states on by a product
    over chunks: fused kernels do neither."""
    model = replace(TINY, mixers="M", networks="-", mamba=MAMBA_TINY)
    found = counted(
        "nemotron_h",
        256,
        hybrid_override_pattern="M",
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        chunk_size=64,
    )
    assert found["aten.mm"] == 2 * 256 * matmul_parameter_count(model)
    repeated = 2 * 64 * 16 * (4 - 2)
    assert found["aten.bmm"] == pytest.approx(
        256 * (state_flops_per_token(model) + repeated), rel=0.02
    )


def test_an_indexer_scores_all_keys_and_attention_meets_the_chosen() -> None:
    model = load_model("deepseek-v3.2")
    plain = load_model("deepseek-v3")
    assert model.latent is not None
    every = attention_forward_flops_per_token(model=plain, seq_len=32768)
    found = attention_forward_flops_per_token(model=model, seq_len=32768)
    indexer = 2 * 16384 * 64 * 128
    chosen = (2048 - 2048**2 / (2 * 32768)) / 16384
    assert found == pytest.approx(every * chosen + indexer)
    short = attention_forward_flops_per_token(model=model, seq_len=1024)
    assert short == attention_forward_flops_per_token(model=plain, seq_len=1024) + 2 * 512 * 8192


def test_an_indexer_saves_time_in_long_sequences_and_costs_it_in_short_ones() -> None:
    def ratio(length: int) -> float:
        seconds = [
            attention_forward_seconds(work(name, tokens=length, seq_len=length), H100)
            for name in ("deepseek-v3.2", "deepseek-v3")
        ]
        return seconds[0] / seconds[1]

    assert ratio(2048) > 1
    assert ratio(131072) < ratio(32768) < ratio(2048)
    assert ratio(131072) < 0.7


@pytest.mark.parametrize(("length", "chunk"), [(32768, 8192), (20000, 8192), (4096, 8192)])
def test_chunks_are_triangles_of_their_own(length: int, chunk: int) -> None:
    pieces = [min(chunk, length - begin) for begin in range(0, length, chunk)]
    exact = sum(piece * piece / 2 for piece in pieces) / length
    found = attention_span_tokens(seq_len=length, window=chunk, chunked=True)
    assert found == pytest.approx(exact)
    assert found <= attention_span_tokens(seq_len=length, window=chunk)


@given(patterned_models())
def test_the_whole_is_the_sum_of_its_kinds(model: Model) -> None:
    counts = kind_counts(model)
    assert sum(number for _, number in counts) == model.layers
    assert [kind_views(model)[place] for place in kind_places(model)] == [
        next(
            view
            for view in kind_views(model)
            if (view.mixer, "-" if not view.has_network else "E" if view.experts else "F") == kind
        )
        for kind in model.block_kinds
    ]
    stage = whole_model(model)
    assert block_kinds(model=model, stage=stage) == counts
    assert stage_elements(model=model, stage=stage, tp=1) == parameter_count(model)
    sizes = [elements(block_tensors(view)) for view in kind_views(model)]
    assert sizes == sorted(sizes)


@given(patterned_models(), st.sampled_from([2, 3, 4]))
def test_stages_share_the_kinds_as_they_stand(model: Model, pp: int) -> None:
    layout = Layout(pp=pp, dp_shard=1, sharding="ddp", schedule="1f1b", num_microbatches=pp)
    stages = pipeline_stages(model=model, layout=layout)
    places, first = kind_places(model), 0
    for stage in stages:
        here = places[first : first + stage.blocks]
        assert stage.mix == tuple(here.count(kind) for kind in range(len(kind_views(model))))
        first += stage.blocks
    assert first == model.layers


@given(patterned_models(), st.sampled_from([512, 4096, 65536]))
def test_flops_are_products_and_what_mixes(model: Model, seq_len: int) -> None:
    mixing = sum(
        number * attention_forward_flops_per_token(model=view, seq_len=seq_len)
        for view, number in kind_counts(model)
    )
    useful = useful_flops_per_token(model=model, seq_len=seq_len)
    assert useful == pytest.approx(6 * matmul_parameter_count(model) + 3 * mixing)


def test_the_products_of_a_block_are_its_matrices() -> None:
    for model in PATTERNED:
        for view in kind_views(model):
            matrices = {t.name.removesuffix(".weight") for t in block_tensors(view) if t.is_matrix}
            assert {p.name for p in block_products(work(view))} == matrices


def test_states_cost_the_same_for_each_token_however_long_the_sequence() -> None:
    for model in (DELTA, STATES):
        view = next(view for view in kind_views(model) if view.mixer in "DM")
        short, long = (
            attention_forward_seconds(work(view, tokens=65536, seq_len=length), H100)
            for length in (4096, 65536)
        )
        assert short == long > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixers": "AX"}, "mixers has letters 'X'"),
        ({"networks": "G"}, "networks has letters 'G'"),
        ({"mixers": "A" * 9}, "9 letters for 8 blocks"),
        ({"mixers": "A-", "networks": "F-"}, "a block cannot be empty"),
        ({"mixers": "D"}, "just where delta is given"),
        ({"mamba": MAMBA_TINY}, "mixers must say where"),
        ({"mixers": "A", "mamba": MAMBA_TINY}, "just where mamba is given"),
        ({"networks": "E"}, "just where experts are given"),
        (
            {"networks": "FE", "experts": Experts(experts=4, active=1, hidden=8, dense_layers=1)},
            "dense_layers must be 0",
        ),
        ({"window_kind": "odd"}, "window_kind"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        replace(SMALL, **changes)


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(SpecError, match="key_heads must divide value_heads"):
        DeltaRule(key_heads=3, value_heads=4, key_head_dim=8, value_head_dim=8)
    with pytest.raises(SpecError, match="groups must divide heads"):
        Mamba2(heads=4, head_dim=8, groups=3, state=8)
    indexer = Indexer(heads=4, head_dim=8, keys=64)
    with pytest.raises(SpecError, match="query_rank must be above 0"):
        LatentAttention(kv_rank=8, rope_head_dim=4, value_head_dim=8, indexer=indexer)

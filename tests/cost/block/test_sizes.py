"""Block sizes: bytes of a block's tensors and of its weight gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.cost.block.branch import weight_gradient_bytes
from fsdpplan.cost.block.sizes import block_sizes, latent_sizes
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.model.params import block_tensors
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Experts, LatentAttention, Model
from tests.cost.problems import SMALL, some_models
from tests.cost.works import work

MIXTURE = replace(SMALL, experts=Experts(experts=8, active=2, hidden=2048, shared_hidden=512))
LATENT = replace(
    SMALL, latent=LatentAttention(kv_rank=128, rope_head_dim=32, value_head_dim=48, query_rank=256)
)


@pytest.mark.parametrize("model", [SMALL, MIXTURE, LATENT], ids=["dense", "mixture", "latent"])
def test_weight_gradients_cover_every_matrix(model: Model) -> None:
    matrices = sum(tensor.elements for tensor in block_tensors(model) if tensor.is_matrix)
    made = weight_gradient_bytes(model=model, tp=1, element_bytes=2)
    assert sum(made.values()) == 2 * matrices


@given(some_models())
def test_weight_gradients_of_any_model_cover_every_matrix(model: Model) -> None:
    matrices = sum(tensor.elements for tensor in block_tensors(model) if tensor.is_matrix)
    made = weight_gradient_bytes(model=model, tp=1, element_bytes=4)
    assert sum(made.values()) == 4 * matrices


def test_expert_parallel_ranks_make_gradients_of_their_own_experts() -> None:
    whole, part = (
        sum(weight_gradient_bytes(model=MIXTURE, tp=1, element_bytes=2, ep=ep).values())
        for ep in (1, 8)
    )
    routed = 2 * sum(t.elements for t in block_tensors(MIXTURE) if t.is_expert)
    assert whole - part == routed * 7 // 8


def small(model: Model, *, tokens: int = 1024, **changes: object) -> BlockWork:
    """An eager block of few tokens."""
    return work(model, tokens=tokens, seq_len=1024, compiled=False, **changes)


def test_latent_attention_makes_keys_of_every_head_and_narrow_values() -> None:
    block = small(LATENT)
    heads = block_sizes(block).heads
    assert heads.key == heads.query == 1024 * 16 * 64 * 2
    assert heads.value == heads.attended == 1024 * 16 * 48 * 2
    assert latent_sizes(block, heads).kept == 1024 * (2 * 256 + 2 * 128 + 32) * 2


def test_a_ring_holds_two_pieces_and_a_gather_all_of_them() -> None:
    model = load_model("llama-3.1-8b")
    piece = 2 * 1024 * model.kv_dim * 2
    assert block_sizes(small(model)).heads.exchanged == 0
    gathered, ring = (
        block_sizes(small(model, cp=8, ring_attention=r)).heads.exchanged for r in (False, True)
    )
    assert (ring, gathered) == (2 * piece, 8 * piece)


def test_scores_span_the_whole_sequence() -> None:
    model = load_model("gpt2-xl")
    block = small(model, tokens=512, cp=2, attention_kernel="scores")
    assert block_sizes(block).heads.scores == model.heads * 512 * 1024 * 2


def test_whole_experts_on_tensor_parallel_ranks_read_a_part_of_the_tokens() -> None:
    split = small(MIXTURE, tp=2, sequence_parallel=True, ep=2)
    of_split = block_sizes(split).routed
    of_whole = block_sizes(replace(split, experts_over_tp=True)).routed
    assert of_whole.rows == of_split.rows // 2
    assert of_whole.inner == of_split.inner
    assert of_whole.router == of_split.router // 2

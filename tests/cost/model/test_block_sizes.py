"""Block sizes: bytes of a block's tensors and of its weight gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.cost.memory.weight_gradients import weight_gradient_bytes
from fsdpplan.cost.model.block_sizes import (
    BlockShape,
    Kernels,
    block_tensors_bytes,
)
from fsdpplan.cost.model.params import block_tensors
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Experts, LatentAttention, Model
from tests.cost.problems import SMALL, some_models

MIXTURE = replace(SMALL, experts=Experts(experts=8, active=2, hidden=2048, shared_hidden=512))
LATENT = replace(
    SMALL, latent=LatentAttention(kv_rank=128, rope_head_dim=32, value_head_dim=48, query_rank=256)
)


@pytest.mark.parametrize("model", [SMALL, MIXTURE, LATENT], ids=["dense", "mixture", "latent"])
def test_weight_gradients_cover_every_matrix(model: Model) -> None:
    matrices = sum(tensor.elements for tensor in block_tensors(model) if tensor.is_matrix)
    assert weight_gradient_bytes(model=model, tp=1, element_bytes=2).total == 2 * matrices


@given(some_models())
def test_weight_gradients_of_any_model_cover_every_matrix(model: Model) -> None:
    matrices = sum(tensor.elements for tensor in block_tensors(model) if tensor.is_matrix)
    assert weight_gradient_bytes(model=model, tp=1, element_bytes=4).total == 4 * matrices


def test_expert_parallel_ranks_make_gradients_of_their_own_experts() -> None:
    whole, part = (
        weight_gradient_bytes(model=MIXTURE, tp=1, element_bytes=2, ep=ep) for ep in (1, 8)
    )
    routed = 2 * sum(t.elements for t in block_tensors(MIXTURE) if t.is_expert)
    assert whole.total - part.total == routed * 7 // 8


def test_latent_attention_makes_keys_of_every_head_and_narrow_values() -> None:
    tensors = block_tensors_bytes(BlockShape(model=LATENT, tokens=1024, seq_len=1024))
    assert tensors.key_bytes == tensors.query_bytes == 1024 * 16 * 64 * 2
    assert tensors.value_bytes == tensors.attended_bytes == 1024 * 16 * 48 * 2
    assert tensors.latents_bytes == 1024 * (2 * 256 + 2 * 128 + 32) * 2


def test_a_ring_holds_two_pieces_and_a_gather_all_of_them() -> None:
    model = load_model("llama-3.1-8b")
    one = BlockShape(model=model, tokens=1024, seq_len=1024)
    piece = 2 * 1024 * model.kv_dim * 2
    assert block_tensors_bytes(one).exchanged_bytes == 0
    gathered = block_tensors_bytes(replace(one, cp=8))
    ring = block_tensors_bytes(replace(one, cp=8, kernels=Kernels(ring_attention=True)))
    assert (ring.exchanged_bytes, gathered.exchanged_bytes) == (2 * piece, 8 * piece)


def test_scores_span_the_whole_sequence() -> None:
    model = load_model("gpt2-xl")
    shape = BlockShape(model=model, tokens=512, seq_len=512, cp=2, kernels=Kernels(flash=False))
    assert block_tensors_bytes(shape).scores_bytes == model.heads * 512 * 1024 * 2


def test_whole_experts_on_tensor_parallel_ranks_read_a_part_of_the_tokens() -> None:
    split = BlockShape(model=MIXTURE, tokens=1024, seq_len=1024, tp=2, sequence_parallel=True, ep=2)
    whole = replace(split, experts_over_tp=True)
    of_split, of_whole = block_tensors_bytes(split).routed, block_tensors_bytes(whole).routed
    assert of_whole.rows_bytes == of_split.rows_bytes // 2
    assert of_whole.inner_bytes == of_split.inner_bytes
    assert of_whole.router_bytes == of_split.router_bytes // 2

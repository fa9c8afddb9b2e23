"""Element-wise work: bytes of a block beside its matmuls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.cost.kernels.operators import element_wise_bytes, element_wise_parts
from fsdpplan.cost.kernels.rates import BlockWork
from fsdpplan.files.catalogue import load_model
from tests.cost.works import work, works


def parts(block: BlockWork) -> dict[str, tuple[float, float]]:
    """(forward, backward) bytes by part."""
    return {p.name: (p.forward, p.backward) for p in element_wise_parts(block)}


@given(works())
def test_fewer_kernels_move_less(block: BlockWork) -> None:
    plain = replace(block, compiled=False, fused_kernels=False)
    eager = element_wise_bytes(plain)
    fused = element_wise_bytes(replace(plain, fused_kernels=True))
    compiled = element_wise_bytes(replace(plain, compiled=True))
    assert all(a >= b for a, b in zip(eager, fused, strict=True))
    assert all(a >= b for a, b in zip(eager, compiled, strict=True))


def test_llama_8b_by_hand() -> None:
    tokens, hidden, inner = 4096, 4096, 14336
    rotated = tokens * (4096 + 1024) * 2
    residual, gate = tokens * hidden * 2, tokens * inner * 2
    eager = element_wise_bytes(work(compiled=False))
    assert eager[0] == 10 * residual + 9 * rotated + 5 * gate
    assert eager[1] == (16 + 9) * residual + 9 * rotated + 9 * gate
    compiled = element_wise_bytes(work())
    assert compiled == (
        8 * residual + 2 * rotated + 3 * gate,
        12 * residual + 2 * rotated + 5 * gate,
    )


def test_sequence_parallelism_splits_the_residual_stream_too() -> None:
    alone = parts(work(tp=8))
    split = parts(work(tp=8, sequence_parallel=True))
    assert split["norms and additions"][0] == alone["norms and additions"][0] / 8
    assert split["activation"] == alone["activation"]


def test_biases_are_summed_in_backward() -> None:
    block = work("gpt2-large", compiled=False)
    assert parts(block)["biases"] == (0, 4096 * (3 * 1280 + 1280 + 5120 + 1280) * 2)
    assert parts(work())["biases"] == (0, 0)


def test_dropout_adds_a_mask_and_a_pass_each_way() -> None:
    plain = work("gpt2-large", compiled=False)
    eager = parts(replace(plain, dropout=True))["dropout"]
    fused = parts(replace(plain, dropout=True, fused_kernels=True))["dropout"]
    size = 2 * 4096 * 1280
    assert eager == (5 * size, 5 * size)
    assert fused == (size, 5 * size)


def test_norms_of_operators_move_nine_times_as_much_as_one_kernel() -> None:
    plain = work(compiled=False)
    composite = replace(plain, composite_norms=True)
    extra = element_wise_bytes(composite)[0] - element_wise_bytes(plain)[0]
    norms = 2 * 4096 * 4096 * 4  # one reading and one writing of 16 bits, two norms
    assert (extra + norms) / norms == pytest.approx(9)
    assert element_wise_bytes(replace(composite, compiled=True)) == element_wise_bytes(work())


def test_post_norms_head_norms_and_latents_cost_passes() -> None:
    gemma = load_model("gemma-2-9b")
    assert parts(work(gemma))["norms behind branches"][0] == 2 * 4096 * gemma.hidden * 2
    olmo = load_model("olmo-2-7b")
    assert parts(work(olmo))["norms of heads"][0] == 4096 * (4096 + 4096) * 2
    assert "heads put together" in parts(work("deepseek-v2-lite"))


def test_experts_widen_the_activation_by_those_that_a_token_visits() -> None:
    mixtral = load_model("mixtral-8x7b")
    dense = replace(mixtral, experts=None)
    sparse_bytes, dense_bytes = (parts(work(m))["activation"][0] for m in (mixtral, dense))
    assert sparse_bytes == 2 * dense_bytes

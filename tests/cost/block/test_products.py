"""Products: the matmuls of one block."""

from __future__ import annotations

import pytest
from hypothesis import given

from fsdpplan.cost.block.products import block_products
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.products import (
    backward_matmul_seconds,
    forward_matmul_seconds,
    product_seconds,
)
from fsdpplan.cost.kernels.rates import matmul_seconds
from fsdpplan.cost.model.params import block_matmul_parameter_count, block_tensors
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.model import Model
from tests.cost.problems import some_models
from tests.cost.works import H100, projection_shapes, work, works


@given(some_models())
def test_the_products_use_every_matrix_of_the_block_once(model: Model) -> None:
    weights = sum(n * k for _, n, k in projection_shapes(work(model)))
    assert weights == sum(t.elements for t in block_tensors(model) if t.is_matrix)


@given(works())
def test_their_flops_are_two_an_active_weight_and_token(block: BlockWork) -> None:
    whole = block_products(work(block.model, tokens=block.tokens))
    flops = 2 * block.tokens * block_matmul_parameter_count(block.model)
    assert sum(p.flops for p in whole) == flops


@given(works())
def test_stacking_projections_changes_no_flops(block: BlockWork) -> None:
    plain, stacked = (
        block_products(work(block.model, joined_projections=joined)) for joined in (False, True)
    )
    assert sum(p.flops for p in plain) == sum(p.flops for p in stacked)
    assert len(stacked) < len(plain) or block.model.latent or not block.model.is_gated


def test_query_key_and_value_are_stacked_and_gate_and_up() -> None:
    stacked = block_products(work(joined_projections=True))
    assert [(p.n, p.k) for p in stacked] == [
        (6144, 4096),
        (4096, 4096),
        (2 * 14336, 4096),
        (4096, 14336),
    ]


def test_down_comes_last_and_every_second_product_is_k_output_and_up() -> None:
    names = [p.name for p in block_products(work())]
    assert names == ["wq", "wk", "wv", "wo", "w1", "w3", "w2"]
    assert names[1::2] == ["wk", "wo", "w3"]


def test_tensor_parallel_splits_the_products() -> None:
    whole = sum(m * n * k for m, n, k in projection_shapes(work()))
    assert sum(m * n * k for m, n, k in projection_shapes(work(tp=8))) == whole // 8


def test_experts_share_the_rows_of_the_tokens_that_visit_them() -> None:
    products = {p.name: p for p in block_products(work("mixtral-8x7b", ep=4))}
    up = products["experts.w1"]
    assert (up.groups, up.rows, up.n, up.k) == (2, 2 * 4096, 14336, 4096)
    assert products["router"].groups == 1


def test_many_small_experts_compute_whole_tiles_and_read_every_weight() -> None:
    few = {p.name: p for p in block_products(work("qwen3-30b-a3b", tokens=128))}["experts.w1"]
    seconds = product_seconds(few, dtype="bf16", device=H100)
    assert few.rows / few.groups == 8
    one = matmul_seconds(m=1024, n=few.n, k=few.k, dtype="bf16", device=H100)
    read = few.weight_elements * 2 / H100.memory_bandwidth_bytes_per_second
    assert seconds > max(one, read)


def test_backward_is_two_products_for_each_forward_one() -> None:
    shapes = projection_shapes(work(tokens=65536))
    forward = forward_matmul_seconds(shapes, dtype="bf16", device=H100)
    backward = backward_matmul_seconds(shapes, dtype="bf16", device=H100)
    assert backward == pytest.approx(2 * forward, rel=0.1)


def test_layers_that_fp8_cannot_split_stay_in_16_bits() -> None:
    block = work("gpt-oss-20b", precision="fp8")
    odd = {p.name: p.dtype(block) for p in block_products(block) if p.n % 16 or p.k % 16}
    assert all(dtype == "bf16" for dtype in odd.values())
    assert block_products(block)[0].dtype(block) == "fp8"
    assert load_model("gpt-oss-20b").hidden % 16 == 0


def test_whole_experts_on_tensor_parallel_ranks_are_as_wide_as_they_are() -> None:
    split = {p.name: p for p in block_products(work("mixtral-8x7b", tp=4, ep=2))}
    changes = {"tp": 4, "ep": 2, "experts_over_tp": True}
    whole = {p.name: p for p in block_products(work("mixtral-8x7b", **changes))}
    up, part = whole["experts.w1"], split["experts.w1"]
    assert (part.groups, part.rows, part.n) == (4, 2 * 4096, 14336 / 4)
    assert (up.groups, up.rows, up.n) == (1, 2 * 4096 / 4, 14336)
    assert (up.flops, up.weight_elements) == (part.flops, part.weight_elements)
    assert whole["wq"] == split["wq"]

"""Operators: a block as one list, what is moved beside its matmuls, and what is made again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from fsdpplan.cost.block.branch import fp8_cast_bytes
from fsdpplan.cost.block.network import INDEXED_PASSES
from fsdpplan.cost.block.operators import (
    block_operators,
    element_wise_bytes,
    repeated_operators,
)
from fsdpplan.cost.block.products import block_products
from fsdpplan.cost.block.work import BlockWork
from fsdpplan.cost.kernels.compute import block_kernels, device_parts
from fsdpplan.cost.kernels.rates import memory_bytes_per_second
from fsdpplan.files.catalogue import load_model
from fsdpplan.spec.training import Fp8Recipe
from tests.cost.works import H100, moved, work, works

RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "rowwise", "delayed")


@given(works())
def test_the_list_has_every_product_once_in_order_and_no_name_twice(block: BlockWork) -> None:
    operators = block_operators(block)
    assert tuple(o.product for o in operators if o.product) == block_products(block)
    assert len({o.name for o in operators}) == len(operators)
    assert all((o.product is not None) == (o.kind == "matmul") for o in operators)


@given(works())
def test_the_block_takes_what_its_operators_take(block: BlockWork) -> None:
    kernels = block_kernels(block, H100)
    forward, backward = device_parts(block, H100)
    assert forward.matmuls + forward.attention == pytest.approx(sum(k.forward for k in kernels))
    both = sum(k.by_input + k.by_weight for k in kernels)
    assert backward.matmuls + backward.attention == pytest.approx(both)


@given(works())
def test_what_is_made_again_is_part_of_the_block(block: BlockWork) -> None:
    names = [o.name for o in block_operators(block)]
    again = [o.name for o in repeated_operators(block)]
    assert again == [name for name in names if name in again]
    if block.mode in ("op", "full"):
        assert len(again) >= len(names) - 1
    if block.mode == "none" and not block.remakes_latents:
        assert not again


def test_tokens_are_dispatched_before_their_experts_and_combined_behind() -> None:
    names = [o.name for o in block_operators(work("deepseek-v2-lite"))]
    experts = [i for i, name in enumerate(names) if name.startswith("experts.")]
    assert names[experts[0] - 1] == "dispatch"
    assert names[experts[-1] + 1] == "combine"
    assert names.index("router") < names.index("dispatch")


@given(works())
def test_fewer_kernels_move_less(block: BlockWork) -> None:
    plain = replace(block, compiled=False, fused_kernels=False, precision="bf16")
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
    alone, split = moved(work(tp=8)), moved(work(tp=8, sequence_parallel=True))
    assert split["ffn_norm"][0] == alone["ffn_norm"][0] / 8
    assert split["activation"] == alone["activation"]


def test_biases_are_summed_in_backward() -> None:
    of = moved(work("gpt2-large"))
    biased = {"wq": 1280, "wk": 1280, "wv": 1280, "wo": 1280, "w1": 5120, "w2": 1280}
    assert {name: of[name] for name in biased} == {
        name: (0, 4096 * width * 2) for name, width in biased.items()
    }
    assert moved(work())["wq"] == (0, 0)
    joined = moved(work("gpt2-large", joined_projections=True))
    assert joined["wq"] == (0, 4096 * 3 * 1280 * 2)


def test_dropout_adds_a_mask_and_a_pass_each_way() -> None:
    plain = work("gpt2-large", compiled=False)
    eager = moved(replace(plain, dropout=True))["ffn dropout"]
    fused = moved(replace(plain, dropout=True, fused_kernels=True))["ffn dropout"]
    size = 4096 * 1280
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
    assert moved(work(gemma))["post_ffn_norm"][0] == 4096 * gemma.hidden * 2
    olmo = load_model("olmo-2-7b")
    assert moved(work(olmo))["norms of heads"][0] == 4096 * (4096 + 4096) * 2
    assert "heads put together" in moved(work("deepseek-v2-lite"))


def test_experts_widen_the_activation_by_those_that_a_token_visits() -> None:
    mixtral = load_model("mixtral-8x7b")
    dense = replace(mixtral, experts=None)
    one = moved(work(dense))["activation"][0]
    assert moved(work(mixtral))["experts.activation"][0] == 2 * one


def test_what_mixtral_routes_by_hand() -> None:
    tokens, hidden = 4096, 4096
    copies = tokens * 2 * hidden * 2
    router = 6 * 4 * tokens * 8
    into, out = (moved(work("mixtral-8x7b"))[name] for name in ("dispatch", "combine"))
    by_index = INDEXED_PASSES
    added, gathered = by_index[0] * copies, by_index[1] / 2 * copies
    summed = tokens * hidden * 2
    assert into == (2 * copies + router, 2 * copies + router + gathered)
    assert out == (3 * copies + summed + added, 4 * copies + summed + gathered)


def test_a_profiled_mixture_moves_its_tokens_in_what_was_measured() -> None:
    """4 ms a block beside 1 ms that a copy's rate would take: gathers, weighting, sums and
    gradients by index of 8,192 tokens of Qwen3 30B-A3B, in a profile of torch 2.11 on an H100."""
    of = moved(work("qwen3-30b-a3b", tokens=8192, seq_len=4096, compiled=False))
    both = sum(of["dispatch"]) + sum(of["combine"])
    assert 3.0e-3 < both / memory_bytes_per_second(H100) < 4.5e-3


def test_expert_parallelism_sorts_twice_more_and_fused_kernels_weight_while_summing() -> None:
    def routed(**changes: object) -> float:
        of = moved(work("mixtral-8x7b", compiled=False, **changes))
        return of["dispatch"][0] + of["combine"][0]

    copies = 4096 * 2 * 4096 * 2
    assert routed(ep=2) == routed() + 4 * copies
    assert routed(fused_kernels=True) == routed() - (2 + INDEXED_PASSES[0]) * copies


def casts(block: BlockWork) -> tuple[float, float]:
    """(forward, backward) bytes of the casts to fp8 of a block."""
    each = [fp8_cast_bytes(product, block) for product in block_products(block)]
    return sum(one[0] for one in each), sum(one[1] for one in each)


def test_16_bits_cast_nothing() -> None:
    assert casts(work()) == (0, 0)


def test_eager_tensorwise_by_hand() -> None:
    block = work(precision="fp8", compiled=False)
    products = block_products(block)
    inputs = sum(p.rows * p.k for p in products)
    weights = sum(p.n * p.k for p in products)
    outputs = sum(p.rows * p.n for p in products)
    assert casts(block) == (5 * inputs + 5 * weights, 7 * inputs + 7 * weights + 7 * outputs)
    plain = element_wise_bytes(replace(block, precision="bf16"))
    assert element_wise_bytes(block) == tuple(
        one + more for one, more in zip(plain, casts(block), strict=True)
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiling_joins_casts_with_what_comes_before(recipe: Fp8Recipe) -> None:
    eager, compiled = (
        casts(work(precision="fp8", fp8_recipe=recipe, compiled=c)) for c in (False, True)
    )
    assert sum(compiled) <= sum(eager)


def test_weights_that_arrive_in_fp8_are_not_cast_in_forward() -> None:
    few = {"tokens": 16, "seq_len": 16, "precision": "fp8"}
    sent, cast = casts(work(fp8_all_gather=True, **few)), casts(work(**few))
    assert sent[0] < 0.05 * cast[0]
    assert sent[1] < cast[1]


def test_delayed_scaling_casts_weights_once_for_all_micro_batches() -> None:
    every, cached = (
        casts(work(precision="fp8", fp8_recipe="delayed", weight_casts=share))
        for share in (1.0, 0.125)
    )
    weights = sum(p.weight_elements for p in block_products(work()))
    assert every[0] - cached[0] == pytest.approx(3.5 * weights)
    assert every[1] == cached[1]

"""fp8: what casting moves."""

from __future__ import annotations

import pytest

from fsdpplan.cost.kernels.compute import fp8_cast_bytes
from fsdpplan.cost.kernels.operators import block_products
from fsdpplan.spec.training import Fp8Recipe
from tests.cost.works import work

RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "rowwise", "delayed")


def test_16_bits_cast_nothing() -> None:
    assert fp8_cast_bytes(work()) == (0, 0)


def test_eager_tensorwise_by_hand() -> None:
    block = work(precision="fp8", compiled=False)
    products = block_products(block)
    inputs = sum(p.rows * p.k for p in products)
    weights = sum(p.n * p.k for p in products)
    outputs = sum(p.rows * p.n for p in products)
    assert fp8_cast_bytes(block) == (
        5 * inputs + 5 * weights,
        7 * inputs + 7 * weights + 7 * outputs,
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiling_joins_casts_with_what_comes_before(recipe: Fp8Recipe) -> None:
    eager, compiled = (
        fp8_cast_bytes(work(precision="fp8", fp8_recipe=recipe, compiled=c)) for c in (False, True)
    )
    assert sum(compiled) <= sum(eager)


def test_weights_that_arrive_in_fp8_are_not_cast_in_forward() -> None:
    few = {"tokens": 16, "seq_len": 16, "precision": "fp8"}
    sent = fp8_cast_bytes(work(fp8_all_gather=True, **few))
    cast = fp8_cast_bytes(work(**few))
    assert sent[0] < 0.05 * cast[0]
    assert sent[1] < cast[1]


def test_delayed_scaling_casts_weights_once_for_all_micro_batches() -> None:
    every, cached = (
        fp8_cast_bytes(work(precision="fp8", fp8_recipe="delayed", weight_casts=share))
        for share in (1.0, 0.125)
    )
    weights = sum(p.weight_elements for p in block_products(work()))
    assert every[0] - cached[0] == pytest.approx(3.5 * weights)
    assert every[1] == cached[1]

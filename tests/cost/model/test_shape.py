"""Inferred shapes: within 1 % of the asked count, and such as people train."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.model.shape import (
    LARGEST_PARAMETERS,
    SMALLEST_PARAMETERS,
    infer_model,
    model_from_shape,
)
from fsdpplan.errors import SpecError

counts = st.floats(math.log(SMALLEST_PARAMETERS), math.log(LARGEST_PARAMETERS)).map(
    lambda power: min(LARGEST_PARAMETERS, max(SMALLEST_PARAMETERS, int(math.exp(power))))
)


@given(counts)
def test_the_real_count_is_within_one_percent_of_the_asked_one(parameters: int) -> None:
    assert parameter_count(infer_model(parameters)) == pytest.approx(parameters, rel=0.01)


@given(counts)
def test_shapes_keep_the_proportions_of_trained_models(parameters: int) -> None:
    model = infer_model(parameters)
    assert model.heads * model.head_dim == model.hidden
    assert model.hidden % 64 == 0
    assert 1.7 <= model.ffn_hidden / model.hidden <= 5.6
    assert 20 <= model.hidden / model.layers <= 200
    copies = 1 if model.tied_embeddings else 2
    assert copies * model.vocab * model.hidden <= 0.35 * parameters


@given(counts.filter(lambda count: count >= 2.5e9))
def test_large_shapes_split_over_eight_ranks(parameters: int) -> None:
    model = infer_model(parameters)
    assert (model.head_dim, model.kv_heads) == (128, 8)
    assert model.hidden % 1024 == 0
    assert model.ffn_hidden % 64 == 0
    assert model.vocab == 128256


@given(counts)
def test_the_same_count_gives_the_same_shape(parameters: int) -> None:
    assert infer_model(parameters) == infer_model(parameters)


@pytest.mark.parametrize(
    ("parameters", "layers", "hidden", "ffn_hidden"),
    [
        (8e9, 32, 4096, 14336),  # Llama 3 8B
        (70e9, 80, 8192, 28672),  # Llama 3 70B
        (7e9, 32, 4096, None),  # Llama 2 7B has 11008, with a vocabulary a quarter as large
        (13e9, 40, 5120, None),  # Llama 2 13B
        (1e9, 16, 2048, None),  # Llama 3.2 1B
    ],
)
def test_the_sizes_of_llama_give_its_shapes(
    parameters: float, layers: int, hidden: int, ffn_hidden: int | None
) -> None:
    model = infer_model(int(parameters))
    assert (model.layers, model.hidden) == (layers, hidden)
    assert ffn_hidden is None or model.ffn_hidden == ffn_hidden


@pytest.mark.parametrize("parameters", [0, -1, 1000, 10**13, 10**400])
def test_a_count_that_no_model_has_is_refused_with_the_flags_to_give(parameters: int) -> None:
    with pytest.raises(SpecError, match=r"give the shape itself: --layers") as refusal:
        infer_model(parameters)
    assert len(str(refusal.value)) < 300


def test_a_shape_by_hand_is_taken_as_it_is() -> None:
    model = model_from_shape(
        layers=4, hidden=320, ffn_hidden=960, heads=5, kv_heads=1, vocab=300
    )  # fmt: skip
    assert (model.head_dim, model.layers, model.kv_heads, model.vocab) == (64, 4, 1, 300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "does not split into 3 heads"),
        ({"heads": 0}, "does not split into 0 heads"),
        ({"kv_heads": 2}, "5 query heads cannot share 2"),
        ({"layers": 0}, "layers must be a whole number of at least 1"),
        ({"vocab": -5}, "vocab must be a whole number of at least 1"),
        ({"layers": 10**6}, "no model has more than 10000 layers"),
    ],
)
def test_a_wrong_shape_by_hand_is_refused(change: dict[str, int], message: str) -> None:
    shape = {
        "layers": 4, "hidden": 320, "ffn_hidden": 960, "heads": 5, "kv_heads": 5, "vocab": 300
    }  # fmt: skip
    with pytest.raises(SpecError, match=message):
        model_from_shape(**(shape | change))

"""Inferred mixtures of experts: both counts within 1 %, and such as people train."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.cost.model.params import active_parameter_count, parameter_count
from fsdpplan.cost.model.shape import (
    LARGEST_PARAMETERS,
    LARGEST_RATIO,
    LEAST_RATIO,
    SMALLEST_PARAMETERS,
    infer_mixture,
    nearest_model,
)
from fsdpplan.errors import SpecError
from fsdpplan.files.catalogue import catalogue_models
from fsdpplan.spec.model import Experts, Model
from tests.refusals import check_one_line

MIXTURES = catalogue_models(with_experts=True)
RATIOS = st.floats(math.log(1.01 * LEAST_RATIO), math.log(0.99 * LARGEST_RATIO)).map(math.exp)


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int]:
    ratio = draw(RATIOS)
    least = math.log(1.01 * SMALLEST_PARAMETERS * ratio)
    parameters = math.exp(draw(st.floats(least, math.log(LARGEST_PARAMETERS))))
    total = min(LARGEST_PARAMETERS, int(parameters))
    return total, int(total / ratio)


@settings(deadline=None)
@given(counts())
def test_both_real_counts_are_within_two_percent_of_the_asked_ones(asked: tuple[int, int]) -> None:
    model = infer_mixture(*asked, published=MIXTURES)
    assert parameter_count(model) == pytest.approx(asked[0], rel=0.02)
    assert active_parameter_count(model) == pytest.approx(asked[1], rel=0.02)
    assert infer_mixture(*asked, published=MIXTURES) == model


@settings(deadline=None)
@given(counts().filter(lambda asked: 1e9 < asked[1] < 1e11 and 3 <= asked[0] / asked[1] <= 32))
def test_shapes_keep_the_proportions_of_trained_mixtures(asked: tuple[int, int]) -> None:
    model = infer_mixture(*asked, published=MIXTURES)
    assert parameter_count(model) == pytest.approx(asked[0], rel=0.01)
    assert active_parameter_count(model) == pytest.approx(asked[1], rel=0.01)
    assert model.heads * model.head_dim in (model.hidden, 2 * model.hidden)
    assert model.kv_heads == 8
    assert 29 <= model.hidden / model.layers <= 165
    assert model.experts is not None
    assert 8 <= model.experts.experts <= 512
    network = model.experts.active * model.experts.hidden + model.experts.shared_hidden
    # wide only where few usual experts leave much to the shared one: 11 in Qwen 2 57B-A14B
    assert 2 <= network / model.hidden <= 20


@pytest.mark.parametrize(
    ("parameters", "active", "experts"),
    [
        # Mixtral 8x7B: the same shape
        (46.7e9, 12.9e9, Experts(experts=8, active=2, hidden=14336)),
        # Qwen 3 30B-A3B: 48 layers of 128 experts of 768, and a shared one in place of a tied table
        (30.5e9, 3.3e9, Experts(experts=128, active=8, hidden=768, shared_hidden=704)),
    ],
)
def test_the_sizes_of_known_mixtures_give_about_their_shapes(
    parameters: float, active: float, experts: Experts
) -> None:
    model = infer_mixture(int(parameters), int(active), published=MIXTURES)
    assert model.experts == experts


@pytest.mark.parametrize("model", MIXTURES, ids=[model.name for model in MIXTURES])
def test_the_counts_of_a_published_mixture_give_about_its_shape(model: Model) -> None:
    total, active = parameter_count(model), active_parameter_count(model)
    found = infer_mixture(total, active, published=MIXTURES)
    assert parameter_count(found) == pytest.approx(total, rel=0.02)
    assert active_parameter_count(found) == pytest.approx(active, rel=0.02)
    assert found.layers == pytest.approx(model.layers, rel=0.2)
    assert found.hidden == pytest.approx(model.hidden, rel=0.3)


def test_between_published_mixtures_the_shape_is_that_of_the_nearest_scaled() -> None:
    near = nearest_model(MIXTURES, int(120e9), int(12e9))
    assert near.name == "glm-4.5-air"
    found = infer_mixture(int(120e9), int(12e9), published=MIXTURES)
    assert found.layers == pytest.approx(near.layers, rel=0.1)
    assert found.hidden == pytest.approx(near.hidden, rel=0.1)
    assert found.experts is not None
    assert near.experts is not None
    assert found.experts.experts == near.experts.experts


def test_the_name_says_both_counts() -> None:
    assert infer_mixture(int(235e9), int(22e9), published=MIXTURES).name == "moe-235b-a22b"
    assert infer_mixture(int(30.5e9), int(3.3e9), published=MIXTURES).name == "moe-30.5b-a3.3b"


@pytest.mark.parametrize(
    ("parameters", "active", "message"),
    [
        (10**9, 2 * 10**9, "more parameters than there are"),
        (10**9, 10**9, "as good as dense: leave out --active-params"),
        (10**9, 9 * 10**8, "give at most 800m"),
        (10**12, 10**9, "use an --active-params of at least 25b"),
        (10**9, 1000, "active ones included"),
        (10**13, 10**12, "to 4t parameters"),
        (10**400, 10**12, "to 4t parameters"),
        (0, 0, "active ones included"),
    ],
)
def test_pairs_that_no_model_has_are_refused_in_words(
    parameters: int, active: int, message: str
) -> None:
    with pytest.raises(SpecError) as refusal:
        infer_mixture(parameters, active, published=MIXTURES)
    assert message in str(refusal.value)
    check_one_line(refusal.value)

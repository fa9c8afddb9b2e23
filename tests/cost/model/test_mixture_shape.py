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
)
from fsdpplan.errors import SpecError
from fsdpplan.spec.model import Experts
from tests.refusals import check_one_line

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
    model = infer_mixture(*asked)
    assert parameter_count(model) == pytest.approx(asked[0], rel=0.02)
    assert active_parameter_count(model) == pytest.approx(asked[1], rel=0.02)
    assert infer_mixture(*asked) == model


@settings(deadline=None)
@given(counts().filter(lambda asked: 1e9 < asked[1] < 1e11 and 3 <= asked[0] / asked[1] <= 32))
def test_shapes_keep_the_proportions_of_trained_mixtures(asked: tuple[int, int]) -> None:
    model = infer_mixture(*asked)
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
    model = infer_mixture(int(parameters), int(active))
    assert model.experts == experts


def test_the_name_says_both_counts() -> None:
    assert infer_mixture(int(235e9), int(22e9)).name == "moe-235b-a22b"
    assert infer_mixture(int(30.5e9), int(3.3e9)).name == "moe-30.5b-a3.3b"


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
        infer_mixture(parameters, active)
    assert message in str(refusal.value)
    check_one_line(refusal.value)

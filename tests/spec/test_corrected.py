"""A corrected cluster has other times, within what its datasheet allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import kind_errors
from fsdpplan.errors import SpecError
from fsdpplan.spec.corrected import corrected, least_factors, scaled_cluster, uncorrected_levels
from fsdpplan.spec.correction import PARTS, Correction
from tests.ledgers import cluster_of

CLUSTER = cluster_of(64)


def correction(**factors: float) -> Correction:
    return Correction(
        **{f"{part}_factor": factors.get(part, 1.0) for part in PARTS},
        runs=10,
        jobs=10,
        step_factor=1.0,
        half_width_fraction=0.1,
    )


def test_parts_are_the_kinds_of_errors_that_machines_have() -> None:
    assert {*PARTS} == {*kind_errors(CLUSTER.device.error)} - {"bubble"}


@given(inside=st.floats(0.9, 3), across=st.floats(1.0, 3))
def test_the_profiles_links_can_be_had_back(inside: float, across: float) -> None:
    told = corrected(CLUSTER, correction(inside=inside, across=across), CLUSTER.device.error)
    for one, other in zip(uncorrected_levels(told), CLUSTER.levels, strict=True):
        assert one.name == other.name
        assert one.bandwidth_fraction == pytest.approx(other.bandwidth_fraction)
        assert one.latency_seconds == pytest.approx(other.latency_seconds)


def test_factors_of_one_change_nothing() -> None:
    assert scaled_cluster(CLUSTER, {}) == CLUSTER
    assert uncorrected_levels(CLUSTER) == CLUSTER.levels


@given(factor=st.floats(0.01, 100))
def test_no_rate_gets_above_its_datasheet(factor: float) -> None:
    told = scaled_cluster(CLUSTER, dict.fromkeys(PARTS, factor))
    assert told.device.fit.matmul_fraction <= 1
    assert all(level.bandwidth_fraction <= 1 for level in told.levels)


def test_at_the_least_factors_the_fastest_rate_is_its_datasheets() -> None:
    told = scaled_cluster(CLUSTER, least_factors(CLUSTER))
    assert told.device.fit.matmul_fraction == pytest.approx(1.0)
    assert max(level.bandwidth_fraction for level in told.levels) == pytest.approx(1.0)


def test_a_factor_is_above_zero() -> None:
    with pytest.raises(SpecError, match="inside_factor"):
        correction(inside=0.0)

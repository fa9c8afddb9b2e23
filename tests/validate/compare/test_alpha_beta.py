"""Latency, bandwidth and ramp: those of an artificial link come back."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.validate.compare.alpha_beta import (
    AlphaBeta,
    alpha_beta,
    alpha_beta_seconds,
    call_fits,
)
from tests.cost.clusters import cluster
from tests.validate.artificial import SIZES, Clock, call_rows
from tests.validate.links import clocks


@st.composite
def links(draw: st.DrawFn) -> AlphaBeta:
    """Links whose ramp lies between the sizes and is no shorter than their latency."""
    ramp = 10 ** draw(st.floats(5.5, 7.5))
    latency = 10 ** draw(st.floats(-5.5, -3.5))
    return AlphaBeta(
        latency_seconds=latency,
        bandwidth_bytes_per_second=ramp / (latency * draw(st.floats(3, 100))),
        ramp_bytes=ramp,
        error_fraction=0.0,
    )


def measured(link: AlphaBeta, clock: Clock) -> list[float]:
    repeat = clock.repeat()
    return [median(repeat(alpha_beta_seconds(sent_bytes=size, fit=link))) for size in SIZES]


@given(links(), clocks())
def test_a_noisy_link_gives_its_latency_and_bandwidth_back(link: AlphaBeta, clock: Clock) -> None:
    found = alpha_beta(SIZES, measured(link, clock))
    assert found.latency_seconds == pytest.approx(link.latency_seconds, rel=0.05)
    assert found.bandwidth_bytes_per_second == pytest.approx(
        link.bandwidth_bytes_per_second, rel=0.05
    )
    assert found.error_fraction < 0.02


@given(links(), st.integers(0, 10**6))
def test_a_quiet_link_gives_its_ramp_back_too(link: AlphaBeta, seed: int) -> None:
    found = alpha_beta(SIZES, measured(link, Clock(noise=0.003, repeats=50, seed=seed)))
    assert found.ramp_bytes == pytest.approx(link.ramp_bytes, rel=0.05)


@given(links())
def test_a_short_transfer_has_half_of_the_bandwidth_and_a_long_one_all(link: AlphaBeta) -> None:
    def rate(sent_bytes: float) -> float:
        seconds = alpha_beta_seconds(sent_bytes=sent_bytes, fit=link) - link.latency_seconds
        return sent_bytes / seconds / link.bandwidth_bytes_per_second

    assert rate(link.ramp_bytes / 1e4) == pytest.approx(0.5, rel=1e-2)
    assert rate(link.ramp_bytes) == pytest.approx(2 / 3)
    assert rate(link.ramp_bytes * 1e4) == pytest.approx(1.0, rel=1e-2)


def test_each_collective_and_group_has_a_line_and_pairs_have_none() -> None:
    rows = list(call_rows(cluster(gpus=16)))
    fits = call_fits(rows)
    assert len(fits) == 3 * 6
    assert {(fit.group, fit.ranks, fit.stride) for fit in fits} == {
        ("inside", 8, 1),
        ("across", 2, 8),
        ("world", 16, 1),
    }


def test_too_few_sizes_give_no_line() -> None:
    assert call_fits(list(call_rows(cluster(gpus=8), sizes=(2**20, 2**24, 2**24)))) == ()

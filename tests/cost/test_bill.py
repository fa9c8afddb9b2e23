"""The bill of a training: by hand, in proportion, and with the band of its step."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.cost.bill import (
    RUNNING_LOG_ERROR,
    Bill,
    bill,
    least_seconds,
    rated_draw,
    seconds_of_chance,
)
from fsdpplan.cost.estimate import estimate
from fsdpplan.files.clusters import load_cluster
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Case, Draw, Estimate, Interval, Terms
from fsdpplan.spec.training import Training
from tests.cost.problems import SMALL

CASE = Case(
    model=SMALL,
    cluster=load_cluster("dgx-h100", gpus=16).cluster,
    training=Training(seq_len=1000, global_batch=32, tokens=64_000_001),
    layout=Layout(dp_shard=16, num_microbatches=2, sharding="fsdp"),
)
PRICED = estimate(CASE)


def of_step(lower: float, expected: float, upper: float) -> Estimate:
    """The same layout with another step."""
    return replace(PRICED, step_seconds=Interval(lower=lower, expected=expected, upper=upper))


def billed(step: Estimate, terms: Terms) -> Bill:
    """Of the training of `CASE`."""
    found = bill(CASE, step, terms)
    assert found is not None
    return found


def test_time_and_money_by_hand() -> None:
    # 64,000,001 tokens are 2000.00003 steps of 32,000: 2001 whole ones, of 1.8 s: 3,601.8 s, which
    # is 1.0005 h; on 16 GPUs 16.008 GPU hours, at 2.50 a GPU hour 40.02
    found = billed(of_step(1.6, 1.8, 2.0), Terms(price=2.5))
    assert found.steps == 2001
    assert found.seconds == Interval(lower=2001 * 1.6, expected=2001 * 1.8, upper=2001 * 2.0)
    assert found.gpu_hours.expected == pytest.approx(16.008)
    assert found.cost is not None
    assert found.cost.expected == pytest.approx(40.02)
    assert found.cost.lower == pytest.approx(40.02 * 1.6 / 1.8)
    assert found.cost.upper == pytest.approx(40.02 * 2.0 / 1.8)
    assert found.energy_kwh is found.co2_kg is found.deadline_chance is None


def test_energy_by_hand() -> None:
    # two nodes of 8 kW for 1.0005 h: 16.008 kWh, at a PUE of 1.25 20.01 kWh, at 300 g 6.003 kg
    terms = Terms(draw=Draw(node_watts=8000), pue=1.25, co2_grams_per_kwh=300)
    found = billed(of_step(1.6, 1.8, 2.0), terms)
    assert found.energy_kwh is not None
    assert found.co2_kg is not None
    assert found.energy_kwh.expected == pytest.approx(20.01)
    assert found.co2_kg.expected == pytest.approx(6.003)
    assert found.energy_kwh.upper == pytest.approx(20.01 * 2.0 / 1.8)
    assert found.cost is None


def test_the_draw_of_a_node_by_hand() -> None:
    # a DGX H100: 8 x 700 W and the rest up to 10.2 kW, of which 76 % are drawn
    whole = rated_draw(gpu_watts=700, gpus_per_node=8, node_gpus=8, node_watts=10_200)
    assert whole.node_watts == pytest.approx(0.76 * 10_200)
    # four of its GPUs: 2.8 kW and the same rest of 4.6 kW
    half = rated_draw(gpu_watts=700, gpus_per_node=4, node_gpus=8, node_watts=10_200)
    assert half.node_watts == pytest.approx(0.76 * 7_400)
    # a node of 8 x 400 W that nobody rated: a rest in the proportion of a DGX H100's
    other = rated_draw(gpu_watts=400, gpus_per_node=8, node_gpus=8, node_watts=None)
    assert other.node_watts == pytest.approx(0.76 * 3200 * 10.2 / 5.6)


def test_the_error_of_a_draw_adds_to_that_of_the_step_in_squares() -> None:
    step = of_step(1.8 / 1.2, 1.8, 1.8 * 1.2)
    said = billed(step, Terms(draw=Draw(node_watts=8000))).energy_kwh
    rated = billed(step, Terms(draw=Draw(node_watts=8000, log_error=RUNNING_LOG_ERROR))).energy_kwh
    assert said is not None
    assert rated is not None
    assert rated.expected == said.expected
    of_step_alone = log(said.upper / said.expected) / NORMAL_80
    both = log(rated.upper / rated.expected) / NORMAL_80
    assert both**2 == pytest.approx(of_step_alone**2 + RUNNING_LOG_ERROR**2)


def test_a_deadline_is_met_by_the_band() -> None:
    step = of_step(1.8 / 1.2, 1.8, 1.8 * 1.2)
    whole = 2001 * 1.8
    at = {
        share: billed(step, Terms(deadline_seconds=whole * share)).deadline_chance
        for share in (1 / 1.2, 1.0, 1.2)
    }
    # ends of an 80 % band
    assert at[1.0] == pytest.approx(0.5)
    assert at[1.2] == pytest.approx(0.9, abs=1e-4)
    assert at[1 / 1.2] == pytest.approx(0.1, abs=1e-4)
    certain = of_step(1.8, 1.8, 1.8)
    assert billed(certain, Terms(deadline_seconds=whole * 1.01)).deadline_chance == 1
    assert billed(certain, Terms(deadline_seconds=whole * 0.99)).deadline_chance == 0


@given(
    st.floats(1e-3, 1e3),
    st.floats(1, 3),
    st.floats(0.01, 100),
    st.floats(1, 9),
    st.floats(0.02, 0.98),
)
def test_the_bill_keeps_its_proportions(
    step: float, error: float, price: float, factor: float, chance: float
) -> None:
    terms = Terms(price=price, draw=Draw(node_watts=7000, log_error=0.1), co2_grams_per_kwh=100)
    one = billed(of_step(step / error, step, step * error), terms)
    slower = billed(of_step(step * factor / error, step * factor, step * factor * error), terms)
    for name in ("seconds", "gpu_hours", "cost", "energy_kwh", "co2_kg"):
        own, other = getattr(one, name), getattr(slower, name)
        assert own.lower <= own.expected <= own.upper
        for end in ("lower", "expected", "upper"):
            assert getattr(other, end) == pytest.approx(factor * getattr(own, end))
    hours = one.seconds.expected / 3600
    assert one.cost is not None
    assert one.cost.expected == pytest.approx(16 * hours * price)
    # the deadline of a chance is met with that chance
    deadline = seconds_of_chance(one.seconds, chance)
    if error > 1.001:
        met = billed(of_step(step / error, step, step * error), Terms(deadline_seconds=deadline))
        assert met.deadline_chance == pytest.approx(chance, abs=1e-3)
        assert deadline == pytest.approx(
            one.seconds.expected * exp(log(deadline / one.seconds.expected))
        )


def test_nothing_is_done_in_less_than_at_the_peak_rate() -> None:
    least = least_seconds(CASE.model, CASE.cluster, CASE.training)
    assert least is not None
    seconds = billed(PRICED, Terms()).seconds.expected
    assert least / seconds == pytest.approx(PRICED.mfu_fraction)
    assert (
        bill(replace(CASE, training=replace(CASE.training, tokens=None)), PRICED, Terms()) is None
    )

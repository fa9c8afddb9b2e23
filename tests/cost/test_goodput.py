"""What failures leave of a run's time, beside a simulation of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import exp, inf, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.goodput import (
    Interruptions,
    Reliability,
    best_every_steps,
    best_interval_seconds,
    failures_per_second,
    goodput,
    goodput_fraction,
    interruptions,
    rank_checkpoint_bytes,
    read_bytes,
    time_shares,
    worthwhile_spares,
)
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.reshard import checkpoint_bytes
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.training import Training
from tests.cost.problems import SMALL, Case, load_cluster

HOUR = 3600.0
MILLION_HOURS = 1e6 * HOUR

RUNS = {
    "Llama 3, in the background": Interruptions(
        failures_per_second=1 / (3.09 * HOUR),
        blocking_seconds=6.3,
        writing_seconds=40.0,
        restart_seconds=720.0,
    ),
    "saved in place": Interruptions(
        failures_per_second=1 / (8 * HOUR),
        blocking_seconds=150.0,
        writing_seconds=0.0,
        restart_seconds=900.0,
    ),
    "slow storage": Interruptions(
        failures_per_second=1 / (2 * HOUR),
        blocking_seconds=10.0,
        writing_seconds=1500.0,
        restart_seconds=600.0,
    ),
    "fails more than it trains": Interruptions(
        failures_per_second=1 / HOUR,
        blocking_seconds=60.0,
        writing_seconds=600.0,
        restart_seconds=2400.0,
    ),
}


def simulated_fraction(run: Interruptions, interval: float, *, seed: int, seconds: float) -> float:
    """Kept training over time, event by event, until `seconds` have passed: lives that end at
    random, restarts that fail, too, and saves that count when they are published and wait for the
    one before them."""
    random = Random(seed)
    passed = kept = 0.0
    while passed < seconds:
        life = random.expovariate(run.failures_per_second)
        if life < run.restart_seconds:
            passed += life
            continue
        passed += life
        now, published, saved = run.restart_seconds, 0.0, 0
        while True:
            # the next save begins when its steps are done and the last one is written
            now = max(now + interval, published) + run.blocking_seconds
            published = now + run.writing_seconds
            if published > life:
                break
            saved += 1
        kept += saved * interval
    return kept / passed


@cache
def simulated(name: str, of_best: float, seconds: float) -> float:
    run = RUNS[name]
    interval = of_best * best_interval_seconds(run)
    return simulated_fraction(run, interval, seed=7, seconds=seconds)


@pytest.mark.parametrize("of_best", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("name", RUNS)
def test_goodput_is_that_of_a_simulation(
    name: str, of_best: float, request: pytest.FixtureRequest
) -> None:
    """Over a million hours within 1 %, and over so many of them as a test has time for within what
    chance leaves of that."""
    is_whole = bool(request.config.getoption("--whole"))
    run = RUNS[name]
    seconds = MILLION_HOURS if is_whole else 8_000 / run.failures_per_second
    predicted = goodput_fraction(run, of_best * best_interval_seconds(run))
    assert simulated(name, of_best, seconds) == pytest.approx(
        predicted, rel=0.01 if is_whole else 0.03
    )


@pytest.mark.parametrize("name", RUNS)
def test_no_interval_keeps_more_than_the_best_one(name: str) -> None:
    run = RUNS[name]
    best = best_interval_seconds(run)
    scan = [best * 1.02**power for power in range(-200, 201)]
    most = max(goodput_fraction(run, each) for each in scan)
    assert goodput_fraction(run, best) == pytest.approx(most, rel=1e-9)


@pytest.mark.parametrize("name", ["Llama 3, in the background", "saved in place"])
def test_the_best_interval_keeps_what_the_simulated_optimum_does(name: str) -> None:
    """Equal failures for each interval, so that their chance is no part of the difference."""
    run = RUNS[name]
    best = best_interval_seconds(run)
    found = {
        factor: simulated_fraction(
            run, factor * best, seed=3, seconds=2500 / run.failures_per_second
        )
        for factor in (0.25, 0.6, 0.8, 1.0, 1.25, 1.7, 4.0)
    }
    assert found[1.0] >= max(found.values()) - 0.003
    assert found[1.0] > max(found[0.25], found[4.0])


def test_a_short_save_makes_it_youngs_interval() -> None:
    for blocking in (0.1, 1.0, 10.0):
        run = Interruptions(
            failures_per_second=1e-6,
            blocking_seconds=blocking,
            writing_seconds=0.0,
            restart_seconds=100.0,
        )
        assert best_interval_seconds(run) == pytest.approx(sqrt(2 * blocking / 1e-6), rel=0.01)


def test_dalys_estimate_of_higher_order() -> None:
    """Daly 2006, equation 37: sqrt(2 d M) (1 + sqrt(d / 2 M) / 3 + (d / 2 M) / 9) - d."""
    mtbf, save = 24 * HOUR, 300.0
    run = Interruptions(
        failures_per_second=1 / mtbf,
        blocking_seconds=save,
        writing_seconds=0.0,
        restart_seconds=600.0,
    )
    part = save / (2 * mtbf)
    daly = sqrt(2 * save * mtbf) * (1 + sqrt(part) / 3 + part / 9) - save
    assert best_interval_seconds(run) == pytest.approx(daly, rel=1e-3)


def test_a_save_is_written_before_the_next_one_begins() -> None:
    run = RUNS["slow storage"]
    assert best_interval_seconds(run) == run.writing_seconds
    assert goodput_fraction(run, 500.0) < goodput_fraction(run, 1500.0) / 2
    hopeless = replace(run, failures_per_second=1 / 900)
    assert best_interval_seconds(hopeless) == pytest.approx(900)


def test_without_failures_only_saves_cost() -> None:
    run = replace(RUNS["saved in place"], failures_per_second=0.0)
    assert best_interval_seconds(run) == inf
    assert goodput_fraction(run, 1350.0) == pytest.approx(0.9)
    assert time_shares(run, 1350.0).restarting == 0
    rare = replace(run, failures_per_second=1e-15)
    assert goodput_fraction(rare, 1350.0) == pytest.approx(0.9, rel=1e-6)


def test_an_interval_far_longer_than_a_life_keeps_nothing() -> None:
    run = RUNS["saved in place"]
    assert goodput_fraction(run, 20 / run.failures_per_second) < 1e-6
    assert goodput_fraction(run, 1e5 / run.failures_per_second) == 0
    shares = time_shares(run, 1e5 / run.failures_per_second)
    assert shares.redone == pytest.approx(exp(-900 / (8 * HOUR)))


@st.composite
def runs(draw: st.DrawFn) -> Interruptions:
    return Interruptions(
        failures_per_second=1 / draw(st.floats(600, 1e8)),
        blocking_seconds=draw(st.floats(0.01, 600)),
        writing_seconds=draw(st.floats(0, 3000)),
        restart_seconds=draw(st.floats(0, 3000)),
    )


@given(runs(), st.floats(1, 1e5), st.floats(1.01, 10))
def test_more_of_what_hurts_never_helps(run: Interruptions, interval: float, more: float) -> None:
    before = goodput_fraction(run, interval)
    assert 0 <= before <= 1
    for name in ("failures_per_second", "blocking_seconds", "writing_seconds", "restart_seconds"):
        worse = replace(run, **{name: more * getattr(run, name)})
        assert goodput_fraction(worse, interval) <= before * (1 + 1e-9)
    shares = time_shares(run, interval)
    total = shares.kept + shares.saving + shares.redone + shares.restarting
    assert total == pytest.approx(1, abs=1e-6)


@given(runs(), st.floats(0.1, 120))
def test_whole_steps_cost_no_more_than_rounding(run: Interruptions, step: float) -> None:
    every = best_every_steps(run, step)
    assert every >= 1
    kept = goodput_fraction(run, every * step)
    for other in (every - 1, every + 1, 2 * every):
        if other >= 1:
            assert kept >= goodput_fraction(run, other * step) * (1 - 1e-9)


def case(**layout: object) -> Case:
    degrees: dict[str, object] = {"dp_replicate": 1, "dp_shard": 16, **layout}
    made = Layout(micro_batch=1, num_microbatches=1, **degrees)  # type: ignore[arg-type]
    return Case(
        model=SMALL,
        cluster=load_cluster("dgx-h100", gpus=made.world).cluster,
        training=Training(seq_len=1024, global_batch=made.global_batch),
        layout=made,
    )


def known(**changes: float) -> Reliability:
    values = {
        "gpu_mtbf_seconds": 5e4 * HOUR,
        "node_mtbf_seconds": 2e4 * HOUR,
        "write_bytes_per_second": 1e9,
        "read_bytes_per_second": 4e9,
        "save_seconds": 2.0,
        "restart_seconds": 600.0,
        **changes,
    }
    return Reliability(**values)  # type: ignore[arg-type]


def test_a_checkpoint_has_each_parameter_once() -> None:
    """fp32 parameters and two moments of AdamW, however many copies there are."""
    elements = parameter_count(SMALL)
    assert checkpoint_bytes(case()) == 12 * elements
    assert checkpoint_bytes(case(dp_replicate=2, dp_shard=8)) == 12 * elements
    assert checkpoint_bytes(case(dp_shard=2, tp=4, pp=2, schedule="1f1b")) == pytest.approx(
        12 * elements, rel=1e-6
    )
    # each copy is read by its own ranks, behind one reading for checksums
    flat, copies = case(), case(dp_replicate=2, dp_shard=8)
    assert read_bytes(flat) == pytest.approx(2 * 12 * elements, rel=0.01)
    assert read_bytes(copies) == pytest.approx(3 * 12 * elements, rel=0.01)
    assert rank_checkpoint_bytes(flat) == pytest.approx(12 * elements / 16, rel=0.01)


def test_gpus_and_nodes_fail_apart() -> None:
    rate = failures_per_second(known(), gpus=16, nodes=2)
    assert rate == pytest.approx((16 / 5e4 + 2 / 2e4) / HOUR)
    never = known(gpu_mtbf_seconds=inf, node_mtbf_seconds=inf)
    assert failures_per_second(never, gpus=16, nodes=2) == 0


def test_only_what_blocks_counts_as_blocking() -> None:
    aside, in_place = (
        interruptions(case(), replace(known(), in_background=each)) for each in (True, False)
    )
    written = checkpoint_bytes(case()) / 1e9
    assert aside.writing_seconds == written
    assert in_place.blocking_seconds == written
    assert in_place.writing_seconds == 0
    assert 2.0 < aside.blocking_seconds < 2.1


def test_the_band_has_what_is_not_known() -> None:
    one = case()
    sure = goodput(one, one.estimate, known())
    assert sure.fraction.lower == pytest.approx(sure.fraction.expected)
    assert sure.fraction.upper == pytest.approx(sure.fraction.expected)
    widths = []
    for factor in (1.5, 3.0):
        unsure = known(mtbf_factor=factor, storage_factor=factor, restart_factor=factor)
        found = goodput(one, one.estimate, unsure)
        band = found.fraction
        assert band.lower < band.expected == sure.fraction.expected < band.upper < 1
        widths.append(band.upper - band.lower)
    assert widths[1] > widths[0]


def test_an_interval_that_is_given_is_kept() -> None:
    one = case()
    best = goodput(one, one.estimate, known())
    given_one = goodput(one, one.estimate, known(), every_steps=7)
    assert given_one.every_steps == 7
    assert given_one.interval_seconds == pytest.approx(7 * one.seconds)
    assert given_one.fraction.expected <= best.fraction.expected


def test_spare_nodes_follow_from_what_waiting_costs() -> None:
    large = Interruptions(
        failures_per_second=1 / (3 * HOUR),
        blocking_seconds=6.0,
        writing_seconds=40.0,
        restart_seconds=1200.0,
    )
    spares, gain = worthwhile_spares(large, 360.0, nodes=2048, requeue_seconds=900.0)
    assert spares >= 8
    assert gain > 0.05
    # with fewer nodes a spare costs more, and with no wait it brings nothing
    few, _ = worthwhile_spares(large, 360.0, nodes=64, requeue_seconds=900.0)
    assert few < spares
    assert worthwhile_spares(large, 360.0, nodes=2048, requeue_seconds=1e-9)[0] == 0
    rare = replace(large, failures_per_second=1 / (800 * HOUR))
    assert worthwhile_spares(rare, 3600.0, nodes=8, requeue_seconds=900.0) == (0, 0.0)


def test_spares_wait_as_a_simulation_says() -> None:
    """Of the failures of a day those beyond the spares wait."""
    from fsdpplan.cost.goodput import _expected_beyond

    random = Random(5)
    for expected, spares in ((0.3, 1), (4.0, 2), (8.0, 11)):
        waits = 0
        for _ in range(4000):
            passed, number = random.expovariate(expected), 0
            while passed < 1:
                passed, number = passed + random.expovariate(expected), number + 1
            waits += max(0, number - spares)
        assert _expected_beyond(spares, expected) == pytest.approx(waits / 4000, abs=0.06)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu_mtbf_seconds": 0.0}, "gpu_mtbf_seconds must be above 0"),
        ({"write_bytes_per_second": inf}, "write_bytes_per_second"),
        ({"mtbf_factor": 0.5}, "mtbf_factor must be at least 1"),
        ({"restart_seconds": -1.0}, "restart_seconds must be at least 0"),
        ({"requeue_seconds": 700.0}, "raise the restart"),
    ],
)
def test_impossible_numbers_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        known(**changes)

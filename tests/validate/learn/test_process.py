"""What runs say of other runs: fully of their own stack, hardly of other software."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.files.learning import load_widths
from fsdpplan.validate.learn.features import HOST_LOGS
from fsdpplan.validate.learn.known import PricedRun, jobs_among
from fsdpplan.validate.learn.likeness import host_chances
from fsdpplan.validate.learn.process import Process, process, student_80
from tests.validate.learn.made import made_run, of_other

WIDTHS = load_widths()
ASKED = made_run(1.0)


def learned(*runs: PricedRun) -> Process:
    return process(jobs_among(runs), WIDTHS)


def factor(posterior: Process, run: PricedRun = ASKED) -> float:
    return exp(posterior.one(run.features)[0])


@pytest.mark.parametrize("true", [0.7, 1.0, 1.25, 1.6, 2.5])
def test_ten_identical_runs_are_reproduced_within_3_percent(true: float) -> None:
    posterior = learned(*[made_run(true) for _ in range(10)])
    assert factor(posterior) == pytest.approx(true, rel=0.03)
    _, deviation = posterior.one(ASKED.features)
    assert exp(NORMAL_80 * deviation) < 1.11


def test_one_run_tells_most_of_its_own_job_and_much_of_its_stack() -> None:
    run = made_run(1.3, micro_batch=8)  # which never waits for its host
    posterior = learned(run)
    itself, alike = factor(posterior, run), factor(posterior, made_run(1.0, micro_batch=16))
    elsewhere = factor(posterior, made_run(1.0, name="llama-3.2-1b", gpus=8, micro_batch=16))
    assert 1.05 < elsewhere < itself <= 1.3
    # a shorter step has a larger share of what a step costs whatever it computes
    assert elsewhere < 1.01 * alike < itself
    assert itself == pytest.approx(1.3, rel=0.03)


@pytest.mark.parametrize(
    ("other", "least", "most"),
    [
        ({"software": "NeMo", "runtime": "megatron"}, 0.0, 0.12),
        ({"software": "another trainer"}, 0.0, 0.12),
        ({"precision": "fp8"}, 0.4, 0.85),
        ({"device": "a100-sxm-80g"}, 0.4, 0.85),
    ],
    ids=["software and runtime", "software", "precision", "device"],
)
def test_another_stack_tells_its_share(other: dict[str, str], least: float, most: float) -> None:
    """Ten runs of it that take half as long again move nothing by more than that share."""
    runs = [made_run(1.5, stack=of_other(**other), micro_batch=2**n) for n in range(4)]
    moved = log(factor(learned(*runs, *runs, *runs[:2]), made_run(1.0))) / log(1.5)
    assert least <= moved <= most


def test_what_is_of_other_software_hardly_disturbs_what_is_known() -> None:
    own = [made_run(1.1), made_run(1.1, micro_batch=2)]
    foreign = [made_run(2.0, stack=of_other(software="NeMo"), micro_batch=2**n) for n in range(5)]
    alone, both = factor(learned(*own)), factor(learned(*own, *foreign))
    assert both == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("odd", [0.4, 3.0])
def test_three_runs_of_one_job_and_an_outlier_do_not_break_it(odd: float) -> None:
    same = [made_run(1.1), made_run(1.12), made_run(1.11)]
    of_that_job = learned(*same, made_run(odd))
    of_another = learned(*same, made_run(odd, micro_batch=2))
    for posterior in (of_that_job, of_another):
        assert factor(posterior) == pytest.approx(1.11, rel=0.03)


@pytest.mark.parametrize("odd", [0.4, 3.0])
def test_an_outlier_among_jobs_hardly_pulls_at_others_and_is_known_itself(odd: float) -> None:
    runs = [made_run(1.1, micro_batch=2**n) for n in range(3)]
    runs += [made_run(1.1, tp=tp) for tp in (2, 4)]
    strange = made_run(odd, activation_checkpointing="full")
    clean, posterior = learned(*runs), learned(*runs, strange)
    other = made_run(1.0, dp_replicate=8, dp_shard=8)
    assert factor(posterior, other) == pytest.approx(factor(clean, other), rel=0.05)
    # one run alone may be the odd one, and not its job
    assert factor(posterior, strange) == pytest.approx(odd, rel=0.2)


def test_seconds_that_every_step_takes_weigh_more_where_steps_are_short() -> None:
    long, short = made_run(1.0, micro_batch=8), made_run(1.0, name="llama-3.2-1b", gpus=64)
    more = 0.5 * short.features.seconds
    slow = [
        made_run(
            1 + more / made_run(1.0, name="llama-3.2-1b", micro_batch=n).features.seconds,
            name="llama-3.2-1b",
            micro_batch=n,
        )
        for n in (1, 2, 4)
    ]
    posterior = learned(*slow)
    assert factor(posterior, long) < factor(posterior, short)


BY_HOST = {"name": "llama-3.2-1b", "gpus": 8, "tp": 8}
"""A layout of which passes wait where its host is twice as slow as predicted."""
SLOW_LOG = HOST_LOGS[15]
"""A host that takes six times as long."""


def slow_run(**layout: Any) -> PricedRun:
    """A run that takes as long as its host lets it: the rest is as predicted."""
    plain = made_run(1.0, **layout)
    return replace(plain, step_seconds=plain.step_seconds * exp(slow_log(plain)))


def slow_log(run: PricedRun) -> float:
    return run.features.delays[HOST_LOGS.index(SLOW_LOG)]


def test_a_slow_host_is_learned_from_the_runs_that_wait_for_it() -> None:
    waiting = [BY_HOST, BY_HOST | {"tp": 4}, BY_HOST | {"tp": 8, "micro_batch": 2}]
    asked, busy = made_run(1.0, **(BY_HOST | {"tp": 2})), made_run(1.0, micro_batch=16)
    assert slow_log(busy) == 0 < 0.15 < slow_log(asked)
    posterior = learned(*(slow_run(**one) for one in waiting))
    assert exp(SLOW_LOG) == pytest.approx(6, rel=0.01)
    host = exp(float(posterior.chances @ HOST_LOGS))
    assert host == pytest.approx(6, rel=0.25)
    assert factor(posterior, asked) == pytest.approx(exp(slow_log(asked)), rel=0.06)
    assert factor(posterior, busy) == pytest.approx(1.0, rel=0.06)


def test_runs_that_keep_their_device_busy_say_nothing_of_the_host() -> None:
    busy = [made_run(1.0, micro_batch=2**n) for n in range(4, 7)]
    few, many = learned(busy[0]), learned(*busy, *busy)
    waiting = made_run(1.0, **BY_HOST)
    assert many.chances == pytest.approx(host_chances(WIDTHS))
    # as wide as the host leaves it, however well the rest is known
    chances, delays = host_chances(WIDTHS), np.array(waiting.features.delays)
    of_host = sqrt(chances @ delays**2 - (chances @ delays) ** 2)
    for posterior in (few, many):
        assert posterior.one(waiting.features)[1] >= of_host
    assert many.one(ASKED.features)[1] < of_host / 3


def test_a_device_that_was_busy_bounds_how_slow_its_host_is() -> None:
    prompt = learned(made_run(1.0, **BY_HOST), made_run(1.0, **(BY_HOST | {"tp": 4})))
    slow = np.array(HOST_LOGS) > log(5)
    assert prompt.chances[slow].sum() < host_chances(WIDTHS)[slow].sum() / 3


def test_the_host_of_another_program_is_as_wide_as_before() -> None:
    known = learned(*(slow_run(**BY_HOST, micro_batch=n) for n in (1, 2, 4)))
    other = made_run(1.0, stack=of_other(software="NeMo"), **BY_HOST)
    mean, deviation = known.one(other.features)
    assert abs(mean) < 0.15 * slow_log(other)
    chances, delays = host_chances(WIDTHS), np.array(other.features.delays)
    assert deviation > sqrt(chances @ delays**2 - (chances @ delays) ** 2)


def test_a_difference_is_known_better_than_a_time_and_better_with_runs() -> None:
    one, other = ASKED.features, made_run(1.0, micro_batch=2).features
    far = learned(made_run(1.0, stack=of_other(software="NeMo")))
    near = learned(made_run(1.0), made_run(1.0, micro_batch=2))
    _, time = far.one(one)
    assert near.difference_deviation(one, other) < far.difference_deviation(one, other) < time
    assert far.difference_deviation(one, one) == 0


@given(factors=st.lists(st.floats(0.3, 3.0), min_size=1, max_size=6))
def test_runs_never_make_what_is_known_less_than_nothing(factors: list[float]) -> None:
    runs = [made_run(one, micro_batch=2**place) for place, one in enumerate(factors)]
    posterior = learned(*runs)
    mean, deviation = posterior.one(ASKED.features)
    assert min(map(log, [*factors, 1.0])) - 0.3 <= mean <= max(map(log, [*factors, 1.0])) + 0.3
    assert deviation > 0
    both = posterior.judged([ASKED.features])
    assert (both.mean[0], both.deviation[0]) == pytest.approx((mean, deviation))


def test_the_quantile_is_that_of_student() -> None:
    stats = pytest.importorskip("scipy.stats")
    for degrees in (4.3, 5, 8, 20, 200):
        # 1.2816 itself has five digits
        assert student_80(degrees) == pytest.approx(stats.t.ppf(0.9, degrees), rel=1.5e-3)
    assert student_80(1e9) == pytest.approx(NORMAL_80)

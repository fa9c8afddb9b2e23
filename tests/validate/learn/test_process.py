"""What runs say of other runs: fully of their own stack, hardly of other software."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.cost.band import NORMAL_80
from fsdpplan.files.learning import load_widths
from fsdpplan.validate.learn.known import PricedRun, jobs_among
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
    posterior = learned(made_run(1.3))
    itself, alike = factor(posterior), factor(posterior, made_run(1.0, micro_batch=2))
    elsewhere = factor(posterior, made_run(1.0, name="llama-3.2-1b", gpus=8))
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

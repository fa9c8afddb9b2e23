"""Alert rules of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from fsdpplan.emit.alerts import LEAST_STALLED_SECONDS, LOW_MFU_FRACTION, alert_rules, alerts
from fsdpplan.spec.plan import Interval, Plan
from fsdpplan.trainer.watch.prometheus import HELP
from tests.emit.plans import make_plan
from tests.emit.promql import Series, fires

DIGEST = "0123456789abcdef" * 4


def with_step(plan: Plan, seconds: float) -> Plan:
    step = Interval(lower=seconds / 2, expected=seconds, upper=seconds * 2)
    return replace(plan, estimate=replace(plan.estimate, step_seconds=step))


def rules(plan: Plan) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(alert_rules(plan, digest=DIGEST))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_the_rules_are_of_mfu_a_stall_and_a_broken_loss() -> None:
    found = rules(make_plan("cuda"))
    assert [rule["alert"] for rule in found] == [
        "TrainingMfuLow",
        "TrainingMfuRegressed",
        "TrainingStalled",
        "TrainingLossNaN",
    ]
    for rule in found:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert '{plan="0123456789ab"}' in rule["expr"]
    assert found[0]["for"] == "10m"


def test_mfu_is_low_below_the_slow_end_of_the_band() -> None:
    plan = make_plan("cuda")
    limit = float(rules(plan)[0]["expr"].split(" < ")[1].split(" and ")[0])
    assert limit == pytest.approx(LOW_MFU_FRACTION * plan.estimate.mfu_fraction / 2)


@pytest.mark.parametrize(("step", "limit"), [(0.1, LEAST_STALLED_SECONDS), (60.0, 1200)])
def test_a_stall_is_many_of_the_plans_steps(step: float, limit: int) -> None:
    rule = rules(with_step(make_plan("cuda"), step))[2]
    assert f"> {limit} and" in rule["expr"]
    assert "training_running" in rule["expr"]


def test_only_metrics_that_the_trainer_writes_are_asked_for() -> None:
    for alert in alerts(make_plan("cuda"), digest=DIGEST):
        words = alert.expression.replace("{", " ").replace("(", " ").split()
        assert {word for word in words if word.startswith("training_")} <= HELP.keys()


@pytest.mark.parametrize("name", ['a "b" {{ $x }}: - #\\', "naïve\n- alert: x", "'"])
def test_names_stay_text(name: str) -> None:
    plan = make_plan("cuda")
    found = rules(replace(plan, model=replace(plan.model, name=name)))
    assert len(found) == 4
    summary = found[3]["annotations"]["summary"]
    assert summary.startswith(name.replace("{{", "{ {"))
    assert "{{" not in summary


HOUR = 3600.0
NOW = 1_800_000_000.0


def mfu_of(value_at: Callable[[float], float], *, job: str = "1", hours: float = 8.0) -> Series:
    """A sample each minute for so many hours until now; `value_at` knows seconds before now."""
    ages = [60.0 * minute for minute in range(int(hours * 60), -1, -1)]
    labels = {"plan": DIGEST[:12], "model": "m", "slurm_job": job}
    return Series("training_mfu", labels, [(NOW - age, value_at(age)) for age in ages])


def running(value: float, *, job: str = "1") -> Series:
    labels = {"plan": DIGEST[:12], "model": "m", "slurm_job": job}
    return Series("training_running", labels, [(NOW - 30.0, value)])


def regressed(*series: Series) -> bool:
    (alert,) = (
        one
        for one in alerts(make_plan("cuda"), digest=DIGEST)
        if one.name == "TrainingMfuRegressed"
    )
    return fires(alert.expression, list(series), NOW)


@pytest.mark.parametrize(
    ("last_half_hour", "speaks"), [(0.40, False), (0.35, False), (0.339, True), (0.1, True)]
)
def test_a_regression_is_half_an_hour_below_85_percent_of_the_hours_before(
    last_half_hour: float, *, speaks: bool
) -> None:
    series = mfu_of(lambda age: last_half_hour if age < 0.5 * HOUR else 0.4)
    assert regressed(series, running(1.0)) is speaks
    # what is over is no regression, nor is another plan's run
    assert not regressed(series, running(0.0))
    other = Series("training_mfu", {**series.labels, "plan": "another"}, series.samples)
    assert not regressed(other, running(1.0))


def test_a_short_dip_is_no_regression_nor_is_what_was_always_so() -> None:
    assert not regressed(mfu_of(lambda age: 0.1 if age < 300 else 0.4), running(1.0))
    assert not regressed(mfu_of(lambda age: 0.1), running(1.0))
    # before half an hour has passed there is nothing to compare with
    assert not regressed(mfu_of(lambda age: 0.1 * (1 + age), hours=0.45), running(1.0))
    # a fall seven hours ago is none of the last six
    assert not regressed(mfu_of(lambda age: 0.4 if age > 6.6 * HOUR else 0.2), running(1.0))


def test_a_run_that_went_on_as_another_job_is_compared_with_the_one_before() -> None:
    before = mfu_of(lambda age: 0.4)
    first = Series(
        before.name, before.labels, [one for one in before.samples if one[0] < NOW - HOUR]
    )
    again = mfu_of(lambda age: 0.2, job="2", hours=0.4)
    assert regressed(first, again, running(1.0, job="2"))


def test_all_rules_are_understood_and_quiet_on_a_healthy_run() -> None:
    plan = make_plan("cuda")
    labels = {"plan": DIGEST[:12], "model": "m", "slurm_job": "1"}
    values = {
        "training_running": 1.0,
        "training_mfu": plan.estimate.mfu_fraction,
        "training_last_step_timestamp_seconds": NOW - 5.0,
        "training_loss": 2.5,
    }
    healthy = {
        name: Series(name, labels, [(NOW - age, value) for age in range(25_000, 0, -60)])
        for name, value in values.items()
    }
    ill = {
        "TrainingMfuLow": ("training_mfu", 0.001),
        "TrainingStalled": ("training_last_step_timestamp_seconds", NOW - 10_000.0),
        "TrainingLossNaN": ("training_loss", float("nan")),
    }
    for alert in alerts(plan, digest=DIGEST):
        assert not fires(alert.expression, list(healthy.values()), NOW), alert.name
        if alert.name in ill:
            name, value = ill[alert.name]
            now = {**healthy, name: Series(name, labels, [(NOW - 10.0, value)])}
            assert fires(alert.expression, list(now.values()), NOW), alert.name

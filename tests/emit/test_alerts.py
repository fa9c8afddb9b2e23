"""Alert rules of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from fsdpplan.emit.alerts import LEAST_STALLED_SECONDS, LOW_MFU_FRACTION, alert_rules, alerts
from fsdpplan.spec.plan import Interval, Plan
from fsdpplan.trainer.watch.prometheus import HELP
from tests.emit.plans import make_plan

DIGEST = "0123456789abcdef" * 4


def with_step(plan: Plan, seconds: float) -> Plan:
    step = Interval(lower=seconds / 2, expected=seconds, upper=seconds * 2)
    return replace(plan, estimate=replace(plan.estimate, step_seconds=step))


def rules(plan: Plan) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(alert_rules(plan, digest=DIGEST))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_the_rules_are_of_low_mfu_a_stall_and_a_broken_loss() -> None:
    found = rules(make_plan("cuda"))
    assert [rule["alert"] for rule in found] == [
        "TrainingMfuLow",
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
    rule = rules(with_step(make_plan("cuda"), step))[1]
    assert f"> {limit} and" in rule["expr"]
    assert "training_running" in rule["expr"]


def test_only_metrics_that_the_trainer_writes_are_asked_for() -> None:
    for alert in alerts(make_plan("cuda"), digest=DIGEST):
        words = alert.expression.replace("{", " ").split()
        assert {word for word in words if word.startswith("training_")} <= HELP.keys()


@pytest.mark.parametrize("name", ['a "b" {{ $x }}: - #\\', "naïve\n- alert: x", "'"])
def test_names_stay_text(name: str) -> None:
    plan = make_plan("cuda")
    found = rules(replace(plan, model=replace(plan.model, name=name)))
    assert len(found) == 3
    summary = found[2]["annotations"]["summary"]
    assert summary.startswith(name.replace("{{", "{ {"))
    assert "{{" not in summary

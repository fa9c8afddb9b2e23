"""Alert rules for Prometheus about one plan's run, whose limits come from its prediction.

Source of the format: prometheus.io, "Alerting rules".
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.emit.yaml_text import YamlValue, yaml_text
from fsdpplan.spec.plan import Plan

LOW_MFU_FRACTION = 0.9
"""Of the MFU at the slow end of the predicted band."""
LOW_MFU_MINUTES = 10
REGRESSED_FRACTION = 0.85
"""Of the MFU in the hours before."""
REGRESSED_MINUTES = 30
BASELINE_HOURS = 6
STALLED_STEPS = 10
"""A step that takes so many times the slow end of the band has stalled."""
LEAST_STALLED_SECONDS = 120
"""Prometheus and node_exporter ask every 15 to 60 s; a checkpoint takes a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str


def alerts(plan: Plan, *, digest: str) -> tuple[Alert, ...]:
    """The rules of `plan`, whose text has the hash `digest`: the trainer puts it in a label."""
    which = f'{{plan="{digest[:12]}"}}'
    step = plan.estimate.step_seconds
    least_mfu = LOW_MFU_FRACTION * plan.estimate.mfu_fraction * step.expected / step.upper
    stalled = max(LEAST_STALLED_SECONDS, STALLED_STEPS * step.upper)
    running = f"training_running{which} == 1"
    age = f"time() - training_last_step_timestamp_seconds{which}"
    return (
        Alert(
            name="TrainingMfuLow",
            expression=f"training_mfu{which} < {least_mfu:.6g} and {running}",
            minutes=LOW_MFU_MINUTES,
            severity="warning",
            summary=f"{plan.model.name}: MFU is below {least_mfu:.1%}; the plan expects "
            f"{plan.estimate.mfu_fraction:.1%}",
        ),
        Alert(
            name="TrainingMfuRegressed",
            expression=f"{_mean(which, f'[{REGRESSED_MINUTES}m]')} / "
            f"{_mean(which, f'[{BASELINE_HOURS}h] offset {REGRESSED_MINUTES}m')} < "
            f"{REGRESSED_FRACTION} and on (plan) {running}",
            minutes=0,
            severity="warning",
            summary=f"{plan.model.name}: MFU of the last {REGRESSED_MINUTES} minutes is below "
            f"{REGRESSED_FRACTION:.0%} of that of the {BASELINE_HOURS} hours before",
        ),
        Alert(
            name="TrainingStalled",
            expression=f"{age} > {stalled:.0f} and {running}",
            minutes=0,
            severity="critical",
            summary=f"{plan.model.name}: no step has ended for {stalled:.0f} s; the plan expects "
            f"one each {step.expected:.3g} s",
        ),
        Alert(
            name="TrainingLossNaN",
            expression=f"training_loss{which} != training_loss{which}",
            minutes=0,
            severity="critical",
            summary=f"{plan.model.name}: the loss is not a number",
        ),
    )


def _mean(which: str, window: str) -> str:
    """Of all series of the plan: one that Slurm requeued, or that went on as another job, has
    several, and what came before is in another one."""
    return f"avg by (plan) (avg_over_time(training_mfu{which}{window}))"


def alert_rules(plan: Plan, *, digest: str) -> str:
    """A rule file for Prometheus."""
    rules = [_rule(alert) for alert in alerts(plan, digest=digest)]
    return yaml_text({"groups": [{"name": f"fsdpplan {digest[:12]}", "rules": rules}]})


def _rule(alert: Alert) -> dict[str, YamlValue]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": f"{alert.minutes}m",
        "labels": {"severity": alert.severity},
        "annotations": {"summary": _literal(alert.summary)},
    }


def _literal(text: str) -> str:
    """Prometheus expands templates in annotations: a name with braces is none."""
    return text.replace("{{", "{ {")

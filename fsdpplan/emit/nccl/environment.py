"""Environment of the ranks: a variable is set only where the plan gives a reason for it.

NCCL finds its own interfaces, adapters and algorithms, and what was a cure for one version slows
the next one down. So each line has a reason taken from the plan and its topology, the versions it
is for and its source, and gives way to a value that the user has exported.
"""

from __future__ import annotations

from fsdpplan.emit.job import Job
from fsdpplan.emit.nccl.fabric import FABRIC_RULES
from fsdpplan.emit.nccl.node import DEBUGGING_RULES, DEVICE_RULES
from fsdpplan.emit.nccl.rules import ChosenValue, Rule, Unset, Variable
from fsdpplan.emit.nccl.unset import NEVER_SET
from fsdpplan.spec.plan import Plan

RULES: tuple[Rule, ...] = (*DEVICE_RULES, *FABRIC_RULES, *DEBUGGING_RULES)
"""Every variable that a job can get, in the order in which they are written."""


def environment(*, plan: Plan, job: Job) -> tuple[Variable, ...]:
    """Variables for every rank of the plan, in the order they are written."""
    return tuple(
        Variable(
            name=rule.name,
            value=setting.value,
            reason=setting.reason,
            versions=rule.versions,
            source=rule.source,
            kind=rule.kind,
            expands=setting.expands,
            on_node=setting.on_node,
        )
        for rule in RULES
        if isinstance(setting := rule.decide(plan, job), ChosenValue)
    )


def left_unset(*, plan: Plan, job: Job) -> tuple[Unset, ...]:
    """What the plan leaves unset on purpose: rules without evidence, those that share a reason
    together, then what is never set."""
    names: dict[str, list[Rule]] = {}
    for rule in RULES:
        why = rule.decide(plan, job)
        if isinstance(why, str):
            names.setdefault(why, []).append(rule)
    without = [
        Unset(names=tuple(rule.name for rule in rules), why=why, source=rules[0].source)
        for why, rules in names.items()
    ]
    return (*without, *(unset for unset in NEVER_SET if unset.is_about(plan.cluster)))

"""Plans that are read to be run: what they leave to a rule of the cost model is named in them.

Somebody who makes a layout in Python need not say which blocks each stage of a pipeline has. The
trainer and other programs have no rule of their own: all that reads a plan reads it here. What a
search finds is named when the plan is made.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

from fsdpplan import __version__
from fsdpplan.cost.estimate import estimate
from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.errors import SpecError
from fsdpplan.files import plans
from fsdpplan.files.table import beside, path_text
from fsdpplan.search.advice.field_rules import broken_rules
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import BrokenRule, Case, Failures, Plan, RankedLayout, Terms, assumed
from fsdpplan.spec.training import Training


def read_plan(path: Path | str) -> Plan:
    """The plan in a file, its stages named. Raises SpecError in one line when it is not sound."""
    if not os.path.exists(path):
        raise SpecError(
            f"there is no plan {path_text(path)}{beside(Path(path))}: type fsdpplan recommend "
            "--params 8e9 --gpus 8 first, which saves one, or name another"
        )
    return _named(plans.read_plan(path), where=path_text(path))


def plan_from_json(text: str, *, where: str) -> Plan:
    """The plan in `text`, its stages named; `where` names it in messages."""
    return _named(plans.plan_from_json(text, where=where), where=where)


def new_plan(
    *,
    model: Model,
    cluster: Cluster,
    training: Training,
    chosen: RankedLayout,
    ranked: tuple[RankedLayout, ...],
    sources: tuple[tuple[str, str], ...] = (),
    assumptions: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    rules: tuple[BrokenRule, ...] | None = None,
    failures: Failures | None = None,
    terms: Terms | None = None,
) -> Plan:
    """The plan that runs `chosen` of `ranked`, by this version; its stages are named. The rules of
    the field are looked at here where they were not."""
    if rules is None:
        case = Case(model=model, cluster=cluster, training=training, layout=chosen.layout)
        rules = broken_rules(case, chosen.estimate)
    plan = Plan(
        model=model,
        cluster=cluster,
        training=training,
        layout=chosen.layout,
        estimate=chosen.estimate,
        alternatives=ranked,
        sources=sources,
        assumptions=assumed(assumptions, model=model, layout=chosen.layout),
        warnings=warnings,
        versions=(("fsdpplan", __version__), ("python", platform.python_version())),
        rules=rules,
        failures=failures,
        terms=terms,
    )
    return with_stages(plan)


def with_stages(plan: Plan) -> Plan:
    """`plan` with the blocks of each stage named, by which its layouts were priced."""
    return replace(
        plan,
        layout=named_stages(model=plan.model, layout=plan.layout),
        alternatives=tuple(
            replace(one, layout=named_stages(model=plan.model, layout=one.layout))
            for one in plan.alternatives
        ),
    )


def in_precision(plan: Plan, precision: str | None) -> Plan:
    """The part of the plan in `precision`, as a plan of its own; the plan itself where that does
    not change, and the first part of one that does where nobody says which."""
    if plan.training.precision_switch == "none":
        return plan
    case = next(
        (each for _, each in plan.case.phases if each.training.precision == precision),
        plan.case.phases[0][1],
    )
    return replace(plan, training=case.training, estimate=estimate(case), alternatives=())


def _named(plan: Plan, *, where: str) -> Plan:
    try:
        return with_stages(plan)
    except SpecError as error:
        raise SpecError(f"{where}: {error}; plan again with `fsdpplan recommend`") from error

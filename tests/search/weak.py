"""A plan with a node that holds the others back."""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.cost.estimate import estimate
from fsdpplan.spec.cluster import WeakSpot
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.weak import weakened


def with_a_weak_node(plan: Plan) -> Plan:
    """The plan where n03 has a slow port, and the prediction that goes with it."""
    spot = WeakSpot(
        nodes=("n03",),
        level=plan.cluster.levels[-1].name,
        remaining_fraction=0.25,
        text="mlx5_3 runs at 100 Gb/s, its equals at 400 Gb/s",
    )
    cluster = weakened(plan.cluster, (spot,))
    predicted = estimate(replace(plan.case, cluster=cluster))
    return replace(plan, cluster=cluster, estimate=predicted, alternatives=())

"""Weak nodes of a plan: what a step takes without them, and what each choice costs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fsdpplan.cost.step import estimate
from fsdpplan.spec.cluster import Cluster
from fsdpplan.spec.host_list import compress_host_list
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.weak import weak_nodes, without_nodes
from fsdpplan.units import format_percent, format_seconds


def without_excluded(plan: Plan, excluded: Collection[str]) -> Plan:
    """`plan` as it is predicted where its weak nodes among `excluded` are left out; scripts carry
    no list."""
    out = [node for node in weak_nodes(plan.cluster) if node in excluded]
    if not out:
        return plan
    cluster = without_nodes(plan.cluster, out)
    predicted = estimate(replace(plan.case, cluster=cluster))
    return replace(plan, cluster=cluster, estimate=predicted, alternatives=())


def price_of_weak_nodes(plan: Plan, excluded: Collection[str]) -> tuple[str, ...]:
    """Sentences on nodes that hold the others back: what it brings that some are left out, and
    what it costs that others are kept."""
    weak = weak_nodes(plan.cluster)
    out = tuple(node for node in weak if node in excluded)
    kept = tuple(node for node in weak if node not in excluded)
    without = without_nodes(plan.cluster, out)
    sentences = []
    if out:
        slow, fast = _step_seconds(plan, plan.cluster), _step_seconds(plan, without)
        sentences.append(
            f"without {_nodes(plan, out)} a step takes {format_seconds(fast)}; kept, "
            f"{'it' if len(out) == 1 else 'they'} would make it {_longer(slow, fast)}"
        )
    if kept:
        slow = _step_seconds(plan, without)
        fast = _step_seconds(plan, without_nodes(without, kept))
        sentences.append(
            f"keeping {_nodes(plan, kept)} makes a step {_longer(slow, fast)} in place of "
            f"{format_seconds(fast)}; --exclude {compress_host_list(kept)} takes other nodes"
        )
    return tuple(sentences)


def _nodes(plan: Plan, nodes: tuple[str, ...]) -> str:
    """The nodes, and what is weak about them."""
    texts = (spot.text for spot in plan.cluster.weak if set(spot.nodes) & {*nodes})
    return f"{compress_host_list(nodes)} ({'; '.join(dict.fromkeys(texts))})"


def _step_seconds(plan: Plan, cluster: Cluster) -> float:
    return estimate(replace(plan.case, cluster=cluster)).step_seconds.expected


def _longer(slow_seconds: float, fast_seconds: float) -> str:
    more = format_percent(slow_seconds / fast_seconds - 1)
    return f"{more} longer: {format_seconds(slow_seconds)}"

"""Orders to render, and what their texts are without their heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdpplan.cost.schedule.stages import named_stages
from fsdpplan.emit.job import Job
from fsdpplan.emit.order import Order
from fsdpplan.emit.pods import Pods
from fsdpplan.emit.slurm.header import header_lines
from fsdpplan.emit.targets import Target, render
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_json
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import Training
from tests.emit.plans import make_cluster, make_estimate, make_plan

SAYABLE: dict[Target, dict[str, Any]] = {
    "torchtitan": {},
    "megatron": {"sharding": "zero1", "gradient_sync": "last"},
    "accelerate": {},
}
"""Fields of a layout that each target with a program of its own can say."""


def make_order(plan: Plan | None = None, *, pods: Pods | None = None, **job: Any) -> Order:
    """An order of `plan`, by default HSDP on two nodes of four GPUs."""
    chosen = plan or make_plan("cuda", nodes=2, per_node=4)
    return Order(
        plan=chosen,
        plan_json=plan_json(chosen),
        job=Job(**job),
        version="0.1.0",
        pods=pods or Pods(),
    )


def plan_of(layout: Layout, training: Training | None = None, **model: Any) -> Plan:
    """A plan on GPUs for any layout, on two nodes where its ranks allow; its stages are named."""
    plan = make_plan("cuda")
    shapes = replace(plan.model, **model)
    nodes = 2 if layout.world % 2 == 0 else 1
    chosen = replace(training or plan.training, global_batch=layout.global_batch)
    return replace(
        plan,
        model=shapes,
        cluster=make_cluster("cuda", nodes=nodes, per_node=layout.world // nodes),
        training=chosen,
        layout=named_stages(model=shapes, layout=layout),
        estimate=make_estimate(tokens=chosen.tokens_per_step, gpus=layout.world),
    )


def body(target: Target, plan: Plan) -> str | None:
    """What the target is told of the plan beside the head; None where it refuses."""
    order = Order(plan=plan, plan_json="{}", job=Job(), version="0.1.0")
    try:
        text = render(target, order)
    except SpecError:
        return None
    head = set(header_lines(plan=plan, plan_json="{}", version="0.1.0"))
    return "\n".join(line for line in text.splitlines() if line not in head)

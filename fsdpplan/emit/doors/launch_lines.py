"""How a program that is not ours is started on each node: environment and torchrun, as text."""

from __future__ import annotations

from fsdpplan.emit.nccl.variables import (
    given_lines,
    reasoned_lines,
    require_debug_meaning,
    set_up_lines,
)
from fsdpplan.emit.order import Order
from fsdpplan.emit.slurm.header import plan_digest
from fsdpplan.emit.slurm.node import prepare_lines
from fsdpplan.spec.plan import Plan


def rendezvous_port(order: Order) -> int:
    """Port of the rendezvous, the same on every host: it follows from the plan unless given."""
    if order.job.port is not None:
        return order.job.port
    return 20000 + int(plan_digest(order.plan_json)[:8], 16) % 10000


def rendezvous_id(order: Order) -> str:
    """Names the job where its ranks meet: those of another plan are turned away."""
    return plan_digest(order.plan_json)[:12]


def environment_lines(order: Order) -> list[str]:
    """Bash for a node: what was given, what the plan gives reasons for, what the node finds out."""
    return [*variables_lines(order), *_of_this_node(order.plan)]


def variables_lines(order: Order) -> list[str]:
    """Bash: set-up lines as given, variables as given, then NCCL's and PyTorch's with reasons."""
    plan, job = order.plan, order.job
    require_debug_meaning(plan=plan, job=job)
    return [*set_up_lines(job), *given_lines(job), *reasoned_lines(plan=plan, job=job)]


def _of_this_node(plan: Plan) -> list[str]:
    """What a node finds out for itself: its cloud's settings, its cores, what it may lock."""
    lines = prepare_lines(plan)
    if not lines:
        return []
    return [
        "prepare_node() {",
        f"  local ranks={plan.cluster.gpus_per_node}",
        *(f"  {line}" for line in lines),
        "}",
        "prepare_node",
    ]


def torchrun_words(plan: Plan) -> str:
    """Options of torchrun for this plan, with the shell's own variables for who is who."""
    nodes, ranks = plan.cluster.nodes, plan.cluster.gpus_per_node
    if nodes == 1:
        return f"--standalone --nproc-per-node={ranks}"
    return (
        f'--nnodes={nodes} --nproc-per-node={ranks} --node-rank="$NODE_RANK" '
        '--master-addr="$HEAD_NODE" --master-port="$PORT"'
    )


def commented(lines: list[str]) -> list[str]:
    """Lines of a shell, to be typed, as comments of another language."""
    return [f"#   {line}".rstrip() for line in lines]

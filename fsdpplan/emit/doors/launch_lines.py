"""How a program that is not ours is started on each node: environment and torchrun, as text.

What each host of a job runs where no Slurm is: look at the host, then torchrun.
"""

from __future__ import annotations

from fsdpplan.emit.nccl.variables import (
    given_lines,
    reasoned_lines,
    require_debug_meaning,
    set_up_lines,
)
from fsdpplan.emit.order import Order
from fsdpplan.emit.safe_text import shell_word
from fsdpplan.emit.slurm.header import METRICS_LINE, plan_digest, plan_lines
from fsdpplan.emit.slurm.node import check_lines, prepare_lines, program_words
from fsdpplan.emit.trainer_program import Trainer
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


STRICT = (
    "# Strings from options are literal (SC2016, SC2088, SC1003, SC1112), a cloud's script is on",
    "# the hosts only (SC1091), traps call functions (SC2317, SC2329), commas are commas (SC2054),",
    "# and parts read what is named here (SC2034).",
    "# shellcheck disable=SC1003,SC1091,SC1112,SC2016,SC2034,SC2054,SC2088,SC2317,SC2329",
    "set -euo pipefail",
    'refuse() { echo "fsdpplan: $*" >&2; exit 5; }',
)


def host_lines(order: Order) -> list[str]:
    """Bash: the plan, the environment, what `check_node` reads, and `start_ranks`, which wants
    HEAD_NODE, the name by which others reach the first host, NODE_RANK and PORT."""
    job = order.job
    metrics = [] if job.metrics is None else [METRICS_LINE + shell_word(job.metrics)]
    return [
        *plan_lines(order.plan_json),
        "",
        *variables_lines(order),
        *metrics,
        "",
        "# What the check of a host takes for granted.",
        f"needed={order.plan.cluster.nodes}",
        *check_lines(plan=order.plan, job=job, version=order.version),
        "",
        "# Starts the ranks of this host.",
        "start_ranks() {",
        *(f"  {line}" for line in _start(order)),
        "}",
    ]


def meeting_lines(order: Order) -> list[str]:
    """Where the ranks meet: the same on every host."""
    return [
        f'PORT="${{FSDPPLAN_PORT:-{rendezvous_port(order)}}}"',
        f'export FSDPPLAN_HEAD="$HEAD_NODE" FSDPPLAN_RUN={rendezvous_id(order)}',
    ]


def _start(order: Order) -> list[str]:
    plan, job = order.plan, order.job
    prepared, metrics = prepare_lines(plan), ""
    if isinstance(job.program, Trainer):
        metrics = ' ${FSDPPLAN_METRICS:+--metrics="$FSDPPLAN_METRICS"}'
    return [
        "set -euo pipefail",
        *([f"local ranks={plan.cluster.gpus_per_node}"] if prepared else []),
        "# torchrun's agent would die of USR1; its workers set a handler of their own.",
        "trap '' USR1",
        *prepared,
        f"exec {shell_word(job.python)} -m torch.distributed.run {torchrun_words(plan)} \\",
        f"  {program_words(job)}{metrics}",
    ]

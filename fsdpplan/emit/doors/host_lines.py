"""What each host of a job runs where no Slurm is: look at the host, then torchrun."""

from __future__ import annotations

from fsdpplan.emit.doors.launch_lines import (
    rendezvous_id,
    rendezvous_port,
    torchrun_words,
    variables_lines,
)
from fsdpplan.emit.order import Order
from fsdpplan.emit.quoting import shell_word
from fsdpplan.emit.slurm.header import METRICS_LINE, plan_lines
from fsdpplan.emit.slurm.node import check_function, prepare_lines, program_words
from fsdpplan.emit.trainer_program import Trainer

STRICT = (
    "# Strings from options are literal (SC2016, SC2088, SC1003, SC1112), a cloud's script is on",
    "# the hosts only (SC1091), traps call functions (SC2317, SC2329).",
    "# shellcheck disable=SC1003,SC1091,SC1112,SC2016,SC2088,SC2317,SC2329",
    "set -euo pipefail",
    'refuse() { echo "fsdpplan: $*" >&2; exit 5; }',
)


def host_lines(order: Order) -> list[str]:
    """Bash: the plan, the environment, `check_node`, and `start_ranks`, which wants HEAD_NODE, the
    name by which others reach the first host, NODE_RANK and PORT."""
    job = order.job
    metrics = [] if job.metrics is None else [METRICS_LINE + shell_word(job.metrics)]
    return [
        *plan_lines(order.plan_json),
        "",
        *variables_lines(order),
        *metrics,
        "",
        *check_function(plan=order.plan, job=job, version=order.version),
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

"""One job script: `sbatch` takes it as it is, `bash` runs it on one node or in an allocation."""

from __future__ import annotations

from dataclasses import fields

from fsdpplan.emit.job import Job, UserProgram, requeues, sbatch_option, tries_first
from fsdpplan.emit.nccl.cloud import gap_lines
from fsdpplan.emit.nccl.variables import (
    given_lines,
    reasoned_lines,
    require_debug_meaning,
    set_up_lines,
)
from fsdpplan.emit.order import Order, refuse_others
from fsdpplan.emit.safe_text import paragraph, sbatch_value, shell_word
from fsdpplan.emit.segments import segment_nodes, segment_reason
from fsdpplan.emit.slurm.allocation import attempt_lines, in_allocation, said_lines
from fsdpplan.emit.slurm.header import METRICS_LINE, header_lines, plan_file_lines, plan_lines
from fsdpplan.emit.slurm.node import node_lines
from fsdpplan.emit.slurm.parts import part_lines, runs_here, settings_lines
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan

LEAVE_IF_STOPPED = '[ -z "$stopped" ] || exit "$stopped"'
"""A signal that came during the check counts after it."""

MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")
"""sbatch takes one of them. Source: sbatch(1)."""

ALL_OF_JOB = frozenset(field.name for field in fields(Job)) - {"folder"}


def render(order: Order) -> str:
    """The job script of an order, which has no pods."""
    refuse_others(order, target="slurm", job=ALL_OF_JOB, pods=frozenset())
    return render_launch(
        plan=order.plan, plan_json=order.plan_json, job=order.job, version=order.version
    )


def render_launch(*, plan: Plan, plan_json: str, job: Job, version: str) -> str:
    """The job script of `plan`.

    `plan_json` is the plan as JSON text, which travels inside the script; `version` is the
    fsdpplan that every node must have.
    """
    _require_meaning(plan=plan, job=job)
    sections = [
        [
            "#!/bin/bash",
            *header_lines(plan=plan, plan_json=plan_json, version=version, job=job),
            *gap_lines(plan, job),
            *_usage(plan),
        ],
        [*sbatch_lines(plan=plan, job=job)],
        _strict(),
        _plan(plan_json, job),
        _environment(plan=plan, job=job),
        node_lines(plan=plan, job=job, version=version),
        settings_lines(plan=plan, job=job),
        attempt_lines(plan=plan, job=job),
        part_lines(plan=plan, job=job),
        _start(plan=plan, job=job),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _require_meaning(*, plan: Plan, job: Job) -> None:
    """Refuse options that would change nothing for this plan."""
    require_debug_meaning(plan=plan, job=job)
    if job.port is not None and plan.cluster.nodes == 1:
        raise SpecError(
            "port has no meaning here: the ranks of one node meet on a free port; leave it out"
        )


def sbatch_lines(*, plan: Plan, job: Job) -> list[str]:
    """#SBATCH lines: what SLURM is asked for."""
    extra = [sbatch_option(option) for option in job.sbatch]
    names = {name for name, _ in extra}
    values: list[tuple[str, str | None]] = [
        ("job-name", job.job_name),
        ("nodes", str(plan.cluster.nodes + job.survival.spares)),
        ("ntasks-per-node", "1"),
        ("requeue" if requeues(job) else "no-requeue", None),
        # The log of a job that comes back goes on where it was.
        ("open-mode", "append"),
    ]
    if job.survival.spares:
        values.append(("no-kill", None))
    if plan.cluster.device.kind == "cuda" and "gres" not in names:
        values.append(("gpus-per-node", str(plan.cluster.gpus_per_node)))
    values += _cores(plan=plan, job=job, names=names)
    for name in ("time", "partition", "account", "qos", "reservation", "constraint", "output"):
        value = getattr(job, name)
        values += [] if value is None else [(name, value)]
    if job.exclude:
        values.append(("exclude", ",".join(job.exclude)))
    segment = segment_nodes(plan, job)
    if job.signal_seconds is not None:
        # B: to this script alone, which passes it on; torchrun would die of it.
        values.append(("signal", f"B:USR1@{job.signal_seconds}"))
    return [
        "# SLURM reads these lines as they are: no variable expands in them.",
        *(_sbatch_line(name, value) for name, value in values + extra),
        *([] if segment is None else _segment(plan, segment)),
    ]


def _segment(plan: Plan, nodes: int) -> list[str]:
    """What keeps nodes together that NVLink joins, and how to do without."""
    return [
        *paragraph(
            f"{segment_reason(plan)}. --segment is of Slurm with TopologyPlugin=topology/block "
            "(23.11 and newer), whose blocks are the NVLink domains. Without: emit with "
            "--no-segment, and have --sbatch=--nodelist=NODES name nodes domain by domain."
        ),
        _sbatch_line("segment", str(nodes)),
    ]


def _cores(*, plan: Plan, job: Job, names: set[str]) -> list[tuple[str, str | None]]:
    """Cores and memory: without a word on them SLURM gives one core a task."""
    if job.cpus_per_task is not None:
        return [("cpus-per-task", str(job.cpus_per_task))]
    if plan.cluster.device.kind == "cpu":
        return [("cpus-per-task", str(plan.cluster.gpus_per_node))]
    whole_nodes: list[tuple[str, str | None]] = [("exclusive", None)]
    if names.isdisjoint(MEMORY_OPTIONS):
        whole_nodes.append(("mem", "0"))
    return [(name, value) for name, value in whole_nodes if name not in names]


def _sbatch_line(name: str, value: str | None) -> str:
    return f"#SBATCH --{name}" + ("" if value is None else f"={sbatch_value(name, value)}")


def _usage(plan: Plan) -> list[str]:
    where = "in an allocation of that many nodes"
    if plan.cluster.nodes == 1:
        where = "on such a node"
    elif plan.cluster.device.kind == "cpu":
        where = "on one host, which then runs all ranks"
    return [
        "#",
        "# Submit it:  sbatch THIS_FILE",
        f"# Or run it:  bash THIS_FILE    ({where})",
    ]


def _strict() -> list[str]:
    return [
        "# Strings from options are literal (SC1003, SC1112, SC2016, SC2054, SC2088), a cloud's",
        "# script is on the nodes (SC1091), parts, srun and traps use what is here (the others).",
        "# shellcheck disable=SC1003,SC1091,SC1112,SC2016,SC2034,SC2054,SC2088,SC2154,SC2317"
        ",SC2329",
        "set -euo pipefail",
        'refuse() { echo "fsdpplan: $*" >&2; exit 5; }',
    ]


def _plan(plan_json: str, job: Job) -> list[str]:
    if job.folder is None:
        return plan_lines(plan_json)
    return plan_file_lines(plan_json=plan_json, folder=job.folder)


def _environment(*, plan: Plan, job: Job) -> list[str]:
    lines = [
        *set_up_lines(job),
        *given_lines(job),
        "# What the run says of itself lies here, where every node sees it: a line a step, too.",
        'export FSDPPLAN_RUN_FOLDER="${FSDPPLAN_RUN_FOLDER:-'
        '${SLURM_SUBMIT_DIR:-$PWD}/fsdpplan-runs/job-${SLURM_JOB_ID:-$$}}"',
    ]
    if job.container is not None:
        lines.append('mkdir -p "$FSDPPLAN_RUN_FOLDER"  # the container sees it')
    lines += _metrics(job)
    return lines + reasoned_lines(plan=plan, job=job)


def _metrics(job: Job) -> list[str]:
    """Lines that say where the trainer reports: where fsdpplan run looks for it, too."""
    if job.metrics is not None:
        return [METRICS_LINE + shell_word(job.metrics)]
    return [
        '[ -z "${SLURM_JOB_ID:-}" ] ||'
        ' export FSDPPLAN_METRICS="${FSDPPLAN_METRICS:-$FSDPPLAN_RUN_FOLDER/metrics.jsonl}"',
    ]


def _start(*, plan: Plan, job: Job) -> list[str]:
    inside = '[ -n "${SLURM_JOB_ID:-}" ]'
    if plan.cluster.nodes == 1:
        inside += " && command -v srun >/dev/null"
    return [
        f"if {inside}; then",
        *(f"  {line}" for line in in_allocation(job=job)),
        "else",
        *(f"  {line}" for line in _outside(plan=plan, job=job)),
        "fi",
    ]


def _outside(*, plan: Plan, job: Job) -> list[str]:
    """Lines for a host that no scheduler stands behind: one start, which whoever typed it sees."""
    nodes, cluster = plan.cluster.nodes, plan.cluster
    if not runs_here(plan):
        return [
            f'refuse "this plan needs {nodes} nodes, and this is no SLURM allocation: submit it by'
            ' sbatch $0 (it never falls back to one host)"'
        ]
    if job.container is not None and job.container.runtime == "pyxis":
        return ['refuse "pyxis starts containers in SLURM only: submit it by sbatch $0"']
    tried = isinstance(job.program, UserProgram) and tries_first(job, nodes=nodes)
    start = [*said_lines(job), *_here(ranks=cluster.gpus, tried=tried)]
    if nodes == 1:
        return start
    return [
        f'echo "fsdpplan: no SLURM allocation: all {cluster.gpus} ranks of the {nodes} planned'
        ' nodes run on $HOSTNAME" >&2',
        *start,
    ]


def _here(*, ranks: int, tried: bool) -> list[str]:
    return [
        "check_node",
        *([f"(start_ranks 1 {ranks} preflight)"] if tried else []),
        LEAVE_IF_STOPPED,
        f"start_ranks 1 {ranks} &",
        "follow",
        'exit "${stopped:-$code}"',
    ]

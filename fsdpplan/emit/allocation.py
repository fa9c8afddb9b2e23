"""A job inside a Slurm allocation: its hosts, where they meet, and one attempt to run on them."""

from __future__ import annotations

from fsdpplan.emit.attempts import attempt_functions, survival_settings
from fsdpplan.emit.container import step_lines
from fsdpplan.emit.decisions import decision_functions
from fsdpplan.emit.job import Job, Trainer, excluded_hosts, tries_first
from fsdpplan.emit.quoting import shell_word
from fsdpplan.spec.plan import Plan


def allocation_functions(*, plan: Plan, job: Job) -> list[str]:
    """Lines of the functions by which a job lives in its allocation; `live` begins."""
    return [
        "# How the job lives in an allocation of Slurm.",
        *survival_settings(plan=plan, job=job),
        "",
        *attempt_functions(),
        "",
        *decision_functions(),
        "",
        *_meet(nodes=plan.cluster.nodes, job=job),
        "",
        *_run_attempt(plan=plan, job=job),
    ]


def in_allocation(*, plan: Plan, job: Job) -> list[str]:
    """Lines that check the allocation, and live in it."""
    nodes, ranks = plan.cluster.nodes, plan.cluster.gpus_per_node
    return [
        '[ -z "${SLURM_ARRAY_TASK_ID:-}" ] ||',
        '  refuse "this is a task of a job array: each would run the same plan on the same'
        ' checkpoints; submit it without --array"',
        '[ -z "${SLURM_HET_SIZE:-}" ] ||',
        '  refuse "this is a heterogeneous job, and the plan is for nodes that are alike: submit'
        ' it as one component"',
        *_right_number(nodes=nodes, ranks=ranks, spares=job.survival.spares),
        *_hosts(several=nodes + job.survival.spares > 1),
        *_without_excluded(excluded_hosts(job)),
        "# srun does not inherit the cores since SLURM 22.05: give each task those of the",
        "# smallest node, from a list such as 96(x3),48.",
        "cores=$(tr ',' '\\n' <<<\"${SLURM_JOB_CPUS_PER_NODE:-1}\" | sed 's/(.*//' | sort -n |"
        " sed -n 1p)",
        'signal_ranks() { [ -z "$job" ] || kill -USR1 "$job" 2>/dev/null || true; }',
        "# An interactive shell may run this more than once in a job.",
        "job_key=$SLURM_JOB_ID",
        'if [ "${SLURM_TASK_PID:-}" != $$ ]; then job_key+=.$$; fi',
        "live",
    ]


def _right_number(*, nodes: int, ranks: int, spares: int) -> list[str]:
    has = '"${SLURM_JOB_NUM_NODES:-0}"'
    enough = f"[ {has} = {nodes} ] ||"
    if spares:
        enough = f"[ {has} -ge {nodes} ] && [ {has} -le {nodes + spares} ] ||"
    return [
        enough,
        f'  refuse "the plan needs {nodes} node(s) of {ranks} ranks, allocation $SLURM_JOB_ID has'
        ' ${SLURM_JOB_NUM_NODES:-0}: take as many, or plan again for what there is"',
    ]


def _hosts(*, several: bool) -> list[str]:
    if not several:
        return ["hosts=${SLURM_JOB_NODELIST:-}"]
    return [
        "if ! command -v srun >/dev/null || ! command -v scontrol >/dev/null; then",
        '  refuse "srun and scontrol are not on PATH in allocation $SLURM_JOB_ID"',
        "fi",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    ]


def _without_excluded(excluded: tuple[str, ...]) -> list[str]:
    """Lines that refuse an allocation, made by hand, with a node that the job must not get."""
    if not excluded:
        return []
    return [
        "for host in $hosts; do",
        '  case "$host" in',
        f"    {'|'.join(map(shell_word, excluded))})",
        '      refuse "allocation $SLURM_JOB_ID has $host, which this job excludes: sbatch $0'
        ' asks for others" ;;',
        "  esac",
        "done",
    ]


def _meet(*, nodes: int, job: Job) -> list[str]:
    if nodes == 1:
        return ["meet() { :; }"]
    port = "$((20000 + (SLURM_JOB_ID + 1000 * (attempt - 1)) % 10000))"
    if job.port is not None:
        port = str(job.port)
    return [
        "# The first host carries the rendezvous; a port per job keeps two jobs on one host apart",
        "# (below the ports that Linux hands out itself), a port per attempt those that hang on.",
        "meet() {",
        "  FSDPPLAN_HEAD=${chosen[0]}",
        '  FSDPPLAN_HOSTS=$(with_commas "${chosen[@]}")',
        f"  FSDPPLAN_PORT={port}",
        '  FSDPPLAN_RUN="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$attempt"',
        "  export FSDPPLAN_HEAD FSDPPLAN_HOSTS FSDPPLAN_PORT FSDPPLAN_RUN",
        "}",
    ]


def _run_attempt(*, plan: Plan, job: Job) -> list[str]:
    nodes, ranks = plan.cluster.nodes, plan.cluster.gpus_per_node
    label = " --label" if nodes > 1 else ""
    inside = ' "${container[@]}"' if step_lines(job.container) else ""
    return [
        "run_attempt() {",
        *(f"  {line}" for line in step_lines(job.container)),
        "  code=0",
        "  # First all nodes are looked at, so that each one that fails is named.",
        f'  "${{step[@]}}"{inside}{label} --kill-on-bad-exit=0 --wait=0 \\',
        '    bash -c "$(declare -f refuse check_node); check_node" || code=$?',
        '  [ "$code" = 0 ] || return 0',
        *_preflight(plan=plan, job=job, inside=inside + label),
        "  # A signal that came meanwhile counts now.",
        '  if [ -n "$stopped$told" ]; then code=1; return; fi',
        "  # A task that fails ends the others.",
        f'  "${{step[@]}}"{inside}{label} --kill-on-bad-exit=1 \\',
        f'    bash -c "$(declare -f start_ranks); start_ranks {nodes} {ranks}" &',
        "  follow",
        "}",
    ]


def _preflight(*, plan: Plan, job: Job, inside: str) -> list[str]:
    """Lines that try the links before a program of the user's own; the trainer does so itself."""
    nodes, ranks = plan.cluster.nodes, plan.cluster.gpus_per_node
    if isinstance(job.program, Trainer) or not tries_first(job, nodes=nodes):
        return []
    return [
        f'  "${{step[@]}}"{inside} --kill-on-bad-exit=1 \\',
        f'    bash -c "$(declare -f start_ranks); start_ranks {nodes} {ranks} preflight" ||',
        "    code=$?",
        '  [ "$code" = 0 ] || return 0',
    ]

"""A job inside a Slurm allocation: its hosts, where they meet, and one attempt to run on them."""

from __future__ import annotations

from fsdpplan.emit.attempts import attempt_functions, survival_settings
from fsdpplan.emit.container import step_lines
from fsdpplan.emit.decisions import decision_functions
from fsdpplan.emit.job import Job, Trainer, excluded_hosts, tries_first
from fsdpplan.emit.node import CONTAINER_JOIN_SECONDS
from fsdpplan.emit.quoting import shell_word
from fsdpplan.spec.plan import Plan

LAST_NODE_SECONDS = 300
"""How much longer than the first node the last one may be checked: the head waits 30 s for a node
and 180 s for what it says, and one whose file system hangs is not waited for."""

WATCH_SECONDS = 20
"""Between looks at the node that the job's script runs on."""


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
        *([*_watch_script(), ""] if _watches(job) else []),
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
        "# What an interactive step says of its own task srun would take for ours, and it wants a",
        "# task's cores from one place.",
        'unset "${!SLURM_CPU_BIND@}" SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK',
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
    join = []
    if job.container is not None:
        join = [
            "# Each node unpacks the image first, at its own pace.",
            f"export FSDPPLAN_JOIN_SECONDS={CONTAINER_JOIN_SECONDS}",
        ]
    return [
        *join,
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


def _missing_pyxis(job: Job) -> list[str]:
    """What srun itself says of an option that a plugin would bring helps nobody."""
    if not step_lines(job.container):
        return []
    return [
        '  if [ "$code" != 0 ] && [[ "$(srun --help 2>/dev/null)" != *--container-image* ]]; then',
        "    code=5",
        '    give_up "srun has no --container-image here, so pyxis is missing: have it installed,'
        ' or emit with --container-runtime apptainer"',
        "  fi",
    ]


def _run_attempt(*, plan: Plan, job: Job) -> list[str]:
    nodes, ranks = plan.cluster.nodes, plan.cluster.gpus_per_node
    label = " --label" if nodes > 1 else ""
    inside = ' "${container[@]}"' if step_lines(job.container) else ""
    wait = LAST_NODE_SECONDS + (0 if job.container is None else CONTAINER_JOIN_SECONDS)
    return [
        "run_attempt() {",
        *(f"  {line}" for line in step_lines(job.container)),
        "  code=0 trained=''",
        "  # First all nodes are looked at, so that each one that fails is named.",
        f'  "${{step[@]}}"{inside}{label} --kill-on-bad-exit=0 --wait={wait} \\',
        '    bash -c "$(declare -f refuse check_node); check_node" || code=$?',
        *_missing_pyxis(job),
        '  [ "$code" = 0 ] || return 0',
        *_preflight(plan=plan, job=job, inside=inside + label),
        "  # A signal that came meanwhile counts now.",
        '  if [ -n "$stopped$told" ]; then code=1; return; fi',
        *(["  watch_script"] if _watches(job) else []),
        "  # A task that fails ends the others.",
        "  trained=yes",
        f'  "${{step[@]}}"{inside}{label} --kill-on-bad-exit=1 \\',
        f'    bash -c "$(declare -f start_ranks); start_ranks {nodes} {ranks}" &',
        "  follow",
        "}",
    ]


def _watches(job: Job) -> bool:
    return job.survival.spares > 0 and job.survival.requeue


def _watch_script() -> list[str]:
    """Lines that have another node watch the one of this script, in a step of its own: with
    --no-kill SLURM only takes a lost node from the job, and ends the steps that it was part of; a
    job that lost its script so would stay RUNNING with nobody to end it (seen: 22.05)."""
    return [
        "# Another node than this one requeues the job if SLURM takes this one from it: with",
        "# --no-kill a job whose script is lost would be RUNNING for ever.",
        "requeue_without_script() {",
        "  local said batch left",
        f"  while sleep {WATCH_SECONDS}; do",
        '    said=$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING --format="%B|%N") ||',
        "      continue",
        "    batch=${said%%|*}",
        '    left=$(scontrol show hostnames "${said#*|}") || continue',
        '    if [ -n "$batch" ] && [ -n "$left" ] && ! grep -qxF "$batch" <<<"$left"; then',
        '      scontrol requeue "$SLURM_JOB_ID" || true',
        "    fi",
        "  done",
        "}",
        "",
        "watch_script() {",
        "  local host",
        '  end_watcher() { [ -z "${watcher:-}" ] || kill "$watcher" 2>/dev/null || true; }',
        "  end_watcher",
        "  watcher=''",
        "  trap end_watcher EXIT",
        "  for host in $hosts; do",
        '    if [ "$host" != "${SLURMD_NODENAME:-}" ] && ! is_bad "$host"; then',
        '      srun --nodes=1 --ntasks=1 --nodelist="$host" --cpus-per-task=1 --overlap --mem=0 \\',
        "        --gres=none --output=none --error=none bash -c \\",
        '        "$(declare -f requeue_without_script); requeue_without_script" >/dev/null 2>&1 &',
        "      watcher=$!",
        "      return",
        "    fi",
        "  done",
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

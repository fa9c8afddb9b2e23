"""The program of each pod: look at the pod, start its ranks, pass signals on, say how it ended.

It lies in a ConfigMap and is read from there, since Kubernetes would expand `$(NAME)` in a command
of the manifest itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.emit.job import Job, tries_first
from fsdpplan.emit.nccl.variables import reasoned_lines, set_up_lines
from fsdpplan.emit.order import Order
from fsdpplan.emit.safe_text import shell_word
from fsdpplan.emit.slurm.node import check_lines, prepare_lines, program_words
from fsdpplan.emit.slurm.parts import packed_parts, part_text
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.spec.plan import Plan

RENDEZVOUS_SECONDS = 1800
"""Pods start one by one, each after its image has come: the first ones wait so long."""

WAIT_FOR_NAME = """\
import socket, sys, time

name, seconds = sys.argv[1], 300
end = time.monotonic() + seconds
while True:
    try:
        socket.getaddrinfo(name, None)
        break
    except OSError as error:
        if time.monotonic() > end:
            print(f"fsdpplan: cannot resolve {name}, the pod of the first ranks, for {seconds} s "
                  f"({error}): look at it by kubectl get pods, and at the service of its name",
                  file=sys.stderr)
            sys.exit(5)
        time.sleep(1)
"""
"""Python program that waits until the cluster's DNS knows the first pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How the pods of one kind of job find each other, as words of bash."""

    head: str
    """Name of the first pod."""
    index: str
    """Which pod this one is, from 0."""
    port: str


def start_script(order: Order, meeting: Meeting) -> str:
    """Text of the program."""
    plan, job = order.plan, order.job
    sections = [
        [
            "#!/bin/bash",
            "# Runs in each pod: looks at it, then hands over to torchrun.",
            "# shellcheck disable=SC1003,SC1091,SC1112,SC2016,SC2034,SC2054,SC2088,SC2317,SC2329",
            "set -euo pipefail",
            'refuse() { echo "fsdpplan: $*" >&2; exit 5; }',
        ],
        set_up_lines(job),
        _variables(plan, job),
        _where(plan, job, meeting),
        [
            "# What the check of a pod takes for granted.",
            f"needed={plan.cluster.nodes}",
            *check_lines(plan=plan, job=job, version=order.version),
        ],
        _start(plan, job),
        _signals(job),
        packed_parts(("check",), plan=plan),
        _go(plan, job),
        _end(),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _variables(plan: Plan, job: Job) -> list[str]:
    metrics = '"$own/metrics.jsonl"' if job.metrics is None else shell_word(job.metrics)
    old = '"$FSDPPLAN_STOPPED_FILE"' + (' "$FSDPPLAN_METRICS"' if job.metrics is None else "")
    return [
        "own=${TMPDIR:-/tmp}/fsdpplan",
        "# One JSON line a step. They are also printed, so that the pod's log has them.",
        f"export FSDPPLAN_METRICS={metrics}",
        "# The trainer notes here that a signal ended it.",
        'export FSDPPLAN_STOPPED_FILE="$own/stopped"',
        'mkdir -p "$own" "$(dirname -- "$FSDPPLAN_METRICS")"',
        f"rm -f {old}",
        *reasoned_lines(plan=plan, job=job),
    ]


def _where(plan: Plan, job: Job, meeting: Meeting) -> list[str]:
    if plan.cluster.nodes == 1:
        if plan.cluster.device.kind == "cuda":
            return []
        return [
            "# All ranks are in this pod.",
            'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"',
        ]
    port = meeting.port if job.port is None else str(job.port)
    return [
        "# Who this pod is, and where the first one is, as the operator says.",
        f"index={meeting.index} head={meeting.head} port={port}",
        'if [ -z "$index" ] || [ -z "$head" ] || [ -z "$port" ]; then',
        '  refuse "no operator has said which pod of the job this is: submit the whole manifest"',
        "fi",
    ]


def _start(plan: Plan, job: Job) -> list[str]:
    rendezvous = "--standalone --local-addr=127.0.0.1"
    if plan.cluster.nodes > 1:
        rendezvous = (
            '--rdzv-backend=static --node-rank="$index" --master-addr="$head" '
            f'--master-port="$port" --rdzv-conf=timeout={RENDEZVOUS_SECONDS}'
        )
    metrics = ""
    if isinstance(job.program, Trainer):
        metrics = ' --metrics="$FSDPPLAN_METRICS"'
        if tries_first(job, nodes=plan.cluster.nodes):
            metrics = f" --preflight{metrics}"
    return [
        "start_ranks() {",
        "  local ranks=$1",
        *(f"  {line}" for line in prepare_lines(plan)),
        "  # torchrun's agent would die of these. Its workers set handlers of their own.",
        "  trap '' USR1 USR2",
        f"  exec {shell_word(job.python)} -m torch.distributed.run \\",
        f'    --nnodes={plan.cluster.nodes} --nproc-per-node="$ranks" \\',
        f"    {rendezvous} \\",
        f"    {program_words(job)}{metrics}",
        "}",
    ]


SIGNAL_RANKS = """\
# torchrun gives each rank a session of its own: they are found by their parent.
signal_ranks() {
  local stat fields parent found=1
  for stat in /proc/[0-9]*/stat; do
    read -r fields 2>/dev/null <"$stat" || continue
    read -r _ parent _ <<<"${fields##*) }"
    [ "$parent" = "$job" ] || continue
    kill -s "$1" "${fields%% *}" 2>/dev/null && found=0
  done
  return "$found"
}"""

TELL_TRAINER = """\
# TERM (the pod has to go) reaches the ranks as USR2: they save and leave, and are not killed after
# torchrun's 30 s. USR1: they save and leave for good. Ranks that are still starting hear nothing,
# so they are told again and again.
tell() {
  passed_on=1
  case " $told " in *" $1 "*) return ;; esac
  told="$told $1"
  [ -z "$job" ] || keep_telling "$1" &
}
keep_telling() {
  while kill -0 "$job" 2>/dev/null; do
    # Without ranks there is nothing to save.
    signal_ranks "$1" || [ "$1" != USR2 ] || kill -TERM "$job" 2>/dev/null || true
    sleep 2
  done
}
stop() { stopped=143; tell USR2; }"""

TELL_PROGRAM = """\
# TERM (the pod has to go) goes on to torchrun, which ends the ranks; USR1 goes on to them.
tell() {
  passed_on=1 told="$told $1"
  signal_ranks
}
stop() {
  passed_on=1 stopped=143
  [ -z "$job" ] || kill -TERM "$job" 2>/dev/null || true
}"""


def _signals(job: Job) -> list[str]:
    if isinstance(job.program, Trainer):
        tell = [SIGNAL_RANKS, TELL_TRAINER]
    else:
        _, _, text = part_text("here").split("\n", 2)
        tell = [text.strip(), TELL_PROGRAM]
    return [
        "job='' told='' passed_on='' stopped=''",
        *tell,
        "trap 'tell USR1' USR1",
        "trap stop TERM INT",
    ]


def _go(plan: Plan, job: Job) -> list[str]:
    wait = []
    if plan.cluster.nodes > 1:
        wait = [
            'if [ "$index" != 0 ]; then',
            f"  {shell_word(job.python)} -c '{WAIT_FOR_NAME}' \"$head\"",
            "fi",
        ]
    tail = 'tail --pid="$job" -s 0.5 -n +1 -F "$FSDPPLAN_METRICS" 2>/dev/null &'
    if job.metrics is not None and plan.cluster.nodes > 1:
        tail = f'if [ "$index" = 0 ]; then {tail} fi'
    return [
        "check_node",
        *wait,
        '[ -z "$stopped" ] || exit "$stopped"',
        f"start_ranks {plan.cluster.gpus_per_node} &",
        "job=$!",
        '[ -z "$stopped" ] || stop',
        "# It may have been told before there were ranks.",
        "for word in $told; do told=''; tell \"$word\"; done",
        tail,
    ]


def _end() -> list[str]:
    return [
        "# A signal interrupts wait: wait again for torchrun's own exit code.",
        "while :; do",
        "  passed_on='' code=0",
        '  wait "$job" || code=$?',
        '  [ -n "$passed_on" ] || break',
        "done",
        "# The last lines of the metrics.",
        "wait",
        "# Ranks that another pod's TERM has stopped end with 0, though there is more to train:",
        "# what is not 0 starts the job again. USR1 (10) was for good.",
        'if [ "$code" = 0 ]; then',
        '  case "$(cat "$FSDPPLAN_STOPPED_FILE" 2>/dev/null)" in',
        "    '' | 10) ;;",
        "    *) code=143 ;;",
        "  esac",
        "fi",
        'exit "${stopped:-$code}"',
    ]

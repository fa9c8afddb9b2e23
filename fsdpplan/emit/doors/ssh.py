"""Plain torchrun on hosts that a person names: over ssh, or typed on each host."""

from __future__ import annotations

from fsdpplan.emit.doors.launch_lines import STRICT, host_lines, meeting_lines
from fsdpplan.emit.order import Order, refuse_others
from fsdpplan.emit.segments import by_hand_lines
from fsdpplan.emit.slurm.header import header_lines

_JOB = frozenset({"program", "env", "env_setup", "python", "port", "nccl_debug", "metrics"})


def render(order: Order) -> str:
    """A bash script that takes the names of the hosts."""
    refuse_others(order, target="ssh", job=_JOB, pods=frozenset())
    nodes = order.plan.cluster.nodes
    sections = [
        [
            "#!/bin/bash",
            *header_lines(
                plan=order.plan, plan_json=order.plan_json, version=order.version, job=order.job
            ),
            *_usage(nodes),
            *by_hand_lines(order.plan),
        ],
        [*STRICT],
        host_lines(order),
        _on_host(order),
        _over_ssh(),
        _main(nodes),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _usage(nodes: int) -> list[str]:
    hosts = " ".join(f"HOST{index}" for index in range(1, min(nodes, 3) + 1))
    hosts += " ..." if nodes > 3 else ""
    lines = [
        "#",
        f"# With ssh to all {nodes} hosts, from a folder that all of them see:"
        if nodes > 1
        else "# With ssh to the host, from a folder that it sees:",
        f"#   bash THIS_FILE {hosts}",
        "# Without, type on each of them, in any order:",
    ]
    shown = [f"#   bash THIS_FILE --on HOST{i} {hosts}" for i in range(1, min(nodes, 3) + 1)]
    return [
        *lines,
        *shown,
        *(["#   ... and so on"] if nodes > 3 else []),
        "# The first host carries the rendezvous: the others reach it by that name, at the port",
        "# that FSDPPLAN_PORT may name. Nothing else listens.",
    ]


def _on_host(order: Order) -> list[str]:
    return [
        "# on_host HERE HOST...: this host's part. The check calls it by the name that others use.",
        "on_host() {",
        "  export HOSTNAME=${1##*@}",
        "  HEAD_NODE=${2##*@}",
        "  NODE_RANK='' ",
        "  local here=$1 index=0 host",
        "  shift",
        '  for host in "$@"; do',
        '    if [ "$host" = "$here" ]; then NODE_RANK=$index; fi',
        "    index=$((index + 1))",
        "  done",
        '  [ -n "$NODE_RANK" ] || refuse "$here is none of $*: name it as the others do"',
        *(f"  {line}" for line in meeting_lines(order)),
        "  check_node",
        "  start_ranks",
        "}",
        "",
        "# Over ssh the end of the connection ends the ranks: the rest of the input says so.",
        "until_hung_up() {",
        "  local folder=$1 job watch code=0",
        "  shift",
        '  cd -- "$folder" 2>/dev/null ||',
        '    refuse "$folder is not on $1: start from a folder that all hosts see"',
        "  exec 3<&0",
        '  on_host "$@" </dev/null 3<&- &',
        "  job=$!",
        "  # It holds the input alone: an output that is open would keep the connection.",
        '  { cat <&3 || true; kill -TERM "$job" || true; } >/dev/null 2>&1 &',
        "  watch=$!",
        '  wait "$job" || code=$?',
        '  kill "$watch" 2>/dev/null || true',
        '  return "$code"',
        "}",
    ]


def _over_ssh() -> list[str]:
    return [
        "# Starts this script on every host. Its text is their input, which stays open as long as",
        "# this one runs, however it ends.",
        "over_ssh() {",
        "  local host code=0 command feed pipes",
        "  trap 'end_all; exit 130' INT",
        "  trap 'end_all; exit 143' TERM",
        "  pipes=$(mktemp -d)",
        '  for host in "$@"; do',
        '    command="bash -s -- $(printf \'%q \' --hung-up "$PWD" "$host" "$@")"',
        '    mkfifo "$pipes/input"',
        '    ssh -o BatchMode=yes -o ServerAliveInterval=15 -- "$host" "$command" \\',
        '      <"$pipes/input" > >(label "$host") 2>&1 &',
        '    started+=("$!")',
        '    exec {feed}>"$pipes/input"',
        '    rm -- "$pipes/input"',
        '    (exec 1>&"$feed" 2>/dev/null; cat -- "$0" &)',
        "  done",
        '  rmdir -- "$pipes"',
        '  for host in "$@"; do',
        "    wait -n || { code=$?; break; }",
        "  done",
        "  # A host that fails ends the others.",
        "  end_all",
        '  return "$code"',
        "}",
        "started=()",
        'end_all() { kill "${started[@]}" 2>/dev/null || true; wait "${started[@]}" || true; }',
        "label() {",
        "  local line",
        '  while IFS= read -r line; do printf \'%s: %s\\n\' "$1" "$line"; done',
        "}",
    ]


def _main(nodes: int) -> list[str]:
    return [
        "main() {",
        '  local way=""',
        '  case "${1:-}" in',
        '    --hung-up) way=until_hung_up; shift; set -- "$@" ;;',
        "    --on) way=on_host; shift ;;",
        '    -*) refuse "$1 is no option of this script: see its first lines" ;;',
        "  esac",
        "  local named=$#",
        '  case "$way" in',
        "    until_hung_up) named=$((named - 2)) ;;",
        "    on_host) named=$((named - 1)) ;;",
        "  esac",
        f'  [ "$named" = {nodes} ] ||',
        f'    refuse "the plan is for {nodes} host(s), and $((named > 0 ? named : 0)) are named:'
        ' name each one once, the first one first"',
        '  "${way:-over_ssh}" "$@"',
        "}",
        "# One line: bash has read all of it before anything else reads the input.",
        'main "$@"; exit',
    ]

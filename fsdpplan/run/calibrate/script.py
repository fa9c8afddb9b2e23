"""The script that starts the measuring program: by torchrun here, or by srun on all nodes."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.emit.quoting import shell_word, shell_words
from fsdpplan.topology.measure.settings import MeasuredDevice

MODULE = "fsdpplan.topology.measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where the processes run."""

    device: MeasuredDevice
    processes: int
    """On each node."""
    nodes: int = 1
    """Above 1: all nodes of the Slurm allocation that we are in."""


def measuring_script(ranks: Ranks, *, python: str, arguments: tuple[str, ...]) -> str:
    """A bash script that measures with `arguments` of the measuring program, and ends with its
    exit code; 130 or 143 where it was told to end."""
    start = _on_nodes if ranks.nodes > 1 else _here
    lines = [
        "#!/bin/bash",
        "# srun calls the function below on other nodes; traps call functions (SC2317, SC2329).",
        "# shellcheck disable=SC2016,SC2317,SC2329",
        "set -euo pipefail",
        "job='' stopped=''",
        "stop() {",
        "  stopped=$1",
        '  [ -z "$job" ] || kill -TERM "$job" 2>/dev/null || true',
        "}",
        "trap 'stop 130' INT",
        "trap 'stop 143' TERM",
        "trap '' USR1",
        *_threads(ranks),
        *start(ranks, python=python, arguments=arguments),
        "job=$!",
        '[ -z "$stopped" ] || stop "$stopped"',
        "code=0",
        'wait "$job" || code=$?',
        "# A signal interrupts wait: wait for what it told to end.",
        'if [ -n "$stopped" ]; then wait "$job" || true; fi',
        'exit "${stopped:-$code}"',
    ]
    return "\n".join(lines) + "\n"


def _threads(ranks: Ranks) -> list[str]:
    """As in jobs: CPU processes compute with one thread, those of GPUs share the cores."""
    if ranks.device == "cpu":
        return ['export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"']
    return [
        f"share=$(($(nproc) / {ranks.processes}))",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((share > 1 ? share : 1))}"',
    ]


def _here(ranks: Ranks, *, python: str, arguments: tuple[str, ...]) -> list[str]:
    lines = []
    if ranks.device == "cpu":
        lines = [
            "# All ranks are on this host: gloo needs no other interface, and no host name.",
            'export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"',
        ]
    start = (python, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
    processes = (f"--nproc-per-node={ranks.processes}", "-m", MODULE)
    return [*lines, f"{shell_words((*start, *processes, *arguments))} &"]


def _on_nodes(ranks: Ranks, *, python: str, arguments: tuple[str, ...]) -> list[str]:
    """One task a node, which starts its ranks. Nodes are numbered in the order of the allocation,
    so that rank 0, which writes the log, is on the first one."""
    program = (f"--nproc-per-node={ranks.processes}", "-m", MODULE, *arguments)
    return [
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "head=${hosts%%$'\\n'*} port=$((20000 + SLURM_JOB_ID % 10000))",
        "start_ranks() {",
        "  local here=${SLURMD_NODENAME:-$HOSTNAME} number=0 host",
        "  for host in $1; do",
        '    if [ "$host" = "$here" ]; then break; fi',
        "    number=$((number + 1))",
        "  done",
        "  ulimit -l unlimited 2>/dev/null || true",
        f"  exec {shell_word(python)} -m torch.distributed.run --nnodes={ranks.nodes} \\",
        '    --node-rank="$number" --master-addr="$2" --master-port="$3" --local-addr="$here" \\',
        f"    {shell_words(program)}",
        "}",
        "# srun does not inherit the cores since SLURM 22.05: give each task those of the",
        "# smallest node, from a list such as 96(x3),48.",
        "cores=$(tr ',' '\\n' <<<\"${SLURM_JOB_CPUS_PER_NODE:-1}\" | sed 's/(.*//' | sort -n |"
        " sed -n 1p)",
        f"srun --nodes={ranks.nodes} --ntasks={ranks.nodes} --ntasks-per-node=1 \\",
        '  --cpus-per-task="$cores" --export=ALL --kill-on-bad-exit=1 \\',
        "  ${SLURM_STEP_ID:+--overlap} \\",
        '  bash -c "$(declare -f start_ranks); start_ranks \\"\\$@\\"" start \\',
        '  "$hosts" "$head" "$port" &',
    ]

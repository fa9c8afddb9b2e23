"""The measuring program on two nodes whose link is shaped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.spec.measurement import MeasuredCall, Measurement
from fsdpplan.spec.plan import Collective
from tests.topology.measuring import PROGRAM, SECONDS, TIMEOUT_SECONDS, calls, environment
from tests.topology.shaped_link import INTERFACE, Node, shaped_link

RATE, BYTES_PER_SECOND = "200mbit", 200e6 / 8
LARGEST_BYTES = 2 * 2**20
RANKS_PER_NODE = 2


def measured_over_link(log: Path) -> tuple[Measurement, ...]:
    """The rows of two nodes of two ranks. A busy machine that has no time for all calls is given
    more."""
    for seconds in SECONDS[1:]:
        log.unlink(missing_ok=True)
        with shaped_link(RATE) as nodes:
            agents = [_start(log, nodes, number, seconds) for number in range(len(nodes))]
            try:
                said = [agent.communicate(timeout=TIMEOUT_SECONDS)[1] for agent in agents]
            finally:
                for agent in agents:
                    agent.kill()
        assert [agent.returncode for agent in agents] == [0, 0], "".join(said)[-4000:]
        rows = read_measurements(log)
        groups = {(one.group, one.collective, one.gathered_bytes) for one in calls(rows)}
        if {(of, "send_recv", LARGEST_BYTES) for of in ("inside", "across", "pair")} <= groups:
            break
    return rows


def _start(log: Path, nodes: tuple[Node, Node], number: int, seconds: int) -> subprocess.Popen[str]:
    """torchrun on one of the nodes."""
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}"),
        *(f"--node-rank={number}", f"--nproc-per-node={RANKS_PER_NODE}"),
        *(f"--master-addr={nodes[0].address}", "--master-port=29517"),
        f"--local-addr={nodes[number].address}",
    )
    program = (*PROGRAM, "--out", str(log), "--device", "cpu", "--seconds", str(seconds))
    sizes = ("--smallest-bytes", str(LARGEST_BYTES // 8), "--largest-bytes", str(LARGEST_BYTES))
    shapes = ("--dtypes", "fp32", "--shapes", "64,64,64", "--attention", "1,1,1,64,64")
    return subprocess.Popen(
        nodes[number].command(*torchrun, *program, *sizes, *shapes),
        env={**environment(), "GLOO_SOCKET_IFNAME": INTERFACE, "SLURMD_NODENAME": f"n{number}"},
        cwd=log.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def largest(
    rows: Sequence[Measurement], collective: Collective, *, group: str
) -> list[MeasuredCall]:
    """Rows of the largest size, one a group."""
    found = [one for one in calls(rows) if (one.group, one.collective) == (group, collective)]
    most = max(one.gathered_bytes for one in found)
    return [one for one in found if one.gathered_bytes == most]

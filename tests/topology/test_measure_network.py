"""Between two nodes whose link is shaped, what is measured is the shape."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.files.runs.measurements import read_measurements
from fsdpplan.spec.measurement import MeasuredCall, MeasuredMachine, Measurement
from fsdpplan.spec.plan import Collective
from tests.topology.measuring import PROGRAM, TIMEOUT_SECONDS, calls, environment
from tests.topology.shaped_link import INTERFACE, Node, missing, shaped_link

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

RATE, BYTES_PER_SECOND = "200mbit", 200e6 / 8
LARGEST_BYTES = 2 * 2**20
RANKS_PER_NODE = 2


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Measurement, ...]:
    """Measured on two nodes of two ranks."""
    log = tmp_path_factory.mktemp("shaped") / "log.jsonl"
    with shaped_link(RATE) as nodes:
        agents = [start(log, nodes, number) for number in range(len(nodes))]
        try:
            said = [agent.communicate(timeout=TIMEOUT_SECONDS)[1] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "".join(said)[-4000:]
    return read_measurements(log)


def start(log: Path, nodes: tuple[Node, Node], number: int) -> subprocess.Popen[str]:
    """torchrun on one of the nodes."""
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}"),
        *(f"--node-rank={number}", f"--nproc-per-node={RANKS_PER_NODE}"),
        *(f"--master-addr={nodes[0].address}", "--master-port=29517"),
        f"--local-addr={nodes[number].address}",
    )
    program = (*PROGRAM, "--out", str(log), "--device", "cpu", "--seconds", "20")
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
    rows: tuple[Measurement, ...], collective: Collective, *, group: str
) -> list[MeasuredCall]:
    """Rows of the largest size, one a group."""
    found = [one for one in calls(rows) if (one.group, one.collective) == (group, collective)]
    most = max(one.gathered_bytes for one in found)
    return [one for one in found if one.gathered_bytes == most]


def test_ranks_are_numbered_node_by_node(rows: tuple[Measurement, ...]) -> None:
    machine = rows[0]
    assert isinstance(machine, MeasuredMachine)
    assert machine.hosts == ("n0", "n1")
    across = {(one.first_rank, one.stride) for one in calls(rows) if one.group == "across"}
    assert across == {(0, 2), (1, 2)}
    pairs = {(one.first_rank, one.stride) for one in calls(rows) if one.group == "pair"}
    assert pairs == {(0, 1), (2, 1), (0, 2), (1, 2)}


CROSSING: tuple[tuple[Collective, str], ...] = (
    ("send_recv", "across"),
    ("send_recv", "pair"),
    ("all_reduce", "across"),
)
"""Calls of which both groups, one of each local rank, use the link both ways at the same time."""


def test_the_measured_bandwidth_between_nodes_is_what_the_link_passes(
    rows: tuple[Measurement, ...],
) -> None:
    """It passes what both groups send together. Of the repeats the middle one counts, as in some
    the groups are not at it at the same time; of the calls the best, since the processes share few
    cores with other tests."""
    measured = [passed(rows, collective, group=group) for collective, group in CROSSING]
    assert max(measured) == pytest.approx(BYTES_PER_SECOND, rel=0.15)


def passed(rows: tuple[Measurement, ...], collective: Collective, *, group: str) -> float:
    """Bytes per second one way, from when both groups begin until both are done."""
    crossing = [
        one for one in largest(rows, collective, group=group) if one.stride == RANKS_PER_NODE
    ]
    assert len(crossing) == RANKS_PER_NODE
    sent_bytes = sum(
        wire_bytes(collective=collective, gathered_bytes=one.gathered_bytes, ranks=one.ranks)
        for one in crossing
    )
    until_both_are_done = map(max, zip(*(one.seconds for one in crossing), strict=False))
    return sent_bytes / median(until_both_are_done)


def test_inside_a_node_the_link_is_not_used(rows: tuple[Measurement, ...]) -> None:
    for one in largest(rows, "send_recv", group="inside"):
        assert one.gathered_bytes / min(one.seconds) > 2 * BYTES_PER_SECOND

"""Bandwidth that the measuring program finds on a link of a known one, between two nodes of two
ranks in network namespaces, and inside such a node.

    python -m tests.benchmarks.link [--runs 3]

Needs root, and `ip` and `tc`. A benchmark, not a test: ranks that wait for a core find less.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fsdpplan.cost.network.collectives import wire_bytes
from fsdpplan.spec.measurement import Measurement
from fsdpplan.spec.plan import Collective
from tests.topology.over_link import BYTES_PER_SECOND, RANKS_PER_NODE, largest, measured_over_link
from tests.topology.shaped_link import missing

CROSSING: tuple[tuple[Collective, str], ...] = (
    ("send_recv", "across"),
    ("send_recv", "pair"),
    ("all_reduce", "across"),
)
"""Calls of which both groups, one of each local rank, use the link both ways at the same time."""


def bytes_per_second_between(
    rows: Sequence[Measurement], collective: Collective, *, group: str
) -> float:
    """Bytes per second one way of both groups together, from when both begin until both are done.
    Of the repeats the middle one counts, as in some the groups are not at it at the same time."""
    crossing = [
        one for one in largest(rows, collective, group=group) if one.stride == RANKS_PER_NODE
    ]
    sent_bytes = sum(
        wire_bytes(collective=collective, gathered_bytes=one.gathered_bytes, ranks=one.ranks)
        for one in crossing
    )
    until_both_are_done = map(max, zip(*(one.seconds for one in crossing), strict=False))
    return sent_bytes / median(until_both_are_done)


def bytes_per_second_inside(rows: Sequence[Measurement]) -> float:
    """Of the slower node, the best repeat."""
    inside = largest(rows, "send_recv", group="inside")
    return min(one.gathered_bytes / min(one.seconds) for one in inside)


def main() -> None:
    """Print a line of each run and call."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    if (why := missing()) is not None:
        sys.exit(f"link: {why}")
    print(f"the link passes {BYTES_PER_SECOND / 1e6:.1f} MB/s each way")
    for run in range(1, runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            rows = measured_over_link(Path(folder, "log.jsonl"))
        for collective, group in CROSSING:
            found = bytes_per_second_between(rows, collective, group=group)
            share = found / BYTES_PER_SECOND
            print(f"run {run}  {collective} {group:8} {found / 1e6:7.1f} MB/s  {share:.0%}")
        print(f"run {run}  inside a node       {bytes_per_second_inside(rows) / 1e6:7.1f} MB/s")


if __name__ == "__main__":
    main()

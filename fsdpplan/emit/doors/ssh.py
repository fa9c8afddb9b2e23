"""Plain torchrun on hosts that a person names: over ssh, or typed on each host."""

from __future__ import annotations

from fsdpplan.emit.doors.launch_lines import STRICT, host_lines, meeting_lines
from fsdpplan.emit.order import Order, refuse_others
from fsdpplan.emit.segments import by_hand_lines
from fsdpplan.emit.slurm.header import header_lines
from fsdpplan.emit.slurm.parts import packed_parts

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
        ["# Where the ranks meet.", "meet() {", *(f"  {x}" for x in meeting_lines(order)), "}"],
        packed_parts(("check", "hosts"), plan=order.plan),
        # One line: bash has read all of it before anything else reads the input.
        ['main "$@"; exit'],
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

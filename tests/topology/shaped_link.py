"""Two nodes on this machine: network namespaces joined by one link of a known bandwidth.

Nothing outside the namespaces is changed, and they vanish with their links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ADDRESSES = ("10.78.0.1", "10.78.0.2")
INTERFACE = "eth0"
SHAPE = "root tbf rate {rate} burst 128kb latency 200ms"
"""A token bucket on either end; netem's own rate would delay acknowledgements, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of the two."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words`, to be run on this node."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *words]


def missing() -> str | None:
    """Why no shaped link can be made here, or None when one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [
        tool for tool in ("ip", "tc", "nsenter", "unshare") if not shutil.which(tool, path=path)
    ]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: iproute2 util-linux)"
    # In a namespace that vanishes with the shell: nothing is left to remove.
    shape = f"tc qdisc add dev v1 {SHAPE.format(rate='200mbit')}"
    probe = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"ip link add v1 type veth peer name v2 && {shape}"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    if probe.returncode:
        return f"this kernel makes no links with a rate: {probe.stderr.strip()}"
    return None


@contextmanager
def shaped_link(rate: str) -> Iterator[tuple[Node, Node]]:
    """Two nodes whose link passes `rate` (as tc reads it) each way."""
    first, second = (
        Node(namespace=f"fsdpplan{os.getpid()}-link{number}", address=address)
        for number, address in enumerate(ADDRESSES, 1)
    )
    try:
        for node in (first, second):
            _run("ip", "netns", "add", node.namespace)
        _run(
            *("ip", "-n", first.namespace, "link", "add", INTERFACE, "type", "veth"),
            *("peer", "name", INTERFACE, "netns", second.namespace),
        )
        for node in (first, second):
            inside = ("ip", "-n", node.namespace)
            _run(*inside, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
            _run(*inside, "link", "set", "lo", "up")
            shape = SHAPE.format(rate=rate).split()
            _run("tc", "-n", node.namespace, "qdisc", "add", "dev", INTERFACE, *shape)
        yield first, second
    finally:
        for node in (first, second):
            subprocess.run(["ip", "netns", "del", node.namespace], check=False, capture_output=True)


def _run(*words: str) -> None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    subprocess.run(
        words, check=True, capture_output=True, timeout=200, env={**os.environ, "PATH": path}
    )

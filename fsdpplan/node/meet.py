"""The nodes of a job meet before anything starts: who is there, and are they alike?

Each one connects to the head, which is the host of the rendezvous, at the port of the rendezvous;
the head listens there for as long as this takes. A node says who it is, then what it found of
itself, and the head answers when it has heard all. A node is to blame where most can do what it
cannot: the head adds it to the file of bad nodes.

The text travels behind that of `look`, without its imports of it, and under the same rules.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import IO

from fsdpplan.node.look import addresses_of, look, say, versions

LONGEST_LINE = 2**16
"""Characters of a message; whoever else finds the port sends no more."""
HELLO_SECONDS = float(os.environ.get("FSDPPLAN_JOIN_SECONDS", "30"))
"""How long a node has to come to the head; the script says more where images are unpacked."""
REPORT_SECONDS = 180.0
"""How long it may look at itself: from a cold file system, torch takes minutes to import."""
PAUSE_SECONDS = 0.2
SAME = ("python", "torch", "nccl", "fsdpplan")
"""Versions that must be the same on all nodes; another driver is only told about."""


def main(words: list[str]) -> int:
    """The exit code of the check, with the words of `look`: 0 or 5."""
    here, head = words[0], words[3]
    nodes = [node for node in words[4].split(",") if node]
    problem = name_problem(here, head) if head else ""
    if problem:
        say(here, problem)
        return 5
    if not nodes:
        return 5 if look(words) else 0
    port = int(os.environ["FSDPPLAN_PORT"])
    if here == head:
        return host_check(head, port, nodes, words)
    return join_check(here, head, port, words)


def is_loopback(address: str) -> bool:
    """Whether an address is this host alone."""
    return address.startswith("127.") or address == "::1"


def name_problem(here: str, head: str) -> str:
    """Why the name of the head leads nowhere from here."""
    try:
        found = addresses_of(head)
    except OSError as error:
        return (
            f"cannot resolve {head}, the first host of the allocation ({error}): all nodes "
            "must know its name"
        )
    if here != head and all(map(is_loopback, found)):
        return (
            f"{head}, the first host of the allocation, resolves to {found[0]} here, which is "
            "this node itself: correct /etc/hosts or the name service"
        )
    return ""


@dataclass
class Report:
    """What a node found of itself."""

    problem: str
    versions: dict[str, str] = field(default_factory=dict)


def tell(line: IO[str], what: dict[str, object]) -> None:
    """One line of JSON."""
    line.write(json.dumps(what) + "\n")
    line.flush()


def join_check(here: str, head: str, port: int, words: list[str]) -> int:
    """Come to the head, look, tell it what was found and hear whether the job may start."""
    try:
        connection = connected(head, port)
        with connection, connection.makefile("rw") as line:
            tell(line, {"run": os.environ.get("FSDPPLAN_RUN", ""), "node": here})
            problem = look(words)
            tell(line, {"problem": problem, "versions": versions()})
            answer = line.readline()
    except OSError as error:
        found = " and ".join(addresses_of(head))
        say(
            here,
            f"cannot reach {head}, the first host, at {found}, port {port} ({error}): its name "
            "must lead to it from all nodes, and no firewall may stand between them",
        )
        return 5
    if not answer:
        say(here, f"{head}, the first host, gave no answer: see what it says itself")
    return 5 if problem or not answer else 0


def connected(head: str, port: int) -> socket.socket:
    """A connection to the head, which may begin to listen a little later."""
    end = time.monotonic() + HELLO_SECONDS
    while True:
        try:
            left = max(end - time.monotonic(), 1.0)
            connection = socket.create_connection((head, port), timeout=left)
            connection.settimeout(HELLO_SECONDS + 2 * REPORT_SECONDS)
            return connection
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(PAUSE_SECONDS)


class Roll:
    """What the nodes said, as their connections are served, each in a thread of its own."""

    def __init__(self, head: str, nodes: list[str]) -> None:
        self.nodes = nodes
        self.began = time.monotonic()
        self.came = {head}
        self.left: set[str] = set()
        """Those that left without a report."""
        self.reports: dict[str, Report] = {}
        self.settled = threading.Event()
        self.threads: list[threading.Thread] = []

    def accept(self, listener: socket.socket) -> None:
        """Serve whoever comes until the listener is closed."""
        while not self.settled.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self.serve, args=(connection,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def serve(self, connection: socket.socket) -> None:
        """Hear one node, and answer it when all is settled."""
        node = ""
        try:
            connection.settimeout(HELLO_SECONDS + REPORT_SECONDS)
            with connection, connection.makefile("rw") as line:
                hello = json.loads(line.readline(LONGEST_LINE))
                node = str(hello["node"])
                stranger = node not in self.nodes or node in self.came
                if stranger or hello["run"] != os.environ.get("FSDPPLAN_RUN", ""):
                    node = ""
                    return
                self.came.add(node)
                self.reports[node] = Report(**json.loads(line.readline(LONGEST_LINE)))
                self.settled.wait()
                line.write("settled\n")
        except (OSError, ValueError, TypeError, KeyError):
            if node and node not in self.reports:
                self.left.add(node)

    def is_complete(self) -> bool:
        """Whether there is nothing more to wait for."""
        waited = time.monotonic() - self.began
        if len(self.came) < len(self.nodes) and waited < HELLO_SECONDS:
            return False
        heard = {*self.reports, *self.left}
        return self.came <= heard or waited > HELLO_SECONDS + REPORT_SECONDS


def host_check(head: str, port: int, nodes: list[str], words: list[str]) -> int:
    """Hear all nodes, decide who is to blame, answer."""
    try:
        listeners = [listening(address, port) for address in own_addresses(head, nodes)]
    except OSError as error:
        found = " and ".join(addresses_of(head))
        say(
            head,
            f"cannot listen at {found}, port {port}, where the other "
            f"nodes look for {head} ({error.strerror}): that must be an address of this node, "
            "and the port free; correct /etc/hosts or the name service, or take another --port",
        )
        return 5
    roll = Roll(head, nodes)
    for listener in listeners:
        threading.Thread(target=roll.accept, args=(listener,), daemon=True).start()
    roll.reports[head] = Report(look(words), versions())
    while not roll.is_complete():
        time.sleep(PAUSE_SECONDS)
    blame, remarks, alike = verdict(head, nodes, dict(roll.reports))
    for remark in remarks:
        print(f"fsdpplan: {remark}", file=sys.stderr, flush=True)
    name_bad_nodes(blame)
    failed = bool(blame) or not alike or any(report.problem for report in roll.reports.values())
    roll.settled.set()
    for thread in list(roll.threads):
        thread.join(timeout=2)
    for listener in listeners:
        listener.close()
    return 5 if failed else 0


def own_addresses(head: str, nodes: list[str]) -> list[str]:
    """Addresses of this node at which the others look for it. Its own /etc/hosts may say that its
    name is this host alone, as on Debian: then the one from which it would reach another node."""
    found = [address for address in addresses_of(head) if not is_loopback(address)]
    if found:
        return found
    other = next(node for node in nodes if node != head)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: this only asks for the route.
        probe.connect((other, 9))
        return [str(probe.getsockname()[0])]


def listening(address: str, port: int) -> socket.socket:
    """A socket at one address, never at all of them."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(1024)
    return listener


def verdict(
    head: str, nodes: list[str], reports: dict[str, Report]
) -> tuple[dict[str, str], list[str], bool]:
    """(bad node -> why, what is to be said beside what nodes say of themselves, whether those that
    work are alike). What most nodes cannot do is the fault of the job, and of no node."""
    blame = dict.fromkeys(
        (node for node in nodes if node not in reports),
        f"did not report to {head}, the first host, within {HELLO_SECONDS:.0f} s",
    )
    if len(blame) == len(nodes) - 1 > 1:
        blame = {head: f"no other node reached {head} within {HELLO_SECONDS:.0f} s"}
    remarks = [
        f"{node}: {why}: see what it says itself, or leave it out" for node, why in blame.items()
    ]
    wrong = {node: report.problem for node, report in reports.items() if report.problem}
    if 2 * len(wrong) <= len(nodes):
        blame.update(wrong)
    working = {node: report.versions for node, report in reports.items() if not report.problem}
    alike = True
    for name in (*SAME, "driver"):
        found = {node: have.get(name, "none") for node, have in working.items()}
        if len(set(found.values())) < 2:
            continue
        usual = majority(list(found.values()))
        others = {node: version for node, version in found.items() if version != usual}
        said = ", ".join(f"{node} has {version}" for node, version in sorted(others.items()))
        most = f"; most have {usual}" if usual else ""
        alike_by = "; install the same, or name one by --python" if name in SAME else ""
        remarks.append(f"{name} is not the same on all nodes: {said}{most}{alike_by}")
        if name in SAME:
            alike = False
            blame.update(dict.fromkeys(others if usual else (), f"its {name} is not {usual}"))
    return blame, remarks, alike


def majority(values: list[str]) -> str:
    """What more than half have, or nothing."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else ""


def name_bad_nodes(blame: dict[str, str]) -> None:
    """Add to the file of nodes that must not be used again."""
    folder = os.environ.get("FSDPPLAN_RUN_FOLDER", "")
    if not folder or not blame:
        return
    lines = "".join("\t".join((node, *why.split("\n")[:1])) + "\n" for node, why in blame.items())
    try:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "bad-nodes"), "a") as file:
            file.write(lines)
    except OSError as error:
        print(f"fsdpplan: {folder}: {error.strerror}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

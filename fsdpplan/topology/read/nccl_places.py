"""Which host each rank of each communicator of NCCL is on.

A channel's line names ranks of its communicator but not the communicator, so a peer is looked up in
all communicators in which the speaker has its rank, and told apart by the name of its GPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fsdpplan.topology.read.nccl_lines import ChannelLine, CommunicatorLine
from fsdpplan.topology.read.nccl_report import Place

Process = tuple[str, int]
"""Host and process id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What one line says of a rank."""

    host: str
    gpu: int
    bus_id: str
    name_of_gpu: str
    """As lines of channels have it."""


class Places:
    """Gathers lines of communicators."""

    def __init__(self) -> None:
        self._pointers: dict[tuple[Process, str], str] = {}
        self._memberships: dict[Process, set[tuple[str, int, int]]] = defaultdict(set)
        self._said: dict[str, dict[int, set[_Said]]] = {}
        self._sizes: dict[str, int] = {}

    def add(self, process: Process, line: CommunicatorLine) -> None:
        """A process has a rank in a communicator."""
        name = line.id or f"of {line.ranks}"
        if line.id is None and line.parent is not None:
            name = f"{self._pointers.get((process, line.parent), 'unknown')}/{line.split}"
        self._pointers[process, line.pointer] = name
        self._memberships[process].add((name, line.rank, line.ranks))
        self._sizes[name] = max(line.ranks, self._sizes.get(name, 0))
        said = _Said(
            host=process[0], gpu=line.gpu, bus_id=line.bus_id, name_of_gpu=line.name_of_gpu
        )
        self._said.setdefault(name, {}).setdefault(line.rank, set()).add(said)

    def peer_hosts(self, process: Process, line: ChannelLine) -> frozenset[str]:
        """Where the other end may be; empty: unknown in some communicator that it may be of."""
        if line.device is None and line.transport != "P2P/MNNVL":
            return frozenset({process[0]})
        own, peer = line.sender, line.receiver
        if line.end == "receive":
            own, peer = peer, own
        hosts: set[str] = set()
        for name, rank, ranks in self._memberships[process]:
            if rank != own or peer >= ranks:
                continue
            said = self._said[name].get(peer)
            if not said:
                return frozenset()
            hosts |= {one.host for one in said if one.name_of_gpu == line.peer_gpu}
        return frozenset(hosts)

    def largest(self) -> tuple[int | None, tuple[Place, ...]]:
        """Ranks of the largest communicator, and those of them that all lines agree on."""
        name = max(self._sizes, key=lambda one: self._sizes[one], default=None)
        if name is None:
            return None, ()
        places = [
            Place(rank=rank, host=one.host, gpu=one.gpu, bus_id=one.bus_id)
            for rank, said in sorted(self._said[name].items())
            for one in said
            if len(said) == 1
        ]
        return self._sizes[name], tuple(places)

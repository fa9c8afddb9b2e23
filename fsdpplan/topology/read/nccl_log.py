"""What NCCL says that it did, gathered from its log while it grows.

Lines of all ranks come in any order, through srun's labels and between other output.

Which host each rank of each communicator of NCCL is on.

A channel's line names ranks of its communicator but not the communicator, so a peer is looked up in
all communicators in which the speaker has its rank, and told apart by the name of its GPU.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from fsdpplan.topology.read.nccl_lines import (
    ChannelLine,
    CommunicatorLine,
    Count,
    Fact,
    Message,
    adapter_entries,
    channel_line,
    communicator_line,
    complaint_kind,
    counts,
    gpudirect_line,
    message_in,
    named_facts,
    nodes_line,
    ring_line,
    variable_line,
    version_in,
)
from fsdpplan.topology.read.nccl_report import (
    SOCKET_NETWORKS,
    Adapter,
    Complaint,
    ComplaintKind,
    Connection,
    NcclReport,
    Place,
)

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


MOST_COMPLAINTS = 64
"""Different ones that are kept: a broken fabric fills the log."""


@dataclass(slots=True)
class _Process:
    """What one process has said."""

    devices: dict[int, set[str]] = field(default_factory=dict)
    """Number -> names of adapters."""
    channels: dict[ChannelLine, set[int]] = field(default_factory=dict)
    """Line with its channel set to 0 -> channels."""


class NcclLogReader:
    """Takes lines, gives a report at any time."""

    def __init__(self) -> None:
        self._processes: dict[Process, _Process] = defaultdict(_Process)
        self._places = Places()
        self._nodes: dict[int, int] = {}
        self._ports: dict[tuple[str, str], set[tuple[int | None, str | None]]] = defaultdict(set)
        self._gpudirect: dict[tuple[str, str], bool] = {}
        self._names: dict[Fact, set[str]] = defaultdict(set)
        self._most: dict[Count, int] = {}
        self._rings: dict[int, tuple[int, ...]] = {}
        self._multicast: set[bool] = set()
        self._mnnvl: set[bool] = set()
        self._nvls_connected = False
        self._variables: set[tuple[str, str]] = set()
        self._complaints: dict[tuple[ComplaintKind, str], Counter[str]] = {}

    def feed(self, line: str) -> bool:
        """Take one line; whether it is one of NCCL's."""
        message = message_in(line)
        if message is not None:
            self._take(message)
            return True
        version = version_in(line)
        if version is not None:
            self._names["version"].add(version)
        return version is not None

    def _take(self, message: Message) -> None:
        process, text = self._processes[message.host, message.pid], message.text
        if (kind := complaint_kind(message)) is not None:
            self._complain(kind, message)
        if (channel := channel_line(text)) is not None:
            self._take_channel(process, channel)
        elif (communicator := communicator_line(text)) is not None:
            self._places.add((message.host, message.pid), communicator)
        elif (ring := ring_line(text)) is not None:
            self._take_ring(*ring)
        elif (variable := variable_line(text)) is not None:
            self._variables.add(variable)
        elif facts := named_facts(text):
            for fact, name in facts:
                self._names[fact].add(name)
        elif text.startswith("NET/"):
            self._take_network(process, message)
        else:
            self._take_rest(text)

    def _complain(self, kind: ComplaintKind, message: Message) -> None:
        key = (kind, message.text)
        if key in self._complaints or len(self._complaints) < MOST_COMPLAINTS:
            self._complaints.setdefault(key, Counter())[message.host] += 1

    def _take_channel(self, process: _Process, line: ChannelLine) -> None:
        key = replace(line, channel=0)
        process.channels.setdefault(key, set()).add(line.channel)

    def _take_ring(self, channel: int, order: tuple[int, ...]) -> None:
        """Rings of the largest communicator, the first one of that size."""
        if self._rings and len(order) > max(map(len, self._rings.values())):
            self._rings.clear()
        if all(len(order) == len(known) for known in self._rings.values()):
            self._rings.setdefault(channel, order)

    def _take_network(self, process: _Process, message: Message) -> None:
        self._take_adapters(process, message)
        if (found := gpudirect_line(message.text)) is not None:
            network, device, name, gpudirect = found
            if network not in SOCKET_NETWORKS:
                self._take_gpudirect(process, message.host, (device, name, gpudirect))

    def _take_adapters(self, process: _Process, message: Message) -> None:
        entries = adapter_entries(message.text)
        for index in {entry.index for entry in entries}:
            process.devices[index] = {entry.name for entry in entries if entry.index == index}
        for entry in entries:
            self._ports[message.host, entry.name].add((entry.port, entry.link_layer))

    def _take_gpudirect(self, process: _Process, host: str, said: tuple[int, str, bool]) -> None:
        device, name, gpudirect = said
        names = name.split("+")  # NCCL's name for several that it takes as one
        process.devices.setdefault(device, set(names))
        for one in names:
            self._ports[host, one].add((None, None))
            self._gpudirect[host, one] = gpudirect and self._gpudirect.get((host, one), True)

    def _take_rest(self, text: str) -> None:
        for count, number in counts(text).items():
            self._most[count] = max(number, self._most.get(count, 0))
        if (said := nodes_line(text)) is not None:
            ranks, nodes, mnnvl = said
            self._nodes[ranks] = max(nodes, self._nodes.get(ranks, 0))
            self._mnnvl.add(mnnvl)
        elif multicast := re.match(r"NVLS multicast support is (not )?available on dev \d+", text):
            self._multicast.add(multicast[1] is None)
        elif text == "Connected NVLS tree" or re.match(r"NVLS comm \S+ headRank \d+ ", text):
            self._nvls_connected = True

    def report(self) -> NcclReport:
        """What has been said so far."""
        connections = self._connections()
        world, ranks = self._places.largest()
        return NcclReport(
            versions=self._sorted("version"),
            networks=self._sorted("network"),
            providers=self._sorted("provider"),
            bootstrap=self._sorted("bootstrap"),
            interfaces=self._sorted("interface"),
            ranks=ranks,
            world=world,
            nodes=None if world is None else self._nodes.get(world),
            adapters=self._adapters(),
            connections=connections,
            coll_channels=self._most.get("coll"),
            nvls_channels=self._most.get("nvls"),
            p2p_channels=self._most.get("p2p"),
            tree_channels=self._most.get("tree"),
            rings=tuple(order for _, order in sorted(self._rings.items())),
            nvls_multicast=self._multicast == {True} if self._multicast else None,
            nvls_connected=self._nvls_connected,
            mnnvl=any(self._mnnvl) if self._mnnvl else None,
            collnet=self._sorted("collnet"),
            variables=tuple(sorted(self._variables)),
            complaints=tuple(
                Complaint(kind=kind, text=text, hosts=tuple(sorted(hosts)), count=hosts.total())
                for (kind, text), hosts in sorted(self._complaints.items())
            ),
        )

    def _sorted(self, what: Fact) -> tuple[str, ...]:
        return tuple(sorted(self._names[what]))

    def _connections(self) -> tuple[Connection, ...]:
        found: dict[Connection, set[int]] = {}
        for key, process in self._processes.items():
            host = key[0]
            for line, channels in process.channels.items():
                hosts = self._places.peer_hosts(key, line)
                connection = Connection(
                    sender=line.sender,
                    receiver=line.receiver,
                    end=line.end,
                    host=host,
                    peer_host=next(iter(hosts)) if len(hosts) == 1 else None,
                    between_hosts=bool(hosts) and host not in hosts,
                    transport=line.transport,
                    device=line.device,
                    gpudirect=line.gpudirect,
                    channels=(),
                )
                found.setdefault(connection, set()).update(channels)
        ordered = sorted(found.items(), key=lambda item: _order(item[0]))
        return tuple(replace(one, channels=tuple(sorted(of))) for one, of in ordered)

    def _adapters(self) -> tuple[Adapter, ...]:
        used = {
            (host, name)
            for (host, _), process in self._processes.items()
            for line in process.channels
            if line.device is not None and line.transport[4:] not in SOCKET_NETWORKS
            for name in self._device_names(host, process, line)
        }
        adapters = []
        for (host, name), ports in sorted(self._ports.items()):
            named = [one for one in ports if one != (None, None)] or [(None, None)]
            for port, layer in sorted(named, key=str):
                adapters.append(
                    Adapter(
                        host=host,
                        name=name,
                        port=port,
                        link_layer=layer,
                        gpudirect=self._gpudirect.get((host, name)),
                        used=(host, name) in used,
                    )
                )
        return tuple(adapters)

    def _device_names(self, host: str, process: _Process, line: ChannelLine) -> set[str]:
        """Names behind a device's number; another rank's numbers where that one drives it."""
        assert line.device is not None
        if not line.proxied:
            return process.devices.get(line.device, set())
        spoken = [one for (place, _), one in self._processes.items() if place == host]
        names = {frozenset(one.devices.get(line.device, set())) for one in spoken} - {frozenset()}
        return set(names.pop()) if len(names) == 1 else set()


def _order(one: Connection) -> tuple[int, int, str, str, str, str, int, bool]:
    device = -1 if one.device is None else one.device
    where = (one.end, one.host, one.peer_host or "", one.transport)
    return (one.sender, one.receiver, *where, device, one.gpudirect is True)

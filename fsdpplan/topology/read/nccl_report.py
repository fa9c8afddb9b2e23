"""What NCCL did: the values that its log comes to. What the log does not say is None or empty."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

End = Literal["send", "receive"]
ComplaintKind = Literal["no_device", "no_verbs", "no_plugin", "no_gpudirect", "warning"]
"""No adapter found, no libibverbs, no network plugin, an adapter without GPUDirect RDMA, or any
line at level WARN."""

SOCKET_NETWORKS = frozenset({"Socket", "FastSocket"})
"""Networks of NCCL that are plain TCP: its own, and the plugin of GKE."""
LIBFABRIC_NETWORKS = frozenset({"AWS Libfabric", "Libfabric"})
"""Names of the plugin aws-ofi-nccl, whose provider decides what carries the data."""
SOCKET_PROVIDERS = ("tcp", "sockets", "net")
"""Libfabric's providers over plain TCP. Source: fi_tcp(7), fi_sockets(7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank runs."""

    rank: int
    """In the largest communicator of the log."""
    host: str
    gpu: int
    """What CUDA calls it in that process."""
    bus_id: str
    """As NCCL writes it, such as `1b000`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter that NCCL named."""

    host: str
    name: str
    port: int | None
    link_layer: str | None
    """`IB` or `RoCE` of verbs; None of a plugin."""
    gpudirect: bool | None
    """NCCL says that it can read device memory."""
    used: bool
    """A channel runs through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One end of the channels from one rank to another, as the process at that end says it."""

    sender: int
    receiver: int
    """Ranks in their communicator, which need not be the largest one."""
    end: End
    """Which of the two says it."""
    host: str
    peer_host: str | None
    """Where the other one runs; None where the log leaves it open."""
    between_hosts: bool
    """Known to leave the host, if not always for which one."""
    transport: str
    """`P2P/CUMEM`, `P2P/IPC`, `P2P/MNNVL`, `SHM`, `NET/IB`, `NET/Socket`, ..."""
    device: int | None
    """Number of the adapter or interface; None of what uses none."""
    gpudirect: bool | None
    """GDRDMA: the adapter reaches device memory; None of what uses none."""
    channels: tuple[int, ...]

    @property
    def network(self) -> str | None:
        """NCCL's name of the network, of connections over one."""
        return self.transport[4:] if self.transport.startswith("NET/") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """Something that NCCL found missing or wrong."""

    kind: ComplaintKind
    text: str
    hosts: tuple[str, ...]
    count: int
    """Lines that say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclReport:
    """All that the log of one job says."""

    versions: tuple[str, ...]
    """Such as `2.27.3`; several mean that ranks do not agree."""
    networks: tuple[str, ...]
    """What NCCL chose for traffic that leaves a host, whether there is any or not."""
    providers: tuple[str, ...]
    """Libfabric's providers, where aws-ofi-nccl is the network."""
    bootstrap: tuple[str, ...]
    """Interfaces of the first contact between ranks."""
    interfaces: tuple[str, ...]
    """Interfaces that the socket network would use."""
    ranks: tuple[Place, ...]
    world: int | None
    """Ranks of the largest communicator."""
    nodes: int | None
    """Its nodes as NCCL counts them: hosts, or domains of NVLink."""
    adapters: tuple[Adapter, ...]
    connections: tuple[Connection, ...]
    coll_channels: int | None
    nvls_channels: int | None
    p2p_channels: int | None
    """The most of any communicator."""
    tree_channels: int | None
    rings: tuple[tuple[int, ...], ...]
    """Order of ranks by channel; NCCL cuts long ones short."""
    nvls_multicast: bool | None
    """All devices, or not all, may let the switch reduce."""
    nvls_connected: bool
    """Communicators have set NVLS up."""
    mnnvl: bool | None
    """NVLink leads to other nodes."""
    collnet: tuple[str, ...]
    """Networks that reduce in their switches, such as `SHARP`."""
    variables: tuple[tuple[str, str], ...]
    """NCCL's variables that it took from its environment; a name that differs stands twice."""
    complaints: tuple[Complaint, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of the ranks."""
        return tuple(sorted({place.host for place in self.ranks}))

    @property
    def between(self) -> tuple[Connection, ...]:
        """Connections that are known to leave their host."""
        return tuple(one for one in self.connections if one.between_hosts)

    @property
    def sockets_between(self) -> tuple[Connection, ...]:
        """Those that go over plain TCP."""
        return tuple(one for one in self.between if self.over_sockets(one))

    def over_sockets(self, connection: Connection) -> bool:
        """Whether a connection is plain TCP, under whichever name."""
        if connection.network in LIBFABRIC_NETWORKS and self.providers:
            return all(name.split(";")[0] in SOCKET_PROVIDERS for name in self.providers)
        return connection.network in SOCKET_NETWORKS

    def values_of(self, variable: str) -> tuple[str, ...]:
        """What the ranks have a variable of NCCL set to."""
        return tuple(value for name, value in self.variables if name == variable)

    def complains(self, kind: ComplaintKind) -> bool:
        """Whether any rank says so."""
        return any(complaint.kind == kind for complaint in self.complaints)


def nccl_words(report: NcclReport) -> str:
    """One sentence: version, transports, adapters, channels, NVLS, warnings."""
    ways = [way_words(way) for way, _ in nccl_ways(report)]
    parts = ["; ".join(ways)] if ways else ["no channel in the log"]
    if report.adapters:
        used = sum(one.used for one in report.adapters)
        parts.append(f"{used} of {len(report.adapters)} adapter ports in use")
    if report.coll_channels is not None:
        parts.append(f"{report.coll_channels} channels")
    if report.nvls_connected:
        parts.append("NVLS")
    warned = sum(one.count for one in report.complaints if one.kind == "warning")
    if warned:
        parts.append(f"{warned} warning{'s' if warned > 1 else ''}")
    version = f" {', '.join(report.versions)}" if report.versions else ""
    return f"NCCL{version}: {', '.join(parts)}."


def rank_pair(one: Connection) -> tuple[frozenset[str | None], int, int]:
    """The same for both ends, in the numbers of their communicator."""
    return frozenset({one.host, one.peer_host}), one.sender, one.receiver


def nccl_ways(
    report: NcclReport,
) -> list[tuple[tuple[str, bool, bool | None], list[Connection]]]:
    """Connections by (transport, whether between hosts, GPUDirect), those inside first."""
    groups: dict[tuple[str, bool, bool | None], list[Connection]] = defaultdict(list)
    for one in report.connections:
        groups[one.transport, one.between_hosts, one.gpudirect].append(one)
    return sorted(groups.items(), key=lambda item: (item[0][1], item[0][0], item[0][2] is False))


def way_words(way: tuple[str, bool, bool | None]) -> str:
    """Such as `NET/IB with GPUDirect between nodes`."""
    transport, between, gpudirect = way
    through = {True: " with GPUDirect", False: " through host memory", None: ""}[gpudirect]
    if transport == "NET/Socket":
        through = ""
    return f"{transport}{through}{' between nodes' if between else ''}"

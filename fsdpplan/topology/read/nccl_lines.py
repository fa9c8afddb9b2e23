"""The lines of NCCL's log, one at a time: who says it, and what it means.

Formats of NCCL 2.10 to 2.30, read from its source at those tags (src/debug.cc, init.cc, bootstrap,
graph/rings.cc, graph/topo.cc, transport/net.cc, net_ib, net_socket, p2p.cc, shm.cc, nvls.cc; since
2.30 transport/net_ib/init.cc), and of the plugin aws-ofi-nccl. A line counts only as a whole: what
is cut short or run into by another rank says nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from fsdpplan.topology.read.nccl_report import ComplaintKind, End

_PREFIX = re.compile(
    r"(?<![\w.-])(?P<host>\w[\w.-]{0,252}):(?P<pid>\d{1,10}):\d{1,10} \[-?\d{1,4}\] "
    r"(?:\S{1,255}:\d{1,6} )?NCCL (?P<level>INFO|WARN) "
)
"""Since 2.26 a time may stand before it; srun, torchrun and Kubernetes put labels there. All parts
have a greatest length, so that a long line of anything is passed over in time."""
LONGEST = 4096
"""Characters of a message; a list of sixteen adapters has a tenth of them."""
_VERSION = re.compile(r"(?:^|.*[\s:])NCCL version (\d+\.\d+\.\d+\w*)(?:\+cuda[\d.]+)?\s*")
_CHANNEL = re.compile(
    r"Channel (?P<channel>\d+)(?:/\d+)? : (?P<sender>\d+)\[(?P<sending>[0-9a-f]+)\] -> "
    r"(?P<receiver>\d+)\[(?P<receiving>[0-9a-f]+)\](?: \[(?P<end>send|receive)\])? "
    r"via (?P<way>.+)"
)
"""In brackets the GPU: its bus id up to 2.17, NVML's number since. No connection before 2.12."""
_NET = re.compile(
    r"(?P<transport>NET/[^/]+)/(?P<device>\d+)(?:\((?P<proxy>\d+)\))?"
    r"(?P<gpudirect>/GDRDMA)?(?:\(PCI\))?(?:/Shared)?"
)
_P2P = re.compile(
    r"(?P<transport>P2P/(?:IPC|CUMEM|MNNVL|direct pointer|common device|indirect))"
    r"(?:(?<=indirect)/\d+\[[0-9a-f]+\])?(?:/read)?(?:/CE)?"
)
_SHM = re.compile(r"SHM/(?:direct|CE)(?:/(?:direct|CE))?|direct shared memory")
_COMMUNICATOR = re.compile(
    r"(?:\[Rank \d+\] )?(?:\w+ )?comm (?P<pointer>\S+) rank (?P<rank>\d+) nranks (?P<ranks>\d+) "
    r"cudaDev (?P<gpu>\d+)(?: nvmlDev (?P<nvml>\d+))? busId (?P<bus_id>[0-9a-f]+)"
    r"(?: parent (?P<parent>\S+)(?: splitCount (?P<split>\d+))? color (?P<color>-?\d+) key -?\d+)?"
    r"(?: commId (?P<id>0x[0-9a-f]+))? ?- Init (?:START|COMPLETE)\s*"
)
_ADAPTER = re.compile(r"\[\d+\] ?(?P<name>[\w.-]+):(?P<port>\d+)(?::\d*)*/(?P<layer>IB|RoCE)\b")
"""Behind the port of 2.30 may stand rail and plane; the plugin of HPC-X adds /SHARP."""

Fact = Literal["version", "network", "bootstrap", "interface", "provider", "collnet"]
Count = Literal["coll", "nvls", "p2p", "tree"]
_FACTS: dict[Fact, re.Pattern[str]] = {
    "version": _VERSION,
    "network": re.compile(r"Using network (\S.*)"),
    "bootstrap": re.compile(r"Bootstrap ?: Using (?:\[0\])?([^\s:]+):.*"),
    "provider": re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,]+).*"),
    "collnet": re.compile(r"CollNet .* \[(?:send|receive)\] via COLLNET/([^/]+)/\d+.*"),
}
_CHANNELS = re.compile(
    r"(?P<coll>\d+) coll channels, (?:\d+ collnet channels, )?(?:(?P<nvls>\d+) nvls channels, )?"
    r"(?P<p2p>\d+) p2p channels, \d+ p2p channels per peer"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message and the process that it is from."""

    host: str
    pid: int
    level: Literal["INFO", "WARN"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLine:
    """`Channel 00/0 : 1[1] -> 2[2] [send] via NET/IB/0/GDRDMA`."""

    channel: int
    sender: int
    receiver: int
    end: End
    peer_gpu: str
    """The other end's, as its communicator line names it."""
    transport: str
    device: int | None
    proxied: bool
    """Another rank of the host drives the adapter for this one (PXN)."""
    gpudirect: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorLine:
    """`ncclCommInitRank comm 0x1 rank 3 nranks 16 cudaDev 3 ... commId 0x2 - Init START`."""

    pointer: str
    """Its address, which is a name only inside one process."""
    rank: int
    ranks: int
    gpu: int
    bus_id: str
    name_of_gpu: str
    """As lines of channels have it: NVML's number, or the bus id where none is said."""
    id: str | None
    """The same on all ranks; none before 2.16, and none of a split since 2.23."""
    parent: str | None
    split: str
    """Which part of which split of the parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """`[0]mlx5_0:1/RoCE`, or one of several that NCCL takes as one."""

    index: int
    """By which channels name it."""
    name: str
    port: int | None
    link_layer: str | None


def message_in(line: str) -> Message | None:
    """The message at the end of a line; what it ran into is lost."""
    found = list(_PREFIX.finditer(line)) if "NCCL " in line else []
    if not found:
        return None
    start = found[-1]
    level = cast(Literal["INFO", "WARN"], start["level"])
    text = line[start.end() :].rstrip()
    if len(text) > LONGEST:
        return None
    return Message(host=start["host"], pid=int(start["pid"]), level=level, text=text)


def version_in(text: str) -> str | None:
    """NCCL's version, of a line with or without a prefix."""
    match = _VERSION.fullmatch(text) if len(text) <= LONGEST else None
    return match[1] if match else None


def channel_line(text: str) -> ChannelLine | None:
    """How one channel reaches one peer, or None for anything else."""
    match = _CHANNEL.fullmatch(text)
    if match is None:
        return None
    net = _NET.fullmatch(match["way"])
    if net is not None and match["end"] is None:
        return None
    transport = net["transport"] if net else _inside(match["way"])
    if transport is None:
        return None
    receives = match["end"] == "receive"
    return ChannelLine(
        channel=int(match["channel"]),
        sender=int(match["sender"]),
        receiver=int(match["receiver"]),
        end="receive" if receives else "send",
        peer_gpu=match["sending"] if receives else match["receiving"],
        transport=transport,
        device=int(net["device"]) if net else None,
        proxied=net is not None and net["proxy"] is not None,
        gpudirect=net["gpudirect"] is not None if net else None,
    )


def _inside(way: str) -> str | None:
    """Transports that use no network."""
    if _SHM.fullmatch(way):
        return "SHM"
    match = _P2P.fullmatch(way)
    return match["transport"] if match else None


def communicator_line(text: str) -> CommunicatorLine | None:
    """A communicator and this process's rank in it."""
    match = _COMMUNICATOR.fullmatch(text)
    if match is None:
        return None
    return CommunicatorLine(
        pointer=match["pointer"],
        rank=int(match["rank"]),
        ranks=int(match["ranks"]),
        gpu=int(match["gpu"]),
        bus_id=match["bus_id"],
        name_of_gpu=match["nvml"] or match["bus_id"],
        id=match["id"],
        parent=match["parent"],
        split=f"{match['split']}/{match['color']}",
    )


def adapter_entries(text: str) -> list[AdapterEntry]:
    """Adapters in `NET/IB : Using ...` and `NET/IB : Made virtual device ...`."""
    if made := re.fullmatch(
        r"NET/IB : Made virtual device \[(\d+)\] name=(\S+) speed=\d+ .*", text
    ):
        names = made[2].split("+")
        return [
            AdapterEntry(index=int(made[1]), name=name, port=None, link_layer=None)
            for name in names
        ]
    using = re.fullmatch(r"NET/IB : Using(?P<list>.*) ?; OOB \S+", text)
    if using is None:
        return []
    entries = []
    # Channels count devices in this order. 2.21 to 2.23 write two ports of a card that are taken as
    # one as [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB}, and go on with [2].
    for index, group in enumerate(re.findall(r"\[\d+\](?:=\{.*?\}|[^\[{]+)", using["list"])):
        for one in _ADAPTER.finditer(group.partition("=")[2] or group):
            entries.append(
                AdapterEntry(
                    index=index,
                    name=one["name"],
                    port=int(one["port"]),
                    link_layer=one["layer"],
                )
            )
    return entries


def gpudirect_line(text: str) -> tuple[str, int, str, bool] | None:
    """(network, device, its name, whether it reaches device memory)."""
    match = re.fullmatch(
        r"NET/([^/]+?) : GPU Direct RDMA (Enabled|Disabled) for HCA (\d+) '([^']+)'(?: \(.*\))?",
        text,
    )
    return (match[1], int(match[3]), match[4], match[2] == "Enabled") if match else None


def ring_line(text: str) -> tuple[int, tuple[int, ...]] | None:
    """(channel, order of ranks): `Channel 00/04 : 0 1 3 2`."""
    match = re.fullmatch(r"Channel (\d+)/\d+ :((?: +\d+)+)(?: ?\.\.\.)?\s*", text)
    return (int(match[1]), tuple(map(int, match[2].split()))) if match else None


def variable_line(text: str) -> tuple[str, str] | None:
    """(name, value) of a variable that NCCL took from its environment."""
    match = re.fullmatch(r"(NCCL_[A-Z0-9_]+) set (?:by environment )?to (\S.*?)\.?", text)
    return (match[1], match[2]) if match else None


def named_facts(text: str) -> list[tuple[Fact, str]]:
    """What is said by naming it."""
    for fact, pattern in _FACTS.items():
        if match := pattern.fullmatch(text):
            return [(fact, match[1])]
    interfaces = re.fullmatch(r"NET/Socket : Using((?: \[\d+\][^\s:]+:\S+)+)", text)
    if interfaces is None:
        return []
    return [("interface", name) for name in re.findall(r" \[\d+\]([^\s:]+):", interfaces[1])]


def counts(text: str) -> dict[Count, int]:
    """Channels and nodes of one communicator."""
    if match := _CHANNELS.fullmatch(text):
        found = {name: match[name] for name in get_args(Count) if name in match.groupdict()}
        return {name: int(number) for name, number in found.items() if number is not None}
    if re.fullmatch(r"Trees(?: \[\d+\] \S+)+", text):
        return {"tree": text.count("[")}
    return {}


def nodes_line(text: str) -> tuple[int, int, bool] | None:
    """(ranks, nodes, whether NVLink leads to other nodes) of one communicator, since 2.20."""
    match = re.fullmatch(
        r"comm \S+ rank \d+ nRanks (\d+) nNodes (\d+) localRanks \d+ localRank \d+ MNNVL (\d)",
        text,
    )
    return (int(match[1]), int(match[2]), match[3] != "0") if match else None


def complaint_kind(message: Message) -> ComplaintKind | None:
    """What is missing or wrong, if anything is."""
    text = message.text
    if re.fullmatch(r"NET/IB : No device found\.?", text):
        return "no_device"
    if text.startswith("Failed to open libibverbs"):
        return "no_verbs"
    if re.match(r"NET/Plugin ?: (?:.*No plugin found|Could not find:)", text):
        return "no_plugin"
    found = gpudirect_line(text)
    if found is not None and found[0] != "Socket" and not found[3]:
        return "no_gpudirect"
    return "warning" if message.level == "WARN" else None

"""Transports: what NCCL's log of this process says that it uses between nodes.

Only whether that is sockets, where the plan counts on adapters that do without: all else that a log
says is for `fsdpplan run`, which reads the logs of all ranks. Formats of NCCL 2.10 to 2.30
(src/transport/net.cc for channels, src/debug.cc for NCCL_DEBUG_FILE).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, MutableMapping, Sequence
from pathlib import Path

from ..config import ClusterConfig
from .findings import Findings, hosts_words

ALLOWS_SOCKETS = "FSDPPLAN_ALLOW_SOCKETS"
"""Variable that lets a job train on over sockets; `run` sets it, since it judges itself."""
SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET"
RDMA = frozenset(
    {"infiniband", "roce", "efa", "fastrak", "tcpxo", "gib", "rdma", "omni-path", "slingshot"}
)
"""Names of levels and transports whose adapters move data without sockets."""
NOT_ADAPTERS = frozenset({"nvlink", "tcpx", "ethernet"})
"""Levels between nodes that are no such adapters, whatever they can do."""
SOCKET_NETWORKS = frozenset({"Socket", "FastSocket"})
"""Networks of NCCL that are plain TCP: its own, and the plugin of GKE."""
LIBFABRIC_NETWORKS = frozenset({"AWS Libfabric", "Libfabric"})
"""Names of the plugin aws-ofi-nccl, whose provider decides what carries the data."""
SOCKET_PROVIDERS = ("tcp", "sockets", "net")
"""Libfabric's providers over plain TCP. Source: fi_tcp(7), fi_sockets(7)."""

_CHANNEL = re.compile(
    r"\[-?\d{1,4}\] NCCL INFO Channel \d+(?:/\d+)? : \d+\[[0-9a-f]+\] -> \d+\[[0-9a-f]+\]"
    r" \[(?:send|receive)\] via NET/(?P<network>[^/\s][^/]{0,63})/\d+"
    r"(?:\(\d+\))?(?:/GDRDMA)?(?:\(PCI\))?(?:/Shared)?$"
)
"""As a whole: what is cut short or run into by another line says nothing."""
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (?P<provider>[^\s,;]+)")


def write_log(folder: Path | None, environment: MutableMapping[str, str]) -> Path | None:
    """Make NCCL write its log into the run's folder, before it starts; this process's file.

    None where the user has a log of his own, and where sockets are allowed, or for `run` to judge.
    """
    if folder is None or environment.get(ALLOWS_SOCKETS):
        return None
    # %h and %p are the host, up to its first dot, and the process
    pattern = str(folder).replace("%", "%%") + "/nccl.%h.%p.log"
    is_set = any(name.startswith("NCCL_DEBUG") for name in environment)
    # the job script may have set what is set here
    if is_set and Path(environment.get("NCCL_DEBUG_FILE", "")) != Path(pattern):
        return None
    environment["NCCL_DEBUG"] = "INFO"
    environment["NCCL_DEBUG_SUBSYS"] = SUBSYSTEMS
    environment["NCCL_DEBUG_FILE"] = pattern
    return folder / f"nccl.{socket.gethostname().partition('.')[0]}.{os.getpid()}.log"


def uses_sockets(lines: Iterable[str]) -> bool:
    """Whether channels go over plain TCP, under whichever name."""
    networks, providers = set(), set()
    for line in lines:
        if channel := _CHANNEL.search(line.rstrip()):
            networks.add(channel["network"])
        elif provider := _PROVIDER.search(line):
            providers.add(provider["provider"])
    over_libfabric = bool(networks & LIBFABRIC_NETWORKS)
    only_tcp = bool(providers) and providers <= set(SOCKET_PROVIDERS)
    return bool(networks & SOCKET_NETWORKS) or (over_libfabric and only_tcp)


def planned_adapters(cluster: ClusterConfig) -> str | None:
    """What the plan counts on between nodes that is no socket, by name; None: nothing such."""
    if cluster.network is not None:
        transport = cluster.network.transport
        return None if transport in ("ethernet", "tcpx") else transport
    for level in cluster.levels:
        leaves_node = level.domain_gpus > cluster.gpus_per_node
        is_adapter = level.name in RDMA or (level.gpudirect and level.name not in NOT_ADAPTERS)
        if leaves_node and is_adapter:
            return level.name
    return None


def judge_transports(hosts_with_sockets: Sequence[str], adapters: str | None) -> Findings:
    """Sockets in place of adapters: no node is to blame, since all agree on one network."""
    if not hosts_with_sockets or adapters is None:
        return Findings()
    return Findings(
        problem=f"NCCL on {hosts_words(hosts_with_sockets)} talks to other nodes over sockets "
        f"although the plan counts on {adapters}: look for NCCL_IB_DISABLE and NCCL_NET, at "
        "ibv_devinfo, and whether the container has /dev/infiniband"
    )

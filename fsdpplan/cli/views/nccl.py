"""What NCCL did in a run, for `--json` and in one line."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fsdpplan.topology.nccl_report import Connection, NcclReport


def nccl_document(report: NcclReport) -> dict[str, Any]:
    """Under `nccl` in what `run --json` prints; null is what the log does not say."""
    return {
        "versions": list(report.versions),
        "networks": list(report.networks),
        "libfabric_providers": list(report.providers),
        "bootstrap_interfaces": list(report.bootstrap),
        "socket_interfaces": list(report.interfaces),
        "ranks": report.world,
        "nodes": report.nodes,
        "hosts": list(report.hosts),
        "transports": [
            {
                "transport": transport,
                "between_hosts": between,
                "gpudirect": gpudirect,
                "pairs": len({_pair(one) for one in group}),
                "channels": len({channel for one in group for channel in one.channels}),
            }
            for (transport, between, gpudirect), group in _ways(report)
        ],
        "adapters": [
            {
                "host": one.host,
                "name": one.name,
                "port": one.port,
                "link_layer": one.link_layer,
                "gpudirect": one.gpudirect,
                "used": one.used,
            }
            for one in report.adapters
        ],
        "channels": {
            "collective": report.coll_channels,
            "nvls": report.nvls_channels,
            "point_to_point": report.p2p_channels,
            "tree": report.tree_channels,
        },
        "rings": [list(order) for order in report.rings],
        "nvls": {"multicast": report.nvls_multicast, "connected": report.nvls_connected},
        "mnnvl": report.mnnvl,
        "collnet": list(report.collnet),
        "variables": [{"name": name, "value": value} for name, value in report.variables],
        "complaints": [
            {"kind": one.kind, "text": one.text, "hosts": list(one.hosts), "count": one.count}
            for one in report.complaints
        ],
    }


def nccl_words(report: NcclReport) -> str:
    """One sentence: version, transports, adapters, channels, NVLS, warnings."""
    ways = [_way_words(way) for way, _ in _ways(report)]
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


def _pair(one: Connection) -> tuple[frozenset[str | None], int, int]:
    """The same for both ends, in the numbers of their communicator."""
    return frozenset({one.host, one.peer_host}), one.sender, one.receiver


def _ways(
    report: NcclReport,
) -> list[tuple[tuple[str, bool, bool | None], list[Connection]]]:
    """Connections by (transport, whether between hosts, GPUDirect), those inside first."""
    groups: dict[tuple[str, bool, bool | None], list[Connection]] = defaultdict(list)
    for one in report.connections:
        groups[one.transport, one.between_hosts, one.gpudirect].append(one)
    return sorted(groups.items(), key=lambda item: (item[0][1], item[0][0], item[0][2] is False))


def _way_words(way: tuple[str, bool, bool | None]) -> str:
    transport, between, gpudirect = way
    through = {True: " with GPUDirect", False: " through host memory", None: ""}[gpudirect]
    if transport == "NET/Socket":
        through = ""
    return f"{transport}{through}{' between nodes' if between else ''}"

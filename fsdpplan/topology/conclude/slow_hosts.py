"""Slow hosts: the levels that equal hosts have in common, and what holds some of them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fsdpplan.spec.cluster import WeakSpot
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.topology import Finding, FindingKind, FoundLevel, LevelKind, Topology
from fsdpplan.topology.conclude.findings import findings_of
from fsdpplan.topology.survey import Survey
from fsdpplan.units import format_bandwidth

_NETWORKS: tuple[LevelKind, ...] = ("infiniband", "roce", "efa", "tcpx", "ethernet")
_TOUCHES: dict[FindingKind, tuple[LevelKind, ...]] = {
    "nic_slow": _NETWORKS,
    "nic_down": _NETWORKS,
    "nvlink_down": ("nvlink",),
    "pcie_slow": ("pcie", "socket", *_NETWORKS),
}
"""Levels that a finding may slow."""
_NOISE = 0.999
"""Rates are sums of floats: what differs by less is equal."""


def common_levels(survey: Survey) -> tuple[FoundLevel, ...]:
    """The levels of the typical host with what most of its equals have: how many ports, and how
    fast one is where nothing is degraded. Of equally common ones the fastest.

    Adapters read device memory directly only where they do on all of these hosts.
    """
    typical = survey.topologies[survey.typical]
    domains = _domains(typical)
    equals = [
        topology.levels
        for topology in (survey.topologies[index] for index in survey.taking_part)
        if _domains(topology) == domains
    ]
    return tuple(
        _commonest(level, [levels[place] for levels in equals])
        for place, level in enumerate(typical.levels)
    )


def weak_spots(survey: Survey) -> tuple[WeakSpot, ...]:
    """What holds others back: levels of a host below the common ones, and capped GPUs.

    Hosts that cannot take part at all are left out.
    """
    common = common_levels(survey)
    spots: list[WeakSpot] = []
    for index in survey.taking_part:
        machine, topology = survey.machines[index], survey.topologies[index]
        findings = findings_of(machine, topology)
        spots += _slow_levels(machine.host.name, topology, common, findings)
        spots += _capped(machine, findings)
    return tuple(spots)


def _domains(topology: Topology) -> tuple[tuple[LevelKind, int | None], ...]:
    return tuple((level.kind, level.domain_gpus) for level in topology.levels)


def _commonest(level: FoundLevel, equals: Sequence[FoundLevel]) -> FoundLevel:
    found = Counter((each.ports, each.healthy_bandwidth_bytes_per_second) for each in equals)
    ports, healthy = max(found, key=lambda pair: (found[pair], pair[0] * pair[1]))
    return replace(
        level,
        ports=ports,
        healthy_bandwidth_bytes_per_second=healthy,
        gpudirect=all(each.gpudirect for each in equals),
    )


def _slow_levels(
    host: str, topology: Topology, common: Sequence[FoundLevel], findings: Sequence[Finding]
) -> list[WeakSpot]:
    spots, below = [], 1
    for level in common:
        best = level.ports * level.healthy_bandwidth_bytes_per_second / below
        now = _bytes_per_second(topology, level)
        below = level.domain_gpus or below
        if now is not None and now < best * _NOISE:
            why = [
                finding.text
                for finding in findings
                if level.kind in _TOUCHES.get(finding.kind, ()) and finding.severity != "note"
            ]
            rates = (
                f"its {level.kind} gives a GPU {format_bandwidth(now)}, that of its equals "
                f"{format_bandwidth(best)}"
            )
            spots.append(
                WeakSpot(
                    nodes=(host,),
                    level=level.kind,
                    remaining_fraction=now / best,
                    text="; ".join(why) or rates,
                )
            )
    return spots


def _bytes_per_second(topology: Topology, common: FoundLevel) -> float | None:
    """What one GPU of the host gets over this level now; over what stands in its place where the
    host has none of its kind; None where that is unknown."""
    if common.domain_gpus is None:
        return topology.across_bytes_per_second
    below = 1
    for level in topology.levels:
        if level.kind == common.kind:
            return level.ports * level.port_bandwidth_bytes_per_second / below
        below = level.domain_gpus or below
    return topology.inside_bytes_per_second


def _capped(machine: Machine, findings: Sequence[Finding]) -> list[WeakSpot]:
    """GPUs whose power cap is below their default: the rate goes as the cube root of the power.

    Source: files.profile_devices, on relatives of another power limit.
    """
    shares = [
        gpu.power_limit_watts / gpu.default_power_limit_watts
        for gpu in machine.gpus
        if gpu.power_limit_watts and gpu.default_power_limit_watts
    ]
    least = min(shares, default=1.0)
    if least >= 1:
        return []
    return [
        WeakSpot(
            nodes=(machine.host.name,),
            level=None,
            remaining_fraction=least ** (1 / 3),
            text="; ".join(f.text for f in findings if f.kind == "power_capped"),
        )
    ]

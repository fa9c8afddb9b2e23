"""Survey: several hosts looked at together: which of them stands for all, and who differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpplan.errors import SpecError
from fsdpplan.spec.machine import Machine
from fsdpplan.spec.nodes import Network, compress_host_list
from fsdpplan.spec.topology import Finding, LevelKind, Topology
from fsdpplan.topology.conclude.differences import differences
from fsdpplan.topology.conclude.findings import findings_of
from fsdpplan.topology.conclude.levels import topology_of
from fsdpplan.topology.conclude.network_facts import network_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Hosts, at least one, what follows from each, and what to know of them."""

    machines: tuple[Machine, ...]
    topologies: tuple[Topology, ...]
    findings: tuple[Finding, ...]
    network: Network | None
    """Of all hosts together."""
    typical: int
    """Index of the host that stands for all."""

    @property
    def taking_part(self) -> tuple[int, ...]:
        """Indices of the hosts with the GPUs of the typical one: others cannot be in a job with
        it that uses all GPUs."""
        wanted = _gpus(self.machines[self.typical])
        return tuple(i for i, machine in enumerate(self.machines) if _gpus(machine) == wanted)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the other hosts."""
        among = self.taking_part
        return tuple(m.host.name for i, m in enumerate(self.machines) if i not in among)


def survey_of(machines: Sequence[Machine], *, unread: Sequence[Finding] = ()) -> Survey:
    """What follows from `machines`; `unread`: findings on hosts that did not answer.

    Raises SpecError where two hosts have one name: nothing could be said of either.
    """
    _require_own_names(machines)
    topologies = tuple(
        topology_of(machine, others=[other for other in machines if other is not machine])
        for machine in machines
    )
    own = [
        finding
        for machine, topology in zip(machines, topologies, strict=True)
        for finding in (*findings_of(machine, topology), *_uncounted(machine, topology))
    ]
    typical = _typical(machines, topologies)
    others = [machine for index, machine in enumerate(machines) if index != typical]
    return Survey(
        machines=tuple(machines),
        topologies=topologies,
        findings=(
            *unread,
            *own,
            *(differences(machines) if others else ()),
            *_other_networks(machines, topologies, typical),
        ),
        network=network_of(machines[typical], topologies[typical], others=others),
        typical=typical,
    )


def _require_own_names(machines: Sequence[Machine]) -> None:
    names = Counter(machine.host.name for machine in machines)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise SpecError(
            f"{names[twice]} of the hosts are called {twice}: give each host once, and record "
            "them under names of their own"
        )


def _typical(machines: Sequence[Machine], topologies: Sequence[Topology]) -> int:
    """The host that stands for all: with the commonest GPUs (of equally common ones the most), then
    with the commonest kinds of levels, then in the smallest NVLink domain, then with the most
    bandwidth; of equals the first."""
    gpus = Counter(_gpus(machine) for machine in machines if machine.gpus)
    wanted = max(gpus, key=lambda names: (gpus[names], len(names)), default=())
    equals = [index for index, machine in enumerate(machines) if _gpus(machine) == wanted]
    kinds = Counter(_kinds(topologies[index]) for index in equals)

    def rank(index: int) -> tuple[float, ...]:
        topology = topologies[index]
        inner = [level.domain_gpus or 0 for level in topology.levels]
        rates = (topology.inside_bytes_per_second, topology.across_bytes_per_second)
        return (kinds[_kinds(topology)], -max(inner, default=0), *(rate or 0.0 for rate in rates))

    return max(equals, key=rank)


def _other_networks(
    machines: Sequence[Machine], topologies: Sequence[Topology], typical: int
) -> list[Finding]:
    """Hosts that reach others by a network of another kind than the typical host."""
    usual = _network_kind(topologies[typical])
    others: dict[LevelKind | None, list[str]] = {}
    for machine, topology in zip(machines, topologies, strict=True):
        if machine.gpus and _network_kind(topology) != usual:
            others.setdefault(_network_kind(topology), []).append(machine.host.name)
    return [_other_network(kind, usual, names) for kind, names in others.items()]


def _other_network(
    kind: LevelKind | None, usual: LevelKind | None, names: Sequence[str]
) -> Finding:
    nodes = compress_host_list(names)
    return Finding(
        kind="nodes_differ",
        severity="broken",
        host=nodes,
        where="network",
        text=f"network: {kind or 'unknown'} on {nodes}, {usual or 'unknown'} on the others",
        consequence="adapters of one kind do not reach those of another: NCCL goes over sockets "
        "between them, or stops",
        remedy=f"leave it out: emit-launch --exclude {nodes}",
        slowdown=None,
    )


def _network_kind(topology: Topology) -> LevelKind | None:
    return next((level.kind for level in topology.levels if level.domain_gpus is None), None)


def _uncounted(machine: Machine, topology: Topology) -> list[Finding]:
    """NVLink domains that span hosts (NVL72), seen from one of them only."""
    return [
        Finding(
            kind="unread",
            severity="note",
            host=machine.host.name,
            where=f"NVLink domain {island.fabric}",
            text=f"the NVLink domain {island.fabric} spans hosts, and {machine.host.name} alone "
            f"does not show how many GPUs it has beside these {len(island.gpus)}",
            consequence=f"a profile of this host joins {len(island.gpus)} GPUs by NVLink, and all "
            "others by the network",
            remedy="detect --nodes counts those of an allocation, and fsdpplan profiles nvl72 "
            "lists whole racks",
            slowdown=None,
        )
        for island in topology.islands
        if island.fabric is not None and island.domain_gpus is None
    ]


def _kinds(topology: Topology) -> tuple[LevelKind, ...]:
    return tuple(level.kind for level in topology.levels)


def _gpus(machine: Machine) -> tuple[str, ...]:
    return tuple(gpu.name for gpu in machine.gpus)

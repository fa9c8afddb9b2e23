"""Hosts on a screen: GPUs, islands, rails, what one GPU gets, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fsdpplan.cli.views.render import blocks, facts, listed, table, wrapped
from fsdpplan.spec.machine import UNLIMITED_BYTES, Gpu, Machine
from fsdpplan.spec.nodes import compress_host_list
from fsdpplan.spec.topology import Finding, Island, LevelKind, Rail, Severity, Topology
from fsdpplan.topology.read.pci import NEAREST_FIRST, path_in
from fsdpplan.topology.survey import Survey
from fsdpplan.units import format_bandwidth, format_bit_bandwidth, format_gib

_HEADINGS: dict[Severity, str] = {
    "broken": "Broken: a job would fail or crawl",
    "degraded": "Degraded: slower than the hardware",
    "note": "To know",
}
_NETWORKS: dict[LevelKind, str] = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "efa": "EFA",
    "tcpx": "GPUDirect-TCPX",
    "ethernet": "TCP",
}
_FEW, _MANY = 4, 12
"""Ports of one rate that are named one by one even where each GPU has equally many, and at most."""
_EXCLUDE = "--exclude"


def hosts_blocks(survey: Survey, *, width: int) -> list[str]:
    """The typical host in full, and who else was read."""
    typical = survey.typical
    machine, topology = survey.machines[typical], survey.topologies[typical]
    return [
        _others(survey, width),
        _heading(machine, width),
        _gpu_table(machine, topology, width),
        _links(topology, machine, width),
        _host(machine, width),
    ]


def _others(survey: Survey, width: int) -> str:
    """Which hosts were read, where there are several."""
    if len(survey.machines) == 1:
        return ""
    names = compress_host_list([machine.host.name for machine in survey.machines])
    shown = survey.machines[survey.typical].host.name
    left_out = ""
    if survey.left_out:
        them = compress_host_list(survey.left_out)
        left_out = (
            f" {them} cannot take part in a job with it that uses all GPUs: "
            f"{'its' if len(survey.left_out) == 1 else 'their'} GPUs are others."
        )
    return wrapped(
        f"{len(survey.machines)} nodes: {names}. {shown} stands for all; where others differ is "
        f"said below.{left_out}",
        width=width,
    )


def _heading(machine: Machine, width: int) -> str:
    counts: dict[str, int] = {}
    for gpu in machine.gpus:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    what = ", ".join(f"{count} x {name}" for name, count in counts.items())
    what = what or ", ".join(machine.other_accelerators) or "no accelerator"
    where = ""
    if machine.cloud is not None:
        kind = machine.cloud.instance_type or "an instance"
        where = f", {kind} of {machine.cloud.provider}"
    return wrapped(f"{machine.host.name}: {what}{where}", width=width)


def _gpu_table(machine: Machine, topology: Topology, width: int) -> str:
    if not machine.gpus:
        return ""
    nics = {
        gpu: f"{rail.nic} ({_way(machine, gpu, rail) or 'unknown way'})"
        for rail in reversed(topology.rails)
        for gpu in rail.gpus
    }
    rows = [
        (
            str(gpu.index),
            "unknown" if gpu.memory_bytes is None else format_gib(gpu.memory_bytes),
            _pcie(gpu),
            _nvlink(gpu),
            nics.get(gpu.index) or _near(machine, gpu),
            "unknown" if gpu.numa_node is None else str(gpu.numa_node),
        )
        for gpu in machine.gpus
    ]
    headers = ("GPU", "memory", "PCIe", "NVLink", "nearest port", "NUMA")
    align = ("right", "right", "left", "left", "left", "right")
    return table(rows, headers=headers, align=align, width=width)


def _way(machine: Machine, index: int, rail: Rail) -> str | None:
    """From this one GPU to the port."""
    gpu = next(gpu for gpu in machine.gpus if gpu.index == index)
    nic = next(nic for nic in machine.nics if nic.name == rail.nic)
    if gpu.bus_id is None or nic.bus_id is None:
        return None
    return path_in(machine, gpu.bus_id, nic.bus_id)


def _near(machine: Machine, gpu: Gpu) -> str:
    """The nearest adapters of a GPU that no rail serves, since what they carry is not known."""
    ways = {
        nic.name: way
        for nic in machine.nics
        if nic.rate_bytes_per_second is None
        and nic.state is None
        and gpu.bus_id is not None
        and nic.bus_id is not None
        and (way := path_in(machine, gpu.bus_id, nic.bus_id)) is not None
    }
    least = min(ways.values(), key=NEAREST_FIRST.index, default=None)
    names = [name for name, way in ways.items() if way == least]
    return f"{', '.join(names)} ({least}), unknown rate" if names else "none"


def _adapters(machine: Machine) -> str:
    """Ports of a host of which no rails are known, as far as something is said of them."""
    return "; ".join(
        " ".join(
            [
                nic.name if nic.port == 1 else f"{nic.name} port {nic.port}",
                nic.link_layer or "of unknown kind",
                "at an unknown rate"
                if nic.rate_bytes_per_second is None
                else format_bit_bandwidth(nic.rate_bytes_per_second),
                *([] if nic.state in (None, "active") else [f"({nic.state})"]),
            ]
        )
        for nic in machine.nics
    )


def _pcie(gpu: Gpu) -> str:
    if gpu.pcie_max_generation is None or gpu.pcie_width is None:
        return "unknown"
    lanes = f"x{gpu.pcie_width}"
    if gpu.pcie_max_width is not None and gpu.pcie_width < gpu.pcie_max_width:
        lanes += f" of x{gpu.pcie_max_width}"
    return f"gen {gpu.pcie_max_generation} {lanes}"


def _nvlink(gpu: Gpu) -> str:
    up = [link for link in gpu.nvlinks if link.active]
    if not gpu.nvlinks:
        return "none"
    down = len(gpu.nvlinks) - len(up)
    rates = {link.bandwidth_bytes_per_second for link in up} - {None}
    each = f" x {format_bandwidth(max(r for r in rates if r is not None))}" if rates else ""
    return f"{len(up)}{each}" + (f", {down} down" if down else "")


def _links(topology: Topology, machine: Machine, width: int) -> str:
    if not machine.gpus:
        return facts([("adapters", _adapters(machine))], width=width) if machine.nics else ""
    pairs = [("islands", _islands(topology.islands))]
    if topology.rails:
        pairs.append(("rails", _rails(topology.rails, len(machine.gpus))))
    elif machine.nics:
        pairs.append(("adapters", _adapters(machine)))
    pairs += [
        ("inside", _rate(topology.inside_bytes_per_second, "between the slowest pair of the node")),
        ("across", _rate(topology.across_bytes_per_second, _across(topology))),
    ]
    return f"One direction\n{facts(pairs, width=width)}"


def _across(topology: Topology) -> str:
    """By which network, and when."""
    kind = next((level.kind for level in topology.levels if level.domain_gpus is None), None)
    over = "" if kind is None else f" over {_NETWORKS.get(kind, kind)}"
    return f"out of the node{over} when all send"


def _islands(islands: Sequence[Island]) -> str:
    """Islands that have all in common together: `GPUs 0-1 and 2-3 over NVLink, 300 GB/s a GPU`."""
    alike: dict[str, list[Island]] = {}
    for island in islands:
        alike.setdefault(_over(island), []).append(island)
    return "; ".join(_named(group, over) for over, group in alike.items())


def _named(group: Sequence[Island], over: str) -> str:
    if group[0].kind == "alone":
        gpus = [gpu for island in group for gpu in island.gpus]
        each = ", each" if len(gpus) > 1 else ""
        return f"GPU{'s' if each else ''} {_ranges(gpus)}{each} {over}"
    names = [_ranges(island.gpus) for island in group]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"GPUs {listed} {over}"


def _over(island: Island) -> str:
    if island.kind == "alone":
        return "alone"
    links = "NVSwitch" if island.kind == "nvswitch" else "NVLink"
    rate = island.bandwidth_bytes_per_second
    each = "unknown bandwidth" if rate is None else f"{format_bandwidth(rate)} a GPU"
    spans = ""
    if island.fabric is not None:
        size = "of unknown size" if island.domain_gpus is None else f"of {island.domain_gpus} GPUs"
        spans = f", part of the domain {island.fabric} {size}"
    return f"over {links}, {each}{spans}"


def _rails(rails: Sequence[Rail], gpus: int) -> str:
    """Ports of one rate together, each named where they are few."""
    alike: dict[str, list[Rail]] = {}
    for rail in rails:
        rate = format_bit_bandwidth(rail.bandwidth_bytes_per_second)
        alike.setdefault(rate, []).append(rail)
    return "; ".join(f"{len(same)} x {rate}{_ports(same, gpus)}" for rate, same in alike.items())


def _ports(rails: Sequence[Rail], gpus: int) -> str:
    served = Counter(gpu for rail in rails for gpu in rail.gpus)
    if len(rails) > _FEW and len(served) == gpus and len(set(served.values())) == 1:
        each = served.most_common(1)[0][1]
        return f", {'one' if each == 1 else each} for each GPU"
    shown = [_port(rail) for rail in rails[:_MANY]]
    more = [f"{len(rails) - _MANY} more"] if len(rails) > _MANY else []
    return f" ({', '.join([*shown, *more])})"


def _port(rail: Rail) -> str:
    served = f"{'s' if len(rail.gpus) > 1 else ''} {_ranges(rail.gpus)}"
    return f"{rail.nic} for GPU{served}" if rail.gpus else rail.nic


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _rate(bytes_per_second: float | None, what: str) -> str:
    if bytes_per_second is None:
        return f"unknown ({what})"
    return f"{format_bandwidth(bytes_per_second)} a GPU, {what}"


def _host(machine: Machine, width: int) -> str:
    host, software = machine.host, machine.software
    sockets = "unknown" if host.sockets is None else str(host.sockets)
    cpu = f"{host.cpu or 'unknown'}; logical cores {host.cores or 'unknown'}, sockets {sockets}"
    memory = "unknown" if host.memory_bytes is None else format_gib(host.memory_bytes)
    versions = {
        "driver": software.driver,
        "CUDA": software.cuda,
        "torch": software.torch,
        "NCCL": software.nccl,
    }
    known = [f"{name} {version}" for name, version in versions.items() if version is not None]
    pairs = [
        ("CPU", cpu),
        ("memory", f"{memory}; may lock {_limit(host.locked_memory_bytes)}"),
        ("GPUDirect", host.gpudirect or "unknown"),
        ("software", ", ".join(known) or "none of driver, CUDA, torch, NCCL"),
    ]
    if machine.slurm is not None:
        pairs.append(("Slurm", _slurm(machine)))
    if machine.kubernetes:
        pairs.append(("Kubernetes", "inside a pod"))
    return facts(pairs, width=width)


def _limit(limit_bytes: int | None) -> str:
    if limit_bytes is None:
        return "an unknown part of it"
    return "all of it" if limit_bytes == UNLIMITED_BYTES else format_gib(limit_bytes)


def _slurm(machine: Machine) -> str:
    slurm = machine.slurm
    assert slurm is not None
    parts = [slurm.version or "unknown version"]
    if slurm.job_id is not None:
        parts.append(f"job {slurm.job_id} on {len(slurm.nodes)} nodes")
    if slurm.gres is not None:
        parts.append(f"GRES {slurm.gres}")
    return ", ".join(parts)


def findings_block(survey: Survey, *, width: int) -> str:
    """What the user should know, the worst first; what holds for several hosts once."""
    several = len(survey.machines) > 1
    return blocks(
        *(
            listed(
                heading,
                _sentences([f for f in survey.findings if f.severity == severity], several),
                width=width,
            )
            for severity, heading in _HEADINGS.items()
        )
    )


def _sentences(findings: Sequence[Finding], several: bool) -> list[str]:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        remedy = (finding.remedy or "").replace(f"{_EXCLUDE} {finding.host}", _EXCLUDE)
        hosts = alike.setdefault((finding.text, finding.consequence, remedy), [])
        hosts.append(finding.host)
    return [_sentence(words, hosts, several) for words, hosts in alike.items()]


def _sentence(words: tuple[str, str, str], hosts: Sequence[str], several: bool) -> str:
    text, consequence, remedy = words
    names = compress_host_list(hosts)
    who = f"{names}: " if several and names not in text else ""
    advice = f"; {remedy.replace(_EXCLUDE, f'{_EXCLUDE} {names}')}" if remedy else ""
    return f"{who}{text}: {consequence}{advice}"

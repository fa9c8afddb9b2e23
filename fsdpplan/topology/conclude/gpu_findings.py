"""What is wrong with the GPUs of a host and with the links between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fsdpplan.spec.machine import Gpu, Machine, P2pStatus
from fsdpplan.spec.topology import Finding, Topology
from fsdpplan.topology.read.lanes import (
    gpu_link_bytes_per_second,
    healthy_gpu_link_bytes_per_second,
)
from fsdpplan.units import format_bandwidth

_BOARD = re.compile(r"(?!.*\b(NVL|PCIe)\b).*(SXM|HBM3|\b(H200|H20|H800|B200|B300|GB200|GB300)\b)")
"""Products that come on boards of 4 or 8, joined by NVLink, by their names in the driver. Cards of
the same chip come alone, and their links need bridges. Words of the driver stand here because what
is found is said of GPUs that no profile knows, too."""
_CONSUMER = ("GeForce", "TITAN", "RTX")
"""Products whose memory runs without ECC as they come."""
_WHY_NOT: Mapping[P2pStatus, str] = {
    "chipset": "the chipset does not support it",
    "gpu": "the GPUs do not support it",
    "topology": "their place in the PCIe tree does not allow it",
    "disabled": "it is switched off in the driver",
    "not_supported": "it is not supported",
    "ok": "",
}


def gpu_findings(machine: Machine, topology: Topology) -> list[Finding]:
    """Findings about GPUs, their PCIe and NVLinks."""
    return [
        *_missing(machine),
        *_slow_lanes(machine, topology),
        *_low_generations(machine),
        *_weak_nvlinks(machine),
        *_power_caps(machine),
        *_no_p2p(machine, topology),
        *_mig(machine),
        *_ecc_off(machine),
    ]


def named(gpus: Sequence[Gpu]) -> str:
    """`GPU 5`, `GPUs 0-7`, `GPUs 1, 3`."""
    indices = sorted(gpu.index for gpu in gpus)
    if len(indices) > 2 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"GPUs {indices[0]}-{indices[-1]}"
    numbers = ", ".join(str(index) for index in indices)
    return f"GPU{'s' if len(indices) > 1 else ''} {numbers}"


def _missing(machine: Machine) -> list[Finding]:
    """Fewer GPUs than Slurm gave the job or lists for the node, or than its board has.

    A gap in the driver's numbers means that the rest is hidden, not missing.
    """
    seen = len(machine.gpus)
    expected, who = _expected_gpus(machine)
    hidden = [gpu.index for gpu in machine.gpus] != list(range(seen))
    if seen >= expected or hidden:
        return []
    return [
        Finding(
            kind="gpu_missing",
            severity="broken",
            host=machine.host.name,
            where=f"{expected - seen} of {expected} GPUs",
            text=f"the driver sees {seen} GPUs, {who} {expected}",
            consequence=f"a job with {expected} processes a node cannot start here; with {seen} a "
            f"node, {(expected - seen) / expected:.1%} of its compute is lost on every node",
            remedy="look for Xid 79 in dmesg and reset or repair it, or leave the node out: "
            f"emit-launch --exclude {machine.host.name}",
            slowdown=None,
        )
    ]


def _expected_gpus(machine: Machine) -> tuple[int, str]:
    """How many GPUs there should be, and who says so; 0 where nobody does.

    A job may have been given a part of the node, a pod any number, and clouds sell parts of boards,
    by powers of two.
    """
    seen, listed, slurm = len(machine.gpus), _listed_gpus(machine), machine.slurm
    if slurm is not None and slurm.given_gpus is not None:
        return slurm.given_gpus, "the job was given"
    if slurm is not None and slurm.job_id is not None and seen in (1, 2, 4):
        return 0, ""
    if listed is not None:
        return listed, "Slurm lists"
    on_boards = all(_BOARD.match(gpu.name) for gpu in machine.gpus)
    if not seen or not on_boards or machine.kubernetes:
        return 0, ""
    return (4 if seen == 3 else 8 if seen in (5, 6, 7) else 0), "its board has"


def _listed_gpus(machine: Machine) -> int | None:
    """GPUs in Slurm's generic resources, as in `gpu:h100:8(S:0-1)`; several kinds add up."""
    gres = machine.slurm.gres if machine.slurm is not None else None
    counts = re.findall(r"(?:^|,)gpu(?::[A-Za-z0-9_.-]+?)?:([0-9]{1,4})(?=[(,]|$)", gres or "")
    return sum(int(count) for count in counts) if counts else None


def _slow_lanes(machine: Machine, topology: Topology) -> list[Finding]:
    """PCIe links with fewer lanes than GPU and slot can have."""
    over_pcie = any(level.kind in ("pcie", "socket") for level in topology.levels)
    found: list[Finding] = []
    for gpu in machine.gpus:
        now, best = gpu_link_bytes_per_second(gpu), healthy_gpu_link_bytes_per_second(gpu)
        if now is None or best is None or now >= best:
            continue
        what = "all-gather inside the node" if over_pcie else "copies between host and GPU"
        found.append(
            Finding(
                kind="pcie_slow",
                severity="degraded",
                host=machine.host.name,
                where=f"GPU {gpu.index}",
                text=f"GPU {gpu.index} has {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes: "
                f"{format_bandwidth(now)} of {format_bandwidth(best)}",
                consequence=f"the slowest link sets the ring: {what} {best / now:.1f}x slower"
                if over_pcie
                else f"{what} {best / now:.1f}x slower, and traffic to adapters with them",
                remedy="reseat the GPU or its riser, and check the slot's setting in the BIOS",
                slowdown=best / now if over_pcie else None,
            )
        )
    return found


def _low_generations(machine: Machine) -> list[Finding]:
    """PCIe generation below the best on some GPUs only. On all of them it is saving power."""
    low = [
        gpu
        for gpu in machine.gpus
        if gpu.pcie_generation is not None
        and gpu.pcie_max_generation is not None
        and gpu.pcie_generation < gpu.pcie_max_generation
    ]
    if not low or len(low) == len(machine.gpus):
        return []
    generations = sorted({gpu.pcie_generation or 0 for gpu in low})
    shown = ", ".join(f"{generation}.0" for generation in generations)
    return [
        Finding(
            kind="pcie_slow",
            severity="note",
            host=machine.host.name,
            where=named(low),
            text=f"{named(low)} show PCIe {shown}, others {low[0].pcie_max_generation}.0",
            consequence="an idle GPU lowers it to save power, so this may be nothing",
            remedy="look again under load: nvidia-smi --query-gpu=pcie.link.gen.gpucurrent "
            "--format=csv",
            slowdown=None,
        )
    ]


def _weak_nvlinks(machine: Machine) -> list[Finding]:
    """GPUs with fewer NVLinks up than their equals, or on a board with some or all down."""
    active = {
        gpu.index: sum(link.active for link in gpu.nvlinks)
        for gpu in machine.gpus
        if not gpu.mig_enabled and gpu.nvlinks
    }
    found: list[Finding] = []
    for gpu in machine.gpus:
        equals = [each for each in machine.gpus if each.name == gpu.name and each.index in active]
        if gpu.index not in active:
            continue
        switched = any(link.remote == "switch" for each in equals for link in each.nvlinks)
        whole = len(gpu.nvlinks) if switched or _BOARD.match(gpu.name) else 0
        best = max([whole, *(active[each.index] for each in equals)])
        if active[gpu.index] < best:
            found.append(_weak_nvlink(machine, gpu, active[gpu.index], best))
    return found


def _weak_nvlink(machine: Machine, gpu: Gpu, active: int, best: int) -> Finding:
    slowdown = best / active if active else None
    return Finding(
        kind="nvlink_down",
        severity="degraded" if active else "broken",
        host=machine.host.name,
        where=f"GPU {gpu.index}",
        text=f"GPU {gpu.index} has {active} of {best} NVLinks up",
        consequence="the slowest GPU sets the ring: all-gather inside the node "
        f"{slowdown:.2f}x slower"
        if slowdown is not None
        else "it reaches the other GPUs over PCIe only, or not at all",
        remedy="nvidia-smi nvlink -s shows the links, -e their errors; on boards with switches "
        "Fabric Manager must run (systemctl status nvidia-fabricmanager)",
        slowdown=slowdown,
    )


def _power_caps(machine: Machine) -> list[Finding]:
    """Caps below the default, GPUs with the same cap together.

    Near its limit a chip takes power as the third power of its clock (P = C V^2 f, and V grows as
    f), so that its sustained rate goes as the cube root; profiles take `power_fraction` so, too.
    """
    capped: dict[tuple[float, float], list[Gpu]] = {}
    for gpu in machine.gpus:
        cap, default = gpu.power_limit_watts, gpu.default_power_limit_watts
        if cap is not None and default is not None and cap < default:
            capped.setdefault((cap, default), []).append(gpu)
    return [
        Finding(
            kind="power_capped",
            severity="degraded",
            host=machine.host.name,
            where=named(gpus),
            text=f"{named(gpus)} may draw {cap:.0f} W of {default:.0f} W",
            consequence=f"long matmuls run at about {(cap / default) ** (1 / 3):.0%} of their "
            "rate (the cube root of the power), and the slowest GPU sets the step",
            remedy=f"nvidia-smi -i {gpus[0].index} -pl {default:.0f} as root, or measure here: "
            "fsdpplan calibrate",
            slowdown=(default / cap) ** (1 / 3),
        )
        for (cap, default), gpus in sorted(capped.items())
    ]


def _no_p2p(machine: Machine, topology: Topology) -> list[Finding]:
    """GPUs that cannot read each other's memory; MIG explains its own."""
    split = {gpu.index for gpu in machine.gpus if gpu.mig_enabled}
    pairs = [
        pair
        for pair in machine.pairs
        if pair.p2p not in ("ok", None) and not {pair.first, pair.second} & split
    ]
    if not pairs:
        return []
    geforce = any("GeForce" in gpu.name for gpu in machine.gpus)
    why = ", ".join(sorted({_WHY_NOT[pair.p2p] for pair in pairs if pair.p2p is not None}))
    inside = topology.inside_bytes_per_second
    over = f" over links of {format_bandwidth(inside)}" if inside is not None else ""
    return [
        Finding(
            kind="no_p2p",
            severity="note" if geforce else "degraded",
            host=machine.host.name,
            where=f"{len(pairs)} of {len(machine.pairs)} pairs of GPUs",
            text=f"{len(pairs)} of {len(machine.pairs)} pairs of GPUs cannot read each other's "
            f"memory: {why}",
            consequence=f"NCCL copies through host memory{over}: two copies where one would do",
            remedy=None
            if geforce
            else "nvidia-smi topo -p2p r shows the pairs; the IOMMU and virtual machines can "
            "stand in the way",
            slowdown=None,
        )
    ]


def _mig(machine: Machine) -> list[Finding]:
    return [
        Finding(
            kind="mig",
            severity="degraded",
            host=machine.host.name,
            where=f"GPU {gpu.index}",
            text=f"GPU {gpu.index} is in MIG mode with {len(gpu.mig_devices)} instances",
            consequence="a process sees one instance, which has no NVLink and reads no other GPU: "
            "it cannot train together with the other GPUs",
            remedy=f"nvidia-smi -i {gpu.index} -mig 0 as root, or leave it out of "
            "CUDA_VISIBLE_DEVICES",
            slowdown=None,
        )
        for gpu in machine.gpus
        if gpu.mig_enabled
    ]


def _ecc_off(machine: Machine) -> list[Finding]:
    off = [
        gpu
        for gpu in machine.gpus
        if gpu.ecc_enabled is False and not any(word in gpu.name for word in _CONSUMER)
    ]
    if not off:
        return []
    return [
        Finding(
            kind="ecc",
            severity="note",
            host=machine.host.name,
            where=named(off),
            text=f"{named(off)} run without ECC",
            consequence="a flipped bit goes unseen into weights and gradients",
            remedy="nvidia-smi -e 1 as root, then reset the GPUs",
            slowdown=None,
        )
    ]

"""Findings: what of a host costs speed or would stop a job, in numbers, and what to do about it."""

from __future__ import annotations

from fsdpplan.spec.machine import UNLIMITED_BYTES, Machine
from fsdpplan.spec.topology import Finding, Severity, Topology
from fsdpplan.topology.conclude.gpu_findings import gpu_findings
from fsdpplan.topology.conclude.nic_findings import nic_findings
from fsdpplan.units import GIB, format_gib

_WORST_FIRST: tuple[Severity, ...] = ("broken", "degraded", "note")
_ENOUGH_LOCKED_BYTES = GIB
_ENOUGH_SHARED_BYTES = GIB
"""Below these, buffers of NCCL and of data loaders do not fit. NVIDIA starts its containers with
--shm-size=1g --ulimit memlock=-1 (TensorRT and Triton guides); Docker by itself gives 64 MiB."""


def findings_of(machine: Machine, topology: Topology) -> tuple[Finding, ...]:
    """All findings of one host, the worst first."""
    found = [
        *gpu_findings(machine, topology),
        *nic_findings(machine, topology),
        *_limit_findings(machine, topology),
        *_access_control(machine, topology),
        *_other_accelerators(machine),
        *_unread(machine),
    ]
    return tuple(sorted(found, key=lambda finding: _WORST_FIRST.index(finding.severity)))


def _limit_findings(machine: Machine, topology: Topology) -> list[Finding]:
    """Limits on memory that processes lock or share."""
    found: list[Finding] = []
    locked, shared = machine.host.locked_memory_bytes, machine.host.shared_memory_bytes
    if topology.rails and locked is not None and locked < UNLIMITED_BYTES:
        few = locked < _ENOUGH_LOCKED_BYTES
        found.append(
            Finding(
                kind="locked_memory",
                severity="broken" if few else "note",
                host=machine.host.name,
                where="ulimit -l",
                text=f"a process may lock {format_gib(locked)} of memory",
                consequence=(
                    "NCCL cannot register its buffers with the adapters and stops"
                    if few
                    else "many communicators may need more, and NCCL then stops"
                ),
                remedy="raise it for jobs: LimitMEMLOCK=infinity in slurmd's unit, or "
                "--ulimit memlock=-1 for a container",
                slowdown=None,
            )
        )
    if len(machine.gpus) > 0 and shared is not None and shared < _ENOUGH_SHARED_BYTES:
        found.append(
            Finding(
                kind="shared_memory",
                severity="broken",
                host=machine.host.name,
                where="/dev/shm",
                text=f"/dev/shm holds {format_gib(shared)}",
                consequence="NCCL and data loaders that exchange data through it die with "
                "a bus error",
                remedy="start the container with --shm-size=16g or --ipc=host",
                slowdown=None,
            )
        )
    return found


def _access_control(machine: Machine, topology: Topology) -> list[Finding]:
    """PCIe access control on bridges, which sends traffic between peers up to the host.

    Source: NCCL user guide, GPU troubleshooting, "PCI Access Control Services (ACS)".
    """
    bridges = machine.host.acs_bridges
    below_switch = any(rail.path in ("pix", "pxb") for rail in topology.rails)
    over_pcie = any(level.kind == "pcie" for level in topology.levels)
    if not bridges or not (below_switch or over_pcie):
        return []
    first = bridges[0].bus_id
    return [
        Finding(
            kind="acs",
            severity="degraded",
            host=machine.host.name,
            where=f"{len(bridges)} PCIe bridges, first {first}",
            text=f"access control (ACS) is on at {len(bridges)} PCIe bridges",
            consequence="what should pass below one switch goes up to the host and back, over the "
            "uplink that all devices below it share",
            remedy="switch it off in the BIOS, or for now with "
            f"setpci -s {first} ECAP_ACS+0x6.w=0000; virtual machines need it",
            slowdown=None,
        )
    ]


def _other_accelerators(machine: Machine) -> list[Finding]:
    return [
        Finding(
            kind="other_accelerator",
            severity="note",
            host=machine.host.name,
            where=each,
            text=f"{each} found",
            consequence="fsdpplan reads NVIDIA GPUs only, so these are not planned for as found",
            remedy="name a profile of such hardware: fsdpplan profiles lists them, "
            "recommend --hardware NAME uses one",
            slowdown=None,
        )
        for each in machine.other_accelerators
    ]


def _unread(machine: Machine) -> list[Finding]:
    return [
        Finding(
            kind="unread",
            severity="note",
            host=machine.host.name,
            where=each.partition(":")[0],
            text=f"could not be read: {each}",
            consequence="what it would have said is unknown",
            remedy=None,
            slowdown=None,
        )
        for each in machine.unread
    ]

"""Surroundings: Slurm, Kubernetes, the cloud, and accelerators that fsdpplan cannot plan for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from fsdpplan.errors import SpecError
from fsdpplan.spec.machine import Cloud, Slurm
from fsdpplan.spec.nodes import expand_host_list
from fsdpplan.topology.read.reading import first_line, labelled, whole_number
from fsdpplan.topology.read.recording import Recording

_DMI = "/sys/class/dmi/id"
_AZURE = "7783-7084-3265-9085-8269-3286-77"
"""The chassis tag of every machine of Azure; other Hyper-V hosts have another one."""
_KFD = "/sys/class/kfd/kfd/topology/nodes"
_PCI = "/sys/bus/pci/devices"
_AMD, _HABANA = "0x1002", "0x1da3"
_COMPUTE_CLASSES = ("0x0302", "0x0380", "0x1200")
"""PCI classes of devices that compute: 3D controller, other display controller, accelerator."""


def slurm_of(recording: Recording) -> Slurm | None:
    """What Slurm says here; None where there is none."""
    environment = recording.environment
    node = _scontrol_node(recording)
    version = re.match(r"slurm\S* ([0-9][\w.-]*)", recording.command("scontrol version") or "")
    job_id = _word(environment.get("SLURM_JOB_ID"))
    if not node and version is None and job_id is None:
        return None
    return Slurm(
        version=version[1] if version else None,
        job_id=job_id,
        nodes=_nodes(environment.get("SLURM_JOB_NODELIST")) if job_id is not None else (),
        gres=_gres(node),
        given_gpus=whole_number(environment.get("SLURM_GPUS_ON_NODE")) if job_id else None,
        partition=_word(environment.get("SLURM_JOB_PARTITION")) or _field(node, "Partitions"),
    )


def _scontrol_node(recording: Recording) -> str:
    """The answer to `scontrol show node <this one>`."""
    answers = (
        text for line, text in recording.commands.items() if line.startswith("scontrol show node")
    )
    return next(answers, "")


def _word(text: str | None) -> str | None:
    return text if text is not None and re.fullmatch(r"[\w.+-]{1,80}", text) else None


def _nodes(text: str | None) -> tuple[str, ...]:
    try:
        return expand_host_list(text) if text else ()
    except SpecError:
        return ()


def _field(node: str, name: str) -> str | None:
    """One `Name=value` of `scontrol show node`; None for `(null)` and for several values."""
    match = re.search(rf"(?:^|\s){name}=(\S+)", node)
    return match[1] if match and match[1] != "(null)" and "," not in match[1] else None


def _gres(node: str) -> str | None:
    """`gpu:h100:8` of `Gres=gpu:h100:8(S:0-1)`: the sockets in brackets are left out."""
    match = re.search(r"(?:^|\s)Gres=(\S+)", node)
    if match is None or match[1] == "(null)":
        return None
    return re.sub(r"\([^)]*\)", "", match[1]) or None


def kubernetes_of(recording: Recording) -> bool:
    """We run inside of a pod: Kubernetes tells every container where its API is."""
    return "KUBERNETES_SERVICE_PORT" in recording.environment or "kubepods" in (
        recording.text("/proc/1/cgroup") or ""
    )


def cloud_of(recording: Recording) -> Cloud | None:
    """The cloud, by what its firmware says.

    Source: AWS EC2 user guide, "Identify EC2 instances"; cloud-init's DataSourceOracle and
    sources/azure/identity.py for the chassis tags. Only AWS writes the type of the instance there.
    """
    vendor, product = (_dmi(recording, name) for name in ("sys_vendor", "product_name"))
    tag = _dmi(recording, "chassis_asset_tag")
    if vendor == "Amazon EC2":
        # Bare metal and machines of Nitro alike; a Xen machine says no type.
        known = product if re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", product) else None
        return Cloud(provider="aws", instance_type=known, evidence=f"{_DMI}/sys_vendor: {vendor}")
    if product == "Google Compute Engine":
        evidence = f"{_DMI}/product_name: {product}"
        return Cloud(provider="gcp", instance_type=None, evidence=evidence)
    if tag == _AZURE:
        evidence = f"{_DMI}/chassis_asset_tag: {tag}, which all machines of Azure have"
        return Cloud(provider="azure", instance_type=None, evidence=evidence)
    if tag == "OracleCloud.com":
        evidence = f"{_DMI}/chassis_asset_tag: {tag}"
        return Cloud(provider="oci", instance_type=None, evidence=evidence)
    return None


def _dmi(recording: Recording, name: str) -> str:
    return first_line(recording.text(f"{_DMI}/{name}")) or ""


def other_accelerators_of(recording: Recording) -> tuple[str, ...]:
    """Accelerators of other makers, in words."""
    amd = Counter(_gfx_targets(recording))
    found = [f"{count} AMD GPU{_s(count)} ({target})" for target, count in sorted(amd.items())]
    vendors = Counter(_compute_vendors(recording))
    if not found and vendors[_AMD]:
        found.append(f"{vendors[_AMD]} AMD GPU{_s(vendors[_AMD])}")
    if vendors[_HABANA]:
        found.append(f"{vendors[_HABANA]} Intel Gaudi accelerator{_s(vendors[_HABANA])}")
    return tuple(found)


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _gfx_targets(recording: Recording) -> Iterator[str]:
    """Name of each GPU that the ROCm driver lists; nodes without SIMD units are CPUs.

    `gfx_target_version` 90402 is gfx942 and 90010 is gfx90a: major, minor and, as a hexadecimal
    digit, stepping.
    """
    for node in recording.children(_KFD):
        properties = (recording.text(f"{_KFD}/{node}/properties") or "").replace(" ", ": ")
        version = whole_number(labelled(properties, "gfx_target_version"))
        if version and whole_number(labelled(properties, "simd_count")):
            yield f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _compute_vendors(recording: Recording) -> Iterator[str]:
    """Vendor of each PCI device that computes."""
    for device in recording.children(_PCI):
        kind = recording.text(f"{_PCI}/{device}/class") or ""
        if kind.startswith(_COMPUTE_CLASSES):
            yield recording.text(f"{_PCI}/{device}/vendor") or ""

"""The GPUs of a recording, and what is between them, as NVML says.

A recording may be anybody's: a field is what was said, or None, and what cannot be is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdpplan.spec.machine import Ancestor, Gpu, GpuFabric, GpuPair, MigDevice, P2pStatus
from fsdpplan.topology.conclude.distrust import line, number, part, parts, pci_address, switch
from fsdpplan.topology.conclude.nvlinks import nvlinks_of
from fsdpplan.topology.read.reading import whole_number
from fsdpplan.topology.read.recording import Recording
from fsdpplan.topology.read.visible import NamedGpu, visible_indices

_P2P: Mapping[int | None, P2pStatus] = {
    0: "ok",
    1: "chipset",
    2: "gpu",
    3: "topology",
    4: "disabled",
    5: "not_supported",
}
_ANCESTORS: Mapping[int | None, Ancestor] = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}
_FABRIC_COMPLETED, _SUCCESS = 3, 0


def gpus_of(recording: Recording) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, else all in the driver's order."""
    found = _gpu_facts(recording)
    bus_ids = {bus_id for facts in found.values() if (bus_id := _bus_id(facts)) is not None}
    visible = visible_indices(
        recording.environment.get("CUDA_VISIBLE_DEVICES"),
        [_named(index, facts) for index, facts in found.items()],
    )
    return tuple(_gpu(recording, index, found[index], bus_ids) for index in visible)


def pairs_of(recording: Recording) -> tuple[GpuPair, ...]:
    """What is between every two visible GPUs of which something was said."""
    visible = {gpu.index for gpu in gpus_of(recording)}
    pairs: dict[tuple[int, int], GpuPair] = {}
    for facts in parts(nvidia_facts(recording), "pairs"):
        one, other = number(facts, "first", least=0), number(facts, "second", least=0)
        if one is None or other is None or one == other or not {one, other} <= visible:
            continue
        first, second = min(one, other), max(one, other)
        pair = GpuPair(
            first=first,
            second=second,
            p2p=_P2P.get(number(facts, "p2p", least=0)),
            ancestor=_ANCESTORS.get(number(facts, "ancestor", least=0)),
        )
        pairs.setdefault((first, second), pair)
    return tuple(pairs[key] for key in sorted(pairs))


def nvidia_facts(recording: Recording) -> Mapping[str, object]:
    """What NVML said: `driver`, `cuda`, `gpus`, `pairs`."""
    return {} if recording.nvml is None else recording.nvml


def _gpu_facts(recording: Recording) -> dict[int, Mapping[str, object]]:
    """Index -> what was said of the GPU; one without index or name is none."""
    found: dict[int, Mapping[str, object]] = {}
    for facts in parts(nvidia_facts(recording), "gpus"):
        index = number(facts, "index", least=0)
        if index is not None and line(facts, "name") is not None:
            found.setdefault(index, facts)
    return dict(sorted(found.items()))


def _named(index: int, facts: Mapping[str, object]) -> NamedGpu:
    uuids = (line(facts, "uuid"), *(line(mig, "uuid") for mig in parts(facts, "mig_devices")))
    return NamedGpu(
        index=index,
        uuids=tuple(uuid for uuid in uuids if uuid is not None),
        mig=switch(facts, "mig") is True,
    )


def _bus_id(facts: Mapping[str, object]) -> str | None:
    return pci_address(line(facts, "bus_id"))


def _gpu(recording: Recording, index: int, facts: Mapping[str, object], bus_ids: set[str]) -> Gpu:
    bus_id = _bus_id(facts)
    capability = _compute_capability(facts.get("compute_capability"))
    return Gpu(
        index=index,
        name=line(facts, "name") or "",
        uuid=line(facts, "uuid"),
        bus_id=bus_id,
        memory_bytes=number(facts, "memory_bytes"),
        compute_capability=capability,
        power_limit_watts=_scaled(number(facts, "power_limit_milliwatts"), 1e-3),
        default_power_limit_watts=_scaled(number(facts, "default_power_limit_milliwatts"), 1e-3),
        max_sm_clock_hertz=_scaled(number(facts, "max_sm_clock_megahertz"), 1e6),
        max_memory_clock_hertz=_scaled(number(facts, "max_memory_clock_megahertz"), 1e6),
        ecc_enabled=switch(facts, "ecc"),
        mig_enabled=switch(facts, "mig"),
        mig_devices=_mig_devices(facts),
        pcie_generation=number(facts, "pcie_generation"),
        pcie_width=number(facts, "pcie_width"),
        pcie_max_generation=number(facts, "pcie_max_generation"),
        pcie_max_width=number(facts, "pcie_max_width"),
        numa_node=_numa_node(recording, facts, bus_id),
        cpu_affinity=_cpu_list(facts.get("cpu_affinity")),
        nvlinks=nvlinks_of(facts, compute_capability=capability, gpu_bus_ids=bus_ids),
        fabric=_fabric(part(facts, "fabric")),
    )


def _scaled(value: int | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _compute_capability(value: object) -> str | None:
    """`9.0` of [9, 0]."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return None
    major, minor = value
    return f"{major}.{minor}" if 1 <= major < 100 and 0 <= minor < 10 else None


def _mig_devices(facts: Mapping[str, object]) -> tuple[MigDevice, ...]:
    return tuple(
        MigDevice(name=name, memory_bytes=number(mig, "memory_bytes"))
        for mig in parts(facts, "mig_devices")
        if (name := line(mig, "name")) is not None
    )


def _numa_node(recording: Recording, facts: Mapping[str, object], bus_id: str | None) -> int | None:
    """The near NUMA node by the driver, else by the kernel, which says -1 for unknown."""
    said = number(facts, "numa_node", least=0)
    return (
        whole_number(recording.text(f"/sys/bus/pci/devices/{bus_id}/numa_node"))
        if said is None
        else said
    )


def _cpu_list(value: object) -> str | None:
    """`0-55,112-167` of the words of a set of bits."""
    if not isinstance(value, list) or not all(_is_word(word) for word in value):
        return None
    bits = "".join(f"{word:064b}"[::-1] for word in value)
    runs = ((run.start(), run.end() - 1) for run in re.finditer("1+", bits))
    texts = [str(start) if start == end else f"{start}-{end}" for start, end in runs]
    return ",".join(texts) or None


def _is_word(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _fabric(facts: Mapping[str, object] | None) -> GpuFabric | None:
    """The domain of many hosts, once the GPU has joined it. A host with NVSwitches of its own says
    a UUID of zeros."""
    if facts is None or number(facts, "state", least=0) != _FABRIC_COMPLETED:
        return None
    digits = (line(facts, "cluster_uuid") or "").replace("-", "").lower()
    clique = number(facts, "clique", least=0)
    joined = number(facts, "status", least=0) == _SUCCESS
    if not joined or clique is None or not re.fullmatch("[0-9a-f]{32}", digits):
        return None
    if not digits.strip("0"):
        return None
    groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return GpuFabric(cluster_uuid="-".join(groups), clique=clique)

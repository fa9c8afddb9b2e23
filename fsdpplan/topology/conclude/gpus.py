"""The GPUs of a recording, and what is between them, as NVML says.

A recording may be anybody's: a field is what was said, or None, and what cannot be is dropped.

Distrust: values out of data that anybody may have written. What is not of the form is None.

NVLinks of one GPU, out of what NVML said of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from fsdpplan.spec.machine import (
    Ancestor,
    Gpu,
    GpuFabric,
    GpuPair,
    MigDevice,
    NvLink,
    NvLinkRemote,
    P2pStatus,
)
from fsdpplan.topology.read.nvml import NamedGpu, visible_indices
from fsdpplan.topology.read.reading import whole_number
from fsdpplan.topology.read.recording import Recording


def number(facts: Mapping[str, object], name: str, *, least: int = 1) -> int | None:
    """A whole number of at least `least` and below 2**63."""
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if least <= value < 2**63 else None


def line(facts: Mapping[str, object], name: str) -> str | None:
    """A text of one printable line."""
    value = facts.get(name)
    text = value.strip() if isinstance(value, str) else ""
    return text if text and text.isprintable() else None


def switch(facts: Mapping[str, object], name: str) -> bool | None:
    """1 for on, 0 for off."""
    value = number(facts, name, least=0)
    return bool(value) if value in (0, 1) else None


def part(facts: Mapping[str, object], name: str) -> Mapping[str, object] | None:
    """An object."""
    value = facts.get(name)
    return value if isinstance(value, Mapping) else None


def parts(facts: Mapping[str, object], name: str) -> Iterator[Mapping[str, object]]:
    """The objects of a list; what is none of them is left out."""
    values = facts.get(name)
    for value in values if isinstance(values, list) else ():
        if isinstance(value, Mapping):
            yield value


def pci_address(text: str | None) -> str | None:
    """A PCI address as sysfs writes it: `0000:1b:00.0` for NVML's `00000000:1B:00.0`. Nothing can
    stand at address 0, which drivers give for unknown."""
    match = re.fullmatch(
        r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", (text or "").strip().lower()
    )
    if match is None or not match[0].strip("0:."):
        return None
    return f"{int(match[1], 16):04x}:{match[2]}"


_REMOTES: Mapping[int | None, NvLinkRemote] = {0: "gpu", 1: "cpu", 2: "switch"}

_GENERATION_OF_CAPABILITY = {
    "6.0": 1,
    "7.0": 2,
    "7.5": 2,
    "8.0": 3,
    "8.6": 3,
    "8.7": 3,
    "9.0": 4,
    "10.0": 5,
    "10.3": 5,
}
"""By compute capability, which NVML says of every GPU: one that no profile knows is read, too."""
_GENERATION_OF_CODE = {1: 1, 2: 2, 3: 2, 5: 3}
"""Where NVML's code means the same however it is read: see `_generation`."""

_PAYLOAD_BYTES_PER_SECOND = {25_781: 25e9, 26_562: 25e9, 53_125: 50e9}
"""Data rate of a link that says this speed in MB/s: speeds count the line code or the forward error
correction, too. nvidia-smi says 25.781 GB/s on V100, 26.562 on H100, 53.125 on B300; datasheets
count 25, 25 and 50 one way (300 over 6 links, 900 over 18 and 1800 over 18 both ways)."""

_USUAL_BYTES_PER_SECOND = {1: 20e9, 2: 25e9, 4: 25e9, 5: 50e9}
"""One way, by generation. Source: open-mpi/hwloc issue 574; the fifth from B200's 1800 GB/s."""
_USUAL_OF_AMPERE = {"8.0": 25e9, "8.6": 14.0625e9}
"""The third generation is slower on GA10x: 14.062 GB/s by nvidia-smi on RTX 3090 and A6000."""


def nvlinks_of(
    gpu: Mapping[str, object], *, compute_capability: str | None, gpu_bus_ids: Collection[str]
) -> tuple[NvLink, ...]:
    """The links of one GPU by their number."""
    links: dict[int, NvLink] = {}
    for facts in parts(gpu, "nvlinks"):
        link, state = number(facts, "link", least=0), number(facts, "state", least=0)
        if link is not None and state is not None and link not in links:
            links[link] = _nvlink(link, state == 1, facts, compute_capability, gpu_bus_ids)
    return tuple(links[link] for link in sorted(links))


def _nvlink(
    link: int,
    active: bool,
    facts: Mapping[str, object],
    compute_capability: str | None,
    gpu_bus_ids: Collection[str],
) -> NvLink:
    generation = _generation(number(facts, "version"), compute_capability)
    speed = number(facts, "speed_megabytes_per_second")
    address = pci_address(line(facts, "remote_bus_id"))
    remote = _REMOTES.get(number(facts, "remote_type", least=0))
    if remote is None and address in gpu_bus_ids:
        remote = "gpu"
    return NvLink(
        link=link,
        active=active,
        version=generation,
        bandwidth_bytes_per_second=(
            _bytes_per_second(speed, generation, compute_capability) if active else None
        ),
        remote=remote,
        remote_bus_id=address if remote == "gpu" else None,
    )


def _generation(code: int | None, compute_capability: str | None) -> int | None:
    """NVLink's generation. It goes by the architecture, and only what that leaves open by the code.

    nvml.h numbers the versions 1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 from 1 on, but drivers gave the
    kernel's own numbers, which skip 3: an A100 says 5 (open-mpi/hwloc issue 658) as an RTX 3090
    does (Syllo/nvtop pull request 469), though nvml.h has 4 and 5 for them.
    """
    if code is None:
        return None
    if compute_capability is not None:
        return _GENERATION_OF_CAPABILITY.get(compute_capability)
    return _GENERATION_OF_CODE.get(code)


def _bytes_per_second(
    speed_megabytes_per_second: int | None, generation: int | None, compute_capability: str | None
) -> float | None:
    """What one link carries one way; what the link says counts before what is usual."""
    if speed_megabytes_per_second is not None:
        said = speed_megabytes_per_second * 1e6
        return _PAYLOAD_BYTES_PER_SECOND.get(speed_megabytes_per_second, said)
    if generation == 3:
        return _USUAL_OF_AMPERE.get(compute_capability or "")
    return _USUAL_BYTES_PER_SECOND.get(generation or 0)


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

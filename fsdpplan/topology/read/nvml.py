"""What NVML says of a host, as plain data for a recording; every number is NVML's own code.

A question that the driver, the GPU or an old binding cannot answer leaves its key out. Nothing is
concluded here: `topology.gpus` does that.

Source: nvml.h of CUDA 13 (github.com/NVIDIA/go-nvml) for codes and units; nvidia-ml-py 13.615 and
12.535 for the calls.

Which GPUs CUDA_VISIBLE_DEVICES leaves.

Source: torch 2.13 cuda/__init__.py, `_parse_visible_devices` and `_transform_uuid_to_ordinals`,
which count as CUDA does without starting it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpplan.topology.read.reading import whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGpu:
    """A GPU by all names that the variable may give it."""

    index: int
    uuids: tuple[str, ...]
    """Its own, and those of its MIG devices."""
    mig: bool
    """MIG is on."""


def visible_indices(wanted: str | None, gpus: Sequence[NamedGpu]) -> tuple[int, ...]:
    """The GPUs that the variable leaves, in its order.

    The first entry says whether all are numbers, UUIDs of GPUs or of MIG devices; the first that
    is not, or that names no GPU, ends the list; a GPU that is named twice leaves none.
    Numbers count as the driver does, as under CUDA_DEVICE_ORDER=PCI_BUS_ID; CUDA by itself puts
    the fastest first, which differs where unlike GPUs share a host.
    """
    if wanted is None:
        return tuple(gpu.index for gpu in gpus)
    entries = [entry.strip() for entry in wanted.split(",")]
    mig = entries[0].startswith("MIG-")
    entry_index = _by_mig if mig else _by_uuid if entries[0].startswith("GPU-") else _by_number
    chosen: list[int] = []
    for entry in entries:
        index = entry_index(entry, gpus)
        if index is None:
            break
        chosen.append(index)
    if mig:  # several MIG devices may be on one GPU
        return tuple(dict.fromkeys(chosen))
    return tuple(chosen) if len(set(chosen)) == len(chosen) else ()


def _by_number(entry: str, gpus: Sequence[NamedGpu]) -> int | None:
    number = whole_number(entry)
    return number if any(gpu.index == number for gpu in gpus) else None


def _by_uuid(entry: str, gpus: Sequence[NamedGpu]) -> int | None:
    """The one GPU with a UUID that starts so."""
    found = [gpu.index for gpu in gpus if any(uuid.startswith(entry) for uuid in gpu.uuids)]
    return found[0] if entry.startswith("GPU-") and len(found) == 1 else None


def _by_mig(entry: str, gpus: Sequence[NamedGpu]) -> int | None:
    """The GPU of a MIG device. Where the UUIDs of MIG devices are unknown, it is the only GPU that
    is divided."""
    if entry.startswith("MIG-GPU-"):  # MIG-GPU-<UUID of the GPU>/<instances>, before driver 470
        return _by_uuid(entry.removeprefix("MIG-").partition("/")[0], gpus)
    if not entry.startswith("MIG-"):
        return None
    found = [gpu.index for gpu in gpus if any(uuid.startswith(entry) for uuid in gpu.uuids)]
    unnamed = not any(uuid.startswith("MIG-") for gpu in gpus for uuid in gpu.uuids)
    divided = [gpu.index for gpu in gpus if gpu.mig and unnamed]
    candidates = found or divided
    return candidates[0] if len(candidates) == 1 else None


CLOCK_SM, CLOCK_MEMORY = 1, 2
P2P_READ = 0
"""By number: the binding's NVML_P2P_CAPS_INDEX_READ is a tuple, for a comma too many."""
AFFINITY_OF_NODE = 0
CPU_WORDS, NODE_WORDS = 32, 4
"""64-bit words asked for: 2048 cores, 256 NUMA nodes."""
MAX_NVLINKS = 36
"""NVML_NVLINK_MAX_LINKS of NVML 13. A GPU refuses the numbers past its own links."""
SPEED_OF_LINK, SPEED_OF_ALL_LINKS = 164, 90
"""NVML_FI_DEV_NVLINK_GET_SPEED (the link in the scope) and _NVLINK_SPEED_MBPS_COMMON."""

Facts = dict[str, object]


def nvml_facts(nvml: Any) -> tuple[Facts, tuple[str, ...]]:
    """(what NVML says, what it failed at). `nvml` is the binding, initialised.

    Raises its NVMLError where not even the number of GPUs is to be had.
    """
    handles: dict[int, Any] = {}
    gpus: list[Facts] = []
    failures: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = gpu_text(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError as error:
            failures.append(f"GPU {index}: {error}")
            continue
        handles[index] = handle
        gpus.append({"index": index, "name": name} | _known(_gpu(nvml, handle)))
    facts = _known(
        {
            "driver": _said(gpu_text, _ask(nvml, "nvmlSystemGetDriverVersion")),
            "cuda": _said(_cuda_version, _ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")),
        }
    )
    return facts | {"gpus": gpus, "pairs": list(_pairs(nvml, handles))}, tuple(failures)


def gpu_names(nvml: Any, index: int, handle: Any) -> NamedGpu:
    """All names that CUDA_VISIBLE_DEVICES may give the GPU."""
    uuid = _said(gpu_text, _ask(nvml, "nvmlDeviceGetUUID", handle))
    mig_devices = list(_mig_devices(nvml, handle))
    uuids = (uuid, *(device.get("uuid") for device in mig_devices))
    return NamedGpu(
        index=index,
        uuids=tuple(uuid for uuid in uuids if isinstance(uuid, str)),
        mig=bool(_said(_first, _ask(nvml, "nvmlDeviceGetMigMode", handle))),
    )


def gpu_text(value: str | bytes) -> str:
    """NVML's text, which was bytes before nvidia-ml-py 11.510 and still is inside of structures."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """What the function answers; None where it, or an answer, does not exist here."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _said(reading: Callable[[Any], object], answer: Any) -> object:
    return None if answer is None else reading(answer)


def _known(facts: Mapping[str, object]) -> Facts:
    return {name: value for name, value in facts.items() if value is not None}


def _cuda_version(number: int) -> str:
    """12080 is CUDA 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _gpu(nvml: Any, handle: Any) -> Facts:
    def ask(function: str, *arguments: Any) -> Any:
        return _ask(nvml, function, handle, *arguments)

    return {
        "uuid": _said(gpu_text, ask("nvmlDeviceGetUUID")),
        "bus_id": _said(_bus_id, ask("nvmlDeviceGetPciInfo")),
        "memory_bytes": _said(_total, ask("nvmlDeviceGetMemoryInfo")),
        "compute_capability": _said(list, ask("nvmlDeviceGetCudaComputeCapability")),
        "power_limit_milliwatts": ask("nvmlDeviceGetPowerManagementLimit"),
        "default_power_limit_milliwatts": ask("nvmlDeviceGetPowerManagementDefaultLimit"),
        "max_sm_clock_megahertz": ask("nvmlDeviceGetMaxClockInfo", CLOCK_SM),
        "max_memory_clock_megahertz": ask("nvmlDeviceGetMaxClockInfo", CLOCK_MEMORY),
        "ecc": _said(_first, ask("nvmlDeviceGetEccMode")),
        "mig": _said(_first, ask("nvmlDeviceGetMigMode")),
        "mig_devices": list(_mig_devices(nvml, handle)),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_max_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_max_width": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "numa_node": _said(
            _only_bit, ask("nvmlDeviceGetMemoryAffinity", NODE_WORDS, AFFINITY_OF_NODE)
        ),
        "cpu_affinity": _said(_words, ask("nvmlDeviceGetCpuAffinity", CPU_WORDS)),
        "nvlinks": list(_nvlinks(nvml, handle)),
        "fabric": _fabric(nvml, handle),
    }


def _bus_id(pci: Any) -> str:
    return gpu_text(pci.busId)


def _total(memory: Any) -> int:
    return int(memory.total)


def _first(modes: Any) -> int:
    """The mode now; the second of the two is that after the next reset."""
    return int(modes[0])


def _words(affinity: Iterable[int]) -> list[int]:
    """The words of a set of bits, without those that are empty at its end."""
    words = [int(word) for word in affinity]
    while words and words[-1] == 0:
        words.pop()
    return words


def _only_bit(affinity: Iterable[int]) -> int | None:
    """The one NUMA node that is near; None where several are, or none.

    nvmlDeviceGetNumaNodeId is another thing: the node that the memory of the GPU itself is.
    """
    bits = sum(word << (64 * place) for place, word in enumerate(_words(affinity)))
    return bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _mig_devices(nvml: Any, handle: Any) -> Iterator[Facts]:
    if not _said(_first, _ask(nvml, "nvmlDeviceGetMigMode", handle)):
        return
    for index in range(_ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        device = _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        name = None if device is None else _ask(nvml, "nvmlDeviceGetName", device)
        if name is not None:
            yield {"name": _mig_profile(gpu_text(name))} | _known(
                {
                    "uuid": _said(gpu_text, _ask(nvml, "nvmlDeviceGetUUID", device)),
                    "memory_bytes": _said(_total, _ask(nvml, "nvmlDeviceGetMemoryInfo", device)),
                }
            )


def _mig_profile(name: str) -> str:
    """`MIG 3g.40gb` of `NVIDIA A100-SXM4-80GB MIG 3g.40gb`."""
    before, mig, profile = name.rpartition("MIG ")
    return mig + profile if mig else before + profile


def _nvlinks(nvml: Any, handle: Any) -> Iterator[Facts]:
    """Every link that the GPU has. A link that is down tells its state and no more."""
    links = range(MAX_NVLINKS)
    states = {link: _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in links}
    present = [link for link, state in states.items() if state is not None]
    speeds = _speeds(nvml, handle, present)
    for link in present:
        remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        yield {"link": link, "state": int(states[link])} | _known(
            {
                "version": _ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, link),
                "remote_type": _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link),
                "remote_bus_id": _said(_bus_id, remote),
                "speed_megabytes_per_second": speeds.get(link) if states[link] else None,
            }
        )


def _speeds(nvml: Any, handle: Any, links: list[int]) -> dict[int, int]:
    """Link -> speed. Old drivers know one speed for all that are up."""
    if not links:
        return {}
    asked = [(SPEED_OF_LINK, link) for link in links]
    fields = _ask(nvml, "nvmlDeviceGetFieldValues", handle, [*asked, (SPEED_OF_ALL_LINKS, 0)])
    if fields is None:
        return {}
    *each, common = [_field_number(field) for field in fields]
    speeds = {
        link: speed or common for link, speed in zip(links, each, strict=True) if speed or common
    }
    return {link: speed for link, speed in speeds.items() if speed is not None}


def _field_number(field: Any) -> int | None:
    """The value of a field, which names the member of the union that holds it; None where it is
    none, or 0."""
    if field.nvmlReturn != 0:
        return None
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
    if not 0 <= field.valueType < len(members):
        return None
    return int(getattr(field.value, members[field.valueType])) or None


def _fabric(nvml: Any, handle: Any) -> Facts | None:
    """Where the GPU stands in a fabric of many hosts. Drivers since 535 know, in one of two ways.

    nvidia-ml-py 12.535 has no `cliqueId`: its structure is not laid out as the driver's is.
    """
    ways = (
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t"),
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    )
    for function, structure in ways:
        info: Any = getattr(nvml, structure, _Nothing)()
        if (
            hasattr(info, "cliqueId")
            and _ask(nvml, function, handle, ctypes.byref(info)) is not None
        ):
            return {
                "cluster_uuid": bytes(info.clusterUuid).hex(),
                "clique": int(info.cliqueId),
                "state": int(info.state) & 0xFF,  # one byte, which the binding reads as four
                "status": int(info.status),
            }
    return None


class _Nothing:
    """In place of a structure that the binding does not have."""


def _pairs(nvml: Any, handles: Mapping[int, Any]) -> Iterator[Facts]:
    for first, one in handles.items():
        for second, other in handles.items():
            if first < second:
                yield {"first": first, "second": second} | _known(
                    {
                        "p2p": _ask(nvml, "nvmlDeviceGetP2PStatus", one, other, P2P_READ),
                        "ancestor": _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", one, other),
                    }
                )

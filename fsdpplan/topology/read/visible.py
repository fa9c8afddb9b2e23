"""Which GPUs CUDA_VISIBLE_DEVICES leaves.

Source: torch 2.13 cuda/__init__.py, `_parse_visible_devices` and `_transform_uuid_to_ordinals`,
which count as CUDA does without starting it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

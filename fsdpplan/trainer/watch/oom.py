"""Out of memory: what was needed, what took the memory, and where the prediction was wrong.

Statistics are those of torch's CUDA allocator (`torch.cuda.memory_stats`, `memory_snapshot`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .phases import calls_of_error, phase_of

_REQUEST = re.compile(r"[Tt]ried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB|TiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CPU_ALLOCATOR = "DefaultCPUAllocator: "
STATE_TERMS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
OTHER_TERMS = (
    "unsharded_parameters_bytes",
    "unsharded_gradients_bytes",
    "activations_bytes",
    "logits_bytes",
    "temporaries_bytes",
)
WORDS = {
    "state_bytes": "parameters, gradients and optimizer",
    "working_bytes": "activations, logits and gathered parameters",
    "reserved_overhead_bytes": "fragmentation",
    "context_bytes": "memory outside of PyTorch",
}
"""Term of the prediction, or a sum of them that can be measured -> words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device at the failure. None: not known, as on CPUs."""

    requested_bytes: int | None
    """What was asked for, and not there."""
    allocated_bytes: int | None
    """In tensors."""
    reserved_bytes: int | None
    """Held by torch's allocator."""
    largest_free_block_bytes: int | None
    """Of what it holds."""
    device_bytes: int | None
    free_bytes: int | None
    """Of the device, held by nobody."""
    state_bytes: int | None
    """Parameters, gradients and optimizer state that live."""
    retries: int | None = None
    """Times that the allocator had to give memory back first."""

    @property
    def needed_bytes(self) -> int | None:
        """The least that would have been enough, in tensors."""
        return _sum(self.allocated_bytes, self.requested_bytes)

    @property
    def fragmentation_bytes(self) -> int | None:
        """Held, and not in tensors."""
        return _difference(self.reserved_bytes, self.allocated_bytes)

    @property
    def outside_bytes(self) -> int | None:
        """Of the device, held by others than torch's allocator: contexts, NCCL, other programs."""
        used = _difference(self.device_bytes, self.free_bytes)
        return _difference(used, self.reserved_bytes)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on the host."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


def device_memory(
    error: BaseException,
    device: torch.device,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> DeviceMemory:
    """What is known where `error` came."""
    state = None if model is None else living_state_bytes(model, optimizer)
    requested = requested_bytes(str(error))
    if device.type != "cuda":
        return DeviceMemory(
            requested_bytes=requested,
            allocated_bytes=None,
            reserved_bytes=None,
            largest_free_block_bytes=None,
            device_bytes=None,
            free_bytes=None,
            state_bytes=state,
        )
    free, total = torch.cuda.mem_get_info(device)
    return from_statistics(
        torch.cuda.memory_stats(device),
        torch.cuda.memory_snapshot(),  # type: ignore[no-untyped-call]
        requested=requested,
        free=free,
        total=total,
        state=state,
    )


def from_statistics(
    statistics: Mapping[str, Any],
    segments: Iterable[Mapping[str, Any]],
    *,
    requested: int | None,
    free: int,
    total: int,
    state: int | None,
) -> DeviceMemory:
    """The device by its allocator's statistics and segments."""
    blocks = (block for segment in segments for block in segment.get("blocks", ()))
    free_blocks = (int(block["size"]) for block in blocks if block.get("state") == "inactive")
    return DeviceMemory(
        requested_bytes=requested,
        allocated_bytes=int(statistics.get("allocated_bytes.all.current", 0)),
        reserved_bytes=int(statistics.get("reserved_bytes.all.current", 0)),
        largest_free_block_bytes=max(free_blocks, default=0),
        device_bytes=total,
        free_bytes=free,
        state_bytes=state,
        retries=int(statistics.get("num_alloc_retries", 0)),
    )


def requested_bytes(message: str) -> int | None:
    """What torch says that it tried to allocate."""
    match = _REQUEST.search(message)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])


def living_state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """This rank's parameters, their gradients and the optimizer's state."""
    tensors: list[torch.Tensor] = []
    for parameter in model.parameters():
        tensors += [parameter, *([] if parameter.grad is None else [parameter.grad])]
    for state in [] if optimizer is None else optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.numel() * each.element_size() for each in local)


def predicted_memory(plan_json: str) -> dict[str, Any]:
    """What the plan predicts; nothing where it does not say."""
    estimate = json.loads(plan_json).get("estimate", {})
    memory = estimate.get("memory") if isinstance(estimate, dict) else None
    return memory if isinstance(memory, dict) else {}


def wrong_terms(memory: DeviceMemory, predicted: Mapping[str, Any]) -> dict[str, int]:
    """Bytes beyond the prediction of each part that can be measured, largest first.

    Tensors that are no state are measured with the request that failed, so theirs is the least.
    """
    measured = {
        "state_bytes": memory.state_bytes,
        "working_bytes": _difference(memory.needed_bytes, memory.state_bytes),
        "reserved_overhead_bytes": memory.fragmentation_bytes,
        "context_bytes": memory.outside_bytes,
    }
    expected = {
        "state_bytes": _total(predicted, STATE_TERMS),
        "working_bytes": _total(predicted, OTHER_TERMS),
        "reserved_overhead_bytes": _total(predicted, ("reserved_overhead_bytes",)),
        "context_bytes": _total(predicted, ("context_bytes",)),
    }
    excess = {name: _difference(measured[name], expected[name]) for name in measured}
    more = {name: size for name, size in excess.items() if size is not None and size > 0}
    return dict(sorted(more.items(), key=lambda pair: -pair[1]))


def postmortem(
    error: BaseException, memory: DeviceMemory, predicted: Mapping[str, Any]
) -> dict[str, Any]:
    """The event of the failure, but for step, rank and host."""
    calls = calls_of_error(error)
    return {
        "phase": phase_of(calls),
        "needed_bytes": memory.needed_bytes,
        "requested_bytes": memory.requested_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "reserved_bytes": memory.reserved_bytes,
        "fragmentation_bytes": memory.fragmentation_bytes,
        "largest_free_block_bytes": memory.largest_free_block_bytes,
        "outside_bytes": memory.outside_bytes,
        "device_bytes": memory.device_bytes,
        "free_bytes": memory.free_bytes,
        "state_bytes": memory.state_bytes,
        "allocation_retries": memory.retries,
        "predicted_allocated_bytes": predicted.get("peak_allocated_bytes"),
        "predicted_phase": predicted.get("peak_phase"),
        "beyond_prediction": wrong_terms(memory, predicted),
    }


def postmortem_words(event: Mapping[str, Any]) -> str:
    """The event for people."""
    step = event["step"]
    when = "before the first step" if step is None else f"in step {step + 1}"
    parts = [f"out of memory in {event['phase']}, {when}"]
    if event["needed_bytes"] is not None:
        predicted = event["predicted_allocated_bytes"]
        beside = "" if predicted is None else f" (predicted: {_gib(predicted)})"
        parts.append(f"tensors needed at least {_gib(event['needed_bytes'])}{beside}")
        parts.append(
            f"torch held {_gib(event['reserved_bytes'])}, of it "
            f"{_gib(event['fragmentation_bytes'])} in no tensor, the largest free piece "
            f"{_gib(event['largest_free_block_bytes'])} for a request of "
            f"{_gib(event['requested_bytes'])}"
        )
        parts.append(f"{_gib(event['outside_bytes'])} lay outside of PyTorch")
    elif event["requested_bytes"] is not None:
        parts.append(f"{_gib(event['requested_bytes'])} more were asked for")
    parts.append(_wrong_words(event["beyond_prediction"]))
    return "; ".join(part for part in parts if part)


def _wrong_words(beyond: Mapping[str, int]) -> str:
    if not beyond:
        return ""
    name, size = next(iter(beyond.items()))
    return f"the prediction is wrong most in {WORDS[name]}: {_gib(size)} too low"


def _gib(size: int | None) -> str:
    return "an unknown amount" if size is None else f"{size / 2**30:.2f} GiB"


def _total(predicted: Mapping[str, Any], names: Iterable[str]) -> int | None:
    values = [predicted.get(name) for name in names]
    whole = [value for value in values if isinstance(value, int)]
    return sum(whole) if len(whole) == len(values) else None


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


def _difference(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first - second

"""What this machine is: the only place that asks NVML."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fsdpplan.errors import ProbeError


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """One GPU as the driver reports it."""

    name: str
    """Product name, such as `NVIDIA H100 80GB HBM3`."""
    memory_bytes: int
    """All memory of the board; torch sees a little less."""


def visible_gpus() -> tuple[VisibleGpu, ...]:
    """The GPUs of this machine that a program may use; none where there is no NVIDIA driver.

    Raises ProbeError when there is a driver that does not answer.
    """
    nvml = _import_nvml()
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in _no_driver_codes(nvml):
            return ()
        raise ProbeError(_advice("nvmlInit", error)) from error
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        return tuple(_gpu(nvml, handle) for handle in _chosen(nvml, handles))
    except nvml.NVMLError as error:
        raise ProbeError(_advice("reading the GPUs", error)) from error
    finally:
        nvml.nvmlShutdown()


def _import_nvml() -> Any | None:
    """The NVML binding, or None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _no_driver_codes(nvml: Any) -> tuple[int, ...]:
    """Errors that mean: no NVIDIA driver here. That is an answer, not a failure."""
    return (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)


def _chosen(nvml: Any, handles: list[Any]) -> list[Any]:
    """Those that CUDA_VISIBLE_DEVICES leaves; as CUDA does, stop at the first unknown entry."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return handles
    chosen: list[Any] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdecimal() and int(entry) < len(handles):
            chosen.append(handles[int(entry)])
        elif entry.startswith("GPU-"):
            chosen += [h for h in handles if _uuid(nvml, h).startswith(entry)][:1]
        else:
            break
    return chosen


def _uuid(nvml: Any, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(handle))


def _text(value: str | bytes) -> str:
    """NVML's text, which was bytes before nvidia-ml-py 11.510."""
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml: Any, handle: Any) -> VisibleGpu:
    return VisibleGpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _advice(action: str, error: Exception) -> str:
    return (
        f"NVML failed at {action}: {error}; run nvidia-smi to see why, or name the hardware "
        "with --hardware (`fsdpplan profiles` lists it)"
    )

"""What a run reports: one JSON line a step in a file, one line for people on stdout.

Lines of the file, told apart by `event`:

    start       the plan's layout in short, where the run begins
    step        loss, times, rates and memory of one step
    eval        the loss on held-out data
    checkpoint  a checkpoint was published
    communication, profiled, straggler, drift, hang
                what a run notices of itself (watch.py)
    spike, rollback
                a loss spike, and where the run went on after it (spikes.py)
    oom         memory ran out: the post-mortem (oom.py), by each rank that saw it
    summary     the whole run, once, at its end
"""

from __future__ import annotations

import json
import math
import re
import resource
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint.whole_file import write_whole
from ..config import PlanConfig
from ..errors import TrainerError
from ..model.flops import flops_per_token
from .dashboards import Dashboards

WARMUP_STEPS = 5
"""Steps at the start of a process that no median counts (first compilation, first buckets)."""

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s")


class Metrics:
    """Rank 0's metrics file, stdout and dashboards; on other ranks it does nothing."""

    def __init__(
        self, path: Path | None, *, first_step: int, dashboards: Dashboards | None = None
    ) -> None:
        self.path = path if dist.get_rank() == 0 else None
        self._dashboards = dashboards
        if self.path is not None:
            keep_steps_until(self.path, first_step)

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps after `step`, which will be trained again."""
        if self.path is not None:
            keep_steps_until(self.path, step)
        if self._dashboards is not None:
            self._dashboards.forget_after(step)

    def emit(self, event: str, **values: Any) -> None:
        """Append one JSON line."""
        if self.path is not None:
            append_line(self.path, event, values)
        if self._dashboards is not None:
            self._dashboards.show(event, values)

    def close(self) -> None:
        """Nothing more is told."""
        if self._dashboards is not None:
            self._dashboards.close()

    def say(self, line: str) -> None:
        """Print a line for people, once for all ranks."""
        if dist.get_rank() == 0:
            print(line, flush=True)


def append_line(path: Path, event: str, values: Mapping[str, Any]) -> None:
    """Append one JSON line at once, since other ranks may, too."""
    with path.open("a", encoding="utf-8") as file:
        file.write(as_line(event, values) + "\n")


def as_line(event: str, values: Mapping[str, Any]) -> str:
    """One line of the metrics file; a number that JSON cannot say becomes null."""
    sayable = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps({"event": event, **sayable})


def keep_steps_until(path: Path, step: int) -> None:
    """Drop lines of steps after `step`: a killed run wrote them after its last checkpoint, and they
    will be trained again. At step 0 the file begins anew."""
    kept = []
    try:
        if step and path.is_file():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if _step_of(line) <= step:
                    kept.append(line + "\n")
        write_whole(path, "".join(kept))
    except OSError as error:
        raise TrainerError(
            f"cannot write the metrics file {path}: {error}; choose another --metrics"
        ) from error


def _step_of(line: str) -> float:
    """The step that a line is about; infinity for a line that a kill cut short."""
    try:
        return float(json.loads(line).get("step", 0))
    except (ValueError, AttributeError, TypeError):
        return float("inf")


def step_rates(
    plan: PlanConfig, step_seconds: float, *, tokens: float | None = None
) -> dict[str, float]:
    """Tokens a second and MFU of a step of `tokens` (None: as planned) that took `step_seconds`."""
    training = plan.training
    if tokens is None:
        tokens = training.global_batch * training.seq_len
    flops = tokens * flops_per_token(
        plan.model,
        seq_len=training.seq_len,
        mean_document_tokens=training.mean_document_tokens,
        adapters=training.adapters,
    )
    return {
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
        "mfu_fraction": flops / step_seconds / plan.peak_flops_per_second,
    }


def predicted_step_seconds(plan_json: str) -> float | None:
    """What the plan predicts; None where it does not say."""
    estimate = json.loads(plan_json).get("estimate", {})
    band = estimate.get("step_seconds") if isinstance(estimate, dict) else None
    seconds = band.get("expected") if isinstance(band, dict) else None
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        return None
    return float(seconds)


class MemoryMeter:
    """Peaks of this process since the meter was made, before the model.

    On CUDA of torch's allocator. CPU tensors have no counter: there `reserved_bytes` is the peak
    resident memory of the process, `allocated_bytes` that without what was resident at first
    (interpreter, torch, buffers of the process group).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resident_at_first_bytes = _resident_bytes()

    def peaks(self) -> dict[str, int]:
        """`allocated_bytes` and `reserved_bytes`."""
        if self.device.type == "cuda":
            return {
                "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
                "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            }
        peak = _peak_resident_bytes()
        return {
            "allocated_bytes": max(0, peak - self.resident_at_first_bytes),
            "reserved_bytes": peak,
        }


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _resident_bytes() -> int:
    """Resident memory now; its peak so far where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return _peak_resident_bytes()
    return pages * resource.getpagesize()


def summary(
    plan: PlanConfig, step_seconds: Sequence[float], losses: Sequence[float], memory: MemoryMeter
) -> dict[str, Any]:
    """Median step and peak memory over all ranks; all ranks call this."""
    device = memory.device
    peaks = torch.tensor(list(memory.peaks().values()), dtype=torch.int64, device=device)
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    allocated, reserved = (int(value) for value in peaks)
    return totals(
        plan,
        step_seconds,
        losses,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device=device,
        world=dist.get_world_size(),
    )


def totals(
    plan: PlanConfig,
    step_seconds: Sequence[float],
    losses: Sequence[float],
    *,
    allocated_bytes: int,
    reserved_bytes: int,
    device: torch.device,
    world: int,
    tokens: float | None = None,
) -> dict[str, Any]:
    """What a summary says of steps of `tokens` (None: as planned), and of peaks over all ranks."""
    skipped = min(WARMUP_STEPS, len(step_seconds) // 2)
    counted = sorted(step_seconds[skipped:])
    rates = step_rates(plan, statistics.median(counted), tokens=tokens) if counted else {}
    return {
        "steps_measured": len(counted),
        "steps_skipped": skipped,
        **rates,
        "step_seconds_least": counted[0] if counted else None,
        "step_seconds_most": counted[-1] if counted else None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "peak_allocated_bytes": allocated_bytes,
        "peak_reserved_bytes": reserved_bytes,
        "memory_kind": "allocator" if device.type == "cuda" else "resident",
        "world": world,
        "device": device_name(device),
        "torch_version": torch.__version__,
        "nccl_version": nccl_version(device),
        "driver_version": driver_version(device),
    }


def nccl_version(device: torch.device) -> str | None:
    """NCCL that torch runs; None on CPUs."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def driver_version(device: torch.device, place: Path = NVIDIA_DRIVER) -> str | None:
    """NVIDIA's driver, as its kernel module says; None where there is none."""
    if device.type != "cuda":
        return None
    try:
        found = _DRIVER.search(place.read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if found is None else found[1]


def device_name(device: torch.device) -> str:
    """What the driver calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"

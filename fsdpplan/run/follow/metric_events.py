"""The events of a metrics file, each on a line of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A run began; what an earlier run of the same file wrote is over."""

    first_step: int
    """Steps done before it: above 0 when it resumed."""
    steps: int | None
    """Step at which it ends."""
    plan_sha256: str | None = None
    """Of the plan that it trains by; None: it did not say."""

    @property
    def is_done(self) -> bool:
        """Whether there was no step left to train."""
        return self.steps is not None and self.first_step >= self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step. None: not reported."""

    step: int
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu_fraction: float | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    precision: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run. None: not reported."""

    step_seconds: float | None
    """Median over the steps after the first few."""
    tokens_per_second: float | None
    mfu_fraction: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    memory_kind: str | None
    """`allocator`: of torch's CUDA allocator; `resident`: of the process."""
    world: int | None
    steps_measured: int | None = None
    """Steps that its medians count."""
    precision: str | None = None
    """Of the steps that its medians count."""
    stopped_by_signal: int | None = None
    """Signal that ended it early."""
    torch_version: str | None = None
    nccl_version: str | None = None
    driver_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """All calls of one collective on one mesh axis in one step, as the profiler saw them."""

    axis: str
    """As in an estimate: mesh axis, or axes joined by `*`."""
    collective: str
    seconds: float
    """Summed over the calls."""
    exposed_seconds: float | None
    """Part of it in which no kernel ran beside it."""
    count: int | None
    """Calls."""
    bytes: int | None
    """The full unsharded buffer, summed over the calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint was published. None: not reported."""

    step: int
    seconds: float
    """From the end of its step."""
    blocking_seconds: float | None
    """Part of that in which training stood still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """A step of a window that was profiled, over all that it did on its device."""

    idle_seconds: float
    """In which no kernel ran."""
    step_seconds: float
    """As long as it took beside the profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A rank ran out of memory: its post-mortem. None: not known."""

    rank: int | None
    host: str | None
    phase: str | None
    step: int | None
    """Steps done before; None: it was before the first."""
    needed_bytes: int | None
    """The least that would have been enough for tensors."""
    fragmentation_bytes: int | None
    outside_bytes: int | None
    beyond_prediction: tuple[tuple[str, int], ...]
    """(part of the prediction, bytes that it was too low by), largest first."""


Event = Start | Step | Summary | Communication | Checkpoint | Profiled | OutOfMemory


def parse_event(line: str) -> Event | None:
    """The event on one line of a metrics file, or None for a line that is none of ours.

    A line without `event` that has a step is a step: programs of the user's own may write those.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    match record.get("event", "step"):
        case "start":
            return Start(
                first_step=_whole(record, "step") or 0,
                steps=_whole(record, "steps"),
                plan_sha256=_text(record, "plan_sha256"),
            )
        case "step":
            return _step(record)
        case "summary":
            return _summary(record)
        case "communication":
            return _communication(record)
        case "checkpoint":
            return _checkpoint(record)
        case "profiled":
            return _profiled(record)
        case "oom":
            return _out_of_memory(record)
        case _:
            return None


def _step(record: dict[str, object]) -> Step | None:
    step = _whole(record, "step")
    if step is None:
        return None
    return Step(
        step=step,
        loss=_number(record, "loss"),
        step_seconds=_number(record, "step_seconds"),
        tokens_per_second=_number(record, "tokens_per_second"),
        mfu_fraction=_number(record, "mfu_fraction"),
        allocated_bytes=_whole(record, "allocated_bytes"),
        reserved_bytes=_whole(record, "reserved_bytes"),
        precision=_text(record, "precision"),
    )


def _summary(record: dict[str, object]) -> Summary:
    return Summary(
        step_seconds=_number(record, "step_seconds"),
        tokens_per_second=_number(record, "tokens_per_second"),
        mfu_fraction=_number(record, "mfu_fraction"),
        peak_allocated_bytes=_whole(record, "peak_allocated_bytes"),
        peak_reserved_bytes=_whole(record, "peak_reserved_bytes"),
        memory_kind=_text(record, "memory_kind"),
        world=_whole(record, "world"),
        steps_measured=_whole(record, "steps_measured"),
        stopped_by_signal=_whole(record, "stopped_by_signal"),
        precision=_text(record, "precision"),
        torch_version=_text(record, "torch_version"),
        nccl_version=_text(record, "nccl_version"),
        driver_version=_text(record, "driver_version"),
    )


def _communication(record: dict[str, object]) -> Communication | None:
    axis, collective = _text(record, "axis"), _text(record, "collective")
    seconds = _number(record, "seconds")
    if axis is None or collective is None or seconds is None:
        return None
    return Communication(
        axis=axis,
        collective=collective,
        seconds=seconds,
        exposed_seconds=_number(record, "exposed_seconds"),
        count=_whole(record, "count"),
        bytes=_whole(record, "bytes"),
    )


def _checkpoint(record: dict[str, object]) -> Checkpoint | None:
    step, seconds = _whole(record, "step"), _number(record, "seconds")
    if step is None or seconds is None:
        return None
    return Checkpoint(
        step=step,
        seconds=seconds,
        blocking_seconds=_number(record, "blocking_seconds"),
    )


def _profiled(record: dict[str, object]) -> Profiled | None:
    idle, step = _number(record, "idle_seconds"), _number(record, "step_seconds")
    if idle is None or step is None:
        return None
    return Profiled(idle_seconds=idle, step_seconds=step)


def _out_of_memory(record: dict[str, object]) -> OutOfMemory:
    beyond = record.get("beyond_prediction")
    parts = beyond.items() if isinstance(beyond, dict) else ()
    return OutOfMemory(
        rank=_whole(record, "rank"),
        host=_text(record, "host"),
        phase=_text(record, "phase"),
        step=_whole(record, "step"),
        needed_bytes=_whole(record, "needed_bytes"),
        fragmentation_bytes=_whole(record, "fragmentation_bytes"),
        outside_bytes=_whole(record, "outside_bytes"),
        beyond_prediction=tuple((str(name), n) for name, n in parts if isinstance(n, int)),
    )


def _text(record: dict[str, object], key: str) -> str | None:
    value = record.get(key)
    return value if isinstance(value, str) else None


def _number(record: dict[str, object], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(record: dict[str, object], key: str) -> int | None:
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

"""A run watches itself: what it tells beside its metrics, and when it ends by itself.

How long a rank works by itself, apart from what it waits for others.

A step takes all ranks equally long, since they wait for each other in every collective. What tells
them apart is the time of the data and that of a few blocks' forward passes, taken behind FSDP's
gathering and before its freeing. Ranks of one tensor-, context- or expert-parallel group wait for
each other inside of a block, too: there a slow rank shows as a slow group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import LayoutConfig, PlanConfig, plan_sha256, plan_text
from ..errors import TrainerError
from ..options import Options
from ..pace import has_passed, mark, seconds_between
from ..parallel.assemble import Assembled
from ..parallel.mesh import place
from ..rehearse.counting import layout_axes
from .hangs import HangWatch
from .metrics import WARMUP_STEPS, Metrics
from .profiling import (
    MemoryTimeline,
    MemoryWindow,
    Profiled,
    ProfileWindow,
    Window,
    folder_of,
    trace_path,
    window_edges,
)
from .prometheus import Sample, exposition, write_exposition
from .trace import a_step
from .trends import DriftWatch, StragglerWatch

MOST_TIMED_BLOCKS = 4
"""Enough to tell a slow device; two CUDA events a pass of each cost next to nothing."""


class OwnTime:
    """Times the first blocks of this rank, and its data."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._began: dict[nn.Module, Any] = {}
        self._passes: list[tuple[Any, Any]] = []
        self._steps: deque[tuple[float, list[tuple[Any, Any]]]] = deque()
        self._newest_seconds = 0.0
        for block in list(blocks)[:MOST_TIMED_BLOCKS]:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end, prepend=True)

    def end_step(self, data_seconds: float) -> None:
        """All of a step has been asked of the device; its data took so long."""
        self._steps.append((data_seconds, self._passes))
        self._passes = []

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """In which blocks run for something else than a step."""
        passes = list(self._passes)
        try:
            yield
        finally:
            self._passes[:] = passes

    def take(self) -> float:
        """Seconds of a step, on average of those that the device has done since the last call;
        those of the call before where there is none. Does not wait."""
        done = []
        while self._steps and all(has_passed(ended) for _, ended in self._steps[0][1][-1:]):
            data_seconds, passes = self._steps.popleft()
            done.append(data_seconds + sum(seconds_between(*each) for each in passes))
        if done:
            self._newest_seconds = sum(done) / len(done)
        return self._newest_seconds

    def _begin(self, block: nn.Module, _inputs: Any) -> None:
        self._began[block] = mark(on_device=self._on_device)

    def _end(self, block: nn.Module, _inputs: Any, _output: Any) -> None:
        # a recomputation ends early, without this
        self._passes.append((self._began.pop(block), mark(on_device=self._on_device)))


PROMETHEUS_SECONDS = 5.0
"""Between two texts for Prometheus, which seldom asks more often."""

SAMPLED = {
    "training_step": "step",
    "training_mfu": "mfu_fraction",
    "training_tokens_per_second": "tokens_per_second",
    "training_step_seconds": "step_seconds",
    "training_data_seconds": "data_seconds",
    "training_loss": "loss",
    "training_grad_norm": "grad_norm",
    "training_memory_allocated_bytes": "allocated_bytes",
    "training_memory_reserved_bytes": "reserved_bytes",
}
"""Metric of Prometheus -> field of a step."""


class Watch:
    """All that watches one run. Each rank has one."""

    def __init__(
        self,
        plan: PlanConfig,
        options: Options,
        device: torch.device,
        assembled: Assembled,
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._device = device
        self._hosts = all_hosts()
        self.take_blocks(assembled)
        self._stragglers = StragglerWatch(peers(plan.layout))
        self._drift = DriftWatch()
        self._steps = 0
        self._heard = 0
        self._apart = True
        axes = layout_axes(assembled.meshes, plan.layout)
        self._profile = None
        self._edges = window_edges(options.profile) | window_edges(options.memory_snapshot)
        if options.profile is not None and dist.get_rank() in options.profile_ranks:
            first, steps = options.profile
            window = Window(first=first, steps=steps)
            self._profile = ProfileWindow(
                window,
                axes,
                device,
                trace_path(options.metrics),
                with_stacks=options.profile_stacks,
            )
        self._memory = None
        if options.memory_snapshot is not None and dist.get_rank() in options.profile_ranks:
            first, steps = options.memory_snapshot
            window = Window(first=first, steps=steps)
            self._memory = MemoryWindow(window, device, folder_of(options.metrics))
        self._hangs = None
        if options.hang_seconds != 0:
            self._hangs = HangWatch(
                axes,
                limit_seconds=options.hang_seconds,
                unread_steps=options.log_every - 1 if device.type == "cuda" else 0,
                said=lambda hang: metrics.emit("hang", **hang),
            )
        self._prometheus = PrometheusFile(
            options.prometheus if dist.get_rank() == 0 else None,
            run_labels(plan, options.plan),
        )

    def take_blocks(self, assembled: Assembled) -> None:
        """Time the blocks of this model from now on."""
        blocks = [block for part in assembled.parts for block in _blocks(part)]
        self.own_time = OwnTime(blocks, self._device)

    def leave_blocks(self) -> None:
        """The model is to go: hold nothing of it, and compare no step with those before."""
        self.own_time = OwnTime((), self._device)
        self._drift = DriftWatch()
        self._steps = 0

    def start(self, step: int) -> None:
        """Training begins behind `step`."""
        self._prometheus.begin()
        if self._hangs is not None:
            self._hangs.start(step)

    def has_edge_before(self, step: int) -> bool:
        """Whether a window begins or has ended before the step of this number: on all ranks, of
        which some may have it. Nothing of another step is to be in it."""
        return step in self._edges

    def before(self, step: int) -> None:
        """The step of this number is about to begin."""
        if self._profile is not None:
            self._profile.before(step)
        if self._memory is not None:
            self._memory.before(step)

    def after(self, step: int, *, own_seconds: Sequence[float]) -> None:
        """All of the step has been asked of the device; `own_seconds` of each rank are of some
        step before it, or not known yet."""
        if self._hangs is not None:
            self._hangs.ended(step)
        if own_seconds:
            self._heard += 1
            if self._heard > WARMUP_STEPS:
                self._say_stragglers(step, own_seconds)
        found = None if self._profile is None else self._profile.after(step)
        if found is not None and self._profile is not None:
            self._say_profile(step, found, self._profile)
            self._apart = True
        line = None if self._memory is None else self._memory.after(step)
        if line is not None and self._memory is not None:
            self._say_memory(step, line, self._memory)
            self._apart = True

    def took(self, step: int, seconds: float) -> None:
        """The device has done a step, which took so long."""
        self._steps += 1
        if self._hangs is not None:
            self._hangs.took(seconds)
        if self._steps > WARMUP_STEPS:
            self._say_drift(step, seconds)

    def reported(self, values: Mapping[str, Any]) -> None:
        """A step was reported, with these fields."""
        self._prometheus.step(values)

    def evaluated(self, values: Mapping[str, Any]) -> None:
        """An evaluation found these fields."""
        self._prometheus.evaluated(values)

    def not_a_step(self) -> None:
        """Something begins that may take longer than a step."""
        self._apart = True
        if self._hangs is not None:
            self._hangs.not_a_step()

    def take_apart(self) -> bool:
        """Whether something else than a step came since this was asked last."""
        apart, self._apart = self._apart, False
        return apart

    def stop(self) -> None:
        """The run ends."""
        if self._hangs is not None:
            self._hangs.stop()
        if self._memory is not None:
            # memory that ran out inside of the window is what it was asked for
            with contextlib.suppress(Exception):
                self._memory.close()
        self._prometheus.stop()

    def _say_stragglers(self, step: int, own_seconds: Sequence[float]) -> None:
        for slow in self._stragglers.ended(own_seconds):
            host = self._hosts[slow.rank]
            self._metrics.emit(
                "straggler", step=step, rank=slow.rank, host=host, factor=slow.factor
            )
            self._metrics.say(
                f"straggler: rank {slow.rank} on {host} takes {slow.factor:.1f} times as long for "
                "its own work as its peers, which wait for it"
            )

    def _say_drift(self, step: int, seconds: float) -> None:
        drift = self._drift.ended(seconds)
        if drift is not None:
            self._metrics.emit(
                "drift",
                step=step,
                first_seconds=drift.first_seconds,
                last_seconds=drift.last_seconds,
            )
            self._metrics.say(
                f"drift: steps now take {drift.last_seconds:.3f} s, at first "
                f"{drift.first_seconds:.3f} s"
            )

    def _say_profile(self, step: int, found: Profiled, done: ProfileWindow) -> None:
        steps = done.window.steps
        events = [a_step(row, steps) for row in found.communication]
        for event in events:
            self._metrics.emit("communication", step=step, **event)
        idle = None
        if found.device is not None:
            idle = found.device.idle_seconds / steps
            self._metrics.emit(
                "profiled",
                step=step,
                idle_seconds=idle,
                step_seconds=found.device.seconds / steps,
                trace=str(done.trace),
            )
        self._prometheus.communication(events, idle_seconds=idle)
        self._metrics.say(f"profiled {done.window.steps} steps: {done.trace}")

    def _say_memory(self, step: int, line: MemoryTimeline, done: MemoryWindow) -> None:
        self._metrics.emit(
            "memory_snapshot",
            step=step,
            snapshot=str(done.snapshot),
            timeline=str(done.timeline),
            start_bytes=line.start_bytes,
            peak_bytes=line.peak[1],
        )
        how = (
            "drop it on pytorch.org/memory_viz"
            if done.snapshot.suffix == ".pickle"
            else "the profiler's, since a CPU's allocator keeps no history"
        )
        self._metrics.say(
            f"memory of {done.window.steps} steps: {done.snapshot} ({how}), {done.timeline}"
        )


def run_labels(plan: PlanConfig, source: str | None = None) -> dict[str, str]:
    """What tells the samples of one run from others'."""
    return {"model": plan.model.name, "plan": plan_sha256(plan_text(source))[:12]}


class PrometheusFile:
    """Rank 0's text for Prometheus; on other ranks, or without a path, it does nothing."""

    def __init__(self, path: Path | None, labels: Mapping[str, str]) -> None:
        self._path = path
        job = os.environ.get("SLURM_JOB_ID")
        self._labels = {**labels, **({} if job is None else {"slurm_job": job})}
        self._values: list[Sample] = []
        self._communication: list[Sample] = []
        self._evaluated: list[Sample] = []
        self._written = 0.0

    def step(self, values: Mapping[str, Any]) -> None:
        self._values = [
            Sample("training_last_step_timestamp_seconds", time.time()),
            *(
                Sample(name, float(values[field]))
                for name, field in SAMPLED.items()
                if values.get(field) is not None
            ),
        ]
        # a broken loss ends the run, and has to be seen
        is_due = time.monotonic() - self._written > PROMETHEUS_SECONDS
        if is_due or values["loss"] != values["loss"]:
            with contextlib.suppress(OSError):
                self._write(running=True)

    def communication(
        self, events: Sequence[Mapping[str, Any]], *, idle_seconds: float | None
    ) -> None:
        names = {
            "training_communication_seconds": "seconds",
            "training_exposed_communication_seconds": "exposed_seconds",
        }
        self._communication = [
            Sample(name, event[field], {"axis": event["axis"], "collective": event["collective"]})
            for name, field in names.items()
            for event in events
            if event[field] is not None
        ]
        if idle_seconds is not None:
            self._communication.append(Sample("training_idle_seconds", idle_seconds))

    def evaluated(self, values: Mapping[str, Any]) -> None:
        self._evaluated = [
            Sample("training_eval_loss", values["loss"]),
            Sample("training_eval_step", values["step"]),
        ]

    def begin(self) -> None:
        """Raise where the file cannot be written; later a full disk does not end the training."""
        try:
            self._write(running=True)
        except OSError as error:
            raise TrainerError(
                f"cannot write the file for Prometheus {self._path}: {error.strerror}; choose "
                "another --prometheus"
            ) from error

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._write(running=False)

    def _write(self, *, running: bool) -> None:
        if self._path is None:
            return
        samples = [
            Sample("training_running", float(running)),
            *self._values,
            *self._communication,
            *self._evaluated,
        ]
        write_exposition(self._path, exposition(samples, self._labels))
        self._written = time.monotonic()


def _blocks(part: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks of a part, which DDP may have wrapped."""
    inner = getattr(part, "module", part)
    layers = getattr(inner, "layers", None)
    return [] if layers is None else list(layers.values())


def peers(layout: LayoutConfig) -> list[list[int]]:
    """Ranks whose work is the same: those of one pipeline stage."""
    groups: dict[int, list[int]] = {}
    for rank in range(layout.world):
        groups.setdefault(place(layout, rank).pp, []).append(rank)
    return list(groups.values())


def all_hosts() -> list[str]:
    """The host of each rank; all ranks call this."""
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return [str(host) for host in hosts]

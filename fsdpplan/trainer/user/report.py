"""What a loop of the user's own reports: a line a step where `fsdpplan run` reads it.

A call waits for no device: it sends what this rank knows to all ranks, and reads what was sent a
step before. So the line of a step is written by the next call, and that of the last step when the
program ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import PLAN_VARIABLE, PlanConfig, load_plan
from ..errors import TrainerError
from ..watch.metrics import MemoryMeter, append_line, keep_steps_until, step_rates, totals

if TYPE_CHECKING:
    from ..watch.watch import PrometheusFile

METRICS_VARIABLE = "FSDPPLAN_METRICS"
"""The file of a job's metrics; a program that finds none reports nothing."""

PROMETHEUS_VARIABLE = "FSDPPLAN_PROMETHEUS"
"""A text file for node_exporter, as `--prometheus` of the reference trainer."""

BATCH_MARGIN = 0.1
"""How far a step's tokens may be off the plan's before that is said."""

EXIT_SECONDS = 1.0
"""Most that the end of a program waits for its last step's numbers: peers may be gone."""

_memory = MemoryMeter(torch.device("cpu"))
"""Made at import, before the user's model is."""


def report_step(
    *, loss: float | Tensor | None = None, tokens: int | None = None, step: int | None = None
) -> None:
    """Report an optimizer step to the job that runs this program: its time, loss, rate, MFU and
    memory. All ranks call this behind each step; outside of a job of fsdpplan it does nothing.

    `loss` is the mean over this rank's micro-batches, None on ranks that have none (a pipeline);
    it may stay on its device. `tokens` are those of these micro-batches (default: as planned).
    `step` is the step's number, for a program that has resumed: without it, the first call is
    step 1, and each later one the next.
    """
    global _reporter
    if _reporter is None:
        metrics = os.environ.get(METRICS_VARIABLE)
        if not metrics:
            return
        _reporter = Reporter(Path(metrics), first_step=1 if step is None else step)
        atexit.register(_reporter.close)
    _reporter.report(loss, tokens, step)


_reporter: Reporter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """What all ranks know of a step, on its way to the host."""

    step: int
    rows: Tensor
    """A rank each: loss, 1 where it has one, tokens, most bytes allocated and reserved."""
    work: Any
    """What a CPU waits for; None: nothing."""
    ended: Any
    """When the step did: seconds, or an event of CUDA."""

    def is_here(self) -> bool:
        if isinstance(self.ended, float):
            return self.work is None or bool(self.work.is_completed())
        return bool(self.ended.query())

    def wait(self) -> None:
        if not isinstance(self.ended, float):
            self.ended.synchronize()
        elif self.work is not None:
            self.work.wait()

    def seconds_since(self, before: _Sent) -> float:
        if isinstance(self.ended, float):
            return self.ended - float(before.ended)
        return float(before.ended.elapsed_time(self.ended)) / 1000


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What the lines of a run have said, for its summary."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    allocated_bytes: int = 0
    reserved_bytes: int = 0


class Reporter:
    """Sends each step of this rank to all, and writes on rank 0 what has arrived."""

    def __init__(self, metrics: Path, *, first_step: int) -> None:
        if not os.environ.get(PLAN_VARIABLE):
            raise TrainerError(
                f"report_step writes to {METRICS_VARIABLE}, and {PLAN_VARIABLE} holds no plan to "
                f"report beside: start the program by fsdpplan run --script, or unset "
                f"{METRICS_VARIABLE}"
            )
        self._plan: PlanConfig = load_plan()
        self._process = os.getpid()
        self._is_first = (dist.get_rank() if dist.is_initialized() else 0) == 0
        self._metrics = metrics
        self._next_step = first_step
        self._device = torch.device(self._plan.cluster.device.kind)
        _memory.device = self._device
        self._sent: _Sent | None = None
        self._before: _Sent | None = None
        self._seen = _Seen()
        self._prometheus: PrometheusFile | None = None
        if self._is_first:
            keep_steps_until(metrics, first_step - 1)
            self._prometheus = _prometheus_file(self._plan)

    def report(self, loss: float | Tensor | None, tokens: int | None, step: int | None) -> None:
        """Send this step, and write the one before it."""
        number = self._next_step if step is None else step
        self._next_step = number + 1
        sent = self._send(number, loss, tokens)
        if self._sent is not None:
            self._sent.wait()
            self._write(self._sent)
        self._sent = sent

    def close(self) -> None:
        """Write the last step, if all ranks came to its end, and the summary."""
        if os.getpid() != self._process:
            return
        until = time.monotonic() + EXIT_SECONDS
        while self._sent is not None and time.monotonic() < until and not self._sent.is_here():
            time.sleep(0.01)
        if self._sent is not None and self._sent.is_here():
            self._write(self._sent)
        self._sent = None
        if not self._is_first:
            return
        seen = self._seen
        if self._prometheus is not None:
            self._prometheus.stop()
        if not seen.tokens:
            return
        append_line(
            self._metrics,
            "summary",
            {
                "step": self._next_step - 1,
                "precision": self._plan.training.precision,
                **totals(
                    self._plan,
                    seen.seconds,
                    seen.losses,
                    allocated_bytes=seen.allocated_bytes,
                    reserved_bytes=seen.reserved_bytes,
                    device=self._device,
                    world=int(os.environ.get("WORLD_SIZE", "1")),
                    tokens=sum(seen.tokens) / len(seen.tokens),
                ),
            },
        )

    def _send(self, step: int, loss: float | Tensor | None, tokens: int | None) -> _Sent:
        plan, peaks = self._plan, _memory.peaks()
        held = self._planned_tokens / plan.layout.data_parallel if tokens is None else tokens
        numbers = [0.0, loss is not None, held, peaks["allocated_bytes"], peaks["reserved_bytes"]]
        row = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if loss is not None:
            row[0] = _whole(loss)
        rows, work = row[None], None
        if dist.is_initialized():
            rows = row.new_empty(dist.get_world_size(), len(numbers))
            work = dist.all_gather(list(rows.unbind()), row, async_op=True)
        if self._device.type == "cpu":
            return _Sent(step=step, rows=rows, work=work, ended=time.perf_counter())
        if work is not None:
            work.wait()  # the stream does, the host does not
        there = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        there.copy_(rows, non_blocking=True)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return _Sent(step=step, rows=there, work=None, ended=event)

    @property
    def _planned_tokens(self) -> int:
        return self._plan.training.global_batch * self._plan.training.seq_len

    def _write(self, sent: _Sent) -> None:
        before, self._before = self._before, sent
        if not self._is_first:
            return
        plan, seen, rows = self._plan, self._seen, sent.rows.tolist()
        # ranks that share sequences, a matrix or a pipeline hold the same tokens
        tokens = sum(row[2] for row in rows) / len(rows) * plan.layout.data_parallel
        heard = [row for row in rows if row[1]]
        weight = sum(row[2] for row in heard)
        loss = sum(row[0] * row[2] for row in heard) / weight if weight else None
        seen.allocated_bytes = max(seen.allocated_bytes, *(int(row[3]) for row in rows))
        seen.reserved_bytes = max(seen.reserved_bytes, *(int(row[4]) for row in rows))
        rates: dict[str, Any] = {}
        if before is not None:
            seconds = sent.seconds_since(before)
            rates = step_rates(plan, seconds, tokens=tokens)
            seen.seconds.append(seconds)
        if not seen.tokens:
            self._compare_batch(tokens)
        seen.tokens.append(tokens)
        if loss is not None:
            seen.losses.append(loss)
        values = {
            "step": sent.step,
            "loss": loss,
            **rates,
            "allocated_bytes": seen.allocated_bytes,
            "reserved_bytes": seen.reserved_bytes,
            "precision": plan.training.precision,
        }
        append_line(self._metrics, "step", values)
        if self._prometheus is not None:
            self._prometheus.step(values)

    def _compare_batch(self, tokens: float) -> None:
        planned = self._planned_tokens
        if abs(tokens / planned - 1) > BATCH_MARGIN:
            print(
                f"fsdpplan: a step trains {tokens:,.0f} tokens, and the plan has {planned:,}: its "
                "step time is predicted for another batch",
                file=sys.stderr,
                flush=True,
            )


def _whole(loss: float | Tensor) -> float | Tensor:
    """The loss without its graph, and whole where ranks hold parts of it."""
    if not isinstance(loss, Tensor):
        return loss
    detached = loss.detach()
    full = getattr(detached, "full_tensor", None)
    whole: Tensor = detached if full is None else full()
    return whole.double()


def _prometheus_file(plan: PlanConfig) -> PrometheusFile | None:
    path = os.environ.get(PROMETHEUS_VARIABLE)
    if not path:
        return None
    from ..watch.watch import PrometheusFile, run_labels  # and all that else watches a run

    file = PrometheusFile(Path(path), run_labels(plan))
    file.begin()
    return file

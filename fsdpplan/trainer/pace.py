"""Nothing in a step waits for the device: what the host wants to know of it arrives later.

Losses, norms and scales stay on the device until a step that is logged, then go to the host while
the next step runs: through pinned memory behind an event on CUDA, by a collective that nobody
waits for elsewhere. What the host itself knows, a signal and the time of its own work, travels
between hosts, a step late, so that all ranks leave after the same step whatever their devices are
at. When steps ended is read off events that have passed. Python's garbage is collected between
steps of the same number on all ranks, since a rank that stops for it lets all others wait.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .scaler import LossScaler
from .step import StepOutput

VOTES = "stop votes"
"""What the group over which hosts talk is called in torch's records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRead:
    """A step whose numbers have arrived."""

    step: int
    loss: float
    """Mean over the sequences of all ranks."""
    grad_norm: float
    learning_rate: float
    data_seconds: float
    expert_imbalance: float | None
    router_aux_loss: float | None
    """Without its coefficient, beside the loss and not in it."""
    scaler_state: dict[str, float]
    """As a checkpoint keeps it; nothing without a scaler."""
    is_spike: bool = False
    usual_loss: float | None = None
    """Median of the steps before it, where spikes are looked for."""
    usual_grad_norm: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A step whose numbers are on the device."""

    step: int
    learning_rate: float
    data_seconds: float
    row: Tensor


class _Answer:
    """Numbers on their way to the host."""

    def __init__(self, steps: list[_Kept]) -> None:
        self.steps = steps
        self._rows = torch.stack([each.row for each in steps])
        self._losses = self._rows[:, 0].clone()
        self._work = dist.all_reduce(self._losses, async_op=True)
        self._event: Any = None
        if self._rows.is_cuda:
            self._add_up()  # the stream waits, the host does not
            there = torch.empty(self._rows.shape, pin_memory=True)
            there.copy_(self._rows, non_blocking=True)
            self._rows, self._event = there, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def numbers(self) -> list[list[float]]:
        """The rows; waits until they are here."""
        if self._event is None:
            self._add_up()
        else:
            self._event.synchronize()
        rows: list[list[float]] = self._rows.tolist()
        return rows

    def _add_up(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._rows[:, 0] = self._losses


class Readings:
    """What steps leave on the device, and its way to the host."""

    def __init__(self, *, stages: int) -> None:
        """Of `stages` pipeline ranks one has the loss, the others 0."""
        self._share = stages / dist.get_world_size()
        self._kept: list[_Kept] = []
        self._asked: deque[_Answer] = deque()
        self._none: Tensor | None = None

    def keep(
        self,
        step: int,
        output: StepOutput,
        scaler: LossScaler | None,
        *,
        learning_rate: float,
        data_seconds: float,
    ) -> None:
        """Keep what a step has left; nothing is read."""
        values: list[Tensor | None] = [output.loss, output.grad_norm]
        balanced = output.balanced
        values += [None] * 2 if balanced is None else [balanced.imbalance, balanced.auxiliary_loss]
        values += [None, None] if scaler is None else [scaler.scale, scaler.good_steps]
        spike = output.spike
        values += [None] * 3 if spike is None else [spike.is_spike, spike.usual[0], spike.usual[1]]
        row = torch.stack([self._number(value, output.loss.device) for value in values])
        self._kept.append(
            _Kept(step=step, learning_rate=learning_rate, data_seconds=data_seconds, row=row)
        )

    def _number(self, value: Tensor | None, device: torch.device) -> Tensor:
        if value is not None:
            return value.detach().to(device, torch.float32, non_blocking=True)
        if self._none is None:
            self._none = torch.full((), torch.nan, device=device)
        return self._none

    def ask(self) -> None:
        """Send what is kept on its way; all ranks call this after the same step."""
        if self._kept:
            self._asked.append(_Answer(self._kept))
            self._kept = []

    def answered(self, *, but: int = 0) -> list[StepRead]:
        """The steps that were asked for, without the newest `but` askings; waits for them."""
        found: list[StepRead] = []
        while len(self._asked) > but:
            answer = self._asked.popleft()
            pairs = zip(answer.steps, answer.numbers(), strict=True)
            found += [self._read(kept, row) for kept, row in pairs]
        return found

    def _read(self, kept: _Kept, row: list[float]) -> StepRead:
        loss, norm, imbalance, auxiliary, scale, good, spike, usual_loss, usual_norm = row
        return StepRead(
            step=kept.step,
            loss=loss * self._share,
            grad_norm=norm,
            learning_rate=kept.learning_rate,
            data_seconds=kept.data_seconds,
            expert_imbalance=_or_none(imbalance),
            router_aux_loss=_or_none(auxiliary),
            scaler_state={} if scale != scale else {"scale": scale, "good_steps": good},
            is_spike=spike == 1.0,
            usual_loss=_or_none(usual_loss),
            usual_grad_norm=_or_none(usual_norm),
        )


def _or_none(number: float) -> float | None:
    return None if number != number else number


class Votes:
    """What hosts tell each other of each step: a signal, and how long each worked by itself.

    It is heard a step late: by then the messages have arrived, and no host waits for a device, nor
    gets more than a step ahead of another.
    """

    def __init__(self) -> None:
        """All ranks call this."""
        self._ranks, self._rank = dist.get_world_size(), dist.get_rank()
        self._group = None
        if self._ranks > 1:
            self._group = dist.new_group(backend="gloo", group_desc=VOTES)
        self._sent: tuple[Any, Tensor] | None = None

    def tell(self, signal: int, own_seconds: float) -> tuple[int, list[float]]:
        """Tell this step's, and hear those of the step before it: the highest signal of any rank,
        and what each gave as `own_seconds`; (0, []) of the first step. A rank alone hears itself.
        """
        if self._group is None:
            return signal, [own_seconds]
        said = torch.zeros(2, self._ranks, dtype=torch.float64)
        said[0, self._rank], said[1, self._rank] = signal, own_seconds
        work = dist.all_reduce(said, group=self._group, async_op=True)
        before, self._sent = self._sent, (work, said)
        return self._heard(before)

    def last(self) -> int:
        """Hear what was told last and not heard: the highest signal of any rank."""
        before, self._sent = self._sent, None
        return self._heard(before)[0]

    @staticmethod
    def _heard(sent: tuple[Any, Tensor] | None) -> tuple[int, list[float]]:
        if sent is None:
            return 0, []
        work, said = sent
        work.wait()
        signals, own_seconds = said.numpy()  # of the host's own
        return int(signals.max()), [float(each) for each in own_seconds]


class StepClock:
    """How long steps take: on CUDA as the device does them, elsewhere as the host does.

    From the end of a step to the end of the next one, or from its beginning where something else
    came between: so the steps add up to the time that passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._last: Any = None
        self._began: Any = None
        self._under_way: deque[tuple[int, Any, Any]] = deque()

    def begin(self, *, apart: bool) -> None:
        """A step begins; `apart`: something else than a step came before it."""
        self._began = mark(on_device=self._on_device) if apart or self._last is None else self._last

    def end(self, step: int) -> None:
        """All of a step has been asked of the device."""
        self._last = mark(on_device=self._on_device)
        self._under_way.append((step, self._began, self._last))

    def done(self) -> dict[int, float]:
        """Seconds of each step that has ended since the last call; does not wait."""
        found = {}
        while self._under_way and has_passed(self._under_way[0][2]):
            step, began, ended = self._under_way.popleft()
            found[step] = seconds_between(began, ended)
        return found


def mark(*, on_device: bool) -> Any:
    """Now: a time of the host, or an event of the device."""
    if not on_device:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def has_passed(moment: Any) -> bool:
    """Whether the device has come to a `mark`; does not wait."""
    return isinstance(moment, float) or bool(moment.query())


def seconds_between(began: Any, ended: Any) -> float:
    """Between two marks that have passed."""
    if isinstance(ended, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1000


class GarbageSchedule:
    """Collects young garbage every so many steps, in place of whenever Python would; 0: never
    meddles."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = gc.isenabled()
        if every:
            gc.disable()
            gc.collect(1)

    def after(self, step: int) -> None:
        """A step has ended."""
        if self._every and step % self._every == 0:
            gc.collect(1)

    def stop(self) -> None:
        """The run ends: Python's own schedule again."""
        if self._every and self._was_enabled:
            gc.enable()

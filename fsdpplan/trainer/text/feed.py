"""The micro-batches of a run, step after step, made before they are asked for.

Text is turned into tokens by data workers, other processes (`worker.py`), since it takes the
interpreter that trains; a thread of the rank asks them for the next steps and puts together what
they answer, in page-locked memory for CUDA. Token files are read by the thread alone. What a step
is given depends on its first sequence number alone, whoever makes it and when.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ..config import PlanConfig
from ..errors import TrainerError
from .data import Data, InText, SyntheticSequences, micro_batches, moved, numbers_of, pinned
from .make_index import cpu_share
from .packing import MicroBatch
from .worker import DataWorker

MOST_WORKERS = 4
"""Of a rank, where nobody asks for more."""
CORES_A_WORKER = 4
"""Of a rank, one is for a worker: a step needs others."""
LEAST_PREFETCH = 2
JOIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast a rank's data is made, as the first step's were."""

    tokens_per_second: float
    workers: int
    """Other processes that make it."""
    ahead: int
    """Steps made before they are asked for."""


@dataclass(slots=True)
class _Made:
    """What was made so far, and how long that took one maker."""

    tokens: int = 0
    seconds: float = 0.0

    def rate(self, workers: int) -> float:
        """Tokens a second of all makers together."""
        return max(1, workers) * self.tokens / max(self.seconds, 1e-9)


@dataclass(slots=True, kw_only=True)
class Feed:
    """Micro-batches of a rank, made when they are asked for, in the step's own thread."""

    data: Data
    plan: PlanConfig
    rank: int
    device: torch.device
    packs: bool
    _first: tuple[int, list[MicroBatch]] | None = None
    """Of the first step, made to see how long that takes."""

    def take(self, first: int) -> list[MicroBatch]:
        """Those of the step that begins with sequence number `first`."""
        kept, self._first = self._first, None
        return kept[1] if kept is not None and kept[0] == first else self._make(first)

    def rate(self, first: int) -> Rate:
        """How fast they are made: those of the step that begins with `first`, which is next."""
        began = time.perf_counter()
        self._first = first, self._make(first)
        seconds = time.perf_counter() - began
        tokens = step_tokens(self.plan)
        return Rate(tokens_per_second=tokens / max(seconds, 1e-9), workers=0, ahead=0)

    def close(self) -> None:
        """The run ends."""

    def _make(self, first: int) -> list[MicroBatch]:
        return micro_batches(
            self.data,
            self.plan,
            first=first,
            rank=self.rank,
            device=self.device,
            packs=self.packs,
        )


class AheadFeed:
    """The same, made ahead by a thread, and what is text by `workers` other processes."""

    def __init__(self, of: Feed, *, workers: int, prefetch: int) -> None:
        self._of, self._workers, self._prefetch = of, workers, prefetch
        self._line: _Line | None = None
        self._next: _Step | None = None

    @property
    def data(self) -> Data:
        """What they are made of."""
        return self._of.data

    def take(self, first: int) -> list[MicroBatch]:
        """Those of the step that begins with sequence number `first`."""
        step = self._get(first)
        self._next = None
        return [moved(batch, self._of.device) for batch in step.batches]

    def rate(self, first: int) -> Rate:
        """How fast they are made: those of the step that begins with `first`, which is next."""
        self._get(first)
        assert self._line is not None
        return Rate(
            tokens_per_second=self._line.made.rate(self._workers),
            workers=self._workers,
            ahead=self._prefetch,
        )

    def close(self) -> None:
        """End the thread and the processes."""
        if self._line is not None:
            self._line.close()
        self._line = self._next = None

    def _get(self, first: int) -> _Step:
        if self._line is None or not self._line.goes_on_with(first, self._next):
            self.close()  # the run goes on elsewhere than where it would have
            self._line = _Line(self._of, first, workers=self._workers, prefetch=self._prefetch)
        if self._next is None:
            self._next = self._line.get()
        return self._next


@dataclass(frozen=True, slots=True)
class _Step:
    first: int
    batches: list[MicroBatch]


@dataclass(slots=True)
class _Fetched:
    """Sequences of which some were read by data workers."""

    data: Data
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """Of the data."""
        return self.data.identity

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`."""
        return self.rows[number][0] if number in self.rows else self.data(number)

    def starts(self, number: int) -> Tensor:
        """Which of its tokens begin a document."""
        return self.rows[number][1] if number in self.rows else self.data.starts(number)


class _Line:
    """Steps in a row, from one on, made by a thread."""

    def __init__(self, of: Feed, first: int, *, workers: int, prefetch: int) -> None:
        self._of, self._due, self.made = of, first, _Made()
        texts = of.data.texts()
        self._number_of = {id(text): number for number, text in enumerate(texts)}
        self._workers = [
            DataWorker(
                tokenizer=next((text.tokenizer for text in texts), None),
                texts=[[f"/dev/fd/{text.index.descriptor}", str(text.path)] for text in texts],
                passed=[text.index.descriptor for text in texts],
            )
            for _ in range(workers)
        ]
        self._turns = cycle(self._workers)
        self._room = threading.Semaphore(prefetch)
        self._steps = queue.SimpleQueue[_Step | BaseException]()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="data", daemon=True)
        self._thread.start()

    def goes_on_with(self, first: int, got: _Step | None) -> bool:
        """Whether the next step begins with `first`."""
        return first == (self._due if got is None else got.first)

    def get(self) -> _Step:
        """The next step; waits for it. Raises what its thread met."""
        step = self._steps.get()
        if isinstance(step, BaseException):
            self._steps.put(step)  # for whoever asks again
            raise step
        self._due = step.first + self._of.plan.training.global_batch
        self._room.release()
        return step

    def close(self) -> None:
        """End the thread and the processes."""
        self._over = True
        self._room.release()
        for worker in self._workers:
            worker.end()
        self._thread.join(JOIN_SECONDS)
        for worker in self._workers:
            worker.close()

    def _run(self) -> None:
        try:
            if self._of.device.type == "cuda":
                torch.cuda.set_device(self._of.device)  # whose context page-locked memory is of
            self._make_steps()
        except BaseException as error:
            self._steps.put(error)

    def _make_steps(self) -> None:
        asked: deque[tuple[int, list[_Asked]]] = deque()
        first = self._due
        while not self._over:
            while self._room.acquire(blocking=not asked) and not self._over:
                asked.append((first, self._ask(first)))
                first += self._of.plan.training.global_batch
            if asked:
                self._steps.put(self._step(*asked.popleft()))

    def _ask(self, first: int) -> list[_Asked]:
        if not self._workers:
            return []
        asked = []
        for numbers in numbers_of(self._of.plan, first=first, rank=self._of.rank):
            found = ((number, self._of.data.in_text(number)) for number in numbers)
            places = {number: place for number, place in found if place is not None}
            if places:
                worker = next(self._turns)
                worker.ask([[self._number_of[id(p.text)], *p[1:]] for p in places.values()])
                asked.append(_Asked(worker, places))
        return asked

    def _step(self, first: int, asked: Sequence[_Asked]) -> _Step:
        of, rows = self._of, _Fetched(self._of.data)
        for each in asked:
            seconds, found = each.answer()
            rows.rows |= found
            self.made.seconds += seconds
        began = time.perf_counter()
        batches = micro_batches(
            rows if asked else of.data,
            of.plan,
            first=first,
            rank=of.rank,
            device=torch.device("cpu"),
            packs=of.packs,
        )
        if of.device.type == "cuda":
            batches = [pinned(batch) for batch in batches]
        self.made.tokens += step_tokens(of.plan)
        if not asked:
            self.made.seconds += time.perf_counter() - began
        return _Step(first, batches)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Stretches that a worker was asked for."""

    worker: DataWorker
    places: dict[int, InText]

    def answer(self) -> tuple[float, dict[int, tuple[Tensor, Tensor]]]:
        """How long it took, and the tokens of each sequence with those that begin documents."""
        head, raw = self.worker.answer()
        rows, tokens = {}, sum(place.stop - place.start for place in self.places.values())
        first = 0
        for number, place in self.places.items():
            length = place.stop - place.start
            rows[number] = (
                torch.frombuffer(raw, dtype=torch.int64, offset=8 * first, count=length),
                torch.frombuffer(raw, dtype=torch.bool, offset=8 * tokens + first, count=length),
            )
            first += length
        return float(head["seconds"]), rows


def step_tokens(plan: PlanConfig) -> int:
    """Tokens that a rank trains on in a step; under context parallelism, with those that share its
    sequences."""
    layout = plan.layout
    return layout.micro_batch * layout.num_microbatches * plan.training.seq_len


def open_feed(
    of: Feed, *, workers: int | None, prefetch: int | None, ranks: int
) -> Feed | AheadFeed:
    """The feed of a rank, of so many on its node, with as many `workers` as asked for; None: as its
    share of the processors says. Made-up tokens and 0 workers need no thread."""
    texts = of.data.texts()
    if workers and not texts:
        raise TrainerError(
            f"--data-workers {workers} is for text, and there is none: leave it out, a token file "
            "is read ahead by a thread"
        )
    if workers is None and texts:
        workers = max(1, min(MOST_WORKERS, cpu_share(ranks) // CORES_A_WORKER))
    if workers == 0 or isinstance(of.data, SyntheticSequences):
        if prefetch is not None:
            raise TrainerError(
                f"--prefetch {prefetch} is for data that is read ahead: leave it out, or give "
                "--data, and no --data-workers 0"
            )
        return of
    workers = workers or 0
    each_has_two = -(-2 * workers // of.plan.layout.num_microbatches)
    return AheadFeed(of, workers=workers, prefetch=prefetch or max(LEAST_PREFETCH, each_has_two))

"""Events: a predicted step as a list of what runs when, on which stream of which pipeline rank.

`step_timeline` in `timeline` makes one. Streams of one rank:

    compute         kernels, and what stands in their way: waits, bubbles, the optimizer
    all_gather reduce_scatter all_reduce    data parallelism's collectives
    tp cp ep pp     collectives inside blocks, and messages between pipeline stages
    upload download copies from and to the host, with offload

The events of a stream do not overlap. Those of the compute stream follow one another from 0 to the
end of the step, each with the term of the estimate that it is counted in; those of other streams
run beside it and are in no term, but in the rows of the estimate's communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Term = Literal["compute", "exposed", "bubble", "host", "optimizer", "beside"]
"""What an event is counted in: a part of the step, or none, as it runs beside."""

Kind = Literal[
    "matmul",
    "attention",
    "elementwise",
    "launch",
    "copy",
    "gradients",
    "optimizer",
    "forward",
    "recompute",
    "backward",
    "wait",
    "bubble",
    "host",
    "collective",
    "upload",
    "download",
]
"""What an event is. `launch`: the device waits for its host to start kernels; `copy`: into and out
of FSDP's flat buffers; `gradients`: added up, or copied for their reduction; `forward`, `recompute`
and `backward` are passes that are not shown kernel by kernel."""

Detail = Literal["kernels", "blocks", "passes"]
"""How finely computation is shown: each kernel, each block, or each micro-batch."""

COMPUTE = "compute"
"""The stream of kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a collective is, by the columns of the estimate's communication."""

    collective: str
    axis: str
    ranks: int
    level: str
    dtype: str
    count: int
    """Calls that the event stands for."""
    bytes: int
    """The full unsharded buffer, summed over the calls."""

    @property
    def row(self) -> tuple[str, str, int, str]:
        """The row of the estimate's communication that it is in."""
        return (self.collective, self.axis, self.ranks, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that runs, or is waited for, on one rank of a pipeline."""

    rank: int
    """Of the pipeline, from 0."""
    stream: str
    name: str
    """Such as `layers.3.wq`, `FSDP::all_gather (layers.3)`, `waits for all_gather`."""
    kind: Kind
    term: Term
    start_seconds: float
    """From the start of the step."""
    seconds: float
    direction: Literal["", "forward", "recompute", "backward"] = ""
    """The pass that it belongs to; empty: to none."""
    micro_batch: int | None = None
    """From 0; None: of the step as a whole."""
    stage: int | None = None
    """Of the pipeline's virtual stages, where it belongs to one."""
    block: int | None = None
    """Of the model's blocks, from 0, where it belongs to one."""
    cause: str = ""
    """Of a wait: the collective or axis that is waited for."""
    traffic: Traffic | None = None
    """Of a collective."""

    @property
    def end_seconds(self) -> float:
        """When it is over."""
        return self.start_seconds + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """What one pipeline rank has allocated from a moment on, in bytes, by the parts of
    `MemoryBreakdown`."""

    rank: int
    start_seconds: float
    phase: str
    parameters_bytes: int
    optimizer_bytes: int
    gradients_bytes: int
    unsharded_parameters_bytes: int
    unsharded_gradients_bytes: int
    activations_bytes: int
    logits_bytes: int
    temporaries_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """All of it."""
        return (
            self.parameters_bytes
            + self.optimizer_bytes
            + self.gradients_bytes
            + self.unsharded_parameters_bytes
            + self.unsharded_gradients_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.temporaries_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted step of one rank of each pipeline stage."""

    step_seconds: float
    rank: int
    """The pipeline rank whose terms are those of the estimate: the one that computes most."""
    events: tuple[Event, ...]
    """Stream by stream of each rank, in order of time."""
    memory: tuple[MemoryPoint, ...] = ()
    """Rank by rank, in order of time."""

    def of(self, rank: int, stream: str) -> tuple[Event, ...]:
        """The events of one stream, in order."""
        return tuple(e for e in self.events if e.rank == rank and e.stream == stream)

    def term_seconds(self, rank: int | None = None) -> dict[str, float]:
        """Sum of the events by term, on the rank of the estimate or on another one."""
        sums: dict[str, float] = {}
        for event in self.events:
            if event.rank == (self.rank if rank is None else rank) and event.term != "beside":
                sums[event.term] = sums.get(event.term, 0.0) + event.seconds
        return sums


def streams(events: Iterable[Event]) -> list[tuple[int, str]]:
    """(rank, stream) of all that there are, in order."""
    return list(dict.fromkeys((event.rank, event.stream) for event in events))

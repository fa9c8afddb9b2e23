"""Events: a predicted step as a list of what runs when, on which stream of which pipeline rank.

`step_timeline` in `timeline` makes one. The events of a stream do not overlap. Those of the compute
stream follow one another from 0 to the end of the step, each with the term of the estimate that it
is counted in; those of other streams run beside it and are in no term, but in the rows of the
estimate's communication.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from fsdpplan.spec.plan import MEMORY_WORDS

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
"""The stream of kernels, and of what stands in their way: waits, bubbles, the optimizer."""

STREAMS = {
    COMPUTE: "compute",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "pp": "pipeline",
    "pp_next": "to next stage",
    "pp_previous": "to previous stage",
    "upload": "from the host",
    "download": "to the host",
}
"""All streams of a rank, in the order in which they are shown, and how people read them: data
parallelism's by its collectives, those inside of blocks by their axis, messages between stages of a
pipeline and its other collectives, copies with offload."""


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
    def terms(self) -> dict[str, int]:
        """The parts by the names that people read, from what stays to what goes."""
        return {MEMORY_WORDS[field]: getattr(self, field) for field in _ALLOCATED}

    @property
    def allocated_bytes(self) -> int:
        """All of it."""
        return sum(self.terms.values())


_ALLOCATED = tuple(one.name for one in fields(MemoryPoint) if one.name in MEMORY_WORDS)


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

    def streams(self, rank: int) -> dict[str, list[Event]]:
        """The events of each stream that a rank has anything on, in the order of `STREAMS`."""
        found: dict[str, list[Event]] = {stream: [] for stream in STREAMS}
        for event in self.events:
            if event.rank == rank:
                found[event.stream].append(event)
        return {stream: events for stream, events in found.items() if events}

    def term_seconds(self, rank: int | None = None) -> dict[str, float]:
        """Sum of the events by term, on the rank of the estimate or on another one."""
        sums: dict[str, float] = {}
        for event in self.events:
            if event.rank == (self.rank if rank is None else rank) and event.term != "beside":
                sums[event.term] = sums.get(event.term, 0.0) + event.seconds
        return sums

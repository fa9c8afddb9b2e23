"""How a job outlives what happens to its nodes."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What a job does about nodes and ranks that fail."""

    retries: int | None = None
    """Starts after the first one, at most: in the same allocation, or as Slurm requeues the job.
    A start is tried again for a failed node or preflight, or where the run before it has saved
    something new: a fault of the program itself would only come back. None: 3 where a later start
    has something to go on from."""
    spares: int = 0
    """Nodes more than the plan has, in the same allocation, to take a failed one's place."""
    requeue: bool | None = None
    """Whether Slurm may put the job back into the queue; None: where a later start has something to
    go on from."""
    preflight: bool | None = None
    """Whether nodes, ranks and links are tried before training; None: with several nodes and the
    reference trainer."""

    def __post_init__(self) -> None:
        for name in ("retries", "spares"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise SpecError(f"{name} must be at least 0, not {number}")

"""A run that ran out of memory: what is said of it, of the next layout and of those tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fsdpplan.files.plans import layout_document
from fsdpplan.run.fallback import Attempt
from fsdpplan.run.ledger import ran_out_of_memory
from fsdpplan.run.metrics import OutOfMemory
from fsdpplan.units import format_gib, format_seconds

PARTS = {
    "state_bytes": "parameters, gradients and optimizer",
    "working_bytes": "activations, logits and gathered parameters",
    "reserved_overhead_bytes": "fragmentation",
    "context_bytes": "memory outside of PyTorch",
}
"""Part of a prediction, as a post-mortem names it -> words."""


def memory_document(attempt: Attempt) -> dict[str, Any] | None:
    """The post-mortem of an attempt and what to try next; None where memory did not run out."""
    if not ran_out_of_memory(attempt.outcome):
        return None
    event, rung = attempt.outcome.measured.out_of_memory, attempt.next_layout
    said = None if event is None else asdict(event)
    if said is not None:
        said["beyond_prediction"] = dict(said["beyond_prediction"])
    return {
        "postmortem": said,
        "next_layout": None if rung is None else layout_document(rung.layout),
        "next_options": None if rung is None else rung.words,
    }


def attempt_document(attempt: Attempt) -> dict[str, Any]:
    """One attempt in short."""
    return {
        "origin": attempt.launch.origin,
        "layout": layout_document(attempt.launch.plan.layout),
        "run_folder": str(attempt.outcome.run_folder),
        "job_exit_code": attempt.outcome.exit_code,
        "ran_out_of_memory": ran_out_of_memory(attempt.outcome),
        "steps": len(attempt.outcome.measured.steps),
    }


def memory_words(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Paragraphs: attempts before the last, and what to do where the last ran out of memory."""
    *before, last = attempts
    for number, attempt in enumerate(before, start=1):
        yield (
            f"Attempt {number} ran out of memory after {len(attempt.outcome.measured.steps)} steps "
            f"({attempt.outcome.run_folder})."
        )
    if before:
        yield f"Attempt {len(attempts)} ran {last.launch.origin}."
    if ran_out_of_memory(last.outcome):
        yield " ".join(_postmortem(last.outcome.measured.out_of_memory))
        yield _next(last)


def _postmortem(event: OutOfMemory | None) -> Iterator[str]:
    if event is None:
        yield "The job ran out of memory."
        return
    when = "before its first step" if event.step is None else f"in step {event.step + 1}"
    yield f"Rank {event.rank} ran out of memory in {event.phase}, {when}."
    if event.needed_bytes is not None:
        yield f"Its tensors needed at least {format_gib(event.needed_bytes)}."
    if event.fragmentation_bytes is not None:
        yield f"{format_gib(event.fragmentation_bytes)} were reserved in no tensor."
    if event.outside_bytes is not None:
        yield f"{format_gib(event.outside_bytes)} lay outside of PyTorch."
    if event.beyond_prediction:
        name, size = event.beyond_prediction[0]
        part = PARTS.get(name, name)
        yield f"The prediction is wrong most in {part}: {format_gib(size)} too low."


def _next(last: Attempt) -> str:
    rung = last.next_layout
    if rung is None:
        return (
            "No leaner layout of this global batch is left on these ranks: use more of them, or "
            "shorter sequences."
        )
    seconds = format_seconds(rung.estimate.step_seconds.expected)
    return (
        f"Next to try: {rung.words} (predicted step {seconds}); fsdpplan run --from plan "
        "--fallback 2 does so."
    )

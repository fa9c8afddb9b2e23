"""Adapters (LoRA): what is not planned with them, each with what to use in its place."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.search.rules.rule import Problem
from fsdpplan.spec.training import Training


def adapter_problems(training: Training) -> Iterator[Problem]:
    """Why these adapters cannot be planned, in whatever layout."""
    if training.adapters is not None:
        yield Problem(
            reason="adapters are not priced yet",
            sentence="adapters (LoRA) are not priced yet: leave --lora out",
        )

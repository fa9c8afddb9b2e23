"""Rule: what legality says of a layout that cannot be trained or is not priced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken rule."""

    reason: str
    """A few words, the same for every layout that breaks the rule."""
    sentence: str
    """The numbers, and what to use instead."""

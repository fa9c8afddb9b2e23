"""Skipped: a row that is not predicted, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Why a row is not predicted."""

    reason: str
    """A few words, the same for all rows that are skipped for it; rows are counted by it."""
    detail: str = ""
    """The numbers of this row."""

    @property
    def sentence(self) -> str:
        """Reason and detail."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class NotExpressed(Exception):
    """Raised inside this room where a row cannot be expressed; `express` turns it into a value."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.skipped = Skipped(reason=reason, detail=detail)


def given(value: Value | None, column: str) -> Value:
    """`value`, or the row is skipped because `column` is empty."""
    if value is None:
        raise NotExpressed(f"{column} is not given")
    return value

"""From options to the values that the other rooms take, each with where it came from and what is to
be said about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", covariant=True)
Sources = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """A value, where its fields came from, and what is to be said about it."""

    value: T
    sources: Sources = ()
    """(field, where its value came from)."""
    assumptions: tuple[str, ...] = ()
    """Sentences on what was not given and what is taken instead."""
    warnings: tuple[str, ...] = ()
    """Sentences on what the user should look at."""


def flag(name: str) -> str:
    """How the option of a field is typed."""
    return "--" + name.replace("_", "-")

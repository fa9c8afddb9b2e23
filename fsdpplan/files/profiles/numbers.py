"""Numbers of a profile: each is written `key = { value = 1.0, source = "name" }`, where
`[sources.name]` says what it is taken from. A number without a source is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, TypeVar

from fsdpplan.errors import SpecError
from fsdpplan.files.table import UNREADABLE, Table

Sources = tuple[tuple[str, str], ...]
Relatives = Callable[[str], Table]
"""Finds the document of a profile that another one names."""
Value = TypeVar("Value")

_SOURCE_KEYS = ("what", "url", "how", "from", "measured_on", "date")
_INTEGERS = ("memory_bytes", "multiprocessors", "context_bytes", "communicator_bytes", "ports")


def parse_toml(text: str, *, where: str) -> Table:
    try:
        return Table(where=where, values=_values(text))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where} is not TOML: {error}; correct it there") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise SpecError(f"{where} cannot be read as TOML: {UNREADABLE}; check the path") from error


@lru_cache(maxsize=256)
def _values(text: str) -> dict[str, Any]:
    """What `text` says, which nobody changes: profiles name the same relatives again and again."""
    return tomllib.loads(text)


def read_sources(table: Table) -> dict[str, str]:
    """Each source as one line of text."""
    lines: dict[str, str] = {}
    for key in table.values:
        entry = table.table(key)
        entry.refuse_unknown(_SOURCE_KEYS)
        entry.text("what")
        parts = [entry.text(part) for part in _SOURCE_KEYS if part in entry.values]
        lines[key] = "; ".join(parts)
    return lines


class SourcedNumbers:
    """Reads the numbers of one table and remembers the source of each."""

    def __init__(self, table: Table, sources: dict[str, str], *, prefix: str) -> None:
        self.table = table
        self.used: list[tuple[str, str]] = []
        self._sources = sources
        self._prefix = prefix

    def _entry(self, key: str) -> Table:
        """The inline table of `key`, its source checked and remembered."""
        if not isinstance(self.table.require(key), dict):
            raise self.table.wrong(key, 'written { value = ..., source = "..." }')
        entry = self.table.table(key)
        entry.refuse_unknown(("value", "source"))
        source = entry.text("source")
        if source not in self._sources:
            raise entry.wrong("source", f"one of [sources]: {', '.join(sorted(self._sources))}")
        self.used.append((f"{self._prefix}{key}", self._sources[source]))
        return entry

    def read(self, key: str) -> int | float:
        """A whole number where the field counts bytes or things, else a finite number."""
        entry = self._entry(key)
        return entry.integer("value", lowest=0) if key in _INTEGERS else entry.number("value")

    def fields_of(self, spec: type, *, besides: frozenset[str]) -> dict[str, Any]:
        """The numbers of a dataclass by field; one that has a default may be left out."""
        numbers = [field for field in fields(spec) if field.name not in besides]
        optional = {field.name for field in numbers if field.default is not MISSING}
        return {
            field.name: self.read(field.name)
            for field in numbers
            if field.name in self.table.values or field.name not in optional
        }

    def integer(self, key: str, *, lowest: int = 1) -> int:
        """A whole number of at least `lowest`."""
        return self._entry(key).integer("value", lowest=lowest)

    def text(self, key: str) -> str:
        """A text of one line."""
        return self._entry(key).text("value")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        return texts(self._entry(key), "value")

    def flag(self, key: str) -> bool:
        """True or false."""
        return self._entry(key).flag("value")

    def choice(self, key: str, choices: Iterable[str]) -> str:
        """One of `choices`."""
        return self._entry(key).choice("value", choices)


def texts(table: Table, key: str) -> tuple[str, ...]:
    """A list of texts."""
    values = table.require(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise table.wrong(key, "a list of texts")
    return tuple(values)


def checked(table: Table, build: Callable[[], Value]) -> Value:
    """`build()`, its complaint headed by the file."""
    try:
        return build()
    except SpecError as error:
        raise SpecError(f"{table.where}: {table.prefix}{error}") from error


def taken_over(
    sources: Sources, prefix: str, names: tuple[str, ...], relative: str, to_prefix: str = ""
) -> dict[str, str]:
    """Sources of the fields of a relative, by the fields that take them over."""
    wanted = {prefix + name: (to_prefix or prefix) + name for name in names}
    return {
        wanted[field]: f"taken over from {relative}: {source}"
        for field, source in sources
        if field in wanted
    }

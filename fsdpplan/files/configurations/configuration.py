"""What a configuration of another tool asks for, in the words of this one's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Options: TypeAlias = "dict[str, str]"
"""Option (its name with underscores) -> its value as it is typed."""
Reader: TypeAlias = "Callable[[Any], Options | None]"
"""What a value asks for; None: this value is not understood. {}: it asks for nothing more."""

AUTO = "auto"
"""A value that the program around the tool fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A file, field by field."""

    tool: str
    """Such as `DeepSpeed`."""
    options: Mapping[str, str]
    """What it asks for, as options."""
    accumulation: int | None
    """Micro-batches of a step; None: not said."""
    understood: tuple[str, ...]
    """Fields that these come from."""
    idle: tuple[str, ...]
    """Fields that change nothing of a step's time or memory."""
    not_understood: tuple[str, ...]
    """All others, with their values: the prediction leaves them out."""
    notes: tuple[str, ...] = ()
    """How the tool's way of running it is priced, where that is not the very thing."""


@dataclass(slots=True, kw_only=True)
class Sorting:
    """Fields while they are sorted."""

    fields: Mapping[str, Any]
    options: Options = field(default_factory=dict)
    understood: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    not_understood: list[str] = field(default_factory=list)

    def read(self, readers: Mapping[str, Reader], idle: tuple[str, ...]) -> None:
        """Sort all fields: by their reader; or, of those without one, as idle where `idle` has them
        or a table of theirs (`scheduler.`)."""
        for name, value in self.fields.items():
            reader = readers.get(name)
            found = None if reader is None or value == AUTO else _asked(reader, value)
            if found is not None:
                self.options |= found
                self.understood.append(name)
            elif reader is None and _is_idle(name, idle):
                self.idle.append(name)
            else:
                self.not_understood.append(f"{name} = {shown(value)}")

    def finished(
        self, tool: str, *, accumulation: int | None = None, notes: tuple[str, ...] = ()
    ) -> Configuration:
        return Configuration(
            tool=tool,
            options=self.options,
            accumulation=accumulation,
            understood=tuple(self.understood),
            idle=tuple(self.idle),
            not_understood=tuple(self.not_understood),
            notes=notes,
        )


def _is_idle(name: str, idle: tuple[str, ...]) -> bool:
    return name in idle or any(name.startswith(each) for each in idle if each[-1] == ".")


def _asked(reader: Reader, value: Any) -> Options | None:
    try:
        return reader(value)
    except (TypeError, ValueError, KeyError):
        return None


def shown(value: Any) -> str:
    """A value of anybody's in a message."""
    text = ascii(value) if not isinstance(value, str) or not value.isprintable() else value
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_count(value: Any) -> bool:
    """A whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40


def count(option: str) -> Reader:
    """Reads a whole number from 1 on."""
    return lambda value: {option: str(value)} if is_count(value) else None


def one_of(option: str, words: Mapping[Any, str]) -> Reader:
    """Reads a value of a list, whatever its capitals."""
    known = {str(key).lower(): word for key, word in words.items()}
    return lambda value: {option: known[str(value).lower()]} if value is not None else None


def switch(yes: Options, no: Options | None = None) -> Reader:
    """Reads true and false."""
    return lambda value: (
        {True: dict(yes), False: dict(no or {})}[value is True] if isinstance(value, bool) else None
    )


def offload(fields: Mapping[str, Any], *names: str) -> dict[str, Reader]:
    """Readers of where parameters and the optimizer's state lie: both on the host are `--offload
    cpu`; one of them alone has no option."""
    if all(fields.get(name) == "cpu" for name in names):
        return {name: one_of("offload", {"cpu": "cpu"}) for name in names}
    return {}


def nothing(*values: Any) -> Reader:
    """Reads values that ask for nothing."""
    return lambda value: {} if any(value is one or value == one for one in values) else None

"""Distrust: values out of data that anybody may have written. What is not of the form is None."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


def number(facts: Mapping[str, object], name: str, *, least: int = 1) -> int | None:
    """A whole number of at least `least` and below 2**63."""
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if least <= value < 2**63 else None


def line(facts: Mapping[str, object], name: str) -> str | None:
    """A text of one printable line."""
    value = facts.get(name)
    text = value.strip() if isinstance(value, str) else ""
    return text if text and text.isprintable() else None


def switch(facts: Mapping[str, object], name: str) -> bool | None:
    """1 for on, 0 for off."""
    value = number(facts, name, least=0)
    return bool(value) if value in (0, 1) else None


def part(facts: Mapping[str, object], name: str) -> Mapping[str, object] | None:
    """An object."""
    value = facts.get(name)
    return value if isinstance(value, Mapping) else None


def parts(facts: Mapping[str, object], name: str) -> Iterator[Mapping[str, object]]:
    """The objects of a list; what is none of them is left out."""
    values = facts.get(name)
    for value in values if isinstance(values, list) else ():
        if isinstance(value, Mapping):
            yield value


def pci_address(text: str | None) -> str | None:
    """A PCI address as sysfs writes it: `0000:1b:00.0` for NVML's `00000000:1B:00.0`. Nothing can
    stand at address 0, which drivers give for unknown."""
    match = re.fullmatch(
        r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", (text or "").strip().lower()
    )
    if match is None or not match[0].strip("0:."):
        return None
    return f"{int(match[1], 16):04x}:{match[2]}"

"""YAML in block style, as people read it, of the values that JSON has.

A string is written plain only where no version of YAML could read anything else in it (`no`, `1e3`,
`0o7`, `1:30`, dates, `~` and `=` are quoted), as a literal block where it is text of several lines,
and otherwise between double quotes, escaped.

Source: YAML 1.1, section 5.7 (escapes), 8.1.1 (block headers), and its type repository for bool,
int, float, null, timestamp, merge and value; YAML 1.2.2, section 10.3.2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from fsdpplan.errors import SpecError

YamlValue: TypeAlias = (
    "Mapping[str, YamlValue] | Sequence[YamlValue] | str | int | float | bool | None"
)

MAX_KEY_CHARACTERS = 1000
"""YAML's readers look 1024 characters ahead for the colon after a key."""

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?::[A-Za-z0-9_./-]+)*")
"""Begins like no number, date or sign; a colon within a word ends no key."""
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_NO_POINT = re.compile(r"(-?\d+)(e[-+]\d+)")


def yaml_text(value: YamlValue) -> str:
    """One document; ends with a line break. Raises SpecError for what YAML cannot hold."""
    return "\n".join(_lines(value)) + "\n"


def yaml_scalar(value: str | int | float | bool | None) -> str:
    """A value of one line, as it stands after a key."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _float(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _quoted(value)


def _lines(value: YamlValue) -> list[str]:
    match value:
        case str():
            return [yaml_scalar(value)]
        case Mapping():
            return [line for name, item in value.items() for line in _entry(_key(name), item)] or [
                "{}"
            ]
        case Sequence():
            return [line for item in value for line in _item(item)] or ["[]"]
    return [yaml_scalar(value)]


def _entry(key: str, value: YamlValue) -> list[str]:
    if isinstance(value, str):
        header, *body = _string(value)
        return [f"{key}: {header}", *_indent(body)]
    lines = _lines(value)
    if isinstance(value, Mapping | Sequence) and value:
        return [f"{key}:", *_indent(lines)]
    return [f"{key}: {lines[0]}"]


def _item(value: YamlValue) -> list[str]:
    first, *rest = _string(value) if isinstance(value, str) else _lines(value)
    return [f"- {first}", *_indent(rest)]


def _string(text: str) -> list[str]:
    """A literal block where the text reads better as one: its header, then its lines."""
    lines = text.removesuffix("\n").split("\n")
    readable = (line.replace("\t", "").isprintable() for line in lines)
    # A block whose first line is blank or indented would need its indentation spelled out.
    framed = lines[0].strip() == lines[0].rstrip() != "" and lines[-1].strip() != ""
    if "\n" not in text or not framed or not all(readable):
        return [yaml_scalar(text)]
    return ["|" if text.endswith("\n") else "|-", *lines]


def _key(name: str) -> str:
    if len(name) > MAX_KEY_CHARACTERS:
        raise SpecError(
            f"{name[:20]!r}... is a name of {len(name)} characters; a YAML file can hold "
            f"{MAX_KEY_CHARACTERS}: shorten it"
        )
    return yaml_scalar(name)


def _quoted(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecError(
            f"{text!r} is not text: it has bytes that are no UTF-8, which YAML cannot hold; "
            "write it in UTF-8"
        )
    return "".join(
        character if character.isprintable() else _escaped(character)
        for character in json.dumps(text, ensure_ascii=False)
    )


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _float(value: float) -> str:
    if not math.isfinite(value):
        raise SpecError(f"{value} is no number that a manifest can hold: give a finite one")
    # YAML 1.1 reads 1e+22 as a string: it wants a point.
    text = repr(value)
    match = _NO_POINT.fullmatch(text)
    return f"{match[1]}.0{match[2]}" if match else text


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]

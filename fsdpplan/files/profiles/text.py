"""Text of profiles: what every file of a node that fsdpplan writes has in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Protocol

from fsdpplan.files.profiles.levels import Joins
from fsdpplan.spec.cluster import Level
from fsdpplan.spec.nodes import Network

_OF_LEVEL = ("name", "domain_gpus", "whole_gpus")
_LONGEST = 2000
"""Longer texts are refused where a profile is read."""


class SourceNames(Protocol):
    """Names of the tables `[sources.NAME]` of a file, by the field that a number is of."""

    def knows(self, field: str) -> bool:
        """The field says where its value is from."""

    def of(self, field: str) -> str:
        """The name of the field's source."""


def level_lines(
    level: Level, *, joins: Joins, domain_gpus: int | None, names: SourceNames
) -> Iterator[str]:
    """One `[[levels]]` table; a number that is what it is without a word is left out."""
    prefix = f"cluster.levels.{level.name}."
    yield "[[levels]]"
    yield f"name = {quoted(level.name)}"
    yield f"joins = {quoted(joins)}"
    if joins == "domain":
        size = f"{prefix}domain_gpus"
        source = names.of(size if names.knows(size) else f"{prefix}ports")
        yield number_line("domain_gpus", domain_gpus, source)
    for field in fields(Level):
        value, where = getattr(level, field.name), f"{prefix}{field.name}"
        if field.name not in _OF_LEVEL and (value != field.default or names.knows(where)):
            yield number_line(field.name, value, names.of(where))


def network_lines(network: Network, names: SourceNames) -> Iterator[str]:
    """The `[network]` table with what is known."""
    yield "[network]"
    for field in fields(Network):
        value = getattr(network, field.name)
        if field.name != "evidence" and value != field.default:
            yield number_line(field.name, value, names.of(f"cluster.network.{field.name}"))


def number_line(key: str, value: object, source: str) -> str:
    """`key = { value = ..., source = "..." }`."""
    return f"{key} = {{ value = {_value(value)}, source = {quoted(source)} }}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(quoted(str(one)) for one in value)}]"
    return repr(value) if isinstance(value, int | float) else quoted(str(value))


def quoted(text: str) -> str:
    """A TOML text of one line; what cannot be printed becomes a space, and what is too
    long is cut."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    short = plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 3]}..."
    return json.dumps(short, ensure_ascii=False)

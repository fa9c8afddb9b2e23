"""Node profiles as text: what `detect --save` writes, read back as the same profile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields

from fsdpplan.files.profile_levels import LevelProfile
from fsdpplan.files.profile_nodes import NodeProfile
from fsdpplan.spec.cluster import Level, WeakSpot
from fsdpplan.spec.network import Network

_OF_LEVEL = ("name", "domain_gpus")
_LONGEST = 2000
"""Longer texts are refused where a profile is read."""


class _Names:
    """Gives each source a short name, in the order of use."""

    def __init__(self, profile: NodeProfile) -> None:
        self._texts = dict(profile.sources)
        self.used: dict[str, str] = {}

    def knows(self, field: str) -> bool:
        """The field says where its value is from."""
        return field in self._texts

    def of(self, field: str) -> str:
        """The name of the field's source."""
        text = self._texts.get(field, "as the program that wrote this takes it")
        return self.used.setdefault(text, f"s{len(self.used) + 1}")


def node_text(profile: NodeProfile) -> str:
    """A node profile in TOML whose device is in the catalogue."""
    names = _Names(profile)
    parts = [
        _lines(_head(profile, names)),
        *(_lines(_level(level, names)) for level in profile.levels),
        *([] if profile.network is None else [_lines(_network(profile.network, names))]),
        *(_lines(_weak(spot, index, names)) for index, spot in enumerate(profile.weak)),
    ]
    parts += [
        _lines((f"[sources.{name}]", f"what = {quoted(text)}")) for text, name in names.used.items()
    ]
    return "\n\n".join(parts) + "\n"


def _lines(lines: Iterator[str] | tuple[str, ...]) -> str:
    return "\n".join(lines)


def _head(profile: NodeProfile, names: _Names) -> Iterator[str]:
    yield "# Bandwidths are one direction: NVLink per GPU, the network per port."
    yield "schema_version = 1"
    yield 'kind = "node"'
    yield f"name = {quoted(profile.name)}"
    yield f"description = {quoted(f'{profile.gpus_per_node} x {profile.device}, as found')}"
    yield f"device = {quoted(profile.device)}"
    yield number_line("gpus_per_node", profile.gpus_per_node, names.of("cluster.gpus_per_node"))


def _level(profile: LevelProfile, names: _Names) -> Iterator[str]:
    level = profile.level
    prefix = f"cluster.levels.{level.name}."
    yield "[[levels]]"
    yield f"name = {quoted(level.name)}"
    yield f"joins = {quoted(profile.joins)}"
    if profile.joins == "domain":
        yield number_line("domain_gpus", profile.domain_gpus, names.of(f"{prefix}ports"))
    for field in fields(Level):
        value, where = getattr(level, field.name), f"{prefix}{field.name}"
        if field.name not in _OF_LEVEL and (value != field.default or names.knows(where)):
            yield number_line(field.name, value, names.of(where))


def _network(network: Network, names: _Names) -> Iterator[str]:
    yield "[network]"
    for field in fields(Network):
        value = getattr(network, field.name)
        if field.name != "evidence" and value != field.default:
            yield number_line(field.name, value, names.of(f"cluster.network.{field.name}"))


def _weak(spot: WeakSpot, index: int, names: _Names) -> Iterator[str]:
    yield "[[weak]]"
    yield f"nodes = [{', '.join(map(quoted, spot.nodes))}]"
    if spot.level is not None:
        yield f"level = {quoted(spot.level)}"
    source = names.of(f"cluster.weak.{index}")
    yield number_line("remaining_fraction", spot.remaining_fraction, source)
    yield f"text = {quoted(spot.text)}"


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

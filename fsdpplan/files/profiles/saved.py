"""Node profiles as text: what `detect --save` writes, read back as the same profile."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.files.profiles.levels import LevelProfile
from fsdpplan.files.profiles.nodes import HOST_MEMORY, NodeProfile
from fsdpplan.files.profiles.text import (
    SourceNames,
    level_lines,
    network_lines,
    number_line,
    quoted,
)
from fsdpplan.spec.cluster import WeakSpot


class _Names(SourceNames):
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
        *([] if profile.network is None else [_lines(network_lines(profile.network, names))]),
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
    if (size := profile.host_memory_bytes) is not None:
        yield number_line(HOST_MEMORY, size, names.of(f"cluster.{HOST_MEMORY}"))


def _level(profile: LevelProfile, names: _Names) -> Iterator[str]:
    return level_lines(
        profile.level, joins=profile.joins, domain_gpus=profile.domain_gpus, names=names
    )


def _weak(spot: WeakSpot, index: int, names: _Names) -> Iterator[str]:
    yield "[[weak]]"
    yield f"nodes = [{', '.join(map(quoted, spot.nodes))}]"
    if spot.level is not None:
        yield f"level = {quoted(spot.level)}"
    source = names.of(f"cluster.weak.{index}")
    yield number_line("remaining_fraction", spot.remaining_fraction, source)
    yield f"text = {quoted(spot.text)}"

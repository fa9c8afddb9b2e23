"""The TOML format of hardware profiles: one device, node type or cluster a file, and `physics`."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, get_args

from fsdpplan.errors import ProfileNotFound
from fsdpplan.files.profiles.devices import (
    DEVICE_KEYS,
    DeviceProfile,
    PhysicsProfile,
    read_device,
    read_physics,
)
from fsdpplan.files.profiles.devices import PHYSICS as PHYSICS
from fsdpplan.files.profiles.nodes import (
    CLUSTER_KEYS,
    NODE_KEYS,
    ClusterProfile,
    NodeProfile,
    read_cluster,
    read_node,
)
from fsdpplan.files.profiles.numbers import Relatives, parse_toml, read_sources
from fsdpplan.files.table import Table, path_text, read_text, short

ProfileKind = Literal["device", "node", "cluster", "physics"]
Profile = DeviceProfile | NodeProfile | ClusterProfile | PhysicsProfile

SCHEMA_VERSION = 1
LIMIT_BYTES = 256 * 1024
_HEADER = ("schema_version", "kind", "name", "description", "sources")


@cache
def profiles_folder() -> Path:
    """Where the catalogue lies: wheels carry it inside the package; a checkout has it beside it."""
    package = Path(__file__).resolve().parents[2]
    packaged = package / "hardware_profiles"
    return packaged if packaged.is_dir() else package.parent / "hardware_profiles"


def read_profile(path: Path) -> Profile:
    """The profile in the file at `path`; its relatives lie beside it or in the catalogue."""
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="profile")

    def relatives(name: str) -> Table:
        beside = path.parent / f"{name}.toml"
        return (
            _document(beside) if _is_plain(name) and os.path.isfile(beside) else _catalogued(name)
        )

    return parse_profile(text, where=path_text(path), relatives=relatives)


def parse_profile(text: str, *, where: str, relatives: Relatives | None = None) -> Profile:
    """The profile in `text`; `where` names the file in messages.

    `relatives` finds the profiles that it names; None: those of the catalogue.
    """
    relatives = relatives or _catalogued
    table = parse_toml(text, where=where)
    if table.integer("schema_version") != SCHEMA_VERSION:
        raise table.wrong("schema_version", f"{SCHEMA_VERSION}, the version read here")
    sources = read_sources(table.table("sources"))
    table.text("description")
    match table.choice("kind", get_args(ProfileKind)):
        case "device":
            table.refuse_unknown((*_HEADER, *DEVICE_KEYS))
            return read_device(table, sources, relatives)
        case "node":
            table.refuse_unknown((*_HEADER, *NODE_KEYS))
            return read_node(table, sources, relatives)
        case "physics":
            table.refuse_unknown((*_HEADER, "fit", "error"))
            return read_physics(table, sources)
        case _:
            table.refuse_unknown((*_HEADER, *CLUSTER_KEYS))
            return read_cluster(table, sources, relatives)


def _document(path: Path) -> Table:
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="profile")
    return parse_toml(text, where=path_text(path))


@lru_cache(maxsize=256)
def _catalogued(name: str) -> Table:
    path = profiles_folder() / f"{name}.toml"
    if not _is_plain(name) or not os.path.isfile(path):
        raise ProfileNotFound(
            f"no hardware profile is called {short(name)}; name one of `fsdpplan profiles`"
        )
    return _document(path)


def _is_plain(name: str) -> bool:
    return name.isprintable() and len(name) < 100 and not set(name) & set("/\\")

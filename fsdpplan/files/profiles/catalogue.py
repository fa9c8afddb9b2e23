"""The catalogue of hardware profiles: finding them by name, path or GPU, and reading their TOML:
one device, node type or cluster a file, and `physics`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, get_args

from fsdpplan.errors import ProfileNotFound, SpecError, nearest
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


_USUAL_NODES = {
    "a100": "dgx-a100-80g-hdr",
    "h100": "dgx-h100",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
    "b300": "dgx-b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "mi300x": "azure-nd-mi300x-v5",
}
"""Name of a GPU -> the machine that is meant by it: its maker's own with one adapter a GPU, or that
of a cloud where the maker sells none."""


@cache
def profiles_folder() -> Path:
    """Where the catalogue lies: wheels carry it inside the package; a checkout has it beside it."""
    package = Path(__file__).resolve().parents[2]
    packaged = package / "hardware_profiles"
    return packaged if packaged.is_dir() else package.parent / "hardware_profiles"


def read_profile(path: Path) -> Profile:
    """The profile in the file at `path`; its relatives lie beside it or in the catalogue."""
    return _shipped(path) if path.parent == profiles_folder() else _read(path)


@lru_cache(maxsize=256)
def _shipped(path: Path) -> Profile:
    """A file of the catalogue, which stays as it is while the program runs."""
    return _read(path)


def _read(path: Path) -> Profile:
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


_KINDS: dict[ProfileKind, type] = {
    "device": DeviceProfile,
    "node": NodeProfile,
    "cluster": ClusterProfile,
    "physics": PhysicsProfile,
}


def profile_names(kind: ProfileKind | None = None) -> list[str]:
    """Names of the profiles that come with fsdpplan, of one kind or of all."""
    if kind is None:
        return list(_names())
    return [name for name in _names() if isinstance(load_profile(name), _KINDS[kind])]


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in profiles_folder().glob("*.toml")))


def load_profile(name_or_path: str) -> Profile:
    """The profile of that name in the catalogue, or in the file at that path."""
    path = _find(name_or_path)
    if path.parent != profiles_folder():
        return read_profile(path)
    stat = path.stat()
    return _read_once(path, (stat.st_mtime_ns, stat.st_size))


@cache
def _read_once(path: Path, _version: tuple[int, int]) -> Profile:
    """A profile of the catalogue, read again where a fit has written it."""
    return read_profile(path)


def profile_text(name_or_path: str) -> str:
    """The profile as it is written, for showing."""
    return read_text(_find(name_or_path), limit_bytes=LIMIT_BYTES, what="profile")


def profiles_mentioning(*words: str) -> Iterator[Profile]:
    """Profiles of the catalogue in whose text one of `words` stands: to read all takes a second."""
    for name in _names():
        text = profile_text(name)
        if any(word in text for word in words):
            yield load_profile(name)


def load_device(name_or_path: str, *, beside: Path | None = None) -> DeviceProfile:
    """The device profile of that name or path; `beside`: a folder to look in first."""
    profile = read_profile(_find(name_or_path, beside=beside, kinds=("device",)))
    if not isinstance(profile, DeviceProfile):
        raise SpecError(
            f"{short(name_or_path)} is not a device profile; use one of "
            f"{', '.join(profile_names('device'))}"
        )
    return profile


def profile_for_gpus(gpu_names: Sequence[str]) -> str | None:
    """The node profile that has these GPUs (names as NVML gives them), or None.

    Of several, the smallest node with room for all of them; then NVIDIA's own system before those
    of clouds, which have the same board; then the first by name.
    """
    if len(set(gpu_names)) != 1:
        return None
    fitting: list[tuple[int, bool, str]] = []
    for name in profile_names("node"):
        node = load_profile(name)
        if isinstance(node, NodeProfile) and node.gpus_per_node is not None:
            known = load_device(node.device).nvml_names
            if gpu_names[0] in known and node.gpus_per_node >= len(gpu_names):
                fitting.append((node.gpus_per_node, not name.startswith("dgx-"), name))
    return min(fitting)[2] if fitting else None


def _find(
    name_or_path: str,
    *,
    beside: Path | None = None,
    kinds: tuple[ProfileKind, ...] = ("device", "node", "cluster"),
) -> Path:
    """The file of a profile: a path if it looks like one, else a name in the catalogue.

    `kinds` are those whose names are offered when there is none.
    """
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return Path(name_or_path)
    if beside is not None and os.path.isfile(beside / f"{name_or_path}.toml"):
        return beside / f"{name_or_path}.toml"
    if name_or_path in _names():
        return profiles_folder() / f"{name_or_path}.toml"
    if beside is None and "node" in kinds and (usual := usual_node(name_or_path)) is not None:
        return profiles_folder() / f"{usual}.toml"
    # what a file names must be all of a name
    within = _within(name_or_path, kinds) if beside is None else []
    if len(within) == 1:
        return profiles_folder() / f"{within[0]}.toml"
    raise ProfileNotFound(
        f"no hardware profile is called {short(name_or_path)}; {_hint(name_or_path, kinds)}"
    )


def usual_node(typed: str) -> str | None:
    """The node profile that the bare name of a GPU means; None for any other name."""
    return None if typed in _names() else _USUAL_NODES.get(typed.lower())


def _within(typed: str, kinds: tuple[ProfileKind, ...]) -> list[str]:
    """Names that hold all parts of what was typed, in any order: `h100 azure`, `H100`; one alone
    that has them as words of its own is meant: `p5` is no `p5en`. That of a profile of another kind
    is no part of one."""
    parts = typed.lower().replace("-", " ").replace("_", " ").split()
    if not parts or not _is_word(typed) or os.path.isfile(Path(f"{typed}.toml")):
        return []
    if typed.lower() in _names():
        return []
    names = {name for kind in kinds for name in profile_names(kind)}
    with_words = [name for name in names if set(parts) <= set(name.split("-"))]
    if len(with_words) == 1:
        return with_words
    return sorted(name for name in names if all(part in name for part in parts))


def _is_word(typed: str) -> bool:
    return typed.isprintable() and len(typed) < 100


def _hint(typed: str, kinds: tuple[ProfileKind, ...]) -> str:
    if _is_word(typed) and os.path.isfile(Path(f"{typed}.toml")):
        return f"type {typed}.toml for the file here"
    names = sorted(name for kind in kinds for name in profile_names(kind))
    plain = typed.strip().lower()[:100]
    near = _within(typed, kinds) or nearest(plain, names)
    near = near or difflib.get_close_matches(plain, names, n=3, cutoff=0.3)
    hint_words = f"nearest: {', '.join(near)}; " if near else ""
    return f"{hint_words}`fsdpplan profiles` lists all; or give the path of a TOML file"


def load_node(name_or_path: str, *, beside: Path | None = None) -> NodeProfile:
    """The node profile of that name or path; `beside`: a folder to look in first."""
    path = _find(name_or_path, beside=beside, kinds=("node",))
    profile = read_profile(path)
    if not isinstance(profile, NodeProfile):
        raise SpecError(
            f"{path}: {short(name_or_path)} is not a node profile; name one of "
            "`fsdpplan profiles --kind node`"
        )
    return profile


def load_machines(name_or_path: str) -> tuple[NodeProfile | ClusterProfile, Path]:
    """The node or cluster profile behind --hardware, and the folder that it lies in."""
    path = _find(name_or_path, kinds=("node", "cluster"))
    profile = read_profile(path)
    if isinstance(profile, DeviceProfile):
        nodes = [n for n in profile_names("node") if _has_device(n, profile.device.name)]
        raise SpecError(
            f"{short(name_or_path)} is a device, not a node type; use --hardware with "
            f"{' or '.join(nodes) or 'a node profile'}"
        )
    if isinstance(profile, PhysicsProfile):
        raise SpecError(
            f"{short(name_or_path)} holds what all GPUs share; use --hardware with a node profile, "
            "which `fsdpplan profiles` lists"
        )
    return profile, path.parent


def _has_device(node_name: str, device: str) -> bool:
    node = load_profile(node_name)
    return isinstance(node, NodeProfile) and node.device == device

"""Searching the catalogue of hardware profiles by words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.profiles.catalogue import (
    Profile,
    ProfileKind,
    load_profile,
    profile_names,
    profile_text,
)
from fsdpplan.files.profiles.devices import DeviceProfile
from fsdpplan.files.profiles.nodes import ClusterProfile, NodeProfile
from fsdpplan.files.profiles.numbers import parse_toml
from fsdpplan.files.search import having_all, nothing_found, split_words
from fsdpplan.files.table import short


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A profile as the catalogue lists it."""

    name: str
    description: str
    profile: Profile
    text: str
    """Its file."""

    @property
    def kind(self) -> ProfileKind:
        """What it describes."""
        return kind_of(self.profile)


def kind_of(profile: Profile) -> ProfileKind:
    """device, node, cluster or physics."""
    match profile:
        case DeviceProfile():
            return "device"
        case NodeProfile():
            return "node"
        case ClusterProfile():
            return "cluster"
        case _:
            return "physics"


def read_entry(name_or_path: str) -> Entry:
    """The profile of that name or path with its description."""
    text = profile_text(name_or_path)
    document = parse_toml(text, where=short(name_or_path))
    return Entry(
        name=document.text("name"),
        description=document.text("description"),
        profile=load_profile(name_or_path),
        text=text,
    )


def find_entries(words: Sequence[str], kind: ProfileKind | None = None) -> tuple[Entry, ...]:
    """The profile that is called so or lies at that path; else all in which each word stands.

    A word may stand in the name, in the description, in the name of the device, or in what the
    driver calls it; capitals do not matter. No words: all profiles.
    """
    found = _exact(words) or _matches(words)
    kept = tuple(entry for entry in found if kind in (None, entry.kind))
    if not kept:
        raise SpecError(
            f"the profiles found are no {kind} profiles, but such as {found[0].name}, a profile of "
            f"the kind {found[0].kind}: leave out --kind"
        )
    return kept


def _exact(words: Sequence[str]) -> list[Entry]:
    if len(words) != 1:
        return []
    (word,) = words
    if "/" in word or word.endswith(".toml"):
        return [read_entry(word)]
    return [read_entry(word.lower())] if word.lower() in profile_names() else []


def _matches(words: Sequence[str]) -> list[Entry]:
    entries = {name: read_entry(name) for name in profile_names()}
    texts = {name: _searched(entry, entries).lower() for name, entry in entries.items()}

    def has(name: str, word: str) -> bool:
        return word in texts[name]

    found = having_all(split_words(words), list(entries), has)
    if words and not found:
        said = nothing_found("hardware profile", words, list(entries), has=has)
        raise ProfileNotFound(
            f"{said}; `fsdpplan profiles` lists all, and a path to a TOML file works too"
        )
    return [entries[name] for name in found]


def _searched(entry: Entry, entries: Mapping[str, Entry]) -> str:
    """The text in which words are sought: of a machine, its device's too."""
    own = f"{entry.name}\n{entry.description}"
    match entry.profile:
        case DeviceProfile() as device:
            return "\n".join((own, *device.nvml_names))
        case NodeProfile() as node if node.device in entries:
            return f"{own}\n{_searched(entries[node.device], entries)}"
        case ClusterProfile() as cluster:
            nodes = (entries[kind.node] for kind in cluster.node_types if kind.node in entries)
            return "\n".join((own, *(_searched(node, entries) for node in nodes)))
        case _:
            return own


def profiles_of_gres(gpu_type: str, *, gpus_per_node: int) -> dict[str, list[str]]:
    """Device -> node types with so many, likeliest first, that Slurm's GRES may call so: `h100`, or
    `nvidia_h100_80gb_hbm3`, as Slurm itself finds it.

    Products that a driver knows go before others. Node types of just so many come before larger
    ones, and the maker's own system before those of clouds, as in `detect`.
    """
    words = re.findall(r"[a-z0-9.]+", gpu_type.lower())
    found: dict[bool, dict[str, list[tuple[int, bool, str]]]] = {True: {}, False: {}}
    for name in profile_names("node"):
        node = load_profile(name)
        if not isinstance(node, NodeProfile) or (node.gpus_per_node or 0) < gpus_per_node:
            continue
        device = load_profile(node.device)
        assert isinstance(device, DeviceProfile)
        own = (device.device.name, *device.nvml_names)
        parts = {part for one in own for part in re.findall(r"[a-z0-9.]+", one.lower())}
        begins = node.device.replace("-", "").startswith("".join(words))
        if words and (parts.issuperset(words) or begins):
            system = not name.startswith(("dgx-", "hgx-"))
            place = node.gpus_per_node or 0, system, name
            found[bool(device.nvml_names)].setdefault(node.device, []).append(place)
    return {
        device: [name for *_, name in sorted(places)]
        for device, places in (found[True] or found[False]).items()
    }

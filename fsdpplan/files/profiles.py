"""The catalogue of hardware profiles, and clusters made from them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdpplan.errors import ProfileNotFound, SpecError
from fsdpplan.files.profile_folder import profiles_folder as profiles_folder
from fsdpplan.files.profile_format import (
    LIMIT_BYTES,
    ClusterProfile,
    DeviceProfile,
    NodeProfile,
    PhysicsProfile,
    Profile,
    ProfileKind,
    read_profile,
)
from fsdpplan.files.profile_numbers import Sources
from fsdpplan.files.table import read_text, short
from fsdpplan.spec.cluster import Cluster, Level

_MAX_GPUS = 1_000_000
_KINDS: dict[ProfileKind, type] = {
    "device": DeviceProfile,
    "node": NodeProfile,
    "cluster": ClusterProfile,
    "physics": PhysicsProfile,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCluster:
    """A cluster and, for each of its fields, where the value comes from."""

    cluster: Cluster
    sources: Sources


def profile_names(kind: ProfileKind | None = None) -> list[str]:
    """Names of the profiles that come with fsdpplan, of one kind or of all."""
    folder = profiles_folder()
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if kind is None:
        return names
    return [name for name in names if isinstance(load_profile(name), _KINDS[kind])]


def load_profile(name_or_path: str) -> Profile:
    """The profile of that name in the catalogue, or in the file at that path."""
    return read_profile(_find(name_or_path))


def profile_text(name_or_path: str) -> str:
    """The profile as it is written, for showing."""
    return read_text(_find(name_or_path), limit_bytes=LIMIT_BYTES, what="profile")


def load_device(name_or_path: str, *, beside: Path | None = None) -> DeviceProfile:
    """The device profile of that name or path; `beside`: a folder to look in first."""
    profile = read_profile(_find(name_or_path, beside=beside, kinds=("device",)))
    if not isinstance(profile, DeviceProfile):
        raise SpecError(
            f"{short(name_or_path)} is not a device profile; use one of "
            f"{', '.join(profile_names('device'))}"
        )
    return profile


def load_cluster(
    name_or_path: str,
    *,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    device: str | None = None,
    intra_bandwidth_bytes_per_second: float | None = None,
    inter_bandwidth_bytes_per_second: float | None = None,
) -> LoadedCluster:
    """A cluster of `gpus` devices from a node or cluster profile, with the flags laid over it.

    Bandwidths are per GPU and one direction. Fewer GPUs than a node has use a part of one node.
    """
    node, folder, profiled_gpus, sources = _node_of(name_or_path)
    count = _gpu_count(node, asked=gpus, profiled=profiled_gpus)
    per_node = _gpus_per_node(node, gpus=count, asked=gpus_per_node)
    chosen = load_device(device) if device else load_device(node.device, beside=folder)
    cluster = Cluster(
        name=node.name,
        device=chosen.device,
        gpus=count,
        gpus_per_node=per_node,
        levels=_levels(node, gpus=count, per_node=per_node),
    )
    named = dict((*chosen.sources, *node.sources, *sources))
    flags = {
        "cluster.gpus": ("--gpus", gpus),
        "cluster.gpus_per_node": ("--gpus-per-node", gpus_per_node),
        "cluster.device": ("--gpu", device),
    }
    named |= {field: f"flag {flag}" for field, (flag, value) in flags.items() if value is not None}
    if intra_bandwidth_bytes_per_second is not None:
        cluster = _with_intra(cluster, intra_bandwidth_bytes_per_second)
        named |= _level_sources(cluster.levels[0], "flag --intra-bw, per GPU and direction")
    if inter_bandwidth_bytes_per_second is not None:
        cluster = _with_inter(cluster, inter_bandwidth_bytes_per_second)
        named |= _level_sources(cluster.levels[-1], "flag --inter-bw, per GPU and direction")
    return LoadedCluster(cluster=cluster, sources=_used(named, cluster))


def profile_for_gpus(gpu_names: Sequence[str]) -> str | None:
    """The node profile that has these GPUs (names as NVML gives them), or None.

    Of several, the smallest node with room for all of them; then the first by name.
    """
    if len(set(gpu_names)) != 1:
        return None
    fitting: list[tuple[int, str]] = []
    for name in profile_names("node"):
        node = load_profile(name)
        if isinstance(node, NodeProfile) and node.gpus_per_node is not None:
            known = load_device(node.device).nvml_names
            if gpu_names[0] in known and node.gpus_per_node >= len(gpu_names):
                fitting.append((node.gpus_per_node, name))
    return min(fitting)[1] if fitting else None


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
    if beside is not None and (beside / f"{name_or_path}.toml").is_file():
        return beside / f"{name_or_path}.toml"
    if name_or_path in profile_names():
        return profiles_folder() / f"{name_or_path}.toml"
    raise ProfileNotFound(
        f"no hardware profile is called {short(name_or_path)}; {_hint(name_or_path, kinds)}"
    )


def _hint(typed: str, kinds: tuple[ProfileKind, ...]) -> str:
    names = sorted(name for kind in kinds for name in profile_names(kind))
    plain = typed.strip().lower()[:100]
    within = [name for name in names if plain and plain in name]
    near = within or difflib.get_close_matches(plain, names, n=3, cutoff=0.3)
    nearest = f"nearest: {', '.join(near[:4])}; " if near else ""
    return f"{nearest}`fsdpplan profiles` lists all, and a path to a TOML file works too"


def _node_of(name_or_path: str) -> tuple[NodeProfile, Path, int | None, Sources]:
    """The node profile behind a name, its folder, and the GPUs that a cluster profile fixes."""
    path = _find(name_or_path, kinds=("node", "cluster"))
    profile = read_profile(path)
    if isinstance(profile, NodeProfile):
        return profile, path.parent, None, ()
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
    node = read_profile(_find(profile.node, beside=path.parent))
    if not isinstance(node, NodeProfile):
        raise SpecError(f"{path}: node {short(profile.node)} is not a node profile")
    return replace(node, name=profile.name), path.parent, profile.gpus, profile.sources


def _has_device(node_name: str, device: str) -> bool:
    node = load_profile(node_name)
    return isinstance(node, NodeProfile) and node.device == device


def _gpu_count(node: NodeProfile, *, asked: int | None, profiled: int | None) -> int:
    """GPUs to use: as asked, as the cluster profile says, or one node."""
    count = next((n for n in (asked, profiled, node.gpus_per_node) if n is not None), None)
    if count is None:
        raise SpecError(f"{node.name} has no fixed size: say how many processes, such as --gpus 4")
    if not 1 <= count <= _MAX_GPUS:
        raise SpecError(f"--gpus must lie between 1 and {_MAX_GPUS}, not {short(count)}")
    return count


def _gpus_per_node(node: NodeProfile, *, gpus: int, asked: int | None) -> int:
    """GPUs used on each node: as asked, else whole nodes, or a part of a single one."""
    most = node.gpus_per_node
    if asked is None:
        return gpus if most is None else min(gpus, most)
    if not 1 <= asked <= gpus:
        raise SpecError(
            f"--gpus-per-node must lie between 1 and the {gpus} GPUs in all, not {short(asked)}"
        )
    if most is not None and asked > most:
        raise SpecError(f"a {node.name} node has {most} GPUs: use --gpus-per-node {most} or less")
    return asked


def _levels(node: NodeProfile, *, gpus: int, per_node: int) -> tuple[Level, ...]:
    inside = replace(node.levels[0].level, domain_gpus=per_node)
    if gpus <= per_node:
        return (inside,)
    if len(node.levels) == 1:
        raise SpecError(
            f"{node.name} is one node of {per_node} GPUs with no network to others: use "
            f"--gpus {per_node}, or another --hardware"
        )
    between = node.levels[1].level
    whole_node = node.gpus_per_node or per_node
    # an allocation of half of a node's GPUs drives half of its ports, but never less than one
    ports = max(1, between.ports * per_node // whole_node)
    return inside, replace(between, domain_gpus=gpus, ports=ports)


def _with_intra(cluster: Cluster, bytes_per_second: float) -> Cluster:
    if cluster.gpus_per_node == 1:
        raise SpecError("--intra-bw has no use with one GPU a node: leave it out")
    inside = replace(cluster.levels[0], ports=1, port_bandwidth_bytes_per_second=bytes_per_second)
    return replace(cluster, levels=(inside, *cluster.levels[1:]))


def _with_inter(cluster: Cluster, bytes_per_second: float) -> Cluster:
    if cluster.nodes == 1:
        raise SpecError(
            f"--inter-bw has no use on one node of {cluster.gpus_per_node} GPUs: leave it out, "
            "or ask for more --gpus"
        )
    outer = replace(
        cluster.levels[-1],
        ports=cluster.gpus_per_node,
        port_bandwidth_bytes_per_second=bytes_per_second,
    )
    return replace(cluster, levels=(*cluster.levels[:-1], outer))


def _level_sources(level: Level, source: str) -> dict[str, str]:
    prefix = f"cluster.levels.{level.name}."
    return {f"{prefix}ports": source, f"{prefix}port_bandwidth_bytes_per_second": source}


def _used(named: dict[str, str], cluster: Cluster) -> Sources:
    """Sources without those of levels that a single node does not reach."""
    reached = tuple(f"cluster.levels.{level.name}." for level in cluster.levels)
    return tuple(
        (field, source)
        for field, source in named.items()
        if not field.startswith("cluster.levels.") or field.startswith(reached)
    )

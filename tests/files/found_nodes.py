"""Profiles of recorded machines, as `detect` makes them."""

from __future__ import annotations

from pathlib import Path

from fsdpplan.files.clusters import Flags, LoadedCluster, cluster_of, load_cluster
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.files.profiles.saved import node_text
from fsdpplan.run.detect import found_node
from fsdpplan.spec.machine import Machine
from fsdpplan.topology.survey import survey_of

DATE = "2026-11-22"


def profile_of(*machines: Machine, name: str = "found") -> NodeProfile:
    return found_node(survey_of(machines), name=name, date=DATE)


def cluster(profile: NodeProfile, *, nodes: int = 1) -> LoadedCluster:
    """As `recommend` has it on the machine itself."""
    return cluster_of(profile, None, Flags(gpus=nodes * (profile.gpus_per_node or 1)))


def saved_and_read(profile: NodeProfile, folder: Path, *, nodes: int = 1) -> LoadedCluster:
    """As `recommend --hardware` has it elsewhere."""
    path = folder / "found.toml"
    path.write_text(node_text(profile), encoding="utf-8")
    return load_cluster(str(path), gpus=nodes * (profile.gpus_per_node or 1))

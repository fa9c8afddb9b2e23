"""Fit levels of links: at most five numbers of each level that has rows of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from fsdpplan.cost.network.collectives import collective_seconds
from fsdpplan.cost.network.placement import group_placement
from fsdpplan.files.profiles.catalogue import load_profile
from fsdpplan.files.profiles.nodes import NodeProfile
from fsdpplan.spec.cluster import Cluster, Level
from fsdpplan.validate.compare.kernels import CollectiveRow, cluster_of
from fsdpplan.validate.fit.search_numbers import Fitted, Numbers, Range, capped, least

FROM_BYTES = 2**20
"""Collectives below this are too short to matter in training; their rows are not fitted."""
LARGE_BYTES = 2**26

BANDWIDTH = Range(lowest=0.1, highest=0.99, starts=(0.8,))
CHUNKS = Range(lowest=1e4, highest=1e9, starts=(1e6, 1e7, 1e8))
LINKS = {
    "bandwidth_fraction": BANDWIDTH,
    "half_bandwidth_bytes": CHUNKS,
    "base_seconds": Range(lowest=1e-6, highest=1e-2, starts=(1e-5, 3e-5)),
    "start_seconds": Range(lowest=1e-7, highest=2e-5, starts=(3e-6,)),
}
SWITCH = {"multicast_fraction": Range(lowest=0.1, highest=0.99, starts=(0.7,))}
# A start over the network is no shorter, and a hop no faster, than NCCL's tuning model has them; a
# hop of RDMA by a proxy thread is no longer than 50 us, and of kernel TCP no longer than half a
# millisecond. Ports carry nine tenths of their rate in long messages: what a row takes beyond
# all that is another level's limit, or stalls and stragglers, which have no hop.
NETWORK = {
    "bandwidth_fraction": BANDWIDTH,
    "half_bandwidth_bytes": CHUNKS,
    "base_seconds": Range(lowest=8.4e-6, highest=1e-2, starts=(2e-5,)),
    "latency_seconds": Range(lowest=2.7e-6, highest=5e-5, starts=(1e-5, 3e-5)),
}
TCP = {**NETWORK, "latency_seconds": Range(lowest=2.7e-6, highest=5e-4, starts=(1e-4, 3e-4))}
# rows of one size: the latency and the chunks are a relative's
ONE_SIZE = {"bandwidth_fraction": Range(lowest=0.4, highest=0.99, starts=(0.8,))}
INFINIBAND = {**NETWORK, "bandwidth_fraction": Range(lowest=0.9, highest=0.99, starts=(0.95,))}
BETWEEN_NODES = (NETWORK, TCP, ONE_SIZE, INFINIBAND)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelFit:
    """One level of links with rows of its own."""

    profile: str
    level: str
    ranges: Mapping[str, Range]
    source: str
    """Name of the source in the profile that says how the numbers were found."""

    @property
    def key(self) -> str:
        """As `fitted_as` writes it."""
        return f"{self.profile}:{self.level}"


LEVELS = (
    LevelFit(profile="dgx-a100-80g-hdr", level="nvlink", ranges=LINKS, source="nvlink_fit"),
    LevelFit(profile="dgx-h100", level="nvlink", ranges={**LINKS, **SWITCH}, source="nvlink_fit"),
    LevelFit(profile="dgx-b200", level="nvlink", ranges={**LINKS, **SWITCH}, source="nvlink_fit"),
    LevelFit(profile="pcie-8xl40s", level="pcie", ranges=LINKS, source="pcie_fit"),
    LevelFit(profile="p4de-24xlarge", level="efa", ranges=NETWORK, source="network_fit"),
    LevelFit(profile="gcp-a3-megagpu-8g", level="fastrak", ranges=NETWORK, source="network_fit"),
    LevelFit(profile="gcp-a3-highgpu-8g", level="tcpx", ranges=TCP, source="network_fit"),
    LevelFit(profile="p5-48xlarge", level="efa", ranges=ONE_SIZE, source="network_fit"),
    LevelFit(profile="dgx-h100", level="infiniband", ranges=INFINIBAND, source="network_fit"),
    LevelFit(profile="dgx-b200", level="infiniband", ranges=INFINIBAND, source="network_fit"),
)
"""In order: a network's rows are predicted with links inside the node that were fitted before."""


def fit_levels(rows: Sequence[CollectiveRow]) -> dict[str, dict[str, float]]:
    """The numbers of each level for which its rows from 1 MiB err least, by `profile:level`."""
    fitted: dict[str, dict[str, float]] = {}
    for level in LEVELS:
        mine = rows_of(level, rows)
        groups: dict[tuple[str, str], list[CollectiveRow]] = {}
        for row in mine:
            groups.setdefault((row.source, row.collective), []).append(row)

        def error(
            point: Numbers,
            level: LevelFit = level,
            groups: Iterable[list[CollectiveRow]] = tuple(groups.values()),
        ) -> float:
            tried = {**fitted, level.key: point}
            return fmean(_group_error(group, tried) for group in groups)

        fitted[level.key] = least(error, level.ranges)
    return fitted


def rows_of(level: LevelFit, rows: Iterable[CollectiveRow]) -> list[CollectiveRow]:
    """The rows that a level is fitted to: on one node for the links inside, on more otherwise."""
    inside = level.ranges not in BETWEEN_NODES
    return [
        row
        for row in rows
        if row.profile == level.profile
        and (row.nodes == 1) is inside
        and row.gathered_bytes >= FROM_BYTES
    ]


def _group_error(rows: Sequence[CollectiveRow], fitted: Fitted) -> float:
    """Error of all rows, and of the large ones once more: those weigh most in a step."""
    errors = collective_errors(rows, fitted)
    large = [e for row, e in zip(rows, errors, strict=True) if row.gathered_bytes >= LARGE_BYTES]
    return capped(errors) + (capped(large) if large else 0.0)


def collective_errors(rows: Iterable[CollectiveRow], fitted: Fitted) -> list[float]:
    """Predicted over measured, less 1, of each row; {}: as the profiles have the links."""
    placements = {}
    errors = []
    for row in rows:
        key = (row.profile, row.gpus, row.nodes)
        if key not in placements:
            cluster = _with_levels(cluster_of(*key), row.profile, fitted)
            placements[key] = group_placement(cluster=cluster, ranks=row.gpus, stride=1)
        predicted = collective_seconds(
            collective=row.collective,
            gathered_bytes=row.gathered_bytes,
            placement=placements[key],
        )
        errors.append(predicted / row.seconds - 1)
    return errors


def _with_levels(cluster: Cluster, profile: str, fitted: Fitted) -> Cluster:
    keys = _level_keys(profile)
    levels = tuple(
        _with_numbers(level, _kept(profile, level, fitted.get(key, {})))
        for level, key in zip(cluster.levels, keys, strict=False)
    )
    return replace(cluster, levels=levels)


def _with_numbers(level: Level, numbers: Numbers) -> Level:
    return replace(
        level,
        latency_seconds=numbers.get("latency_seconds", level.latency_seconds),
        bandwidth_fraction=numbers.get("bandwidth_fraction", level.bandwidth_fraction),
        half_bandwidth_bytes=numbers.get("half_bandwidth_bytes", level.half_bandwidth_bytes),
        base_seconds=numbers.get("base_seconds", level.base_seconds),
        start_seconds=numbers.get("start_seconds", level.start_seconds),
        crowding_exponent=numbers.get("crowding_exponent", level.crowding_exponent),
        multicast_fraction=numbers.get("multicast_fraction", level.multicast_fraction),
    )


@lru_cache(maxsize=64)
def _level_keys(profile: str) -> tuple[str, ...]:
    """Whose fit each level has: its relative's, or its own."""
    node = load_profile(profile)
    assert isinstance(node, NodeProfile)
    return tuple(level.fitted_as or f"{profile}:{level.level.name}" for level in node.levels)


def _kept(profile: str, level: Level, numbers: Numbers) -> dict[str, float]:
    """`numbers` without those that the profile gives itself instead of its relative's."""
    own = _own_fields(profile, level.name)
    return {field: value for field, value in numbers.items() if field not in own}


@lru_cache(maxsize=64)
def _own_fields(profile: str, level_name: str) -> frozenset[str]:
    node = load_profile(profile)
    assert isinstance(node, NodeProfile)
    level = next(level for level in node.levels if level.level.name == level_name)
    if level.fitted_as is None:
        return frozenset()
    prefix = f"cluster.levels.{level_name}."
    taken = f"taken over from {level.fitted_as}"
    return frozenset(
        field.removeprefix(prefix)
        for field, source in node.sources
        if field.startswith(prefix) and not source.startswith(taken)
    )

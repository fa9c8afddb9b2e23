"""How often machines fail that train, as published, and what a restart takes: failures.toml beside
this.

Each published cluster says how often one of its jobs, or of its GPUs, failed. The first one, which
counted most failures and told their causes, is the default; how far the others are from it is the
default's 80 % band.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from pathlib import Path
from statistics import pstdev
from typing import Any

_FILE = Path(__file__).with_name("failures.toml")
_HOUR_SECONDS = 3600.0
_NORMAL_80 = 1.2816
"""Half-width of 80 % of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFailures:
    """What is known of clusters in general."""

    gpu_mtbf_seconds: float
    node_mtbf_seconds: float
    mtbf_factor: float
    mtbf_source: str
    node_write_bytes_per_second: float
    """Of each node, while all write."""
    node_read_bytes_per_second: float
    storage_factor: float
    storage_source: str
    save_seconds: float
    save_factor: float
    save_source: str
    restart_seconds: float
    restart_factor: float
    restart_source: str


@lru_cache(maxsize=1)
def published_failures() -> PublishedFailures:
    """The figures, and where they were published."""
    tables = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    first, *others = tables["published"]
    storage, save, restart = tables["storage"], tables["save"], tables["restart"]
    of_gpus = first["of_gpus"]
    nodes = first["gpus"] / first["gpus_per_node"]
    return PublishedFailures(
        gpu_mtbf_seconds=first["gpus"] * first["hours"] / of_gpus * _HOUR_SECONDS,
        node_mtbf_seconds=nodes * first["hours"] / (first["failures"] - of_gpus) * _HOUR_SECONDS,
        mtbf_factor=_band_factor([0.0, *(_far(one, first) for one in others)]),
        mtbf_source=first["what"],
        node_write_bytes_per_second=storage["write_bytes_per_second"],
        node_read_bytes_per_second=storage["read_bytes_per_second"],
        storage_factor=storage["factor"],
        storage_source=storage["source"],
        save_seconds=save["seconds"],
        save_factor=save["factor"],
        save_source=save["source"],
        restart_seconds=restart["seconds"],
        restart_factor=restart["factor"],
        restart_source=restart["source"],
    )


def _far(one: dict[str, Any], first: dict[str, Any]) -> float:
    """Log of one cluster's time between failures over the first one's: of all failures, or of those
    of GPUs where it tells of these alone."""
    kind = "failures" if "failures" in one else "of_gpus"
    own, its = (each["gpus"] * each["hours"] / each[kind] for each in (one, first))
    return log(own / its)


def _band_factor(logs: list[float]) -> float:
    return exp(_NORMAL_80 * pstdev(logs))

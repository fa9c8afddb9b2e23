"""Levels of links in node profiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from fsdpplan.files.profile_numbers import (
    SourcedNumbers,
    Sources,
    checked,
    read_sources,
    taken_over,
)
from fsdpplan.files.table import Table
from fsdpplan.spec.cluster import Level, LowLatency

Joins = Literal["node", "cluster"]
Relatives = Callable[[str], Table]
"""Finds the document of a profile that another one names."""

LEVEL_FIT = (
    "latency_seconds",
    "bandwidth_fraction",
    "half_bandwidth_bytes",
    "base_seconds",
    "multicast_fraction",
)
"""Fields of `Level` that are fitted, so that a relative can give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelProfile:
    """One level of links before the number of GPUs is known."""

    joins: Joins
    """`node`: the GPUs of one node; `cluster`: all nodes."""
    fitted_as: str | None
    """`node profile:level` of the relative whose fitted numbers it takes."""
    level: Level
    """Complete but for `domain_gpus`, which stands at 1."""


def read_level(
    table: Table, sources: dict[str, str], relatives: Relatives
) -> tuple[LevelProfile, Sources]:
    besides = frozenset({"name", "domain_gpus", "gpudirect", "low_latency"})
    keys = {field.name for field in fields(Level)} - besides
    table.refuse_unknown((*keys, "name", "joins", "gpudirect", "low_latency", "fitted_as"))
    name = table.text("name")
    prefix = f"cluster.levels.{name}."
    values: dict[str, Any] = {}
    named: dict[str, str] = {}
    fitted_as = table.text("fitted_as") if "fitted_as" in table.values else None
    if fitted_as is not None:
        relative, relative_sources = _relative_level(table, fitted_as, relatives)
        values |= {field: getattr(relative.level, field) for field in (*LEVEL_FIT, "low_latency")}
        from_prefix = f"cluster.levels.{relative.level.name}."
        named |= taken_over(relative_sources, from_prefix, LEVEL_FIT, fitted_as, prefix)
    numbers = SourcedNumbers(table, sources, prefix=prefix)
    given = frozenset(set(values) - set(table.values))
    values |= numbers.fields_of(Level, besides=besides | given)
    gpudirect = numbers.flag("gpudirect")
    if "low_latency" in table.values:
        values["low_latency"] = numbers.choice("low_latency", get_args(LowLatency))
    level = checked(table, lambda: Level(name=name, domain_gpus=1, gpudirect=gpudirect, **values))
    joins: Joins = "node" if table.choice("joins", get_args(Joins)) == "node" else "cluster"
    profile = LevelProfile(joins=joins, fitted_as=fitted_as, level=level)
    return profile, tuple((named | dict(numbers.used)).items())


def _relative_level(
    table: Table, fitted_as: str, relatives: Relatives
) -> tuple[LevelProfile, Sources]:
    node_name, _, level_name = fitted_as.partition(":")
    document = relatives(node_name)
    rows = document.values.get("levels")
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        if isinstance(row, dict) and row.get("name") == level_name and "fitted_as" not in row:
            row_table = Table(where=document.where, values=row, prefix=f"levels[{index}].")
            return read_level(row_table, read_sources(document.table("sources")), relatives)
    raise table.wrong("fitted_as", 'written "node profile:level", of a level with its own fit')

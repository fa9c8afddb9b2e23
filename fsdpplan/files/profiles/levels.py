"""Levels of links in node and cluster profiles, and the levels of a cluster of some size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.numbers import (
    Relatives,
    SourcedNumbers,
    Sources,
    checked,
    read_sources,
    taken_over,
)
from fsdpplan.files.table import Table, short
from fsdpplan.spec.cluster import NVLINK, Level, LowLatency

Joins = Literal["node", "domain", "cluster"]

LEVEL_FIT = (
    "latency_seconds",
    "bandwidth_fraction",
    "half_bandwidth_bytes",
    "base_seconds",
    "start_seconds",
    "crowding_exponent",
    "multicast_fraction",
)
"""Fields of `Level` that are fitted."""
LEVEL_LOAN = (*LEVEL_FIT, "low_latency")
"""Fields that a relative can give."""

_DOMAIN = ("domain_gpus", "domain_nodes")
_PORTS = ("ports", "port_bandwidth_bytes_per_second", "oversubscription")
_OWN_KEYS = (
    "name",
    "joins",
    "gpudirect",
    "low_latency",
    "fitted_as",
    *_DOMAIN,
    "usable_gpus",
    "oversubscription",
)
SOCKETS = "lan-1x4090:ethernet"
"""Node profile and level that say what NCCL reaches over TCP."""
OVER_SOCKETS = ("ethernet", "tcp")
"""Names of levels that are taken as TCP where nothing else is said of them."""
LEAST_SHARE = 1 / 2
"""Of a domain of NVLink: jobs that cannot have equal shares as large fill domain after domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelProfile:
    """One level of links before the number of GPUs is known."""

    joins: Joins
    """`node`: the GPUs of one node; `domain`: a number of GPUs or nodes; `cluster`: all nodes."""
    domain_gpus: int | None
    """Of `domain`: GPUs that it joins, fewer or more than a node has."""
    domain_nodes: int | None
    """Of `domain`: nodes that it joins, in place of GPUs."""
    usable_gpus: int | None
    """Of `domain`: the most GPUs that a job gets of one; None: all."""
    oversubscription: float | None
    """Ports of the level below over ports of this one, each as fast as those below; None where the
    ports are given themselves."""
    fitted_as: str | None
    """`node profile:level` of the relative whose fitted numbers it takes."""
    level: Level
    """Complete but for `domain_gpus`, which stands at 1, and the ports where `oversubscription`
    gives them."""


def read_level(
    table: Table, sources: dict[str, str], relatives: Relatives
) -> tuple[LevelProfile, Sources]:
    """One `[[levels]]` table and the source of each of its numbers."""
    besides = frozenset({"name", "domain_gpus", "whole_gpus", "gpudirect", "low_latency"})
    table.refuse_unknown(({field.name for field in fields(Level)} - besides) | set(_OWN_KEYS))
    name = table.text("name")
    prefix = f"cluster.levels.{name}."
    values: dict[str, Any] = {}
    named: dict[str, str] = {}
    fitted_as = table.text("fitted_as") if "fitted_as" in table.values else None
    if fitted_as is None and name in OVER_SOCKETS and not {*LEVEL_FIT} & {*table.values}:
        fitted_as = SOCKETS
    if fitted_as is not None:
        relative, relative_sources = _relative_level(table, fitted_as, relatives)
        values |= {field: getattr(relative.level, field) for field in LEVEL_LOAN}
        from_prefix = f"cluster.levels.{relative.level.name}."
        named |= taken_over(relative_sources, from_prefix, LEVEL_LOAN, fitted_as, prefix)
    elif "latency_seconds" not in table.values:
        raise SpecError(
            f"{table.field('fitted_as')} is missing: name the level of the catalogue that is most "
            'like this one, such as "gcp-a3-megagpu-8g:fastrak", or give its latency_seconds, '
            "bandwidth_fraction and half_bandwidth_bytes"
        )
    numbers = SourcedNumbers(table, sources, prefix=prefix)
    joins, domain = _domain(table, numbers)
    usable = _usable(table, numbers, joins)
    oversubscription = _oversubscription(table, numbers)
    if oversubscription is not None:
        values |= {"ports": 1, "port_bandwidth_bytes_per_second": 1.0}
    given = frozenset(set(values) - set(table.values))
    values |= numbers.fields_of(Level, besides=besides | given)
    gpudirect = numbers.flag("gpudirect")
    if "low_latency" in table.values:
        values["low_latency"] = numbers.choice("low_latency", get_args(LowLatency))
    profile = LevelProfile(
        joins=joins,
        domain_gpus=domain.get("domain_gpus"),
        domain_nodes=domain.get("domain_nodes"),
        usable_gpus=usable,
        oversubscription=oversubscription,
        fitted_as=fitted_as,
        level=checked(
            table, lambda: Level(name=name, domain_gpus=1, gpudirect=gpudirect, **values)
        ),
    )
    return profile, tuple((named | dict(numbers.used)).items())


def _domain(table: Table, numbers: SourcedNumbers) -> tuple[Joins, dict[str, int]]:
    """What the level joins, and of a domain its size."""
    kinds: tuple[Joins, ...] = get_args(Joins)
    joins = next(kind for kind in kinds if kind == table.choice("joins", kinds))
    given = [key for key in _DOMAIN if key in table.values]
    if (len(given) == 1) != (joins == "domain") or len(given) > 1:
        raise SpecError(
            f'{table.field("joins")}: a level with joins = "domain" must say how large one is, by '
            "domain_gpus or by domain_nodes, and other levels neither"
        )
    return joins, {key: numbers.integer(key) for key in given}


def _usable(table: Table, numbers: SourcedNumbers, joins: Joins) -> int | None:
    """The part of a domain of NVLink that a job gets."""
    if "usable_gpus" not in table.values:
        return None
    if joins != "domain" or table.text("name") != NVLINK:
        raise SpecError(
            f'{table.field("usable_gpus")} is of a level called "{NVLINK}" with joins = "domain": '
            "leave it out"
        )
    return numbers.integer("usable_gpus")


def _oversubscription(table: Table, numbers: SourcedNumbers) -> float | None:
    if "oversubscription" not in table.values:
        return None
    field = table.field("oversubscription")
    if any(key in table.values for key in _PORTS[:2]):
        raise SpecError(f"{field} says what ports and their bandwidth say: give either")
    value = float(numbers.read("oversubscription"))
    if not 1 <= value <= 1000:
        raise SpecError(
            f"{field} must lie between 1 and 1000: ports below over ports of this level, not "
            f"{value:g}"
        )
    return value


def _relative_level(
    table: Table, fitted_as: str, relatives: Relatives
) -> tuple[LevelProfile, Sources]:
    node_name, _, level_name = fitted_as.partition(":")
    document = relatives(node_name)
    rows = document.values.get("levels")
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        if isinstance(row, dict) and row.get("name") == level_name:
            if "fitted_as" in row:
                raise SpecError(
                    f"{table.field('fitted_as')}: {fitted_as} borrows its numbers itself: write "
                    f"{short(row['fitted_as'])}"
                )
            row_table = Table(where=document.where, values=row, prefix=f"levels[{index}].")
            return read_level(row_table, read_sources(document.table("sources")), relatives)
    raise table.wrong(
        "fitted_as", 'written "node profile:level", such as "gcp-a3-megagpu-8g:fastrak"'
    )


def check_levels(levels: Sequence[LevelProfile], *, gpus_per_node: int | None, where: str) -> None:
    """Raise SpecError where the levels do not grow outwards, or the first has nothing below it."""
    names = [profile.level.name for profile in levels]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SpecError(f"{where}: two levels are called {twice}; name them apart")
    joined = [profile.joins for profile in levels]
    if not levels or "cluster" in joined[:-1] or joined.count("node") > 1:
        raise SpecError(
            f'{where}: levels must stand innermost first: at most one with joins = "node", and at '
            'most one, the last, with joins = "cluster"'
        )
    if any(profile.oversubscription is not None for profile in levels[:2]):
        raise SpecError(
            f"{where}: oversubscription compares the ports of two levels of the network, so the "
            "first level between nodes must give its ports itself"
        )
    if gpus_per_node is None and "domain" in joined:
        raise SpecError(
            f'{where}: gpus_per_node = "any" leaves the size of a domain open; write a '
            "number, or leave the domain out"
        )
    sizes = [_whole_gpus(profile, gpus_per_node or 1) for profile in levels]
    known = [size for size in sizes if size is not None]
    if known != sorted(set(known)):
        raise SpecError(f"{where}: levels must grow outwards, but they join {known} GPUs")


def _whole_gpus(profile: LevelProfile, gpus_per_node: int) -> int | None:
    """GPUs of one domain with all GPUs of its nodes; None for the whole cluster."""
    if profile.joins == "node":
        return gpus_per_node
    if profile.domain_nodes is not None:
        return profile.domain_nodes * gpus_per_node
    return profile.domain_gpus


def levels_of(
    profiles: Sequence[LevelProfile],
    *,
    gpus: int,
    per_node: int,
    whole_node: int,
    name: str,
    domain_gpus: int | None = None,
) -> tuple[Level, ...]:
    """The levels that `gpus` GPUs on nodes of `per_node` reach, of nodes that have `whole_node`.

    An allocation of half of a node's GPUs drives half of its ports, but never less than one, and so
    does a job that uses a part of each domain of NVLink: `domain_gpus` of it, as the user says, or
    its equal share (`share_of_domain`).
    """
    if domain_gpus is not None and not _joins_nodes(profiles[0], whole_node):
        raise SpecError(
            f"--domain-gpus {domain_gpus} is of domains of NVLink that join nodes, and {name} has "
            "none: leave it out"
        )
    levels: list[Level] = []
    below_whole, below_used, below_ports = 1, 1, 0.0
    for profile in profiles:
        whole = _whole_gpus(profile, whole_node)
        if whole is None:
            used = gpus
        elif not levels and _joins_nodes(profile, whole_node):
            most = whole // whole_node * per_node
            asked = _asked_share(domain_gpus, gpus=gpus, per_node=per_node, most=most, name=name)
            usable = min(most, profile.usable_gpus or most)
            used = asked or share_of_domain(gpus=gpus, per_node=per_node, most=usable)
        elif levels and below_whole > whole_node:
            used = min(gpus, whole // below_whole * below_used)
        else:
            used = _used_gpus(whole, gpus, per_node, whole_node)
        if levels and used <= levels[-1].domain_gpus:
            continue
        level = profile.level
        if profile.oversubscription is not None:
            level = replace(
                level,
                ports=max(1, round(below_ports / profile.oversubscription)),
                port_bandwidth_bytes_per_second=levels[-1].port_bandwidth_bytes_per_second,
            )
        elif below_used < below_whole:
            level = replace(level, ports=max(1, level.ports * below_used // below_whole))
        left_out = not levels and whole is not None and used < min(gpus, whole) and used > per_node
        levels.append(replace(level, domain_gpus=used, whole_gpus=whole if left_out else None))
        below_ports = level.ports * used / below_used
        below_whole, below_used = whole or used, used
    if levels[-1].domain_gpus < gpus:
        joined = levels[-1].domain_gpus
        what = "one node" if joined <= per_node else "one domain"
        raise SpecError(
            f"{name} is {what} of {joined} GPUs with no network to others: use --gpus {joined}; "
            "say how fast the network is, per GPU, such as --inter-bw 10Gb/s; or use another "
            "--hardware"
        )
    return tuple(levels)


def _joins_nodes(profile: LevelProfile, whole_node: int) -> bool:
    """Whether it is NVLink between nodes."""
    whole = _whole_gpus(profile, whole_node)
    return profile.level.name == NVLINK and whole is not None and whole > whole_node


def share_of_domain(*, gpus: int, per_node: int, most: int) -> int:
    """GPUs that a job takes of each domain of NVLink, of which it may have `most`.

    All that it has, if they fit into one; else the largest equal share of whole nodes: 64 of 72
    for 512 GPUs, so that groups of a power of two stay inside, all 72 for 144. Where only small
    shares are equal, domains are filled one after another.

    Source: NVIDIA-NeMo/Megatron-Bridge scripts/performance (executor of Slurm jobs: the largest
    divisor of the nodes up to 18 is the segment).
    """
    if gpus <= most:
        return gpus
    nodes, most_nodes = gpus // per_node, most // per_node
    share = max(n for n in range(1, most_nodes + 1) if nodes % n == 0) * per_node
    return share if share >= LEAST_SHARE * most else most


def _asked_share(
    asked: int | None, *, gpus: int, per_node: int, most: int, name: str
) -> int | None:
    """What the user says of it. Raises SpecError for a share that no domain can give."""
    if asked is None:
        return None
    if not per_node <= asked <= most or asked % per_node:
        raise SpecError(
            f"--domain-gpus must be whole nodes of {per_node} GPUs, up to the {most} of a domain "
            f"of {name}, not {short(asked)}"
        )
    if asked != most and gpus > asked and gpus % asked:
        near = max(1, round(gpus / asked)) * asked
        raise SpecError(
            f"{gpus} GPUs do not split into domains of {asked}: use --gpus {near}, or another "
            "--domain-gpus"
        )
    return min(asked, gpus)


def _used_gpus(whole: int, gpus: int, per_node: int, whole_node: int) -> int:
    """GPUs of a domain that has `whole`, on nodes of which `per_node` GPUs are used."""
    if whole <= whole_node:
        return min(whole, per_node)
    return min(gpus, whole // whole_node * per_node)

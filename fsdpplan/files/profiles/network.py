"""The `[network]` and `[[weak]]` tables of node and cluster profiles."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.numbers import SourcedNumbers, Sources, checked
from fsdpplan.files.table import Table
from fsdpplan.spec.cluster import WeakSpot
from fsdpplan.spec.host_list import expand_host_list
from fsdpplan.spec.network import Network

_EVIDENCE = "evidence"


def read_network(table: Table, sources: dict[str, str]) -> tuple[Network | None, Sources]:
    """The network of a profile's table, if it has one, and the source of each field."""
    if "network" not in table.values:
        return None, ()
    numbers = SourcedNumbers(table.table("network"), sources, prefix="cluster.network.")
    names = [field.name for field in fields(Network) if field.name != _EVIDENCE]
    numbers.table.refuse_unknown(names)
    hints = get_type_hints(Network)
    values: dict[str, Any] = {
        name: _value(numbers, name, hints[name]) for name in names if name in numbers.table.values
    }
    if "transport" not in values:
        raise SpecError(f"{numbers.table.field('transport')} is missing; add it")
    evidence = dict(numbers.used)["cluster.network.transport"]
    network = checked(numbers.table, lambda: Network(evidence=evidence, **values))
    return network, tuple(numbers.used)


def _value(numbers: SourcedNumbers, name: str, kind: Any) -> Any:
    """One field, read as its type says."""
    if kind in (bool, bool | None):
        return numbers.flag(name)
    if kind == int | None:
        return int(numbers.integer(name, lowest=0))
    if kind == tuple[str, ...]:
        return numbers.texts(name)
    if kind == str | None:
        return numbers.text(name)
    choices = [arm for arm in getattr(kind, "__args__", ()) if arm is not type(None)]
    plain = [word for arm in choices for word in getattr(arm, "__args__", (arm,))]
    return numbers.choice(name, plain)


def read_weak(table: Table, sources: dict[str, str]) -> tuple[tuple[WeakSpot, ...], Sources]:
    """What holds nodes back, from the `[[weak]]` tables."""
    rows = table.values.get("weak", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise table.wrong("weak", "[[weak]] tables")
    spots, used = [], []
    for index, row in enumerate(rows):
        row_table = Table(where=table.where, values=row, prefix=f"weak[{index}].")
        spot, source = _weak_spot(row_table, sources)
        spots.append(spot)
        used.append((f"cluster.weak.{index}", source))
    return tuple(spots), tuple(used)


def _weak_spot(table: Table, sources: dict[str, str]) -> tuple[WeakSpot, str]:
    table.refuse_unknown(("nodes", "level", "remaining_fraction", "text"))
    nodes = table.require("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        raise table.wrong("nodes", "a list of names of nodes")
    numbers = SourcedNumbers(table, sources, prefix="")
    fraction = float(numbers.read("remaining_fraction"))
    level = table.text("level") if "level" in table.values else None
    spot = checked(
        table,
        lambda: WeakSpot(
            nodes=tuple(name for node in nodes for name in expand_host_list(node)),
            level=level,
            remaining_fraction=fraction,
            text=table.text("text"),
        ),
    )
    return spot, numbers.used[0][1]

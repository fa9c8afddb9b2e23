"""All that is to be seen to in a profile at once, where its reader stops at the first fault.

What a reader refuses (`wrong`, `missing`), sources that nobody can look up, and numbers that lie
far outside those of the catalogue, which most often are bits for bytes, both directions of a link,
or a peak with sparsity.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fsdpplan.errors import SpecError
from fsdpplan.files.profiles.catalogue import (
    LIMIT_BYTES,
    ProfileKind,
    profile_text,
    profiles_folder,
    read_profile,
)
from fsdpplan.files.profiles.devices import DEVICE_FIT, DEVICE_KEYS, NO_NUMBERS, POWER
from fsdpplan.files.profiles.nodes import CLUSTER_KEYS, HOST_MEMORY, HOST_RATE, NODE_KEYS
from fsdpplan.files.profiles.numbers import parse_toml
from fsdpplan.files.table import Finding, path_text, read_text, short
from fsdpplan.spec.cluster import Device, DeviceFit, Level, StepError
from fsdpplan.spec.nodes import Network

HEADER = ("schema_version", "kind", "name", "description")
KEYS: dict[str, tuple[str, ...]] = {"device": DEVICE_KEYS, "node": NODE_KEYS}
KEYS["cluster"] = CLUSTER_KEYS
FAR = 3.0
"""Times the largest of the catalogue, or the least over it, at which a number is asked about."""
SLIPS = ((8.0, "bits for bytes"), (2.0, "both directions, or a peak with sparsity"))
LOOKED_UP = ("url", "how", "measured_on", "from")
"""One of these lets somebody else look a source up."""

Where = str
Numbers = Iterator[tuple[Where, str, Any]]
"""(where it stands, what it is among those of its kind, entry) of each number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProfile:
    """A profile that was looked at."""

    name: str
    kind: ProfileKind | None
    """None: the file does not say."""
    numbers: int
    """Numbers that have a source."""
    findings: tuple[Finding, ...]


def check_profile(path: Path) -> CheckedProfile:
    """All that is to be seen to in the profile at `path`. Raises SpecError where it is no TOML."""
    where = path_text(path)
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="profile")
    document = dict(parse_toml(text, where=where).values)
    found = [*_shape(document), *_numbers_found(document), *_sources_found(document)]
    if not any(one.kind in ("wrong", "missing") for one in found):
        try:
            read_profile(path)
        except SpecError as error:
            found.append(Finding(kind="wrong", where=where, what=str(error)))
    kind = document.get("kind")
    return CheckedProfile(
        name=str(document.get("name", path.stem)),
        kind=kind if kind in ("device", "node", "cluster", "physics") else None,
        numbers=sum(1 for _ in _all_numbers(document)),
        findings=tuple(found),
    )


def _shape(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Header, keys that are not known, and tables that are not there."""
    for key in HEADER:
        if key not in document:
            yield _missing(key)
    kind = document.get("kind")
    if kind not in KEYS:
        if "kind" in document and kind != "physics":
            yield _wrong("kind", f"must be {', '.join(KEYS)}, not {short(kind)}")
        return
    yield from _unknown(document, (*HEADER, "sources", *KEYS[kind]), "")
    if kind == "device":
        yield from _device_shape(document, "")
    if kind == "node":
        for key in ("device", "gpus_per_node", "levels"):
            if key not in document:
                yield _missing(key)
        if isinstance(document.get("device"), dict):
            yield from _device_shape(document["device"], "device.")
    if kind == "cluster" and ("node" in document) == ("node_types" in document):
        yield _missing("node", 'once: node = "profile" with gpus, or [[node_types]]')
    for place, level in _rows(document, "levels"):
        yield from _level_shape(level, place)
    if isinstance(network := document.get("network"), dict):
        known = [field.name for field in fields(Network) if field.name != "evidence"]
        yield from _unknown(network, known, "network.")


def _device_shape(device: Mapping[str, Any], place: Where) -> Iterator[Finding]:
    for key in ("torch_device", "nvml_names", "evidence", "numbers"):
        if key not in device:
            yield _missing(f"{place}{key}")
    tables = (("numbers", Device, NO_NUMBERS), ("fit", DeviceFit, ()), ("error", StepError, ()))
    for name, kind, besides in tables:
        table = device.get(name)
        known = {field.name for field in fields(kind)} - set(besides)
        if isinstance(table, dict):
            yield from _unknown(table, known, f"{place}{name}.")
    numbers = device.get("numbers")
    for field in fields(Device):
        needed = field.default is MISSING and field.name not in NO_NUMBERS
        needed = needed and field.name != "peak_fp8_flops_per_second"
        if isinstance(numbers, dict) and needed and field.name not in numbers:
            yield _missing(f"{place}numbers.{field.name}")
    fit = device.get("fit", {})
    if "fitted_as" not in device and isinstance(fit, dict):
        defaults = {field.name for field in fields(DeviceFit) if field.default is not MISSING}
        for name in DEVICE_FIT:
            if name not in fit and name not in defaults:
                advice = 'or the nearest device that lends it, fitted_as = "h100-sxm-80g"'
                yield _missing(f"{place}fit.{name}", advice)


def _level_shape(level: Mapping[str, Any], place: Where) -> Iterator[Finding]:
    own = ("joins", "fitted_as", "domain_nodes", "usable_gpus", "oversubscription")
    yield from _unknown(level, {*own, *(field.name for field in fields(Level))}, place)
    for key in ("name", "joins", "gpudirect"):
        if key not in level:
            yield _missing(f"{place}{key}")
    if "oversubscription" not in level:
        for key in ("ports", "port_bandwidth_bytes_per_second"):
            if key not in level:
                yield _missing(f"{place}{key}")
    if "fitted_as" not in level and "latency_seconds" not in level:
        yield _missing(
            f"{place}fitted_as",
            'the level that is most like it, such as "dgx-h100:infiniband", or its '
            "latency_seconds, bandwidth_fraction and half_bandwidth_bytes",
        )


def _unknown(table: Mapping[str, Any], known: Collection[str], at: str) -> Iterator[Finding]:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key[:60], known, n=1)
            meant = f"write {near[0]}" if near else "remove it"
            yield _wrong(f"{at}{key}"[:120], f"is not known: {meant}")


def _rows(document: Mapping[str, Any], key: str) -> Iterator[tuple[Where, Mapping[str, Any]]]:
    rows = document.get(key, [])
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        if isinstance(row, dict):
            yield f"{key}[{index}].", row


def _all_numbers(document: Mapping[str, Any]) -> Numbers:
    """Every entry that has a source, or should have one."""
    for key in ("gpus_per_node", HOST_MEMORY, HOST_RATE, "gpus"):
        if key in document and document[key] != "any":
            yield key, key, document[key]
    device = document.get("device")
    for place, holder in (("", document), ("device.", device)):
        if not isinstance(holder, dict):
            continue
        if POWER in holder:
            yield f"{place}{POWER}", POWER, holder[POWER]
        for name in ("numbers", "fit", "error"):
            table = holder.get(name)
            for key, entry in (table if isinstance(table, dict) else {}).items():
                if not (document.get("kind") == "physics" and name == "error"):
                    yield f"{place}{name}.{key}", key, entry
    plain = ("name", "joins", "fitted_as")
    for place, level in _rows(document, "levels"):
        for key, entry in level.items():
            if key not in plain:  # links inside a node and out of it are of other sizes
                yield f"{place}{key}", f"{level.get('joins')} {key}", entry
    network = document.get("network")
    for key, entry in (network if isinstance(network, dict) else {}).items():
        yield f"network.{key}", key, entry
    for place, row in (*_rows(document, "weak"), *_rows(document, "node_types")):
        for key in ("remaining_fraction", "num_nodes"):
            if key in row:
                yield f"{place}{key}", key, row[key]


def _numbers_found(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Numbers without a source, or of a kind or size that they cannot have."""
    sources = document.get("sources")
    known = set(sources) if isinstance(sources, dict) else set()
    for where, key, entry in _all_numbers(document):
        if not isinstance(entry, dict):
            yield _wrong(where, f'must be written {{ value = {short(entry)}, source = "NAME" }}')
            continue
        yield from _unknown(entry, ("value", "source"), f"{where}.")
        if "value" not in entry:
            yield _missing(f"{where}.value")
        source = entry.get("source")
        if source is None:
            yield Finding(kind="missing", where=f"{where}.source", what="add where it is from")
        elif source not in known:
            listed = f"one of [sources]: {', '.join(sorted(known))}" if known else "in [sources]"
            yield _wrong(f"{where}.source", f"must be {listed}, not {short(source)}")
        yield from _size(where, key, entry.get("value"))


def _size(where: str, key: str, value: object) -> Iterator[Finding]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        yield _wrong(where, f"must be a finite number, not {value}")
        return
    least, most = catalogue_range().get(key, (-math.inf, math.inf))
    if value > 0 and most > 0 and (value > most * FAR or value < least / FAR):
        slip = next(
            (
                f": {words}? then it is {value / by:.4g}"
                for by, words in SLIPS
                if value > most * FAR and least <= value / by <= most * FAR
            ),
            "",
        )
        what = f"{value:.4g} is far from what the catalogue has, {least:.4g} to {most:.4g}{slip}"
        yield Finding(kind="implausible", where=where, what=what)


@cache
def catalogue_range() -> dict[str, tuple[float, float]]:
    """The least and the most that a field has in the catalogue."""
    found: dict[str, tuple[float, float]] = {}
    for path in sorted(profiles_folder().glob("*.toml")):
        document = tomllib.loads(profile_text(path.stem))
        for _, key, entry in _all_numbers(document):
            value = entry.get("value")
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                least, most = found.get(key, (value, value))
                found[key] = (min(least, value), max(most, value))
    return found


def _sources_found(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Sources that are not there, that nobody can look up, or that nothing uses."""
    sources = document.get("sources")
    if not isinstance(sources, dict):
        yield _missing("sources", "a table for each source: [sources.NAME] with what and url")
        return
    used = {
        entry.get("source") for _, _, entry in _all_numbers(document) if isinstance(entry, dict)
    }
    for name, source in sources.items():
        where = f"sources.{name}"[:120]
        if not isinstance(source, dict):
            yield _wrong(where, "must be a table with what, and url or how")
            continue
        yield from _unknown(source, ("what", *LOOKED_UP, "date"), f"{where}.")
        if "what" not in source:
            yield _missing(f"{where}.what", "what the numbers are taken from")
        elif not any(key in source for key in LOOKED_UP) and not _declared(source["what"]):
            what = "nobody can look it up: add url, or how (and measured_on, date) it was measured"
            yield Finding(kind="unsourced", where=where, what=what)
        if "measured_on" in source and "date" not in source:
            yield Finding(kind="unsourced", where=where, what="add the date of the measurement")
        if document.get("kind") != "physics" and name not in used:
            yield Finding(kind="unsourced", where=where, what="no number names it: remove it")


def _declared(what: object) -> bool:
    """Whether a source says that there is nothing to look up."""
    return isinstance(what, str) and what.startswith("declared")


def _missing(where: str, advice: str = "") -> Finding:
    return Finding(kind="missing", where=where, what=f"add {advice}" if advice else "add it")


def _wrong(where: str, what: str) -> Finding:
    return Finding(kind="wrong", where=where, what=what)

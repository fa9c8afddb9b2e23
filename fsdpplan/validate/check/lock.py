"""Lock: what a plan was made of, in a file that is kept beside it; and what of two plans differs.

A lock has the inputs and the layout as the plan's JSON has them, what is predicted, the versions,
and a hash of each hardware profile's values as this fsdpplan carries it. One of an earlier fsdpplan
is read as its plans are: a field that has come since is what it meant without saying it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdpplan import __version__
from fsdpplan.errors import SpecError
from fsdpplan.files.plans import plan_document, upgraded
from fsdpplan.files.profiles.catalogue import PHYSICS, profile_names, profile_text
from fsdpplan.files.profiles.numbers import parse_toml
from fsdpplan.files.table import parse_json_object, path_text, read_text, short
from fsdpplan.files.writing import write_text_atomically
from fsdpplan.spec.plan import Plan

LOCK_VERSION = 1
LIMIT_BYTES = 2**20
INPUTS = ("model", "cluster", "training")
"""Parts of a plan that are asked; its layout and its estimate answer them."""

ROUNDING = 1e-9
"""Of two numbers that are the same."""

Part = Literal["inputs", "layout", "predicted", "versions", "profiles"]
Software = Mapping[str, str | None]
"""What is installed here -> its version; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """A value that two plans, or a plan and its lock, do not share."""

    part: Part
    name: str
    """Its path in the plan's JSON, or what has the version or the hash."""
    before: Any
    after: Any

    @property
    def is_unknown(self) -> bool:
        """Whether one side does not know it: no difference, but nothing that was checked."""
        return self.part in ("versions", "profiles") and None in (self.before, self.after)


def locked(plan: Plan, software: Software) -> dict[str, Any]:
    """The lock of a plan, as JSON has it."""
    document = plan_document(plan)
    return {
        "lock_version": LOCK_VERSION,
        "versions": {
            "fsdpplan": __version__,
            "planned_by": dict(plan.versions).get("fsdpplan"),
            **software,
        },
        "profiles": profile_hashes(plan),
        "predicted": predicted(document),
        **{part: document[part] for part in (*INPUTS, "layout")},
    }


def predicted(document: Mapping[str, Any]) -> dict[str, Any]:
    """The totals of what is predicted, by the names of a plan's document."""
    estimate = document["estimate"]
    kept = ("step_seconds", "tokens_per_second", "mfu_fraction", "hfu_fraction", "bottleneck")
    peaks = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
    memory = {name: estimate["memory"][name] for name in peaks}
    return {**{name: estimate[name] for name in kept}, "memory": memory}


def profile_hashes(plan: Plan) -> dict[str, str]:
    """Of the profiles by whose names the plan's machines go, and of all that those name; none
    where no profile here has that name."""
    known = set(profile_names())
    waiting = [plan.cluster.name, plan.cluster.device.name]
    waiting += [PHYSICS] if plan.case.on_cuda else []
    hashes: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        if name not in known or name in hashes:
            continue
        values = parse_toml(profile_text(name), where=name).values
        text = json.dumps(values, sort_keys=True, default=str)
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()
        waiting += [one for one in _texts(values) if one in known]
    return dict(sorted(hashes.items()))


def _texts(value: Any) -> Iterator[str]:
    """The texts of a profile; a name of another profile stands as one."""
    if isinstance(value, dict):
        for name, one in value.items():
            if name != "sources":
                yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


def write_lock(lock: Mapping[str, Any], path: Path) -> None:
    """Write the whole lock or nothing; in stable order, a line a value."""
    text = json.dumps(lock, indent=1, allow_nan=False) + "\n"
    write_text_atomically(path, text, advice="choose another place with --lock")


def read_lock(path: Path) -> dict[str, Any]:
    """The lock in a file. Raises SpecError where it is none."""
    where = path_text(path)
    if not path.exists():
        raise SpecError(f"there is no lock {where}: add --write-lock to write it")
    text = read_text(path, limit_bytes=LIMIT_BYTES, what="lock")
    document = parse_json_object(text, where=where)
    again = "write it again with --write-lock"
    if document.get("lock_version") != LOCK_VERSION:
        raise SpecError(
            f"{where}: lock_version is {short(document.get('lock_version'))}, and this fsdpplan "
            f"reads {LOCK_VERSION}; {again}"
        )
    for part in ("versions", "profiles", "predicted", "layout", *INPUTS):
        if not isinstance(document.get(part), dict):
            raise SpecError(f"{where}: {part} is missing or no table; {again}")
    return upgraded(document)


def lock_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Differs, ...]:
    """What differs between two locks; what one of them does not know is among it."""
    return (
        *_differing("versions", before["versions"], after["versions"]),
        *_differing("profiles", before["profiles"], after["profiles"]),
        *_differing("inputs", _parts(before, INPUTS), _parts(after, INPUTS)),
        *_differing("layout", before["layout"], after["layout"]),
        *_differing("predicted", before["predicted"], after["predicted"]),
    )


def plan_differences(before: Plan, after: Plan) -> tuple[Differs, ...]:
    """What two plans say otherwise, runners-up and sentences aside."""
    one, other = plan_document(before), plan_document(after)
    return (
        *_differing("inputs", _parts(one, INPUTS), _parts(other, INPUTS)),
        *_differing("layout", one["layout"], other["layout"]),
        *_differing("predicted", one["estimate"], other["estimate"]),
        *_differing("versions", one["versions"], other["versions"]),
    )


def _parts(document: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: document[name] for name in names}


def _differing(part: Part, before: Any, after: Any, path: str = "") -> Iterator[Differs]:
    """The innermost values in which two documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            here = f"{path}.{name}" if path else name
            yield from _differing(part, before.get(name), after.get(name), here)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if len(before) != len(after):
            yield Differs(part=part, name=f"{path}.length", before=len(before), after=len(after))
        for index, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from _differing(part, one, other, f"{path}.{_called(index, one, other)}")
    elif not _same(before, after):
        yield Differs(part=part, name=path, before=_plain(before), after=_plain(after))


def _called(index: int, one: Any, other: Any) -> str:
    """A level by its name where both have the same, else by its place."""
    names = {item.get("name") if isinstance(item, dict) else None for item in (one, other)}
    name = names.pop() if len(names) == 1 else None
    return name if isinstance(name, str) else str(index)


def _same(before: Any, after: Any) -> bool:
    numbers = isinstance(before, int | float) and isinstance(after, int | float)
    if numbers and not isinstance(before, bool) and not isinstance(after, bool):
        return math.isclose(before, after, rel_tol=ROUNDING)
    return bool(before == after)


def _plain(value: Any) -> Any:
    """A table that the other side has not at all as one word."""
    return "a table" if isinstance(value, dict | list | tuple) else value

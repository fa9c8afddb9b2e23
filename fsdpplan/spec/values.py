"""Values: what the spec's frozen values share: checks of their fields, and a hash taken once.

Each check raises `SpecError` naming the field. Values that are keys of many tables hash their
fields once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from fsdpplan.errors import SpecError, did_you_mean

Value = TypeVar("Value")


def require_positive_int(**fields: int) -> None:
    """Raise unless every field is an int >= 1 (bool is not an int here)."""
    for name, value in fields.items():
        if type(value) is int and value > 0:  # nearly always, and a search makes many
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{name} must be a whole number of at least 1, not {value!r}")


def require_positive(**fields: float) -> None:
    """Raise unless every field is a finite number > 0."""
    for name, value in fields.items():
        if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise SpecError(f"{name} must be a finite number above 0, not {value!r}")


def require_fraction(**fields: float) -> None:
    """Raise unless every field is in [0, 1]."""
    for name, value in fields.items():
        if isinstance(value, bool) or not math.isfinite(value) or not 0 <= value <= 1:
            raise SpecError(f"{name} must lie between 0 and 1, not {value!r}")


def require_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        near = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
        raise SpecError(
            f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}{near}"
        )


class RemembersHash:
    """Base of a frozen dataclass that is hashed often; its `__hash__` is `remembered_hash`."""

    __slots__ = ("_hash",)
    _hash: int
    __dataclass_fields__: ClassVar[dict[str, object]]


def remembered_hash(self: RemembersHash) -> int:
    """The hash of all fields, as a dataclass has it, computed when it is first asked for."""
    try:
        return self._hash
    except AttributeError:
        # a class is hashable, however its values are hashed
        value = hash(_all_fields(type(self))(self))  # type: ignore[arg-type]
        object.__setattr__(self, "_hash", value)
        return value


def replace(value: Value, /, **changes: object) -> Value:
    """`dataclasses.replace` of a frozen value, checks included, in half the time: a search makes
    tens of thousands."""
    kind: Any = type(value)
    names, known, read = _fields(kind)
    if not changes.keys() <= known:
        kind(**changes)  # which says what it does not know
    new: Value = object.__new__(kind)
    put = object.__setattr__
    for name, kept in zip(names, read(value), strict=True):
        put(new, name, kept)
    for name, changed in changes.items():
        put(new, name, changed)
    check = getattr(new, "__post_init__", None)
    if check is not None:
        check()
    return new


@cache
def _fields(
    kind: Any,
) -> tuple[tuple[str, ...], frozenset[str], Callable[[Any], tuple[object, ...]]]:
    """(names, their set, what reads all of them at once) of a dataclass of two fields or more."""
    names = tuple(field.name for field in fields(kind))
    return names, frozenset(names), attrgetter(*names)


@cache
def _all_fields(kind: type[RemembersHash]) -> Callable[[RemembersHash], tuple[object, ...]]:
    """What reads all fields of a value of that class at once."""
    return attrgetter(*kind.__dataclass_fields__)

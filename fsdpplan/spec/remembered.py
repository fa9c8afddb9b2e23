"""Remembered: values that are keys of many tables hash their fields once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import ClassVar


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


@cache
def _all_fields(kind: type[RemembersHash]) -> Callable[[RemembersHash], tuple[object, ...]]:
    """What reads all fields of a value of that class at once."""
    return attrgetter(*kind.__dataclass_fields__)

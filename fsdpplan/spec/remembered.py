"""Remembered: values that are keys of many tables hash their fields once."""

from __future__ import annotations

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
        value = hash(tuple([getattr(self, name) for name in self.__dataclass_fields__]))
        object.__setattr__(self, "_hash", value)
        return value

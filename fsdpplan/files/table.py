"""Reading text and tables that a user may have written: size limits, types and paths to the fault.

Profiles and model configs are read through `Table` rather than pydantic, because planning reads
them on every start and pydantic costs more than the rest of it.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdpplan.errors import SpecError, did_you_mean, nearest

MAX_INTEGER = 2**63 - 1
UNREADABLE = "it holds a number of thousands of digits, or brackets in brackets without end"


def read_text(path: Path, *, limit_bytes: int, what: str) -> str:
    """The text of a regular UTF-8 file of at most `limit_bytes`, or one line on why not; without
    the mark that some editors put before it."""
    return decoded(read_data(path, limit_bytes=limit_bytes, what=what), f"{what} {path_text(path)}")


def read_data(path: Path, *, limit_bytes: int, what: str) -> bytes:
    """The same, before it is text. Neither a pipe nor a device is waited for, or asked at all."""
    shown = path_text(path)
    try:
        data = _read_at_most(path, limit_bytes + 1)
    except FileNotFoundError as error:
        raise SpecError(f"{what} {shown} does not exist{beside(path)}; check the path") from error
    except _NoFile as error:
        raise SpecError(f"{what} {shown} is not a file, but {error}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(
            f"{what} {shown} cannot be read: {reason}; check the path and its permissions"
        ) from error
    if len(data) > limit_bytes:
        raise SpecError(
            f"{what} {shown} is larger than {limit_bytes // 1024} KiB, so it is not a {what}; "
            "check the path"
        )
    return data


def beside(path: Path) -> str:
    """` (did you mean fsdpplan.json?)`: files in the folder of one that is not there, whose name
    is nearly its own."""
    try:
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry, _ in zip(entries, range(MOST_LOOKED_AT), strict=False)]
    except (OSError, ValueError):
        return ""
    near = [str(path.with_name(one)) for one in nearest(path.name, names) if one.isprintable()]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


MOST_LOOKED_AT = 1000
"""Files of a folder that are compared with a name that is not there."""


def text_of(path: Path, *, limit_bytes: int) -> str:
    """What can be read of a file whose lack is no fault; "" where there is none."""
    try:
        return read_data(path, limit_bytes=limit_bytes, what="file").decode("utf-8", "replace")
    except SpecError:
        return ""


def decoded(data: bytes, where: str) -> str:
    """The text that `data` holds; `where` names it in messages."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise SpecError(f"{where} is not text (UTF-8), but UTF-16; save it as UTF-8")
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{where} is not text (UTF-8) at byte {error.start}; check the path, or save it as "
            "UTF-8"
        ) from error


class _NoFile(Exception):
    """Something else than a regular file; says what, and what to do."""


def _read_at_most(path: Path, limit_bytes: int) -> bytes:
    # Looked at before it is opened, which some devices take for an order, and after, when it may
    # be another.
    _require_file(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with open(descriptor, "rb") as file:
        _require_file(os.fstat(descriptor).st_mode)
        return file.read(limit_bytes)


def _require_file(mode: int) -> None:
    if not stat.S_ISREG(mode):
        is_folder = stat.S_ISDIR(mode)
        advice = "check the path" if is_folder else "put what it holds into one, and name that"
        raise _NoFile(f"{kind_of_node(mode)}; {advice}")


def kind_of_node(mode: int) -> str:
    """What a name of the file system stands for, in words."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFBLK: "a disk",
        stat.S_IFCHR: "a device",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFREG: "a file",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def path_text(path: Path | str) -> str:
    """A path for messages: as it is, or escaped where it would break the line."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def parse_json_object(text: str, *, where: str) -> dict[str, Any]:
    """The JSON object in `text`; NaN, infinities and repeated keys are refused."""

    def refuse_constant(constant: str) -> float:
        raise SpecError(f"{where}: {constant} is not a number; write a finite one")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise SpecError(f"{where}: the key {short(twice)} stands twice; keep one")
        return table

    try:
        value = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=unique)
    except SpecError:
        raise
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            "correct it there"
        ) from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where} cannot be read as JSON: {UNREADABLE}; check the path") from error
    if not isinstance(value, dict):
        raise SpecError(f"{where} must hold one JSON object, not {kind_of(value)}")
    return value


def short(value: object) -> str:
    """`value` as it was written, cut where it would fill the screen."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number with thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def kind_of(value: object) -> str:
    """What `value` is, in the words of JSON and TOML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a document: typed access, each failure naming the file and the field."""

    where: str
    """File that it came from."""
    values: Mapping[str, Any]
    prefix: str = ""
    """Path of this table within the file, with its final dot."""

    def field(self, key: str) -> str:
        """Where `key` is, for messages."""
        return f"{self.where}: {self.prefix}{key}"

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise on keys that are not `known`."""
        allowed = sorted(known)
        for key in self.values:
            if key not in allowed:
                meant = did_you_mean(key, allowed)
                raise SpecError(
                    f"{self.where}: unknown key {short(self.prefix + key)}{meant}; "
                    f"remove it, or use one of {', '.join(allowed)}"
                )

    def require(self, key: str) -> Any:
        """The value of `key`, which must be there."""
        if key not in self.values:
            raise SpecError(f"{self.field(key)} is missing; add it")
        return self.values[key]

    def text(self, key: str) -> str:
        """A non-empty text of one line."""
        value = self.require(key)
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, "a text")
        if len(value) > 2000 or not value.isprintable():
            raise self.wrong(key, "one line of printable text")
        return value

    def choice(self, key: str, choices: Iterable[str]) -> str:
        """One of `choices`."""
        value, allowed = self.require(key), tuple(choices)
        if value not in allowed:
            near = did_you_mean(value, allowed) if isinstance(value, str) else ""
            raise self.wrong(key, f"one of {', '.join(allowed)}", near)
        return str(value)

    def integer(self, key: str, *, lowest: int = 1) -> int:
        """A whole number of at least `lowest`."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "a whole number")
        if not lowest <= value <= MAX_INTEGER:
            raise self.wrong(key, f"a whole number from {lowest} to 2**63 - 1")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.require(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        if not -MAX_INTEGER <= value <= MAX_INTEGER or not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self.require(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def table(self, key: str) -> Table:
        """A table within this one."""
        value = self.require(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "a table")
        return Table(where=self.where, values=value, prefix=f"{self.prefix}{key}.")

    def wrong(self, key: str, wanted: str, meant: str = "") -> SpecError:
        """The error for a value that is not what was `wanted`, but perhaps what was `meant`."""
        value = self.values.get(key)
        return SpecError(f"{self.field(key)} must be {wanted}, not {short(value)}{meant}")


FindingKind = Literal["wrong", "missing", "unsourced", "implausible"]
"""`wrong` and `missing`: the file cannot be read so; `unsourced`: nobody can look it up;
`implausible`: it can be, and most often is a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is to be seen to in a file that somebody wrote."""

    kind: FindingKind
    where: str
    """Field, or row and column."""
    what: str
    """What is wrong, and what would be right."""

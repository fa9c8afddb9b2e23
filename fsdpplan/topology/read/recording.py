"""Recording: all that `detect` reads of one host, as data, so that every parser is pure.

On disk it is one JSON object with the fields of `Recording` and `schema_version`. It may come from
another machine, by mail or from an issue, so it is read with distrust.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from fsdpplan.errors import SpecError

SCHEMA_VERSION = 1
MAX_RECORDING_CHARACTERS = 32 * 2**20
"""A host with 8 GPUs and 10 adapters fills less than one MiB."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_TEXT_MAPS = ("files", "links", "commands", "failed", "environment", "packages")
_PATH_MAPS = ("files", "links")
_DOCUMENT_KEYS = frozenset({"schema_version", "about", "date", *_TEXT_MAPS, "nvml", "nvml_error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was read of one host. What is not in it was not there, or could not be read."""

    about: str = ""
    """What it is, or what it is built from."""
    date: str = ""
    """Day of the reading, `2026-05-31`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Absolute path -> text."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Absolute path -> real path."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """Command line -> what it printed; only those that succeeded."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Command line or path -> why it could not be read."""
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    """Installed distribution -> version."""
    nvml: Mapping[str, object] | None = None
    """What NVML said, as `topology.nvml` writes it; None where there is no NVML."""
    nvml_error: str | None = None
    """What NVML failed at; None where all went well, and where there is no driver at all."""

    def text(self, path: str) -> str | None:
        """Text of the file, without white space around it."""
        text = self.files.get(path)
        return None if text is None else text.strip()

    def link(self, path: str) -> str | None:
        """Where the path leads to."""
        return self.links.get(path)

    def command(self, line: str) -> str | None:
        """What the command printed."""
        return self.commands.get(line)

    def children(self, folder: str) -> tuple[str, ...]:
        """Names directly under the folder that a file or link stands under, sorted."""
        start = folder.rstrip("/") + "/"
        paths = (path for known in (self.files, self.links) for path in known)
        below = (path[len(start) :].partition("/")[0] for path in paths if path.startswith(start))
        return tuple(sorted({name for name in below if name}))


def recording_json(recording: Recording) -> str:
    """The recording as text: stable order, one entry a line."""
    values = {"schema_version": SCHEMA_VERSION} | {
        each.name: _plain(getattr(recording, each.name)) for each in fields(recording)
    }
    return json.dumps(values, indent=1, sort_keys=True, allow_nan=False) + "\n"


def recording_from_json(text: str) -> Recording:
    """The recording in `text`. Raises SpecError where it is none."""
    if len(text) > MAX_RECORDING_CHARACTERS:
        raise SpecError(
            f"a recording of a host is at most {MAX_RECORDING_CHARACTERS} characters long, this "
            f"one is {len(text)}: record again with fsdpplan detect --record FILE"
        )
    values = _object(text)
    _check_keys(values)
    nvml = values.get("nvml")
    if nvml is not None and not isinstance(nvml, dict):
        raise _wrong("nvml", "must be an object or null")
    maps = {name: _texts(values, name) for name in _TEXT_MAPS}
    return Recording(
        about=_text(values, "about"),
        date=_text(values, "date"),
        **maps,
        nvml=nvml,
        nvml_error=_text(values, "nvml_error") if values.get("nvml_error") is not None else None,
    )


def _plain(value: object) -> object:
    """A mapping of any kind as a dict, which JSON can be made of."""
    return dict(value) if isinstance(value, Mapping) else value


def _object(text: str) -> dict[str, Json]:
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _wrong("it", f"is not JSON, as if it was cut ({error})") from error
    if not isinstance(values, dict):
        raise _wrong("it", "must be a JSON object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_keys(values: Mapping[str, Json]) -> None:
    unknown = sorted(values.keys() - _DOCUMENT_KEYS)
    if unknown:
        raise _wrong(unknown[0], "is not known")
    version = values.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise _wrong("schema_version", f"must be {SCHEMA_VERSION}")


def _text(values: Mapping[str, Json], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise _wrong(name, "must be text")
    return value


def _texts(values: Mapping[str, Json], name: str) -> dict[str, str]:
    found = values.get(name)
    if not isinstance(found, dict):
        raise _wrong(name, "must be an object of texts")
    for key, value in found.items():
        if not isinstance(value, str):
            raise _wrong(name, f"must be an object of texts, and {key[:80]!r} is none")
        if name in _PATH_MAPS and not key.startswith("/"):
            raise _wrong(name, f"must have absolute paths, and {key[:80]!r} is none")
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _wrong(name: str, what: str) -> SpecError:
    return SpecError(
        f"the recording of a host is wrong: {name[:80]} {what}; record again with "
        "fsdpplan detect --record FILE"
    )

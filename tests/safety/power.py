"""Kills and power cuts, simulated: what a folder may hold if the machine stops at any moment.

What a function does to files is recorded as it runs (Python's own `_pyio` in place of the files of
C, so that each write is seen). From each beginning of that record come the folders that one may
find afterwards:

    killed     everything that was done is there
    power cut  names: what folders were made to keep by fsync, and any beginning of what was done to
               names after that, in order, as a journal keeps them; contents: what fsync wrote, and
               of the rest nothing, or zeros, or all of it

Source: "All File Systems Are Not Created Equal", OSDI 2014, section 2; ext4 with delayed allocation
has shown the zeros and the nothing. That writes of one file come in order is assumed.
"""

from __future__ import annotations

import _pyio
import builtins
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

Lost = Literal["nothing", "zeros", "the rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that was done below the folder; paths are relative to it."""

    kind: Literal["link", "unlink", "rename", "mkdir", "rmdir", "data", "sync", "sync names"]
    path: str = ""
    to: str = ""
    inode: int = 0
    data: bytes = b""

    @property
    def names(self) -> tuple[str, ...]:
        """The folders whose names it changes."""
        if self.kind in ("data", "sync", "sync names"):
            return ()
        return tuple({os.path.dirname(path) for path in (self.path, self.to or self.path)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a folder may hold afterwards."""

    files: Mapping[str, bytes]
    folders: frozenset[str]
    is_over: bool
    """Whether the function had returned."""
    how: str

    def lay(self, place: Path) -> Path:
        """Make it at `place`, which is new."""
        for folder in sorted(self.folders):
            (place / folder).mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        return place


@dataclass
class Recorder:
    """Records what this process does below `root`."""

    root: Path
    events: list[Event] = field(default_factory=list)
    open_files: dict[int, int] = field(default_factory=dict)
    open_folders: dict[int, str] = field(default_factory=dict)

    def inside(self, path: Any) -> str | None:
        text = os.path.abspath(os.fspath(path))
        return os.path.relpath(text, self.root) if text.startswith(f"{self.root}/") else None

    def add(self, **of: Any) -> None:
        self.events.append(Event(**of))

    def wrapped(self, name: str) -> Callable[..., Any]:
        """`os.<name>`, recorded behind what it does."""
        real: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            new = name == "open" and not os.path.lexists(arguments[0])
            result = real(*arguments, **more)
            getattr(self, f"_{name}")(result, new, *arguments)
            return result

        return call

    def _open(self, result: int, new: bool, path: Any, *_: Any) -> None:
        relative = "" if os.path.abspath(os.fspath(path)) == str(self.root) else self.inside(path)
        if relative is None:
            return
        status = os.fstat(result)
        if stat.S_ISDIR(status.st_mode):
            self.open_folders[result] = relative
            return
        self.open_folders.pop(result, None)
        self.open_files[result] = status.st_ino
        if new:
            self.add(kind="link", path=relative, inode=status.st_ino)

    def _write(self, result: int, _new: bool, descriptor: int, data: Any) -> None:
        if descriptor in self.open_files:
            kept = bytes(data)[:result]
            self.add(kind="data", inode=self.open_files[descriptor], data=kept)

    def _fsync(self, _result: None, _new: bool, descriptor: int) -> None:
        if descriptor in self.open_folders:
            self.add(kind="sync names", path=self.open_folders[descriptor])
        elif descriptor in self.open_files:
            self.add(kind="sync", inode=self.open_files[descriptor])

    def _close(self, _result: None, _new: bool, descriptor: int) -> None:
        self.open_files.pop(descriptor, None)
        self.open_folders.pop(descriptor, None)

    def _replace(self, _result: None, _new: bool, source: Any, target: Any) -> None:
        a, b = self.inside(source), self.inside(target)
        if a is not None and b is not None:
            self.add(kind="rename", path=a, to=b)

    _rename = _replace

    def _unlink(self, _result: None, _new: bool, path: Any, **_: Any) -> None:
        if (relative := self.inside(path)) is not None:
            self.add(kind="unlink", path=relative)

    def _mkdir(self, _result: None, _new: bool, path: Any, *_: Any) -> None:
        if (relative := self.inside(path)) is not None:
            self.add(kind="mkdir", path=relative)

    def _rmdir(self, _result: None, _new: bool, path: Any, **_: Any) -> None:
        if (relative := self.inside(path)) is not None:
            self.add(kind="rmdir", path=relative)


CALLS = ("open", "write", "fsync", "close", "replace", "rename", "unlink", "mkdir", "rmdir")


@contextmanager
def recorded(root: Path) -> Iterator[Recorder]:
    """Record what is done below `root`."""
    recorder = Recorder(root)
    with _patched(recorder):
        yield recorder


@contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    patches = [patch.object(os, name, recorder.wrapped(name)) for name in CALLS]
    patches += [patch.object(module, "open", _pyio.open) for module in (builtins, io)]
    # Folders are removed by names, not by descriptors, which would have to be followed.
    patches.append(patch.object(shutil, "_use_fd_functions", False))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


@dataclass
class Disk:
    """Names and contents, as events make them."""

    names: dict[str, int]
    folders: set[str]
    written: dict[int, bytearray]
    kept: dict[int, int]
    """Bytes of each file that fsync wrote."""

    @classmethod
    def of(cls, root: Path) -> Disk:
        """What lies there, all of it on the disk."""
        paths = {str(p.relative_to(root)): p for p in root.rglob("*")}
        files = {name: p for name, p in paths.items() if p.is_file()}
        names = {name: p.stat().st_ino for name, p in files.items()}
        written = {names[name]: bytearray(p.read_bytes()) for name, p in files.items()}
        return cls(
            names=names,
            folders={name for name, p in paths.items() if p.is_dir()},
            written=written,
            kept={inode: len(data) for inode, data in written.items()},
        )

    def copy(self) -> Disk:
        return Disk(
            dict(self.names),
            set(self.folders),
            {inode: bytearray(data) for inode, data in self.written.items()},
            dict(self.kept),
        )

    def name(self, event: Event) -> None:
        """Do to names what the event did."""
        match event.kind:
            case "link":
                self.names[event.path] = event.inode
            case "unlink":
                self.names.pop(event.path, None)
            case "mkdir":
                self.folders.add(event.path)
            case "rmdir":
                self.folders.discard(event.path)
            case "rename":
                self.names = {self._moved(event, name): i for name, i in self._left(event)}
                self.folders = {self._moved(event, name) for name in self.folders}

    def _left(self, event: Event) -> list[tuple[str, int]]:
        """All names but the one that is replaced."""
        return [(name, inode) for name, inode in self.names.items() if name != event.to]

    @staticmethod
    def _moved(event: Event, name: str) -> str:
        if name == event.path or name.startswith(f"{event.path}/"):
            return event.to + name[len(event.path) :]
        return name

    def data(self, event: Event) -> None:
        """Do to contents what the event did."""
        if event.kind == "link":
            self.written[event.inode], self.kept[event.inode] = bytearray(), 0
        elif event.kind == "data":
            self.written[event.inode] += event.data
        elif event.kind == "sync":
            self.kept[event.inode] = len(self.written[event.inode])

    def content(self, inode: int, lost: Lost) -> bytes:
        data, kept = bytes(self.written.get(inode, b"")), self.kept.get(inode, 0)
        match lost:
            case "nothing":
                return data
            case "zeros":
                return data[:kept] + bytes(len(data) - kept)
            case "the rest":
                return data[:kept]


def found_after(root: Path, act: Callable[[], object]) -> list[Found]:
    """What `root` may hold if the machine stops while `act` runs, or after; each once."""
    root = Path(os.path.realpath(root))
    before = Disk.of(root)
    with recorded(root) as recorder:
        act()
    seen: dict[tuple[Any, ...], Found] = {}
    for done in range(len(recorder.events) + 1):
        is_over = done == len(recorder.events)
        for found in _cuts(before, recorder.events[:done], is_over=is_over):
            key = (tuple(sorted(found.files.items())), found.folders, is_over)
            seen.setdefault(key, found)
    return list(seen.values())


def _cuts(before: Disk, events: list[Event], *, is_over: bool) -> Iterator[Found]:
    disk = before.copy()
    names = [event for event in events if event.names]
    for event in events:
        disk.data(event)
    for number in range(_names_kept(events), len(names) + 1):
        disk.names, disk.folders = dict(before.names), set(before.folders)
        for event in names[:number]:
            disk.name(event)
        for lost in ("nothing", "zeros", "the rest"):
            yield Found(
                files={name: disk.content(inode, lost) for name, inode in disk.names.items()},
                folders=frozenset(disk.folders),
                is_over=is_over,
                how=f"after {len(events)} events, {number} of {len(names)} names, {lost} lost",
            )


def _names_kept(events: list[Event]) -> int:
    """How many of the changes of names are on the disk for certain."""
    kept = seen = 0
    last: dict[str, int] = {}
    for event in events:
        if event.names:
            seen += 1
            last.update(dict.fromkeys(event.names, seen))
        elif event.kind == "sync names":
            kept = max(kept, last.get(event.path, 0))
    return kept

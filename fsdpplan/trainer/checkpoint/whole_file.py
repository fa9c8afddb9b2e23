"""The one place of the trainer that writes files whole, and reads small ones.

What a path leads to decides. A file, or nothing yet: a new file takes its name once the disk has
it; a symbolic link stays, and its target is replaced. A device or a pipe (`--metrics /dev/null`) is
written into, never replaced. All else is refused, as an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

SMALL_BYTES = 2**26
"""More than any file of ours that is read at once."""
NO_SMALL_FILE = (errno.EINVAL, errno.EFBIG)
"""Numbers of the errors that say so of what is there, but is no small file."""


def write_whole(path: Path, text: str, *, durably: bool = True) -> None:
    """Replace the file at once: a reader may come, or this run be killed, at any moment; `durably`:
    or the power fail."""
    target = Path(os.path.realpath(path)) if path.is_symlink() and not _is_of_proc(path) else path
    mode = mode_of(target)
    if mode is not None and (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode) or target.is_symlink()):
        with target.open("a", encoding="utf-8") as stream:
            stream.write(text)
        return
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a file", str(target))
    partial = partial_of(target)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            if durably:
                sync(file)
        os.replace(partial, target)
        if durably:
            sync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_durably(path: Path, text: str) -> None:
    """Write a small file and wait until the disk has it; one that a killed run left goes first."""
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        sync(file)


def sync(file: IO[Any]) -> None:
    """Wait until the disk has what was written."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder, where the file system can tell."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems refuse to sync a folder; they write names through at once.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_of(path: Path) -> Path:
    """A new name beside `path`, which nobody foresees: in a folder that others may write to, a link
    of that name could lead elsewhere. To be opened in a mode with `x`, which follows none."""
    return path.with_name(f".{path.name[:40]}.{os.urandom(8).hex()}.partial")


def read_small(path: Path, *, limit_bytes: int = SMALL_BYTES) -> str:
    """The text of a small regular file. Raises OSError, or ValueError for what is no text: nothing
    is waited for, and no device is read."""
    require_file(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", str(path))
    return data.decode("utf-8")


def require_file(path: Path) -> None:
    """Raise OSError where `path` is none, or is a folder, a device or a pipe."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a file", str(path))


def is_plain(name: str) -> bool:
    """Whether `name` is one of a file in its folder, and leads nowhere else."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def mode_of(path: Path) -> int | None:
    """Kind and permissions of what `path` leads to; None where it leads to nothing."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _is_of_proc(path: Path) -> bool:
    """A link that stands for an open file, as /dev/stdout does in the end."""
    return os.path.realpath(path.parent).startswith("/proc/") or any(
        str(path) == name for name in ("/dev/stdout", "/dev/stderr")
    )

"""The one place that writes files: whole or not at all, on the disk, and nothing but files.

What the path leads to decides:

    a regular file, or nothing yet   a new file beside it takes its name, once the disk has it
    a symbolic link                  the same at its target; the link stays
    a device, a pipe                 written into, never replaced: /dev/null, /dev/stdout, >(cat)
    a disk, a socket, a folder       refused
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fsdpplan.errors import SpecError
from fsdpplan.files.table import kind_of_node, path_text

_MOST_LINKS = 40
"""As many as Linux follows."""


def write_text_atomically(path: Path, text: str, *, advice: str = "choose another place") -> None:
    """Write `text` to `path`. Raises SpecError, which ends in `advice`, where that cannot be."""
    with _explained(path, advice):
        data = text.encode("utf-8")
    write_bytes_atomically(path, data, advice=advice)


def write_bytes_atomically(
    path: Path, data: bytes, *, advice: str = "choose another place"
) -> None:
    """The same of what is no text."""
    with _explained(path, advice):
        target = _target(path)
        status = _status(target)
        if _takes_a_stream(target, status):
            _write_into(target, data)
            return
        _require_file(target, status)
        _write_beside(target, data, status)


def require_place(path: Path, *, advice: str = "choose another place") -> None:
    """Raise SpecError where a file cannot be written to `path`, before whatever it holds is worked
    out."""
    with _explained(path, advice):
        target = _target(path)
        status = _status(target)
        if _takes_a_stream(target, status):
            return
        _require_file(target, status)
        if not target.parent.is_dir():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def write_folder_at_once(
    folder: Path, texts: Mapping[str, str], *, advice: str = "choose another place"
) -> None:
    """Make `folder` with these files, by their paths in it: all of them appear at once.

    It may be there already where it is empty, and may be a link to such a one.
    """
    with _explained(folder, advice):
        target = Path(os.path.realpath(_target(folder)))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not mkdtemp, whose folders are private: the user's umask decides who reads a folder.
        temporary = target.parent / _temporary_name(target)
        temporary.mkdir()
        try:
            for name, text in texts.items():
                file = temporary / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("x", encoding="utf-8", newline="\n") as opened:
                    _write_through(opened.fileno(), text.encode("utf-8"))
            for made, _, _ in os.walk(temporary):
                _sync_folder(Path(made))
            os.replace(temporary, target)
            _sync_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _explained(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # whoever read has gone, as of `head`: nothing is to be mended
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise SpecError(f"{path_text(path)} cannot be written: {error}; {advice}") from error
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{path_text(path)} cannot be written: {reason}; {advice}") from error


def _target(path: Path) -> Path:
    """Where the links at `path` lead. Links of /proc, which stand for open files, are not followed:
    what they name may be gone, or be the file that a shell writes our output into."""
    for _ in range(_MOST_LINKS):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return path
        if not stat.S_ISLNK(status.st_mode) or _is_of_proc(path):
            return path
        _require_trusted(path, status)
        path = path.parent / os.readlink(path)
    raise SpecError("its links lead in a circle")


def _is_of_proc(path: Path) -> bool:
    return os.path.realpath(path.parent).startswith("/proc/")


def _require_trusted(link: Path, status: os.stat_result) -> None:
    """A link that somebody else laid into a folder for all would have us write where they please:
    the rule of Linux's `protected_symlinks`."""
    trusted = {os.geteuid(), 0, link.parent.stat().st_uid}
    if status.st_uid not in trusted:
        raise SpecError("it is a link that somebody else made")


def _status(target: Path) -> os.stat_result | None:
    """What lies at the end of all links; None where nothing does."""
    try:
        return target.stat()
    except FileNotFoundError:
        return None


def _takes_a_stream(target: Path, status: os.stat_result | None) -> bool:
    """Whether it is written into as it stands: a terminal, /dev/null, a pipe, an open file."""
    if status is None:
        return False
    kind = status.st_mode
    return stat.S_ISCHR(kind) or stat.S_ISFIFO(kind) or (stat.S_ISREG(kind) and _is_link(target))


def _is_link(target: Path) -> bool:
    """Of links only those of /proc are left."""
    return stat.S_ISLNK(target.lstat().st_mode)


def _require_file(target: Path, status: os.stat_result | None) -> None:
    if status is None:
        return
    if not stat.S_ISREG(status.st_mode):
        raise SpecError(f"it is {kind_of_node(status.st_mode)}, not a file")
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise SpecError("it is protected against writing")


def _write_into(target: Path, data: bytes) -> None:
    # Without O_NONBLOCK, a pipe that nobody reads would hold us for ever.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
    try:
        descriptor = os.open(target, flags)
    except OSError as error:
        if _is_unread_pipe(target):
            raise SpecError("it is a pipe, and nobody reads it") from error
        raise
    try:
        os.set_blocking(descriptor, True)
        _write_all(descriptor, data)
    finally:
        os.close(descriptor)


def _is_unread_pipe(target: Path) -> bool:
    status = _status(target)
    return status is not None and stat.S_ISFIFO(status.st_mode)


def _write_beside(target: Path, data: bytes, replaced: os.stat_result | None) -> None:
    # A name that nobody foresees, and never through a link that lies there: a folder may be
    # shared. Not mkstemp, whose files are private: the user's umask decides.
    new = target.parent / _temporary_name(target)
    temporary: Path | None = None
    try:
        with new.open("xb") as file:
            temporary = new
            _write_through(file.fileno(), data)
            if replaced is not None:
                _take_after(file.fileno(), replaced)
        os.replace(temporary, target)
        temporary = None
        _sync_folder(target.parent)
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _temporary_name(target: Path) -> str:
    """Short enough where the name itself is as long as a name may be."""
    return f".{target.name[:40]}.{os.urandom(8).hex()}.tmp"


def _take_after(descriptor: int, replaced: os.stat_result) -> None:
    """Owner and permissions of the file that is replaced, as far as we may give them."""
    mine = os.fstat(descriptor)
    if (mine.st_uid, mine.st_gid) != (replaced.st_uid, replaced.st_gid):
        with suppress(OSError):  # only root gives files away; what is written is the same
            os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))


def _write_through(descriptor: int, data: bytes) -> None:
    """Write all of `data`, and wait until the disk has it: a name must not come before its data."""
    _write_all(descriptor, data)
    os.fsync(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in `folder`, where the file system can tell."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(
            OSError
        ):  # some network file systems refuse; they write names through at once
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

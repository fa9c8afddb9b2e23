"""Lines of a file that another process writes, as they come."""

from __future__ import annotations

import os
from pathlib import Path


class FileTail:
    """Whole lines added to `path` after this was made.

    What the file held before is passed over, unless it is read from its start. A file that is
    replaced or cut short is read again from its beginning: a new run writes it.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._inode, self._offset = (0, 0) if from_start else _inode_and_size(path)
        self._partial = b""

    def poll(self) -> list[str]:
        """Lines since the last call; an unfinished last line waits for its end."""
        inode, size = _inode_and_size(self._path)
        if inode != self._inode or size < self._offset:
            self._inode, self._offset, self._partial = inode, 0, b""
        if size <= self._offset:
            return []
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    return []  # replaced just now: the next look reads it from its beginning
                file.seek(self._offset)
                added = file.read()
        except OSError:
            return []
        self._offset += len(added)
        *lines, self._partial = (self._partial + added).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def rest(self) -> list[str]:
        """Lines since the last call, the unfinished one too: the writer is gone."""
        lines = self.poll()
        if self._partial:
            lines.append(self._partial.decode(errors="replace"))
            self._partial = b""
        return lines


def _inode_and_size(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_ino, status.st_size

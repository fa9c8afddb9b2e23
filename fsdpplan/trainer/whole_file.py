"""A file that is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file at once: a reader may come, or this run be killed, at any moment."""
    partial = partial_of(path)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def partial_of(path: Path) -> Path:
    """A new name beside `path`, which nobody foresees: in a folder that others may write to, a link
    of that name could lead elsewhere. To be opened in a mode with `x`, which follows none."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")

"""The checkpoints of a job: which are whole, and ways to damage one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from fsdpplan.trainer.checkpoint.files import (
    MANIFEST,
    PROGRESS,
    TENSOR_INDEX,
    Unreadable,
    damage,
    read_manifest,
    resumable,
    step_of,
)


def sound_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints to resume from that are as they were written, newest first."""
    return [step_of(path) for path in resumable(folder) if _is_sound(path)]


def newest_sound(folder: Path) -> int:
    """Step of the newest one; 0: none."""
    return next(iter(sound_steps(folder)), 0)


def corrupt_newest(folder: Path, draw: random.Random) -> str:
    """Damage the newest checkpoint in one of many ways; what was done."""
    while True:
        path = resumable(folder)[0]
        way = draw.choice(WAYS)
        try:
            return f"{path.name}: {way(path, draw)}"
        except FileNotFoundError:
            # It was published anew or deleted just now.
            continue


def _is_sound(path: Path) -> bool:
    try:
        records = read_manifest(path)
    except Unreadable:
        return False
    return records is not None and not damage(records, path, rank=0, ranks=1)


def _flip(path: Path, draw: random.Random) -> str:
    file = _tensors(path, draw)
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    content[at] ^= 0xFF
    file.write_bytes(content)
    return f"byte {at} of {file.name} flipped"


def _truncate(path: Path, draw: random.Random) -> str:
    file = _tensors(path, draw)
    left = draw.randrange(file.stat().st_size)
    with file.open("r+b") as opened:
        opened.truncate(left)
    return f"{file.name} cut to {left} bytes"


def _lose(path: Path, draw: random.Random) -> str:
    file = draw.choice((_tensors(path, draw), path / TENSOR_INDEX, path / MANIFEST))
    file.unlink()
    return f"{file.name} removed"


def _garble(path: Path, draw: random.Random) -> str:
    file = path / draw.choice((PROGRESS, MANIFEST, TENSOR_INDEX))
    file.stat()
    file.write_bytes(draw.randbytes(draw.randrange(200)))
    return f"{file.name} overwritten"


def _tensors(path: Path, draw: random.Random) -> Path:
    files = sorted(path.glob("*.distcp"))
    if not files:
        raise FileNotFoundError(path)
    return draw.choice(files)


WAYS: tuple[Callable[[Path, random.Random], str], ...] = (_flip, _truncate, _lose, _garble)

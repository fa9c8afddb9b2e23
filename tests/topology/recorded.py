"""The recorded machines of `tests/recordings/machines`, and recordings made of a few files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fsdpplan.topology.read.recording import Recording, recording_from_json

FOLDER = Path(__file__).parent.parent / "recordings" / "machines"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def recorded(name: str) -> Recording:
    return recording_from_json((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def files(**texts: str) -> Recording:
    """A recording of files under /proc: `meminfo="..."`."""
    return Recording(files={f"/proc/{name}": text for name, text in texts.items()})

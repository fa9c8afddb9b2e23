"""What the preflight leaves in the run's folder: `preflight.json` and lines of `bad-nodes`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..checkpoint.whole_file import read_small, write_whole

RESULT_FILE = "preflight.json"
ATTEMPTS_FILE = "attempts.jsonl"
BAD_NODES_FILE = "bad-nodes"
"""One line a node that must not be used again: `HOST<TAB>reason`."""


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """A folder that is full or gone is told about, and no reason not to train."""
    try:
        yield
    except OSError as error:
        print(f"preflight: {folder}: {error.strerror}", file=sys.stderr, flush=True)


def write_result(folder: Path | None, result: Mapping[str, Any]) -> None:
    """Replace the newest result at once: its reader may come at any moment."""
    if folder is None:
        return
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / RESULT_FILE, json.dumps(result, indent=1) + "\n")


def append_bad_nodes(folder: Path | None, bad: Mapping[str, str]) -> None:
    """One write, so that lines of others who append do not mix with these."""
    if folder is None or not bad:
        return
    lines = "".join(f"{host}\t{' '.join(why.split())}\n" for host, why in bad.items())
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / BAD_NODES_FILE).open("a", encoding="utf-8") as file:
            file.write(lines)


def planned_nodes(folder: Path | None) -> tuple[str, ...]:
    """Nodes of the newest start in `attempts.jsonl`, which the batch script writes; none known
    where there is no such file."""
    try:
        text = "" if folder is None else read_small(folder / ATTEMPTS_FILE)
        starts = [json.loads(line) for line in text.splitlines()]
        nodes = [start["nodes"] for start in starts if start["event"] == "attempt"]
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(map(str, nodes[-1])) if nodes else ()


def bad_nodes_words(folder: Path | None, bad: Mapping[str, str]) -> str:
    """What to do, said behind the reason; where nobody is to blame, something else is."""
    if not bad:
        return "; see to that, plan another layout, or leave the preflight out"
    names = ", ".join(bad)
    if folder is None:
        return f"; leave out {names}"
    return f"; leave out {names}, as a retry does by {folder / BAD_NODES_FILE}"

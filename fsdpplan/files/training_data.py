"""How much there is to train on, as far as the host that plans can see it.

Chats are counted by their lines, one a sequence. What would have to be tokenized is estimated: the
trainer counts itself when it reads the data, and goes by that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

BYTES_PER_TOKEN = 4
"""Of English text under a tokenizer of 32k to 128k tokens; assumed."""

TEXT_SUFFIXES = (".txt", ".jsonl")
BLOCK_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Data of one pass."""

    sequences: int
    is_exact: bool
    """False: estimated by bytes."""


def counted_data(
    paths: Iterable[Path], *, seq_len: int, chats: bool, packed: bool, tokenized: bool
) -> Counted | None:
    """Sequences of one pass over the data in `paths`; None where one of them is not on this host.
    `tokenized`: text goes through a tokenizer, in place of being bytes."""
    total, is_exact = 0, True
    for path in paths:
        try:
            if chats:
                files = list(_text_files(path))
                found = sum(map(_lines, files))
                if packed:
                    tokens = sum(file.stat().st_size for file in files) / BYTES_PER_TOKEN
                    found, is_exact = ceil(tokens / (seq_len + 1)), False
            elif path.is_dir() or path.suffix in TEXT_SUFFIXES:
                size = sum(file.stat().st_size for file in _text_files(path))
                found = int(size / (BYTES_PER_TOKEN if tokenized else 1)) // seq_len
                is_exact = False
            else:
                found = (_file_tokens(path) - 1) // seq_len
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not found:
            return None
        total += found
    return Counted(sequences=total, is_exact=is_exact) if total else None


def is_chats(path: Path) -> bool:
    """Whether there are chats at `path`: by the first line of a .jsonl file."""
    try:
        file = next(_text_files(path))
        with file.open("rb") as lines:
            line = json.loads(lines.readline(BLOCK_BYTES))
        return isinstance(line, dict) and (
            "messages" in line or {"prompt", "completion"} <= line.keys()
        )
    except (OSError, ValueError, StopIteration):
        return False


def _text_files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    yield from sorted(each for each in path.rglob("*") if each.suffix in TEXT_SUFFIXES)


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _file_tokens(path: Path) -> int:
    """What the sidecar of a token file says."""
    with path.with_name(path.name + ".json").open("rb") as file:
        return int(json.loads(file.read(BLOCK_BYTES))["tokens"])

"""Text files cut into pieces: `.txt` files, one document each, and `.jsonl` files, one in each
line's "text".

A piece is some bytes of one file. A long document is cut into pieces at the ends of lines.

Like all that a data worker imports, this needs the standard library alone: a worker starts at once
and takes little memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import TrainerError

PIECE_BYTES = 1 << 16
"""Of a document that no line end cuts, as much is read to find one token."""

SUFFIXES = (".txt", ".jsonl")


class Piece(NamedTuple):
    """Some text of one document."""

    file: int
    offset: int
    length: int
    """Bytes in the file; of a line of JSON, the whole line."""
    begins: bool
    """It is the first of its document."""
    ends: bool


def text_files(path: Path) -> tuple[Path, ...]:
    """The text files that `path` is, or has in it, at any depth."""
    if not path.is_dir():
        return (path,)
    found = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
    if not found:
        raise TrainerError(f"{path} has no .txt and no .jsonl file: give a folder that has some")
    return tuple(found)


def pieces_of(file: IO[bytes], number: int, *, is_json: bool) -> Iterator[Piece]:
    """The pieces of file `number`, in order."""
    offset = 0
    if is_json:
        for line in file:
            if line.strip():
                yield Piece(number, offset, len(line), begins=True, ends=True)
            offset += len(line)
        return
    block = file.read(PIECE_BYTES)
    while block:
        length = _cut(block) if len(block) == PIECE_BYTES else len(block)
        file.seek(offset + length)
        following = file.read(PIECE_BYTES)
        yield Piece(number, offset, length, begins=offset == 0, ends=not following)
        offset, block = offset + length, following


def _cut(block: bytes) -> int:
    """Where a piece ends: behind the last line end, or else before the last character begun."""
    line_end = block.rfind(b"\n") + 1
    if line_end:
        return line_end
    cut = len(block) - 1
    while cut > len(block) - 4 and block[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def text_of(piece: Piece, file: IO[bytes], path: Path) -> bytes:
    """The text of `piece`, from its open file."""
    file.seek(piece.offset)
    raw = file.read(piece.length)
    if path.suffix != ".jsonl":
        return raw
    try:
        text = json.loads(raw)["text"]
        encoded: bytes = text.encode()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TrainerError(
            f'{path}, at byte {piece.offset}: a line must be a JSON object with "text", a string, '
            f"not {raw[:60].decode(errors='replace')!r}"
        ) from error
    return encoded

"""Where the tokens of text are: an index of pieces, in a file that is made once and then mapped.

It says which bytes of which file a piece is, and the number of its first token in all the text, so
that the tokens from any number to any other are found without reading what comes before. Who makes
it, and where it lies, is in `make_index.py`.

    8 bytes              MAGIC
    32 bytes a piece     its first token, offset, length, file and flags; behind the last one a
                         record with the number of all tokens
    JSON                 what it is an index of, and the names of the files
    8 bytes              how long the JSON is
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple
from weakref import finalize

from ..errors import RankError, TrainerError
from .pieces import Piece, pieces_of, text_of
from .text_tokenizer import TextTokenizer

MAGIC = b"FSDPIDX2"
RECORD_BYTES = 32
LENGTH_BYTES = 8


class NoIndex(ValueError):
    """A file that is no index, or not a whole one."""


class PieceIndex:
    """Where each piece lies, and its first token."""

    def __init__(self, index: Path, text: Path) -> None:
        """Map the file `index` of the text in `text`. Raises NoIndex or OSError."""
        self.path = index
        self.descriptor = os.open(index, os.O_RDONLY)
        """For data workers: an index that nobody can write to a disk has no name any more."""
        finalize(self, os.close, self.descriptor)
        size = os.fstat(self.descriptor).st_size
        if size < len(MAGIC) + RECORD_BYTES + LENGTH_BYTES:
            raise NoIndex(f"{index} has {size} bytes")
        self._map = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        said, end = self._read_end(size)
        self.digest: str = said["digest"]
        self.files = tuple(text / name for name in said["files"])
        self._records = memoryview(self._map)[len(MAGIC) : end].cast("Q")
        self._pieces = len(self._records) // 4 - 1
        self.tokens = self.first_token(self._pieces)

    def _read_end(self, size: int) -> tuple[dict[str, Any], int]:
        length = int.from_bytes(self._map[size - LENGTH_BYTES :], sys.byteorder)
        end = size - LENGTH_BYTES - length
        if self._map[: len(MAGIC)] != MAGIC or end < len(MAGIC) + RECORD_BYTES:
            raise NoIndex(f"{self.path} is no index")
        try:
            said = json.loads(self._map[end : size - LENGTH_BYTES])
            is_whole = (said["pieces"] + 1) * RECORD_BYTES == end - len(MAGIC)
        except (ValueError, KeyError, TypeError) as error:
            raise NoIndex(f"{self.path} is no index: {error}") from error
        if not is_whole:
            raise NoIndex(f"{self.path} has not as many pieces as it says")
        return said, end

    def first_token(self, number: int) -> int:
        """The number of the first token of piece `number`; behind the last piece, of all."""
        return self._records[number * 4]

    def piece_of(self, token: int) -> int:
        """The piece that has token number `token`."""
        # of empty pieces, which begin at the same token, the last one is no good
        return bisect_right(range(self._pieces), token, key=self.first_token) - 1

    def piece(self, number: int) -> Piece:
        """Piece `number`."""
        _, offset, length, rest = self._records[number * 4 : (number + 1) * 4]
        return Piece(rest >> 2, offset, length, begins=bool(rest & 2), ends=bool(rest & 1))


class Stretch(NamedTuple):
    """Some tokens in a row."""

    tokens: array[int]
    """8 bytes each."""
    starts: bytearray
    """1 for each that begins a document."""


class TextReader:
    """Reads tokens of text by their numbers; the pieces read last are kept."""

    def __init__(self, index: PieceIndex, tokenizer: TextTokenizer) -> None:
        self.index, self.tokenizer = index, tokenizer
        self._encoded = lru_cache(maxsize=16)(self._encode)

    def read(self, start: int, stop: int) -> Stretch:
        """Tokens number `start` to `stop`."""
        found = Stretch(array("q"), bytearray())
        number = self.index.piece_of(start)
        while start < stop:
            first = self.index.first_token(number)
            piece = self._encoded(number)
            taken = slice(start - first, stop - first)
            found.tokens.extend(piece.tokens[taken])
            found.starts.extend(piece.starts[taken])
            start = first + len(piece.tokens)
            number += 1
        return found

    def _encode(self, number: int) -> Stretch:
        piece = self.index.piece(number)
        path = self.index.files[piece.file]
        try:
            with path.open("rb") as file:
                tokens = self.tokenizer.ids(text_of(piece, file, path))
        except OSError as error:
            raise RankError(f"{path} can be read no longer: {error}; see to its disk") from error
        except TrainerError as error:
            raise changed(path) from error
        if piece.ends and self.tokenizer.end is not None:
            tokens.append(self.tokenizer.end)
        expected = self.index.first_token(number + 1) - self.index.first_token(number)
        if len(tokens) != expected:
            raise changed(path)
        starts = bytearray(len(tokens))
        starts[:1] = bytes([piece.begins])[: len(tokens)]
        return Stretch(tokens, starts)


def changed(path: Path) -> RankError:
    """What to say of text that is not what the index is of."""
    return RankError(f"{path} has changed under the run: start it again, and it will be read anew")


def digest_of(text: Path, files: Sequence[Path], tokenizer: TextTokenizer) -> str:
    """Changes with the files, their sizes and times, and with the tokenizer."""
    try:
        states = [(os.path.relpath(file, text), file.stat()) for file in files]
    except OSError as error:
        raise cannot_read(text, error) from error
    said = [f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states]
    return f"{zlib.crc32('|'.join([tokenizer.identity, *said]).encode(errors='replace')):08x}"


def cannot_read(text: Path, error: OSError) -> TrainerError:
    """What to say of text that is not there, or of nobody's."""
    return TrainerError(
        f"the text {text} cannot be read: {error}; check --data and its permissions"
    )


def all_pieces(files: Sequence[Path]) -> Iterator[Piece]:
    """The pieces of `files`, one file after the other."""
    for number, path in enumerate(files):
        with path.open("rb") as file:
            yield from pieces_of(file, number, is_json=path.suffix == ".jsonl")


class PieceCounter:
    """Counts the tokens of pieces, without those that end documents."""

    def __init__(self, files: Sequence[Path], tokenizer: TextTokenizer) -> None:
        self._files, self._tokenizer = files, tokenizer
        self._open: tuple[int, IO[bytes]] | None = None

    def count(self, pieces: Iterable[Piece]) -> list[int]:
        """Of each piece."""
        return [self._tokenizer.count(self._text(piece)) for piece in pieces]

    def _text(self, piece: Piece) -> bytes:
        path = self._files[piece.file]
        if self._open is None or self._open[0] != piece.file:
            self.close()
            self._open = piece.file, path.open("rb")
        return text_of(piece, self._open[1], path)

    def close(self) -> None:
        """Leave the file that was read last."""
        if self._open is not None:
            self._open[1].close()
        self._open = None


def write_index(
    out: IO[bytes],
    text: Path,
    files: Sequence[Path],
    digest: str,
    counted: Iterable[tuple[Piece, int]],
    *,
    ends: bool,
) -> None:
    """Write the index of `files`, whose pieces come with their tokens; `ends`: a token ends each
    document."""
    out.write(MAGIC)
    tokens = pieces = 0
    for piece, count in counted:
        flags = piece.file << 2 | piece.begins << 1 | piece.ends
        out.write(array("Q", [tokens, piece.offset, piece.length, flags]).tobytes())
        tokens += count + int(piece.ends and ends)
        pieces += 1
    out.write(array("Q", [tokens, 0, 0, 0]).tobytes())
    names = [os.path.relpath(file, text) for file in files]
    said = json.dumps({"digest": digest, "pieces": pieces, "files": names}).encode()
    out.write(said + len(said).to_bytes(LENGTH_BYTES, sys.byteorder))
    out.flush()

"""Text read where it lies: `.txt` files, one document each, and `.jsonl` files, one in each line's
"text".

Nothing is held in memory but an index of pieces, mapped from a file that is made once beside the
text: which bytes of which file a piece is, and the number of its first token in all the text. So
the tokens from any number to any other are found without reading what comes before, and where a run
stands is one number, whatever the ranks. A long document is cut into pieces at the ends of lines.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.whole_file import partial_of, sync
from ..errors import RankError, TrainerError
from .text_tokenizer import TextTokenizer

PIECE_BYTES = 1 << 16
"""Of a document that no line end cuts, as much is read to find one token."""

SUFFIXES = (".txt", ".jsonl")

_WORDS = 4


class Piece(NamedTuple):
    """Some text of one document."""

    file: int
    offset: int
    length: int
    """Bytes in the file; of a line of JSON, the whole line."""
    begins: bool
    """It is the first of its document."""
    ends: bool


class TextSource:
    """All tokens of some text files, one document behind the other, in the order of their names."""

    def __init__(self, path: Path, tokenizer: TextTokenizer) -> None:
        self.path, self.files, self.tokenizer = path, text_files(path), tokenizer
        self.vocab = tokenizer.vocab
        self._index = PieceIndex(path, self.files, tokenizer)
        self.tokens = self._index.tokens
        self.identity: dict[str, int | str] = {
            "kind": "text",
            "tokens": self.tokens,
            "index": self._index.digest,
        }
        self._encoded = lru_cache(maxsize=16)(self._encode)

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens number `start` to `stop`, int64."""
        return torch.cat([tokens for tokens, _ in self._parts(start, stop)])

    def starts(self, start: int, stop: int) -> Tensor:
        """Which of them begin a document."""
        return torch.cat([starts for _, starts in self._parts(start, stop)])

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        number = self._index.piece_of(start)
        while start < stop:
            first = self._index.first_token(number)
            tokens, starts = self._encoded(number)
            taken = slice(start - first, stop - first)
            yield tokens[taken], starts[taken]
            start = first + len(tokens)
            number += 1

    def _encode(self, number: int) -> tuple[Tensor, Tensor]:
        piece = self._index.piece(number)
        with self.files[piece.file].open("rb") as file:
            text = text_of(piece, file, self.files[piece.file])
        tokens = self.tokenizer.encode(text)
        if piece.ends and self.tokenizer.end is not None:
            tokens = torch.cat([tokens, torch.tensor([self.tokenizer.end])])
        expected = self._index.first_token(number + 1) - self._index.first_token(number)
        if len(tokens) != expected:
            raise RankError(
                f"{self.files[piece.file]} has changed under the run: start it again, and it will "
                "be read anew"
            )
        starts = torch.zeros(len(tokens), dtype=torch.bool)
        starts[:1] = piece.begins
        return tokens, starts


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


class PieceIndex:
    """Where each piece lies, and its first token; in a file beside the text, made if it is not
    there and named by what it is an index of."""

    def __init__(self, path: Path, files: Sequence[Path], tokenizer: TextTokenizer) -> None:
        self.digest = _digest(path, files, tokenizer)
        folder = path if path.is_dir() else path.parent
        index = folder / f".{path.name}.{self.digest}.fsdpplan-index"
        try:
            with _opened(index, files, tokenizer) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise TrainerError(
                f"the text {path} cannot be read: {error}; check --data and its permissions"
            ) from error
        self._records = memoryview(self._map).cast("Q")
        self._pieces = len(self._records) // _WORDS - 1
        self.tokens = self.first_token(self._pieces)

    def first_token(self, number: int) -> int:
        """The number of the first token of piece `number`; behind the last piece, of all."""
        return self._records[number * _WORDS]

    def piece_of(self, token: int) -> int:
        """The piece that has token number `token`."""
        # of empty pieces, which begin at the same token, the last one is no good
        return bisect_right(range(self._pieces), token, key=self.first_token) - 1

    def piece(self, number: int) -> Piece:
        """Piece `number`."""
        _, offset, length, rest = self._records[number * _WORDS : (number + 1) * _WORDS]
        return Piece(rest >> 2, offset, length, begins=bool(rest & 2), ends=bool(rest & 1))


def _digest(path: Path, files: Sequence[Path], tokenizer: TextTokenizer) -> str:
    try:
        states = [(os.path.relpath(file, path), file.stat()) for file in files]
    except OSError as error:
        raise TrainerError(
            f"the text {path} cannot be read: {error}; check --data and its permissions"
        ) from error
    said = [f"{name} {state.st_size} {state.st_mtime_ns}" for name, state in states]
    return f"{zlib.crc32('|'.join([tokenizer.identity, *said]).encode()):08x}"


def _opened(index: Path, files: Sequence[Path], tokenizer: TextTokenizer) -> IO[bytes]:
    """The index file, made first if need be; each rank may make it, and all make the same one.

    Text that lies where nothing can be written has an index without a name.
    """
    if index.exists():
        return index.open("rb")
    partial = partial_of(index)
    try:
        file: IO[bytes] = partial.open("x+b")
    except OSError:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - it is gone when the map is
        _write_index(file, files, tokenizer)
        return file
    try:
        with file:
            _write_index(file, files, tokenizer)
            sync(file)
        os.replace(partial, index)
    finally:
        partial.unlink(missing_ok=True)
    return index.open("rb")


def _write_index(out: IO[bytes], files: Sequence[Path], tokenizer: TextTokenizer) -> None:
    tokens = 0
    for number, path in enumerate(files):
        with path.open("rb") as file, path.open("rb") as again:
            for piece in pieces_of(file, number, is_json=path.suffix == ".jsonl"):
                flags = number << 2 | piece.begins << 1 | piece.ends
                out.write(_record(tokens, piece.offset, piece.length, flags))
                tokens += tokenizer.count(text_of(piece, again, path))
                tokens += int(piece.ends and tokenizer.end is not None)
    out.write(_record(tokens, 0, 0, 0))
    out.flush()


def _record(*words: int) -> bytes:
    return b"".join(word.to_bytes(8, sys.byteorder) for word in words)

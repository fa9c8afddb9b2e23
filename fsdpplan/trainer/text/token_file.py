"""Token files: raw little-endian unsigned integers, of which no more is read than is asked for.

`FILE.json` beside it says

    {"format": "fsdpplan_tokens", "dtype": "uint16", "vocab": 50257, "tokens": 1000000}

with dtype `uint16` or `uint32`, and, where documents can be told apart, the token that ends each
as `"end_of_document"`. `python -m fsdpplan.trainer.tokenize` writes both.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ..checkpoint.whole_file import read_small, require_file
from ..errors import RankError, TrainerError

TOKEN_BYTES = {"uint16": 2, "uint32": 4}
TOKEN_FORMAT = "fsdpplan_tokens"


class TokenFile:
    """The tokens of a file."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.tokens: int = header["tokens"]
        self.vocab: int = header["vocab"]
        self._end: int | None = header.get("end_of_document")
        self._dtype = getattr(torch, header["dtype"])
        self._token_bytes = TOKEN_BYTES[header["dtype"]]
        self._descriptor = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._descriptor)
        size, most = self.tokens * self._token_bytes, 1 << 16
        ends = self._bytes(0, min(size, most)) + self._bytes(max(0, size - most), size)
        self.identity: dict[str, int | str] = {
            "kind": "tokens",
            "tokens": self.tokens,
            "ends": f"{zlib.crc32(ends):08x}",
        }

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens number `start` to `stop`, int64."""
        raw = self._bytes(start * self._token_bytes, stop * self._token_bytes)
        if not raw:
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(raw, dtype=self._dtype).to(torch.int64)

    def _bytes(self, start: int, stop: int) -> bytearray:
        """By a call of the system, and not from a map: who waits for a disk in a thread of its own
        lets the others go on meanwhile."""
        raw = bytearray(stop - start)
        done = 0
        while done < len(raw):
            count = os.preadv(self._descriptor, [memoryview(raw)[done:]], start + done)
            if not count:
                raise RankError(f"{self.path} has become shorter under the run: write it again")
            done += count
        return raw

    def starts(self, start: int, stop: int) -> Tensor:
        """Which of them begin a document: those behind one that ends a document."""
        if self._end is None:
            raise TrainerError(
                f"{self.path} does not say where its documents end, which --pack must know: write "
                "it again with `python -m fsdpplan.trainer.tokenize --documents`"
            )
        before = self.read(max(0, start - 1), stop - 1) == self._end
        return before if start else torch.cat([torch.tensor([True]), before])


def sidecar_of(path: Path) -> Path:
    """What lies beside the token file `path`."""
    return path.with_name(path.name + ".json")


def read_header(path: Path) -> dict[str, Any]:
    """The sidecar of the token file `path`, checked against the file."""
    sidecar = sidecar_of(path)
    try:
        require_file(path)
        actual_bytes = path.stat().st_size
        header = json.loads(read_small(sidecar))
    except (OSError, ValueError, RecursionError) as error:
        raise TrainerError(
            f"the token file {path} cannot be read: {error}; `python -m fsdpplan.trainer.tokenize "
            f"TEXT -o {path}` writes one from text, with its {sidecar.name}"
        ) from error
    if not isinstance(header, dict) or header.get("format") != TOKEN_FORMAT:
        raise TrainerError(f'{sidecar} must be a JSON object with "format": "{TOKEN_FORMAT}"')
    if header.get("dtype") not in TOKEN_BYTES:
        raise TrainerError(
            f"{sidecar}: dtype must be uint16 or uint32, not {header.get('dtype')!r}"
        )
    for key in ("vocab", "tokens"):
        if type(header.get(key)) is not int or header[key] < 1:
            raise TrainerError(f"{sidecar}: {key} must be a whole number, not {header.get(key)!r}")
    end = header.get("end_of_document")
    if end is not None and (type(end) is not int or not 0 <= end < header["vocab"]):
        raise TrainerError(f"{sidecar}: end_of_document must be one of the tokens, not {end!r}")
    expected_bytes = header["tokens"] * TOKEN_BYTES[header["dtype"]]
    if actual_bytes != expected_bytes:
        raise TrainerError(
            f"{path} has {actual_bytes} bytes where its sidecar says {expected_bytes}: it was cut "
            "short or changed; write it again"
        )
    return header

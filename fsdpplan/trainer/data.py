"""Tokens: which sequences a rank sees in a step, from a token file or made up.

Sequences are numbered without end: number `n` of a run is a pure function of the seed and `n`, and
step `s` of global batch `B` takes numbers `s * B` to `s * B + B - 1`. So the data does not depend
on the layout, and a run resumes from one number.

A token file is raw little-endian unsigned integers; `FILE.json` beside it says

    {"format": "fsdpplan_tokens", "dtype": "uint16", "vocab": 50257, "tokens": 1000000}

with dtype `uint16` or `uint32`. `python -m fsdpplan.trainer.tokenize` writes both.
"""

from __future__ import annotations

import json
import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .batch import MicroBatch
from .config import PlanConfig
from .errors import RankError, TrainerError
from .mesh import batch_rank

TOKEN_BYTES = {"uint16": 2, "uint32": 4}
TOKEN_FORMAT = "fsdpplan_tokens"


class Sequences(Protocol):
    """Where the tokens come from."""

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`: seq_len + 1 tokens, int64, on the CPU."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSequences:
    """Tokens that can be learned: every second one follows from the one before, the others are
    drawn with probability about 1/(k + 1) for token k."""

    seq_len: int
    vocab: int
    seed: int

    def __call__(self, number: int) -> Tensor:
        generator = torch.Generator()
        generator.manual_seed(zlib.crc32(f"{self.seed}:{number}".encode()))
        uniform = torch.rand(self.seq_len // 2 + 1, generator=generator, dtype=torch.float64)
        drawn = (self.vocab**uniform).long().clamp(1, self.vocab) - 1
        following = (drawn * 31 + 7) % self.vocab
        return torch.stack([drawn, following], dim=1).flatten()[: self.seq_len + 1]


class TokenFile:
    """Windows of seq_len + 1 tokens of a file, each epoch in another order."""

    def __init__(self, path: Path, *, seq_len: int, vocab: int, seed: int) -> None:
        header = read_header(path)
        if header["vocab"] > vocab:
            raise TrainerError(
                f"{path} has a vocabulary of {header['vocab']} tokens, the model one of {vocab}: "
                f"plan with --vocab {header['vocab']}, or tokenize the text anew"
            )
        self.seq_len, self.seed, self.vocab, self.path = seq_len, seed, vocab, path
        self.windows = (header["tokens"] - 1) // seq_len
        if self.windows < 1:
            raise TrainerError(
                f"{path} has {header['tokens']} tokens, too few for one sequence of {seq_len}: use "
                "a longer text or a shorter --seq-len"
            )
        self._dtype = getattr(torch, header["dtype"])
        self._token_bytes = TOKEN_BYTES[header["dtype"]]
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __call__(self, number: int) -> Tensor:
        epoch, position = divmod(number, self.windows)
        window = shuffled(position, self.windows, key=f"{self.seed}:{epoch}")
        start = window * self.seq_len * self._token_bytes
        stop = start + (self.seq_len + 1) * self._token_bytes
        raw = torch.frombuffer(bytearray(self._map[start:stop]), dtype=self._dtype)
        tokens = raw.to(torch.int64)
        if int(tokens.max()) >= self.vocab:
            raise RankError(
                f"{self.path} has token {int(tokens.max())} but the model {self.vocab} tokens: its "
                "sidecar says a smaller vocabulary than it has"
            )
        return tokens


def read_header(path: Path) -> dict[str, Any]:
    """The sidecar of the token file `path`, checked against the file."""
    sidecar = path.with_name(path.name + ".json")
    try:
        actual_bytes = path.stat().st_size
        header = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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
    expected_bytes = header["tokens"] * TOKEN_BYTES[header["dtype"]]
    if actual_bytes != expected_bytes:
        raise TrainerError(
            f"{path} has {actual_bytes} bytes where its sidecar says {expected_bytes}: it was cut "
            "short or changed; write it again"
        )
    return header


def shuffled(position: int, length: int, *, key: str) -> int:
    """Where `position` lands in a permutation of range(length) chosen by `key`.

    A Feistel network on the least even number of bits that holds `length`, walked until it lands
    inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 4): no table,
    so an epoch may have any number of windows.
    """
    half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = position >> half_bits, position & mask
        for turn in range(4):
            mixed = zlib.crc32(f"{key}:{turn}:{right}".encode()) * 0x9E3779B1 >> 7
            left, right = right, left ^ (mixed & mask)
        position = left << half_bits | right
        if position < length:
            return position


def open_sequences(plan: PlanConfig, path: Path | None, *, seed: int) -> Sequences:
    """The token file `path`, or synthetic tokens."""
    if path is None:
        return SyntheticSequences(seq_len=plan.training.seq_len, vocab=plan.model.vocab, seed=seed)
    return TokenFile(path, seq_len=plan.training.seq_len, vocab=plan.model.vocab, seed=seed)


def micro_batches(
    sequences: Sequences, plan: PlanConfig, *, first: int, rank: int, device: torch.device
) -> list[MicroBatch]:
    """The micro-batches of `rank`, in the step that begins with sequence number `first`."""
    layout = plan.layout
    part = batch_rank(layout, rank)
    batches = []
    for index in range(layout.num_microbatches):
        start = first + (index * layout.data_parallel + part) * layout.micro_batch
        rows = torch.stack([sequences(start + row) for row in range(layout.micro_batch)])
        rows = rows.to(device)
        batches.append(MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches

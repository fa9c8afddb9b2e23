"""Text read where it lies: `.txt` files, one document each, and `.jsonl` files, one in each line's
"text".

Nothing is held in memory but a mapped index (`index.py`) and the pieces that were read last. Where
a run stands is one number, whatever the ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .index import TextReader
from .make_index import open_index
from .text_tokenizer import open_tokenizer


class TextSource:
    """All tokens of some text files, one document behind the other, in the order of their names."""

    def __init__(self, path: Path, tokenizer: Path | None = None) -> None:
        self.path, self.tokenizer = path, tokenizer
        self.index = open_index(path, tokenizer)
        of_text = open_tokenizer(tokenizer)
        self.vocab = of_text.vocab
        self.tokens = self.index.tokens
        self.identity: dict[str, int | str] = {
            "kind": "text",
            "tokens": self.tokens,
            "index": self.index.digest,
        }
        self._reader = TextReader(self.index, of_text)

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens number `start` to `stop`, int64."""
        return torch.frombuffer(self._reader.read(start, stop).tokens, dtype=torch.int64)

    def starts(self, start: int, stop: int) -> Tensor:
        """Which of them begin a document."""
        return torch.frombuffer(self._reader.read(start, stop).starts, dtype=torch.bool)

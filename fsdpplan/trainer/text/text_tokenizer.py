"""From text to tokens: one a byte, or those of a tokenizer.json."""

from __future__ import annotations

import importlib
import zlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..checkpoint.whole_file import read_small
from ..errors import TrainerError

if TYPE_CHECKING:
    from torch import Tensor

END_OF_BYTES = 256
"""The token that ends a document whose other tokens are bytes."""

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names that tokenizers give to the token that ends a document; the first one that is there."""


class TextTokenizer(Protocol):
    """What turns a piece of UTF-8 text into tokens."""

    vocab: int
    end: int | None
    """The token that ends a document; None: there is none."""
    identity: str
    """Changes with the tokens that a text has."""

    def count(self, text: bytes) -> int:
        """How many tokens `text` has."""
        ...

    def ids(self, text: bytes) -> array[int]:
        """The tokens of `text`, 8 bytes each."""
        ...

    def encode(self, text: bytes) -> Tensor:
        """The same as a tensor, int64."""
        ...


class ByteTokenizer:
    """One token a byte."""

    vocab = END_OF_BYTES + 1
    end: int | None = END_OF_BYTES
    identity = "bytes"

    def count(self, text: bytes) -> int:
        """How many tokens `text` has."""
        return len(text)

    def ids(self, text: bytes) -> array[int]:
        """The tokens of `text`, 8 bytes each."""
        return array("q", text and memoryview(text).tolist())

    def encode(self, text: bytes) -> Tensor:
        """The same as a tensor, int64."""
        return _as_tensor(self.ids(text))


class FileTokenizer:
    """A Hugging Face tokenizer.json, without the special tokens that it may put around a text."""

    def __init__(self, path: Path) -> None:
        try:
            # an optional package: the trainer needs torch alone
            tokenizers: Any = importlib.import_module("tokenizers")
        except ImportError as error:
            raise TrainerError(
                "--tokenizer needs the Python package tokenizers, which is not installed: `pip "
                "install tokenizers`, or leave it out to train on bytes"
            ) from error
        try:
            text = read_small(path)
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare exceptions
            raise TrainerError(
                f"{path} cannot be read as a tokenizer.json: {error}; give the file that a "
                "Hugging Face tokenizer is saved in"
            ) from error
        # what a file says of these is for whoever saved it: all of a text is trained on
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab = int(self._tokenizer.get_vocab_size())
        ends = (self._tokenizer.token_to_id(name) for name in END_NAMES)
        self.end: int | None = next((int(end) for end in ends if end is not None), None)
        content = text.encode()
        self.identity = f"tokenizer-{zlib.crc32(content):08x}-{len(content)}"

    def count(self, text: bytes) -> int:
        """How many tokens `text` has."""
        return len(self._encoded(text))

    def ids(self, text: bytes) -> array[int]:
        """The tokens of `text`, 8 bytes each."""
        return array("q", self._encoded(text).ids)

    def encode(self, text: bytes) -> Tensor:
        """The same as a tensor, int64."""
        return _as_tensor(self.ids(text))

    def encodings(self, texts: list[str], with_special_tokens: bool) -> list[Any]:
        """The tokens of each text, and the characters that each token stands for."""
        found: list[Any] = self._tokenizer.encode_batch(
            texts, add_special_tokens=with_special_tokens
        )
        return found

    def id_of(self, name: str | None) -> int | None:
        """The token of that name."""
        found = None if name is None else self._tokenizer.token_to_id(name)
        return None if found is None else int(found)

    def _encoded(self, text: bytes) -> Any:
        decoded = text.decode("utf-8", errors="replace")
        return self._tokenizer.encode(decoded, add_special_tokens=False)


def _as_tensor(ids: array[int]) -> Tensor:
    # here alone: what only counts, or runs in a data worker, need not wait for torch
    import torch

    if not ids:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(ids, dtype=torch.int64)


def open_tokenizer(path: Path | None) -> TextTokenizer:
    """The tokenizer in `path`, or bytes."""
    return ByteTokenizer() if path is None else FileTokenizer(path)

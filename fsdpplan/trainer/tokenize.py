"""Text to a token file, one token a byte: `python -m fsdpplan.trainer.tokenize IN... -o FILE`.

The vocabulary is 256, or with --documents 257: the last one ends each document. With --tokenizer it
is that of a Hugging Face tokenizer.json. The format is told in `token_file.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint.whole_file import partial_of, sync, sync_folder
from .errors import TrainerError
from .text.pieces import pieces_of, text_of
from .text.text_tokenizer import ByteTokenizer, TextTokenizer, open_tokenizer
from .text.token_file import TOKEN_FORMAT, sidecar_of

CHUNK_BYTES = 1 << 20


def tokenize_bytes(paths: Iterable[Path]) -> Iterator[bytes]:
    """The contents of `paths`, a newline after each, every byte widened to a uint16."""
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield _widened(chunk)
        yield _widened(b"\n")


def _widened(chunk: bytes) -> bytes:
    wide = bytearray(2 * len(chunk))
    wide[::2] = chunk
    return bytes(wide)


def tokenize_documents(paths: Iterable[Path], tokenizer: TextTokenizer) -> Iterator[bytes]:
    """The documents of `paths`, each with the token that ends it: a text is one, a .jsonl file has
    one a line."""
    assert tokenizer.end is not None
    end = torch.tensor([tokenizer.end])
    for number, path in enumerate(paths):
        with path.open("rb") as file, path.open("rb") as again:
            for piece in pieces_of(file, number, is_json=path.suffix == ".jsonl"):
                yield _stored(tokenizer.encode(text_of(piece, again, path)), tokenizer.vocab)
                if piece.ends:
                    yield _stored(end, tokenizer.vocab)


def _stored(tokens: Tensor, vocab: int) -> bytes:
    return array("H" if _dtype(vocab) == "uint16" else "I", tokens.tolist()).tobytes()


def _dtype(vocab: int) -> str:
    return "uint16" if vocab <= 1 << 16 else "uint32"


def write_token_file(
    paths: Iterable[Path], out: Path, tokenizer: TextTokenizer | None = None
) -> dict[str, str | int]:
    """Write `out` and its sidecar, each whole or not at all; returns what the sidecar says.

    With a tokenizer, even one of bytes, documents are told apart. The old sidecar goes first and
    the new one comes last, so that no reader sees one that is not of the tokens beside it.
    """
    sidecar = sidecar_of(out)
    partial, partial_sidecar = partial_of(out), partial_of(sidecar)
    header: dict[str, str | int] = {"format": TOKEN_FORMAT, "dtype": "uint16", "vocab": 256}
    chunks = tokenize_bytes(paths)
    if tokenizer is not None and tokenizer.end is not None:
        header |= {"dtype": _dtype(tokenizer.vocab), "vocab": tokenizer.vocab}
        header["end_of_document"] = tokenizer.end
        chunks = tokenize_documents(paths, tokenizer)
    try:
        with partial.open("xb") as file:
            written_bytes = sum(file.write(chunk) for chunk in chunks)
            sync(file)
        header["tokens"] = written_bytes // (2 if header["dtype"] == "uint16" else 4)
        with partial_sidecar.open("x", encoding="utf-8") as file_of_header:
            file_of_header.write(json.dumps(header) + "\n")
            sync(file_of_header)
        sidecar.unlink(missing_ok=True)
        os.replace(partial, out)
        os.replace(partial_sidecar, sidecar)
        sync_folder(out.parent)
    except OSError as error:
        raise TrainerError(f"cannot make {out}: {error}; choose another -o") from error
    finally:
        partial.unlink(missing_ok=True)
        partial_sidecar.unlink(missing_ok=True)
    return header


def _tokenizer(options: argparse.Namespace) -> TextTokenizer | None:
    if options.tokenizer is None:
        return ByteTokenizer() if options.documents else None
    tokenizer = open_tokenizer(options.tokenizer)
    if tokenizer.end is None:
        raise TrainerError(
            f"{options.tokenizer} has no token that ends a document, such as <|endoftext|>: add "
            "one, or leave --tokenizer out"
        )
    return tokenizer


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdpplan.trainer.tokenize",
        description="Turn text files into a token file for --data: one token a byte, or those of "
        "a tokenizer.",
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="IN", help="text files, in order")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="token file to write"
    )
    parser.add_argument(
        "--documents",
        action="store_true",
        help="end each document with a token of its own, for --pack: a file is one, a .jsonl file "
        'has one in each line\'s "text"',
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json; implies --documents"
    )
    options = parser.parse_args(arguments)
    try:
        header = write_token_file(options.inputs, options.output, _tokenizer(options))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    said = f"{header['tokens']} tokens, vocabulary {header['vocab']}"
    print(f"{options.output}: {said}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

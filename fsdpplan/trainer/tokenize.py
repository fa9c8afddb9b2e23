"""Text to a token file, one token a byte: `python -m fsdpplan.trainer.tokenize IN... -o FILE`.

The vocabulary is 256. The format is told in `data.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from .data import TOKEN_FORMAT
from .errors import TrainerError

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


def write_token_file(paths: Iterable[Path], out: Path) -> int:
    """Write `out` and its sidecar, each whole or not at all; returns the number of tokens.

    The old sidecar goes first and the new one comes last, so that no reader sees one that is not
    of the tokens beside it.
    """
    sidecar = out.with_name(out.name + ".json")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial_sidecar = sidecar.with_name(f".{sidecar.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            tokens = sum(file.write(chunk) for chunk in tokenize_bytes(paths)) // 2
        header = {"format": TOKEN_FORMAT, "dtype": "uint16", "vocab": 256, "tokens": tokens}
        partial_sidecar.write_text(json.dumps(header) + "\n", encoding="utf-8")
        sidecar.unlink(missing_ok=True)
        os.replace(partial, out)
        os.replace(partial_sidecar, sidecar)
    except OSError as error:
        raise TrainerError(f"cannot make {out}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
        partial_sidecar.unlink(missing_ok=True)
    return tokens


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m fsdpplan.trainer.tokenize",
        description="Turn text files into a token file for --data: one token a byte.",
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="IN", help="text files, in order")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="token file to write"
    )
    options = parser.parse_args(arguments)
    try:
        tokens = write_token_file(options.inputs, options.output)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {tokens} tokens, vocabulary 256", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

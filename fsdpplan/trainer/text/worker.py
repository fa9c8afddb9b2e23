"""Data workers: processes beside a rank that turn text into tokens, and count them.

A worker is a Python of its own, never a fork: a process group and CUDA may be initialised here. It
imports the standard library, a tokenizer's package and this folder's modules without torch, so it
starts at once. Requests and answers go through its standard input and output, in order. It leaves
when its input ends, however this process does, and waits for no signal: those of a scheduler come
to it, too, while the rank finishes its step.

    request   one line of JSON
    answer    a line of JSON with "bytes", then as many bytes
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ..errors import DataWorkerLost, RankError, TrainerError
from ..signals import STOP_SIGNALS
from .index import PieceCounter, PieceIndex, TextReader
from .pieces import Piece
from .text_tokenizer import TextTokenizer, open_tokenizer

PROGRAM = Path(__file__).with_name("__main__.py")
END_SECONDS = 5.0
"""For a process that has closed its output, until it is gone."""


class DataWorker:
    """One worker, as its rank sees it."""

    def __init__(self, *, tokenizer: Path | None, passed: Sequence[int] = (), **given: Any) -> None:
        """Start it; `given` is what it reads from (`serve`), `passed` descriptors of files."""
        said = {"paths": sys.path, "tokenizer": None if tokenizer is None else str(tokenizer)}
        # what is blocked stays so in the new process, from its first moment on
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=passed,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.ask({**said, **given})

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def ask(self, request: Any) -> None:
        """Send a request; it is answered after those before it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._lost() from error

    def answer(self) -> tuple[dict[str, Any], bytearray]:
        """The answer to the next request; raises what the worker met."""
        assert self._process.stdout is not None
        try:
            head: dict[str, Any] = json.loads(self._process.stdout.readline())
            data = bytearray(head["bytes"])
            if self._process.stdout.readinto(data) != len(data):  # type: ignore[attr-defined]
                raise EOFError
        except (OSError, ValueError, EOFError) as error:
            raise self._lost() from error
        if "error" in head:
            raise _met(head)
        return head, data

    def end(self) -> None:
        """End the process: whoever waits for an answer learns that."""
        with suppress(OSError):
            self._process.kill()

    def close(self) -> None:
        """End the process and leave nothing of it."""
        self.end()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _lost(self) -> DataWorkerLost:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return DataWorkerLost(f"data worker {self.pid} answers no longer")
        how = f"with exit code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            how = f"by {name}" + (", perhaps for want of host memory" if -code == 9 else "")
        return DataWorkerLost(
            f"data worker {self.pid} was ended {how}: start again with --resume auto; with fewer "
            "--data-workers less memory is needed"
        )


def _met(head: dict[str, Any]) -> Exception:
    kinds = {"rank": RankError, "user": TrainerError}
    kind = kinds.get(head["kind"])
    if kind is not None:
        return kind(head["error"])
    return RuntimeError(f"a data worker failed:\n{head['error']}")


def serve() -> None:
    """Be a worker, until the input ends.

    The first line says the "tokenizer", and "texts", each an index and its text, whose stretches
    [[TEXT, START, STOP], ...] are read, or "files" whose pieces [[FILE, OFFSET, LENGTH], ...] are
    counted. A stretch has 8 bytes a token; behind the last one comes 1 byte a token of each, which
    says whether it begins a document.
    """
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a package prints is no answer
    given = json.loads(requests.readline())
    sys.path[:] = given["paths"]
    work = _work(given)
    for line in requests:
        began = time.perf_counter()
        try:
            head, data = work(json.loads(line))
            head["seconds"] = time.perf_counter() - began
        except Exception as error:
            head, data = _told(error), []
        _send(answers, head, data)


Work = Callable[[list[list[int]]], tuple[dict[str, Any], list[Any]]]
"""From a request to its answer: a head, and what follows it."""


def _work(given: dict[str, Any]) -> Work:
    try:
        return _counting(given) if "files" in given else _reading(given)
    except Exception as error:
        failure = error  # the answer to every request

    def fail(_request: list[list[int]]) -> tuple[dict[str, Any], list[Any]]:
        raise failure

    return fail


def _reading(given: dict[str, Any]) -> Work:
    tokenizer = _tokenizer(given)
    indexes = (PieceIndex(Path(index), Path(text)) for index, text in given["texts"])
    readers = [TextReader(index, tokenizer) for index in indexes]

    def read(request: list[list[int]]) -> tuple[dict[str, Any], list[Any]]:
        found = [readers[text].read(start, stop) for text, start, stop in request]
        return {}, [stretch.tokens for stretch in found] + [stretch.starts for stretch in found]

    return read


def _counting(given: dict[str, Any]) -> Work:
    counter = PieceCounter([Path(name) for name in given["files"]], _tokenizer(given))

    def count(request: list[list[int]]) -> tuple[dict[str, Any], list[Any]]:
        pieces = (Piece(file, start, length, False, False) for file, start, length in request)
        return {"counts": counter.count(pieces)}, []

    return count


def _tokenizer(given: dict[str, Any]) -> TextTokenizer:
    named = given["tokenizer"]
    return open_tokenizer(None if named is None else Path(named))


def _told(error: Exception) -> dict[str, Any]:
    if isinstance(error, RankError):
        return {"kind": "rank", "error": str(error)}
    if isinstance(error, TrainerError):
        return {"kind": "user", "error": str(error)}
    return {"kind": "fault", "error": "".join(traceback.format_exception(error))}


def _send(answers: IO[bytes], head: dict[str, Any], data: list[Any]) -> None:
    views = [memoryview(part).cast("B") for part in data]
    size = sum(len(view) for view in views)
    answers.write(json.dumps({**head, "bytes": size}).encode() + b"\n")
    for view in views:
        answers.write(view)
    answers.flush()

"""Who makes the index of some text, and where: one rank, by several processes, while others wait.

It lies beside the text; where nothing can be written there, in the user's cache; where not even
there, in a file that has no name any more once the ranks of the node have opened it. The rank that
comes first makes it. A node that does not see that rank's file has a disk of its own, and makes its
own. A file takes its name once it is whole and the disk has it: a run that is killed leaves at most
one that nobody takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from ..checkpoint.whole_file import partial_of, sync, sync_folder
from ..errors import RankError, TrainerError
from ..private_torch import meeting_store
from .index import NoIndex, PieceCounter, PieceIndex, all_pieces, cannot_read, digest_of
from .index import write_index as write
from .pieces import Piece, text_files
from .text_tokenizer import TextTokenizer, open_tokenizer
from .worker import DataWorker

BATCH_PIECES, BATCH_BYTES = 512, 1 << 20
"""Most that one request has a worker count."""
AHEAD_BATCHES = 3
"""Requests that wait at each worker."""
WORKER_BYTES = 1 << 24
"""Text that is worth a process."""
MOST_WORKERS = 64
SAY_SECONDS = 15.0
"""Between two words on how far it is."""
BEAT_SECONDS = 2.0
SILENT_SECONDS = 120.0
"""After which a rank that others wait for is lost."""
MOST_POLL_SECONDS = 0.5


def cpu_share(ranks: int = 1) -> int:
    """Processors of this process over `ranks`, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (allowed or 1) // max(1, ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What an index is made of."""

    path: Path
    tokenizer: TextTokenizer
    tokenizer_file: Path | None
    files: tuple[Path, ...]
    digest: str

    @classmethod
    def find(cls, path: Path, tokenizer_file: Path | None) -> Text:
        """Look at the files in `path`."""
        tokenizer, files = open_tokenizer(tokenizer_file), text_files(path)
        return cls(
            path=path,
            tokenizer=tokenizer,
            tokenizer_file=tokenizer_file,
            files=files,
            digest=digest_of(path, files, tokenizer),
        )

    @property
    def name(self) -> str:
        """Of the index's file."""
        return f".{self.path.name}.{self.digest}.2.fsdpplan-index"

    def places(self) -> list[Path]:
        """Where it may lie, the best one first."""
        beside = self.path if self.path.is_dir() else self.path.parent
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return [beside / self.name, Path(cache).expanduser() / "fsdpplan" / self.name.lstrip(".")]


def existing_index(text: Text) -> PieceIndex | None:
    """A whole one that was made before."""
    for place in text.places():
        with contextlib.suppress(OSError, NoIndex):
            return PieceIndex(place, text.path)
    return None


def make_index(text: Text, begun: Callable[[Path | None], None] = lambda _: None) -> PieceIndex:
    """Make it here; `begun` hears of the file that it is written to, if that has a name."""
    try:
        for place in text.places():
            partial = partial_of(place)
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                file: IO[bytes] = partial.open("x+b")
            except OSError:
                continue
            begun(partial)
            try:
                with file:
                    _write(text, file)
                    sync(file)
                os.replace(partial, place)
                sync_folder(place.parent)
            finally:
                partial.unlink(missing_ok=True)
            return PieceIndex(place, text.path)
        begun(None)
        with tempfile.NamedTemporaryFile(prefix="fsdpplan-index-", delete=False) as file:
            try:
                _write(text, file)
            except BaseException:
                os.unlink(file.name)
                raise
        return PieceIndex(Path(file.name), text.path)
    except OSError as error:
        raise cannot_read(text.path, error) from error


def _write(text: Text, file: IO[bytes]) -> None:
    total_bytes = sum(each.stat().st_size for each in text.files)
    # bytes are counted as fast as they are found
    workers = 0 if text.tokenizer_file is None else min(cpu_share(), total_bytes // WORKER_BYTES)
    progress = Progress(text.path, total_bytes, workers=min(workers, MOST_WORKERS))
    pieces = progress.of(all_pieces(text.files))
    with contextlib.closing(counted(text, pieces, workers=progress.workers)) as found:
        write(
            file,
            text.path,
            text.files,
            text.digest,
            found,
            ends=text.tokenizer.end is not None,
        )
    progress.end()


def counted(
    text: Text, pieces: Iterator[Piece], *, workers: int
) -> Generator[tuple[Piece, int], None, None]:
    """Each piece with its tokens, in order, counted by so many other processes; 0: here."""
    batches = _batches(pieces)
    if workers < 2:
        counter = PieceCounter(text.files, text.tokenizer)
        with contextlib.closing(counter):
            for batch in batches:
                yield from zip(batch, counter.count(batch), strict=True)
        return
    files = [str(path) for path in text.files]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(workers):
            worker = DataWorker(tokenizer=text.tokenizer_file, files=files)
            stack.callback(worker.close)
            processes.append(worker)
        turns, asked = cycle(processes), deque[tuple[list[Piece], DataWorker]]()
        for batch in batches:
            worker = next(turns)
            worker.ask([[piece.file, piece.offset, piece.length] for piece in batch])
            asked.append((batch, worker))
            if len(asked) > AHEAD_BATCHES * workers:
                yield from _answered(*asked.popleft())
        for each in asked:
            yield from _answered(*each)


def _answered(batch: list[Piece], worker: DataWorker) -> Iterator[tuple[Piece, int]]:
    head, _ = worker.answer()
    yield from zip(batch, head["counts"], strict=True)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.length
        if size >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Progress:
    """Says how far an index is, where it takes long."""

    def __init__(self, path: Path, total_bytes: int, *, workers: int) -> None:
        self.path, self.total_bytes, self.workers = path, total_bytes, workers
        self._began = self._said = time.monotonic()
        self._done_bytes = 0

    def of(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The pieces as they are; each is a little further."""
        while batch := list(islice(pieces, 64)):
            yield from batch
            self._done_bytes += sum(piece.length for piece in batch)
            if time.monotonic() - self._said > SAY_SECONDS:
                self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        share = self._done_bytes / max(1, self.total_bytes)
        left = (self._said - self._began) * (1 - share) / max(share, 1e-9)
        print(
            f"index of {self.path}: {share:.0%} of {self.total_bytes / 1e9:.3g} GB read, "
            f"{max(1, self.workers)} at a time; about {left / 60:.0f} min more",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        """Say so, if anything was said."""
        if self._said > self._began:
            seconds = time.monotonic() - self._began
            print(f"index of {self.path}: made in {seconds:.0f} s", file=sys.stderr, flush=True)


def open_index(path: Path, tokenizer: Path | None) -> PieceIndex:
    """The index of the text in `path`, made if it is not there. Where there is a process group, all
    its ranks call this, and one of each file system makes it."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        text = Text.find(path, tokenizer)
        index = existing_index(text) or make_index(text)
        _drop_name(index, text)
        return index
    return _Meeting(path, tokenizer).index()


def _drop_name(index: PieceIndex, text: Text) -> None:
    """A file in a folder for temporary ones stays mapped without its name."""
    if index.path not in text.places():
        index.path.unlink(missing_ok=True)


_meetings = count()
"""Of this process, which is in step with the others."""


@dataclass(slots=True)
class _Meeting:
    """The ranks agree on who makes an index, through the store by which they met: no collective,
    which would end after its own timeout."""

    path: Path
    tokenizer: Path | None
    host: str = field(default_factory=lambda: socket.gethostname())
    store: Any = field(default_factory=lambda: meeting_store(f"index {next(_meetings)}"))

    def index(self) -> PieceIndex:
        """Found, made or waited for."""
        node = f"node {self.host}"
        if self.store.add(f"{node}/first", 1) != 1:
            index = self._opened(self._await(f"{node}/made", by=node))
            self.store.add("opened", 1)
            return index
        with self._beating(node), self._telling(f"{node}/made"):
            index = self._of_node(node)
            self.store.set(f"{node}/made", json.dumps({"index": str(index.path)}))
            self.store.add("opened", 1)
            self._leave(index)
        return index

    def _of_node(self, node: str) -> PieceIndex:
        if self.store.add("first", 1) == 1:
            with self._beating("first"), self._telling("begun"), self._telling("made"):
                return self._of_first()
        begun = self._await("begun", by="first")
        if begun["file"] is not None and Path(begun["file"]).exists():
            return self._opened(self._await("made", by="first"))
        text = Text.find(self.path, self.tokenizer)
        return existing_index(text) or make_index(text)

    def _of_first(self) -> PieceIndex:
        text = Text.find(self.path, self.tokenizer)
        index = existing_index(text)
        if index is None:
            index = make_index(text, begun=self._begun)
        else:
            self._begun(index.path)
        self.store.set("made", json.dumps({"index": str(index.path)}))
        return index

    def _begun(self, file: Path | None) -> None:
        self.store.set("begun", json.dumps({"file": None if file is None else str(file)}))

    def _opened(self, made: dict[str, Any]) -> PieceIndex:
        try:
            return PieceIndex(Path(made["index"]), self.path)
        except (OSError, NoIndex) as error:
            raise RankError(
                f"the index {made['index']}, which another rank has made, cannot be read on "
                f"{self.host}: {error}; look at that file system"
            ) from error

    def _leave(self, index: PieceIndex) -> None:
        """Take the name of a file for temporary ones away, once all have opened theirs."""
        if index.path.parent != Path(tempfile.gettempdir()):
            return
        if not index.path.name.startswith("fsdpplan-index-"):
            return
        deadline = time.monotonic() + SILENT_SECONDS
        while self.store.add("opened", 0) < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.05)
        index.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        """What goes wrong is told to those that wait for `key`."""
        try:
            yield
        except Exception as error:
            if not self.store.check([key]):
                is_user = isinstance(error, TrainerError)
                self.store.set(key, json.dumps({"error": str(error), "is_user": is_user}))
            raise

    @contextlib.contextmanager
    def _beating(self, who: str) -> Iterator[None]:
        """Those that wait see that this rank is alive."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_SECONDS):
                self.store.add(f"{who}/beat", 1)

        thread = threading.Thread(target=beat, name="index beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _await(self, key: str, *, by: str) -> dict[str, Any]:
        """What `key` says, once it is there; whoever is to say it must give signs of life."""
        beats, heard, pause = 0, time.monotonic(), 0.01
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, MOST_POLL_SECONDS)
            now = self.store.add(f"{by}/beat", 0)
            if now != beats:
                beats, heard = now, time.monotonic()
            elif time.monotonic() - heard > SILENT_SECONDS:
                raise RankError(
                    f"the rank that makes the index of {self.path} gives no sign of life for "
                    f"{SILENT_SECONDS:.0f} s: look at its node, and start again"
                )
        said: dict[str, Any] = json.loads(self.store.get(key))
        if "error" in said:
            kind = TrainerError if said["is_user"] else RankError
            raise kind(said["error"])
        return said

"""Chats to be fine-tuned on: `.jsonl` files of messages, or of prompts and completions.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}

Only what the assistant says is a target. All chats are rendered and tokenized once, into a file
beside the data that later steps and runs map; it is named by what it was made of. One process makes
it while others that see the folder wait for its lock.

With `--pack` a sequence holds as many whole chats as fit, each of which attends to itself alone;
otherwise one. Which ones are together depends on their lengths alone, and each epoch takes the
sequences in another order, so number `n` follows from the seed and `n`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import tempfile
import zlib
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.whole_file import partial_of, require_file, sync
from ..config import PlanConfig
from ..errors import TrainerError
from ..options import Options
from .chat_template import (
    CONFIG_FILE,
    TEMPLATE_FILE,
    ChatTemplate,
    Said,
    Unrenderable,
    read_template,
)
from .data import Data, InText, MaskedMixture, shuffled, weights_of
from .mixture import Share, require_shares
from .pieces import pieces_of, text_files
from .stream import TextSource
from .text_tokenizer import FileTokenizer

FORMAT = 1
"""Of the file of tokenized chats."""
COUNTED = 1 << 31
"""The bit of a stored token that says that it is an answer's."""
AT_ONCE = 256
"""Chats that are tokenized together, by several threads."""

_WORDS = 3
_FOOTER = ("chats", "tokens", "counted", "dropped", "untold", "highest", "digest")


class Chat(NamedTuple):
    """One line of a file."""

    said: Said
    plain: bool
    """It is a text and its continuation: the tokenizer puts its own tokens around."""


class Tokens(NamedTuple):
    """A chat as it is stored."""

    stored: array[int]
    first: int
    """The first of them that counts."""
    counted: int


def chat_files(path: Path) -> tuple[Path, ...]:
    """The `.jsonl` files that `path` is, or has in it."""
    files = text_files(path)
    for file in files:
        if file.suffix != ".jsonl":
            raise TrainerError(
                f"{file} is no .jsonl file, which --sft takes chats from: give one with a JSON "
                'object with "messages" in each line'
            )
        require_file(file)
    return files


class ChatReader:
    """Lines to tokens, by a tokenizer and its template."""

    def __init__(self, path: Path, tokenizer: Path, own_template: Path | None) -> None:
        self.path, self.files = path, chat_files(path)
        self._tokenizer = FileTokenizer(tokenizer)
        states = [file.stat() for file in self.files]
        source, names = read_template(tokenizer, own_template)
        newest = datetime.fromtimestamp(max(state.st_mtime for state in states), UTC)
        self._template = None if source is None else ChatTemplate(source, names, now=newest)
        self._no_template = (
            f"{tokenizer} has no chat template: there is no {TEMPLATE_FILE}, nor one in "
            f"{CONFIG_FILE}, beside it; give one by --chat-template, or lines with a prompt and a "
            "completion"
        )
        end = self._tokenizer.id_of(names.get("eos_token"))
        self._end = self._tokenizer.end if end is None else end
        made_of = [
            str(FORMAT),
            self._tokenizer.identity,
            f"{source} {sorted(names.items())}",
            *(
                f"{os.path.relpath(file, path)} {state.st_size} {state.st_mtime_ns}"
                for file, state in zip(self.files, states, strict=True)
            ),
        ]
        self.digest = f"{zlib.crc32('|'.join(made_of).encode()):08x}"

    def write(self, out: IO[bytes]) -> None:
        """All chats: their tokens, where each ends, and what there is in all."""
        records = array("Q")
        found = dict.fromkeys(_FOOTER, 0)
        for chat, encoding in self._encoded():
            tokens = self._tokens(chat, encoding)
            found["untold"] += chat.said.untold
            if not tokens.counted:
                found["dropped"] += 1
                continue
            raw = tokens.stored.tobytes()
            out.write(raw)
            found["digest"] = zlib.crc32(raw, found["digest"])
            found["chats"] += 1
            found["tokens"] += len(tokens.stored)
            found["counted"] += tokens.counted
            found["highest"] = max(found["highest"], max(encoding.ids, default=0))
            records.extend((found["tokens"], tokens.first, tokens.counted))
        if not found["chats"]:
            raise TrainerError(self._nothing(found["untold"]))
        out.write(bytes(-found["tokens"] * 4 % 8))
        out.write(records.tobytes())
        out.write(array("Q", [found[name] for name in _FOOTER]).tobytes())
        out.flush()

    def _nothing(self, untold: int) -> str:
        if untold:
            return (
                f"no answer in {self.path} can be told from its prompt: the chat template renders "
                "a prompt otherwise than the chat that it begins; give a template with "
                "{% generation %} around answers by --chat-template"
            )
        return (
            f"{self.path} has no answer to learn: chats need messages of the role assistant, and "
            "templates with {% generation %} have it around these"
        )

    def _encoded(self) -> Iterator[tuple[Chat, Any]]:
        chats = itertools.chain.from_iterable(map(self._chats, range(len(self.files))))
        while some := list(itertools.islice(chats, AT_ONCE)):
            for plain, alike in itertools.groupby(some, key=lambda chat: chat.plain):
                together = list(alike)
                texts = [chat.said.text for chat in together]
                yield from zip(together, self._tokenizer.encodings(texts, plain), strict=True)

    def _chats(self, number: int) -> Iterator[Chat]:
        file = self.files[number]
        with file.open("rb") as lines, file.open("rb") as again:
            for piece in pieces_of(lines, number, is_json=True):
                again.seek(piece.offset)
                raw = again.read(piece.length)
                try:
                    yield self._chat(json.loads(raw))
                except TrainerError:
                    raise
                except Unrenderable as error:
                    raise TrainerError(
                        f"{file}, at byte {piece.offset}: the chat template takes no such chat "
                        f"({error}); leave it out, or give another --chat-template"
                    ) from error
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                    raise TrainerError(
                        f"{file}, at byte {piece.offset}: a line must be a JSON object with "
                        '"messages", each with "role" and "content", or with "prompt" and '
                        f'"completion", not {raw[:60].decode(errors="replace")!r}'
                    ) from error

    def _chat(self, line: dict[str, Any]) -> Chat:
        if "messages" in line:
            return Chat(self._said(line["messages"], line.get("tools"), first=0), plain=False)
        prompt, completion = line["prompt"], line["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            whole = prompt + completion
            return Chat(Said(whole, [(len(prompt), len(whole))], 0), plain=True)
        said = self._said([*prompt, *completion], line.get("tools"), first=len(prompt))
        return Chat(said, plain=False)

    def _said(self, messages: Any, tools: Any, *, first: int) -> Said:
        if self._template is None:
            raise TrainerError(self._no_template)
        if not messages or not all(isinstance(each["role"], str) for each in messages):
            raise ValueError("no messages")
        return self._template(messages, tools, first=first)

    def _tokens(self, chat: Chat, encoding: Any) -> Tokens:
        stored, first, counted, ids = array("I"), 0, 0, encoding.ids
        marks = overlaps(encoding.offsets, chat.said.answers)
        if chat.plain and self._end is not None and (not ids or ids[-1] != self._end):
            ids, marks = [*ids, self._end], [*marks, True]
        # the first token of all follows from nothing
        for place, (token, mark) in enumerate(zip(ids, marks, strict=True)):
            mark = mark and place > 0
            stored.append(token | COUNTED if mark else token)
            counted += mark
            first = place if mark and not first else first
        return Tokens(stored, first, counted)


def overlaps(offsets: Iterable[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Which tokens, given by where their characters begin and end, have some in `spans`. Both are
    in order."""
    found, number = [], 0
    for begin, end in offsets:
        while number < len(spans) and spans[number][1] <= begin:
            number += 1
        found.append(begin < end and number < len(spans) and spans[number][0] < end)
    return found


class StoredChats:
    """The file of all chats, mapped."""

    def __init__(self, file: IO[bytes]) -> None:
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        footer = memoryview(self._map).cast("Q")[-len(_FOOTER) :]
        self.chats, self.tokens, self.counted, self.dropped, self.untold, self.highest, digest = (
            footer
        )
        self.digest = f"{digest:08x}"
        records = memoryview(self._map).cast("Q")
        self._records = records[-len(_FOOTER) - _WORDS * self.chats : -len(_FOOTER)]

    def bounds(self, chat: int) -> tuple[int, int]:
        """The numbers of the first token of a chat and of the one behind its last."""
        begin = self._records[(chat - 1) * _WORDS] if chat else 0
        return begin, self._records[chat * _WORDS]

    def first_counted(self, chat: int) -> int:
        """The place in a chat of its first token that counts."""
        return self._records[chat * _WORDS + 1]

    def read(self, start: int, stop: int) -> Tensor:
        """Stored tokens, int64."""
        raw = bytearray(self._map[start * 4 : stop * 4])
        return torch.frombuffer(raw, dtype=torch.int32).long() & 0xFFFFFFFF


class ChatSequences:
    """Chats in sequences of seq_len + 1 tokens."""

    def __init__(
        self,
        path: Path,
        stored: StoredChats,
        *,
        seq_len: int,
        vocab: int,
        seed: int | str,
        packs: bool,
    ) -> None:
        if stored.highest >= vocab:
            raise TrainerError(
                f"the chats of {path} have token {stored.highest} but the model {vocab} tokens: "
                "give the model's own --tokenizer, or plan with a larger --vocab"
            )
        self.path, self.stored, self.seed, self.packs = path, stored, seed, packs
        self.room = seq_len + 1
        lengths = [stop - start for start, stop in map(stored.bounds, range(stored.chats))]
        kept = [chat for chat in range(stored.chats) if stored.first_counted(chat) < self.room]
        self.cut = sum(lengths[chat] > self.room for chat in kept)
        self.dropped = stored.dropped + stored.chats - len(kept)
        self.held = sum(min(lengths[chat], self.room) for chat in kept)
        if not kept:
            raise TrainerError(
                f"no answer in {path} begins within {seq_len} tokens: plan with a longer --seq-len"
            )
        self._rows = (
            packed_rows({chat: lengths[chat] for chat in kept}, room=self.room)
            if packs
            else [array("Q", [chat]) for chat in kept]
        )
        self.windows = len(self._rows)
        self.identity: dict[str, int | str] = {
            "kind": "chats",
            "tokens": stored.tokens,
            "index": stored.digest,
            "rows": "packed" if packs else "one a sequence",
        }
        self._row = lru_cache(maxsize=8)(self._read_row)

    @property
    def words(self) -> str:
        """What there is, and what is made of it."""
        stored = self.stored
        parts = [
            f"{self.path}: {stored.chats:,} chats of {stored.tokens:,} tokens, of which "
            f"{stored.counted / stored.tokens:.1%} are answers and count"
        ]
        if self.cut:
            parts.append(f"{self.cut:,} are cut to {self.room:,} tokens")
        if self.dropped:
            parts.append(f"{self.dropped:,} are left out, with no answer to learn")
        if stored.untold:
            parts.append(
                f"{stored.untold:,} answers do not count, since the template renders them "
                "otherwise than when they were given"
            )
        share = self.held / (self.windows * self.room)
        how = "packed into" if self.packs else "one each in"
        advice = "" if self.packs or share > 0.7 else " (--pack would fill them)"
        parts.append(f"{how} {self.windows:,} sequences, {share:.0%} full{advice}")
        return "; ".join(parts)

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`, filled up with token 0."""
        return self._row(number)[0]

    def starts(self, number: int) -> Tensor:
        """Which of its tokens begin a chat, or what fills up."""
        return self._row(number)[1]

    def counted(self, number: int) -> Tensor:
        """Which of its tokens are answers'."""
        return self._row(number)[2]

    def real(self, number: int) -> Tensor:
        """Which of its tokens are a chat's."""
        return self._row(number)[3]

    def texts(self) -> list[TextSource]:
        """None: they have been tokenized."""
        return []

    def in_text(self, number: int) -> InText | None:
        """Nowhere."""
        return None

    def epochs(self, number: int) -> dict[str, float]:
        """How often the chats have been read before sequence `number`."""
        return {str(self.path): number / self.windows}

    def _read_row(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        epoch, position = divmod(number, self.windows)
        row = self._rows[shuffled(position, self.windows, key=f"{self.seed}:{epoch}")]
        tokens = torch.zeros(self.room, dtype=torch.int64)
        starts = torch.zeros(self.room, dtype=torch.bool)
        end = 0
        for chat in row:
            start, stop = self.stored.bounds(chat)
            read = self.stored.read(start, min(stop, start + self.room))
            starts[end] = True
            tokens[end : end + len(read)] = read
            end += len(read)
        starts[end : end + 1] = True
        real = torch.arange(self.room) < end
        return tokens & (COUNTED - 1), starts, (tokens & COUNTED).bool(), real


def packed_rows(lengths: dict[int, int], *, room: int) -> list[array[int]]:
    """Chats in rows of at most `room` tokens: the longest first, each where the least is left over
    (best fit decreasing; Johnson et al. 1974, SIAM J. Comput. 3, at most 11/9 of the best number of
    rows and 4)."""
    rows: list[array[int]] = []
    by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # those that some row has, in order
    for chat in sorted(lengths, key=lambda each: (-lengths[each], each)):
        length = min(lengths[chat], room)
        place = bisect_left(spaces, length)
        if place == len(spaces):
            row, space = len(rows), room
            rows.append(array("Q"))
        else:
            space = spaces[place]
            row = by_space[space].pop()
            if not by_space[space]:
                del spaces[place], by_space[space]
        rows[row].append(chat)
        left = space - length
        if left > 1:  # one token has nothing to predict
            if left not in by_space:
                insort(spaces, left)
            by_space.setdefault(left, []).append(row)
    return rows


def open_all_chats(
    plan: PlanConfig, options: Options, shares: Sequence[Share], *, seed: int
) -> Data:
    """The chats that `shares` name: of one source, or of a mixture of them."""
    require_shares(shares)
    if len(shares) == 1:
        return open_chats(plan, options, Path(shares[0].path), seed=seed)
    sources = [
        open_chats(plan, options, Path(share.path), seed=f"{seed}:{index}")
        for index, share in enumerate(shares)
    ]
    return MaskedMixture(sources, weights_of(shares, sources))


def open_chats(plan: PlanConfig, options: Options, path: Path, *, seed: int | str) -> ChatSequences:
    """The chats in `path`, tokenized first if need be."""
    assert options.tokenizer is not None, "the command line asks for one"
    try:
        reader = ChatReader(path, options.tokenizer, options.chat_template)
        folder = path if path.is_dir() else path.parent
        with _stored(folder / f".{path.name}.{reader.digest}.fsdpplan-chats", reader) as file:
            stored = StoredChats(file)
    except OSError as error:
        raise TrainerError(
            f"the chats {path} cannot be read: {error}; check --data and its permissions"
        ) from error
    return ChatSequences(
        path,
        stored,
        seq_len=plan.training.seq_len,
        vocab=plan.model.vocab,
        seed=seed,
        packs=options.pack,
    )


def _stored(place: Path, reader: ChatReader) -> IO[bytes]:
    """The file of tokenized chats, made by one of the processes that ask for it; where nothing can
    be written, one without a name."""
    if place.exists():
        return place.open("rb")
    lock = place.with_name(place.name + ".lock")
    try:
        turn: IO[bytes] = lock.open("ab")
    except OSError:
        file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is gone when the map is
        reader.write(file)
        return file
    with turn:
        with contextlib.suppress(OSError):  # of a file system that knows no locks
            fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            if not place.exists():
                _make(place, reader)
        finally:
            lock.unlink(missing_ok=True)
    return place.open("rb")


def _make(place: Path, reader: ChatReader) -> None:
    partial = partial_of(place)
    try:
        with partial.open("xb") as file:
            reader.write(file)
            sync(file)
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)

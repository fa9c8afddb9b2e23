"""Tokens: which sequences a rank sees in a step, from a token file, from text or made up.

Sequences are numbered without end: number `n` of a run is a pure function of the seed and `n`, and
step `s` of global batch `B` takes numbers `s * B` to `s * B + B - 1`. So the data does not depend
on the layout, and a run resumes from one number.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import PlanConfig
from ..errors import RankError, TrainerError
from ..parallel.context_parallel import own_positions
from ..parallel.mesh import batch_rank, place
from ..private_torch import meeting_store
from .mixture import Order, Share, parts, require_shares
from .packing import IGNORED, MicroBatch, only_counted, pack
from .pieces import SUFFIXES
from .stream import TextSource
from .token_file import TokenFile, sidecar_of

MEAN_DOCUMENTS_TOKENS = 64
"""Of made-up documents."""


class Sequences(Protocol):
    """Where the tokens come from."""

    @property
    def identity(self) -> dict[str, Any]:
        """Changes with the tokens: what a checkpoint says of them."""
        ...

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`: seq_len + 1 tokens, int64, on the CPU."""
        ...

    def starts(self, number: int) -> Tensor:
        """Which of its tokens begin a document."""
        ...


@runtime_checkable
class Masked(Protocol):
    """Sequences not all of whose tokens are to be predicted."""

    def counted(self, number: int) -> Tensor:
        """Which tokens of sequence `number` the loss counts where they are targets."""
        ...

    def real(self, number: int) -> Tensor:
        """Which tokens of sequence `number` do more than fill it up."""
        ...


class InText(NamedTuple):
    """Where a sequence lies in some text."""

    text: TextSource
    start: int
    stop: int


class Data(Sequences, Protocol):
    """Sequences of a run."""

    def texts(self) -> list[TextSource]:
        """Those of its sources that have to be tokenised."""
        ...

    def in_text(self, number: int) -> InText | None:
        """Where sequence `number` lies in one of them; None: elsewhere."""
        ...

    def epochs(self, number: int) -> dict[str, float]:
        """How often each source has been read before sequence `number`, by its path."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSequences:
    """Tokens that can be learned: every second one follows from the one before, the others are
    drawn with probability about 1/(k + 1) for token k."""

    seq_len: int
    vocab: int
    seed: int

    @property
    def identity(self) -> dict[str, int | str]:
        """What a checkpoint says of them."""
        return {"kind": "synthetic", "vocab": self.vocab}

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`."""
        generator = self._generator(f"{self.seed}:{number}")
        uniform = torch.rand(self.seq_len // 2 + 1, generator=generator, dtype=torch.float64)
        drawn = (self.vocab**uniform).long().clamp(1, self.vocab) - 1
        following = (drawn * 31 + 7) % self.vocab
        return torch.stack([drawn, following], dim=1).flatten()[: self.seq_len + 1]

    def starts(self, number: int) -> Tensor:
        """Documents of random lengths, a few at least in a sequence."""
        mean = min(MEAN_DOCUMENTS_TOKENS, max(1, self.seq_len // 4))
        uniform = torch.rand(
            self.seq_len + 1, generator=self._generator(f"{self.seed}:{number}:documents")
        )
        return uniform < 1 / mean

    def texts(self) -> list[TextSource]:
        """None."""
        return []

    def in_text(self, number: int) -> InText | None:
        """Nowhere."""
        return None

    def epochs(self, number: int) -> dict[str, float]:
        """None: they never come again."""
        return {}

    @staticmethod
    def _generator(key: str) -> torch.Generator:
        generator = torch.Generator()
        generator.manual_seed(zlib.crc32(key.encode()))
        return generator


class TokenSource(Protocol):
    """A long row of tokens."""

    path: Path
    tokens: int
    vocab: int
    identity: dict[str, int | str]

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens number `start` to `stop`, int64."""
        ...

    def starts(self, start: int, stop: int) -> Tensor:
        """Which of them begin a document."""
        ...


class Windows:
    """Windows of seq_len + 1 tokens of a source, each epoch in another order."""

    def __init__(self, source: TokenSource, *, seq_len: int, vocab: int, seed: int | str) -> None:
        if source.vocab > vocab:
            raise TrainerError(
                f"{source.path} has a vocabulary of {source.vocab} tokens, the model one of "
                f"{vocab}: plan with --vocab {source.vocab}, or tokenize the text anew"
            )
        self.source, self.seq_len, self.seed, self.vocab = source, seq_len, seed, vocab
        self.path, self.identity = source.path, source.identity
        self.windows = (source.tokens - 1) // seq_len
        if self.windows < 1:
            raise TrainerError(
                f"{source.path} has {source.tokens} tokens, too few for one sequence of {seq_len}: "
                "use a longer text or a shorter --seq-len"
            )

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`."""
        tokens = self.source.read(*self._bounds(number))
        if int(tokens.max()) >= self.vocab:
            raise RankError(
                f"{self.source.path} has token {int(tokens.max())} but the model {self.vocab} "
                "tokens: its sidecar says a smaller vocabulary than it has; write it again"
            )
        return tokens

    def starts(self, number: int) -> Tensor:
        """Which of its tokens begin a document."""
        return self.source.starts(*self._bounds(number))

    def texts(self) -> list[TextSource]:
        """The source, if it is text."""
        return [self.source] if isinstance(self.source, TextSource) else []

    def in_text(self, number: int) -> InText | None:
        """Where sequence `number` lies in it."""
        text = self.source
        return InText(text, *self._bounds(number)) if isinstance(text, TextSource) else None

    def epochs(self, number: int) -> dict[str, float]:
        """How often the source has been read before sequence `number`."""
        return {str(self.path): number / self.windows}

    def _bounds(self, number: int) -> tuple[int, int]:
        epoch, position = divmod(number, self.windows)
        window = shuffled(position, self.windows, key=f"{self.seed}:{epoch}")
        return window * self.seq_len, window * self.seq_len + self.seq_len + 1


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


class Source(Data, Protocol):
    """Sequences that come again after the last one."""

    path: Path
    windows: int


class Mixture:
    """Sequences of several sources, each with epochs and an order of its own."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[Fraction]) -> None:
        self.sources = tuple(sources)
        self.order = Order(parts(weights))
        for source, part in zip(self.sources, self.order.parts, strict=True):
            if not part:
                raise TrainerError(
                    f"--data {source.path} has less than a {self.order.round:,}th of all "
                    "weights: give it more, or leave it out"
                )
        self.identity: dict[str, Any] = {
            "kind": "mixture",
            "sources": [
                {"of": part, **source.identity}
                for source, part in zip(self.sources, self.order.parts, strict=True)
            ],
        }

    def __call__(self, number: int) -> Tensor:
        """Sequence `number`."""
        turn = self.order(number)
        return self.sources[turn.source](turn.number)

    def starts(self, number: int) -> Tensor:
        """Which of its tokens begin a document."""
        turn = self.order(number)
        return self.sources[turn.source].starts(turn.number)

    def texts(self) -> list[TextSource]:
        """Those of its sources that have to be tokenised."""
        return [text for source in self.sources for text in source.texts()]

    def in_text(self, number: int) -> InText | None:
        """Where sequence `number` lies in one of them."""
        turn = self.order(number)
        return self.sources[turn.source].in_text(turn.number)

    def epochs(self, number: int) -> dict[str, float]:
        """How often each source has been read before sequence `number`, by its path."""
        found: dict[str, float] = {}
        for index, source in enumerate(self.sources):
            found |= source.epochs(self.order.had(number, index))
        return found


class MaskedMixture(Mixture):
    """A mixture of sources not all of whose tokens are to be predicted."""

    def counted(self, number: int) -> Tensor:
        """Which of its tokens the loss counts where they are targets."""
        turn = self.order(number)
        source = self.sources[turn.source]
        assert isinstance(source, Masked)
        return source.counted(turn.number)

    def real(self, number: int) -> Tensor:
        """Which of its tokens do more than fill it up."""
        turn = self.order(number)
        source = self.sources[turn.source]
        assert isinstance(source, Masked)
        return source.real(turn.number)


def epoch_sequences(data: Data) -> int:
    """Sequences of one pass over `data`; of a mixture as many as all its sources have."""
    sources: Sequence[Any] = data.sources if isinstance(data, Mixture) else (data,)
    return sum(source.windows for source in sources)


def weights_of(shares: Sequence[Share], sources: Sequence[Source]) -> list[Fraction]:
    """What each share says, or else as many as its source has sequences."""
    return [
        Fraction(source.windows) if share.weight is None else share.weight
        for share, source in zip(shares, sources, strict=True)
    ]


def open_sequences(
    plan: PlanConfig,
    path: Path | None,
    *,
    seed: int | str,
    tokenizer: Path | None = None,
    is_text: bool | None = None,
) -> Data:
    """The token file or the text in `path`, or synthetic tokens; all ranks call this. `is_text`:
    which of both it is, where that is known."""
    seq_len, vocab = plan.training.seq_len, plan.model.vocab
    if path is None:
        return SyntheticSequences(seq_len=seq_len, vocab=vocab, seed=int(seed))
    if is_text is None:
        (is_text,) = are_texts([path])
    source = _source(path, tokenizer, is_text=is_text)
    return Windows(source, seq_len=seq_len, vocab=vocab, seed=seed)


def open_data(
    plan: PlanConfig, shares: Sequence[Share], *, seed: int, tokenizer: Path | None = None
) -> Data:
    """What `shares` name: nothing, one source or a mixture."""
    require_shares(shares)
    if len(shares) < 2:
        path = Path(shares[0].path) if shares else None
        return open_sequences(plan, path, seed=seed, tokenizer=tokenizer)
    paths = [Path(share.path) for share in shares]
    texts = are_texts(paths)
    if tokenizer is not None and not any(texts):
        raise _no_text(paths[0])
    sources = [
        Windows(
            _source(path, tokenizer if is_text else None, is_text=is_text),
            seq_len=plan.training.seq_len,
            vocab=plan.model.vocab,
            seed=f"{seed}:{index}",  # so that sources of one length do not go in step
        )
        for index, (path, is_text) in enumerate(zip(paths, texts, strict=True))
    ]
    return Mixture(sources, weights_of(shares, sources))


_asked = count()
"""Of this process, which is in step with the others."""


def are_texts(paths: Sequence[Path]) -> list[bool]:
    """Which of `paths` are to be tokenised; all ranks call this. They take the first one's answer,
    since a shared file system may show others what stands beside a file later."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return [_is_text(path) for path in paths]
    store = meeting_store(f"texts {next(_asked)}")
    if dist.get_rank() == 0:
        store.set("are", json.dumps([_is_text(path) for path in paths]))
    answer: list[bool] = json.loads(store.get("are"))
    return answer


def _is_text(path: Path) -> bool:
    return path.is_dir() or (path.suffix in SUFFIXES and not sidecar_of(path).exists())


def _source(path: Path, tokenizer: Path | None, *, is_text: bool) -> TokenSource:
    if is_text:
        return TextSource(path, tokenizer)
    if tokenizer is not None:
        raise _no_text(path)
    return TokenFile(path)


def _no_text(path: Path) -> TrainerError:
    return TrainerError(
        f"{path} is a token file, which no tokenizer is needed for: leave --tokenizer out, or "
        "give --data a .txt or .jsonl file, or a folder of them"
    )


def data_state(sequences: Sequences, *, packs: bool) -> dict[str, Any]:
    """What a checkpoint says of the data, beside how many sequences the run has seen."""
    return {**sequences.identity, "packed": packs}


def require_same_data(saved: dict[str, Any], sequences: Sequences) -> None:
    """Raise unless a run that saved `saved`, if anything, can go on with `sequences` where it
    stopped."""
    before = {key: value for key, value in saved.items() if key != "packed"}
    if before and before != sequences.identity:
        raise TrainerError(
            f"the checkpoint was trained on {_said(before)}, this run has "
            f"{_said(sequences.identity)}: the data would not go on where it stopped; use the same "
            "--data, or another --checkpoint-dir"
        )


def _said(identity: dict[str, Any]) -> str:
    kind = identity.get("kind")
    if kind == "synthetic":
        return "synthetic tokens"
    if kind == "mixture":
        sources = identity.get("sources", [])
        whole = sum(source.get("of", 0) for source in sources)
        said = (f"{_said(source)} ({source.get('of', 0)} of {whole})" for source in sources)
        return f"a mixture of {', '.join(said)}"
    of = {"tokens": "a token file", "text": "text", "chats": "chats"}.get(str(kind), "other data")
    rows = f", {identity['rows']}" if "rows" in identity else ""
    return f"{of} of {identity.get('tokens')} tokens{rows}"


def micro_batches(
    sequences: Sequences,
    plan: PlanConfig,
    *,
    first: int,
    rank: int,
    device: torch.device,
    packs: bool = False,
) -> list[MicroBatch]:
    """The micro-batches of `rank`, in the step that begins with sequence number `first`; `packs`:
    documents of one sequence are trained apart."""
    batches = []
    for numbers in numbers_of(plan, first=first, rank=rank):
        rows = torch.stack([sequences(number) for number in numbers])
        if packs:
            batch = pack(rows, torch.stack([sequences.starts(number) for number in numbers]))
        else:
            batch = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        if isinstance(sequences, Masked):
            batch = only_counted(batch, torch.stack([sequences.counted(n) for n in numbers]))
            if plan.model.experts is not None:  # to which nothing is routed that fills up
                real_BS = torch.stack([sequences.real(number) for number in numbers])
                batch = batch._replace(real=real_BS[:, :-1].contiguous())
        batches.append(_own_part(batch, plan, rank))
    return [moved(batch, device) for batch in batches]


def numbers_of(plan: PlanConfig, *, first: int, rank: int) -> list[range]:
    """The sequences of each micro-batch of `rank`, in the step that begins with number `first`."""
    layout = plan.layout
    part = batch_rank(layout, rank)
    starts = (
        first + (index * layout.data_parallel + part) * layout.micro_batch
        for index in range(layout.num_microbatches)
    )
    return [range(start, start + layout.micro_batch) for start in starts]


def _own_part(batch: MicroBatch, plan: PlanConfig, rank: int) -> MicroBatch:
    """Under context parallelism, this rank's part of each sequence; the documents stay whole."""
    if plan.layout.cp == 1:
        return batch
    own = own_positions(plan, cp_rank=place(plan.layout, rank).cp)
    positions = own.expand(len(batch.tokens), -1)
    if batch.positions is not None:
        positions = batch.positions[:, own]
    targets = batch.targets[:, own]
    return MicroBatch(
        tokens=batch.tokens[:, own],
        targets=targets,
        positions=positions.contiguous(),
        documents=batch.documents,
        longest=batch.longest,
        masked=None if batch.masked is None else (targets != IGNORED).sum()[None],
        real=None if batch.real is None else batch.real[:, own],
    )


def pinned(batch: MicroBatch) -> MicroBatch:
    """In memory that a CUDA device copies from by itself."""
    return _each(batch, Tensor.pin_memory)


def moved(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """On the device; a copy to CUDA has only begun, and all that follows there waits for it."""
    if device.type == "cuda" and not batch.tokens.is_pinned():
        batch = pinned(batch)
    return _each(batch, lambda part: part.to(device, non_blocking=True))


def _each(batch: MicroBatch, change: Callable[[Tensor], Tensor]) -> MicroBatch:
    changed = {name: change(part) for name, part in batch._asdict().items() if part is not None}
    return MicroBatch(**changed)

"""The data: the same whatever the layout, each window once an epoch, and checked."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import TrainerError
from fsdpplan.trainer.text.data import (
    SyntheticSequences,
    Windows,
    micro_batches,
    open_sequences,
    shuffled,
)
from fsdpplan.trainer.text.token_file import TokenFile
from fsdpplan.trainer.tokenize import main as tokenize
from tests.trainer import plans

CPU = torch.device("cpu")


def token_file(folder: Path, tokens: list[int], *, dtype: str = "uint16", vocab: int = 61) -> Path:
    path = folder / "tokens.bin"
    path.write_bytes(struct.pack(f"<{len(tokens)}{'H' if dtype == 'uint16' else 'I'}", *tokens))
    header = {"format": "fsdpplan_tokens", "dtype": dtype, "vocab": vocab, "tokens": len(tokens)}
    (folder / "tokens.bin.json").write_text(json.dumps(header))
    return path


def open_windows(path: Path, *, seq_len: int, vocab: int, seed: int) -> Windows:
    return Windows(TokenFile(path), seq_len=seq_len, vocab=vocab, seed=seed)


@given(length=st.integers(1, 2000), key=st.text(max_size=5))
def test_shuffling_is_a_permutation(length: int, key: str) -> None:
    assert sorted(shuffled(i, length, key=key) for i in range(length)) == list(range(length))


def test_epochs_have_other_orders(tmp_path: Path) -> None:
    file = open_windows(token_file(tmp_path, list(range(61)) * 9), seq_len=10, vocab=61, seed=0)
    first = [tuple(file(number).tolist()) for number in range(file.windows)]
    second = [tuple(file(file.windows + number).tolist()) for number in range(file.windows)]
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_cover_the_file_and_overlap_by_the_target(tmp_path: Path, dtype: str) -> None:
    path = token_file(tmp_path, list(range(31)), dtype=dtype)
    file = open_windows(path, seq_len=10, vocab=61, seed=3)
    windows = sorted(file(number).tolist() for number in range(3))
    assert windows == [list(range(start, start + 11)) for start in (0, 10, 20)]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [({"dp_shard": 4}, 4), ({"dp_replicate": 2, "num_microbatches": 2}, 2), ({}, 1)],
)
def test_the_global_batch_does_not_depend_on_the_layout(layout: dict[str, int], ranks: int) -> None:
    plan = parse_plan(plans.plan_text(**layout))
    sequences = open_sequences(plan, None, seed=5)
    rows = []
    for rank in range(ranks):
        for batch in micro_batches(sequences, plan, first=16, rank=rank, device=CPU):
            tokens, targets = batch.tokens, batch.targets
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            rows += torch.cat([tokens, targets[:, -1:]], dim=1).tolist()
    assert sorted(rows) == sorted(sequences(16 + row).tolist() for row in range(8))


def test_synthetic_tokens_are_the_same_again_and_in_the_vocabulary() -> None:
    sequences = SyntheticSequences(seq_len=101, vocab=7, seed=1)
    tokens = sequences(12)
    assert tokens.shape == (102,)
    assert torch.equal(tokens, sequences(12))
    assert not torch.equal(tokens, sequences(13))
    assert not torch.equal(tokens, SyntheticSequences(seq_len=101, vocab=7, seed=2)(12))
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < 7


def test_every_second_synthetic_token_can_be_learned() -> None:
    tokens = SyntheticSequences(seq_len=99, vocab=61, seed=0)(0)
    assert torch.equal(tokens[1::2], (tokens[::2] * 31 + 7) % 61)


def test_text_becomes_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("naïve", encoding="utf-8")
    out = tmp_path / "text.tokens"
    assert tokenize([str(text), str(text), "-o", str(out)]) == 0
    assert "14 tokens" in capsys.readouterr().err
    file = open_windows(out, seq_len=6, vocab=256, seed=0)
    windows = {bytes(file(number).tolist()) for number in range(2)}
    assert windows == {"naïve\n".encode(), "\nnaïve".encode()}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "text.tokens",
        "text.tokens.json",
        "text.txt",
    ]


def test_documents_of_a_token_file_can_be_told_apart(tmp_path: Path) -> None:
    text, lines = tmp_path / "text.txt", tmp_path / "lines.jsonl"
    text.write_text("abc")
    lines.write_text('{"text": "de"}\n{"text": "f"}\n')
    out = tmp_path / "tokens.bin"
    assert tokenize(["--documents", str(text), str(lines), "-o", str(out)]) == 0
    file = TokenFile(out)
    assert (file.tokens, file.vocab) == (9, 257)
    assert file.read(0, 9).tolist() == [*b"abc", 256, *b"de", 256, *b"f", 256]
    assert file.starts(0, 9).nonzero().flatten().tolist() == [0, 4, 7]
    assert file.starts(4, 6).tolist() == [True, False]
    assert file.starts(5, 8).tolist() == [False, False, True]


def test_a_token_file_that_does_not_tell_its_documents_is_not_packed(tmp_path: Path) -> None:
    file = TokenFile(token_file(tmp_path, list(range(31))))
    with pytest.raises(TrainerError, match="tokenize --documents"):
        file.starts(0, 5)


def test_a_text_that_cannot_be_read_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tokenize([str(tmp_path / "none.txt"), "-o", str(tmp_path / "out")]) == 2
    assert "cannot make" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_larger_vocabulary_than_the_models_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path, list(range(31)), vocab=62)
    with pytest.raises(TrainerError, match="vocabulary of 62 tokens, the model one of 61"):
        open_windows(path, seq_len=10, vocab=61, seed=0)


def test_a_sidecar_that_understates_the_vocabulary_is_found_out(tmp_path: Path) -> None:
    file = open_windows(token_file(tmp_path, [500] * 31), seq_len=10, vocab=61, seed=0)
    with pytest.raises(TrainerError, match="token 500"):
        file(0)


def test_a_file_too_short_for_one_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="too few"):
        open_windows(token_file(tmp_path, list(range(10))), seq_len=10, vocab=61, seed=0)


@pytest.mark.parametrize(
    ("sidecar", "words"),
    [
        ("", "cannot be read"),
        ("[]", '"format"'),
        ('{"format": "fsdpplan_tokens", "dtype": "int8"}', "dtype must be"),
        ('{"format": "fsdpplan_tokens", "dtype": "uint16", "vocab": "61"}', "vocab must be"),
        (
            '{"format": "fsdpplan_tokens", "dtype": "uint16", "vocab": 61, "tokens": 40}',
            "62 bytes where its sidecar says 80",
        ),
        (
            '{"format": "fsdpplan_tokens", "dtype": "uint16", "vocab": 61, "tokens": 31, '
            '"end_of_document": 61}',
            "end_of_document must be one of the tokens",
        ),
    ],
)
def test_a_sidecar_that_is_wrong_is_refused(tmp_path: Path, sidecar: str, words: str) -> None:
    path = token_file(tmp_path, list(range(31)))
    (tmp_path / "tokens.bin.json").write_text(sidecar)
    with pytest.raises(TrainerError) as raised:
        open_windows(path, seq_len=10, vocab=61, seed=0)
    assert words in str(raised.value)

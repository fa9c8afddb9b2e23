"""Text where it lies: read by number, a little at a time, the same whatever came before."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.errors import RankError, TrainerError
from fsdpplan.trainer.text import pieces
from fsdpplan.trainer.text.data import (
    data_state,
    micro_batches,
    open_sequences,
    require_same_data,
)
from fsdpplan.trainer.text.stream import TextSource
from fsdpplan.trainer.text.text_tokenizer import END_OF_BYTES
from tests.trainer import plans

BYTES = {"vocab": 260}
END = END_OF_BYTES


def folder_of_texts(folder: Path) -> Path:
    """Four documents, one of them empty, in two kinds of files; others are passed over."""
    lines = [{"text": "naïve\n"}, {"text": ""}, {"text": "zwei", "id": 7}]
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (folder / "a.txt").write_text("one\ntwo")
    (folder / "notes.md").write_text("no text to train on")
    return folder


def all_tokens(source: TextSource) -> list[int]:
    tokens: list[int] = source.read(0, source.tokens).tolist()
    return tokens


def test_documents_come_in_the_order_of_their_files_each_with_its_end(tmp_path: Path) -> None:
    source = TextSource(folder_of_texts(tmp_path))
    expected = [*b"one\ntwo", END, *"naïve\n".encode(), END, END, *b"zwei", END]
    assert all_tokens(source) == expected
    begins = source.starts(0, source.tokens).nonzero().flatten().tolist()
    assert begins == [0, 8, 16, 17]


@given(text=st.text(max_size=300), cuts=st.tuples(st.integers(0, 400), st.integers(0, 400)))
def test_any_stretch_is_that_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, text: str, cuts: tuple[int, int]
) -> None:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"." + text.encode(errors="replace"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 16)
        source = TextSource(path)
        whole = all_tokens(source)
        assert whole == [*path.read_bytes(), END]
        start, stop = sorted(min(cut, len(whole) - 1) for cut in cuts)
        assert source.read(start, stop + 1).tolist() == whole[start : stop + 1]


def test_pieces_end_with_a_line_or_with_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 8)
    path = tmp_path / "text.txt"
    path.write_bytes("ab\ncdéefgh\nèéèéèéèé".encode())
    with path.open("rb") as file:
        found = list(pieces.pieces_of(file, 0, is_json=False))
        texts = [pieces.text_of(piece, file, path).decode() for piece in found]
    assert "".join(texts) == path.read_text()
    assert texts[0] == "ab\n"
    assert [piece.begins for piece in found] == [True, *[False] * (len(found) - 1)]
    assert [piece.ends for piece in found] == [*[False] * (len(found) - 1), True]


def test_a_large_file_is_never_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    size = 1 << 26
    with path.open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    try:
        source = TextSource(path)
        tokens = source.read(size // 2, size // 2 + 4097)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert source.tokens == size + 1
    assert tokens.shape == (4097,)
    assert most < 1 << 23


def test_the_index_is_made_once_and_anew_when_the_text_changes(tmp_path: Path) -> None:
    folder = folder_of_texts(tmp_path / "texts")
    tokens = TextSource(folder).tokens
    (index,) = folder.glob(".*.fsdpplan-index")
    made = index.stat().st_mtime_ns
    assert TextSource(folder).tokens == tokens
    assert index.stat().st_mtime_ns == made
    (folder / "a.txt").write_text("one\ntwo and three")
    assert TextSource(folder).tokens == tokens + 10
    assert not list(folder.glob("*.partial"))


def test_text_that_changes_under_a_run_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text")
    source = TextSource(path)
    path.write_text("less")
    with pytest.raises(RankError, match="changed under the run"):
        source.read(0, 5)


def test_text_where_nothing_can_be_written_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of_texts(tmp_path)
    opened = Path.open

    def refused(path: Path, mode: str = "r", **options: Any) -> Any:
        if "x" in mode:
            raise PermissionError("read only")
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", refused)
    assert TextSource(folder).tokens == 22
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("line", "shown"),
    [("not JSON", "not JSON"), ('{"txt": "x"}', "txt"), ('{"text": 3}', "3"), ("[]", "[]")],
)
def test_a_line_without_text_is_named(tmp_path: Path, line: str, shown: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(TrainerError, match="at byte 17") as raised:
        TextSource(path)
    assert shown in str(raised.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"no \.txt and no \.jsonl file"):
        TextSource(tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="cannot be read"):
        TextSource(tmp_path / "none.txt")


def long_text(folder: Path) -> Path:
    path = folder / "long.jsonl"
    lines = [json.dumps({"text": f"document {number} " * (number % 7)}) for number in range(200)]
    path.write_text("\n".join(lines))
    return path


def test_a_run_goes_on_from_its_number_in_any_layout(tmp_path: Path) -> None:
    path = long_text(tmp_path)
    four = parse_plan(plans.plan_text(model=BYTES, dp_shard=4))
    one = parse_plan(plans.plan_text(model=BYTES))
    device = torch.device("cpu")
    rows = []
    for rank in range(4):
        sequences = open_sequences(four, path, seed=1)  # each rank's own
        rows += [
            row
            for batch in micro_batches(
                sequences, four, first=16, rank=rank, device=device, packs=True
            )
            for row in batch.targets.tolist()
        ]
    resumed = open_sequences(one, path, seed=1)
    (whole,) = micro_batches(resumed, one, first=16, rank=0, device=device, packs=True)
    assert sorted(rows) == sorted(whole.targets.tolist())


def test_a_model_with_too_few_tokens_for_bytes_is_refused(tmp_path: Path) -> None:
    plan = parse_plan(plans.plan_text(model={"vocab": 256}))
    with pytest.raises(TrainerError, match="vocabulary of 257 tokens, the model one of 256"):
        open_sequences(plan, long_text(tmp_path), seed=0)


def test_a_checkpoint_goes_on_with_its_own_data_only(tmp_path: Path) -> None:
    plan = parse_plan(plans.plan_text(model=BYTES))
    text = open_sequences(plan, long_text(tmp_path), seed=0)
    made_up = open_sequences(plan, None, seed=0)
    saved = json.loads(json.dumps(data_state(text, packs=True)))
    require_same_data(saved, text)
    require_same_data({}, made_up)
    with pytest.raises(TrainerError, match=r"trained on text of .* this run has synthetic tokens"):
        require_same_data(saved, made_up)


def test_a_tokenizer_is_read_where_its_package_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(WORDS))
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "one two"}\n{"text": "two six"}')
    plan = parse_plan(plans.plan_text(model={"vocab": 4}, training={"seq_len": 4}))
    sequences = open_sequences(plan, path, seed=0, tokenizer=tokenizer)
    assert sequences(0).tolist() == [1, 2, 3, 2, 0]
    assert sequences.starts(0).tolist() == [True, False, False, True, False]


WORDS = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "WordLevel",
        "vocab": {"unknown": 0, "one": 1, "two": 2, "</s>": 3},
        "unk_token": "unknown",
    },
}


def test_without_the_package_a_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    plan = parse_plan(plans.plan_text(model=BYTES))
    with pytest.raises(TrainerError, match="pip install tokenizers"):
        open_sequences(plan, long_text(tmp_path), seed=0, tokenizer=tmp_path / "tokenizer.json")


def test_a_token_file_needs_no_tokenizer(tmp_path: Path) -> None:
    plan = parse_plan(plans.plan_text(model=BYTES))
    with pytest.raises(TrainerError, match="leave --tokenizer out"):
        open_sequences(plan, tmp_path / "tokens.bin", seed=0, tokenizer=tmp_path / "t.json")

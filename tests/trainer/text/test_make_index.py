"""The index of text: made once, whole or not at all, wherever it can be kept."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.trainer.errors import Stopped
from fsdpplan.trainer.signals import STOP_SIGNALS, StopRequest
from fsdpplan.trainer.text import make_index
from fsdpplan.trainer.text.index import NoIndex, PieceIndex, all_pieces
from fsdpplan.trainer.text.make_index import Text, counted
from fsdpplan.trainer.text.stream import TextSource
from tests.trainer import jobs

TOKENIZER = {
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
        "vocab": {"unknown": 0, "document": 1, "</s>": 2},
        "unk_token": "unknown",
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some text, and a cache and a folder for temporary files that are empty."""
    for name in ("text", "cache", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    lines = [json.dumps({"text": f"document {number} " * (number % 9)}) for number in range(3000)]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "text" / "b.txt").write_text("some text\n" * 30000)
    return tmp_path / "text"


@pytest.fixture
def makes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows with each index that is made."""
    found: list[Path] = []
    make = make_index.make_index

    def noted(text: Text, **options: Any) -> PieceIndex:
        found.append(text.path)
        return make(text, **options)

    monkeypatch.setattr(make_index, "make_index", noted)
    return found


def refuse(monkeypatch: pytest.MonkeyPatch, *refused: Path) -> None:
    """Let nothing be written into these folders, as if they were read-only."""
    opened: Callable[..., Any] = Path.open

    def guarded(path: Path, mode: str = "r", **options: Any) -> Any:
        if "x" in mode and any(each in path.parents for each in refused):
            raise PermissionError("read only")
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", guarded)


def test_several_processes_count_as_one_does(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(TOKENIZER))
    text = Text.find(folder, tokenizer)
    here = list(counted(text, all_pieces(text.files), workers=0))
    assert list(counted(text, all_pieces(text.files), workers=3)) == here
    assert len(here) > 3 * 3 * make_index.AHEAD_BATCHES
    assert sum(count for _, count in here) > 20_000


@pytest.mark.parametrize("damage", ["cut short", "in the middle", "empty", "another file"])
def test_an_index_that_is_not_whole_is_never_taken(
    damage: str, folder: Path, makes: list[Path]
) -> None:
    source = TextSource(folder)
    index = source.index.path
    whole = index.read_bytes()
    index.unlink()  # what is mapped stays as it was
    index.write_bytes(
        {
            "cut short": whole[:-3],
            "in the middle": whole[:4000],
            "empty": b"",
            "another file": bytes(len(whole)),
        }[damage]
    )
    with pytest.raises((NoIndex, ValueError)):
        PieceIndex(index, folder)
    assert TextSource(folder).tokens == source.tokens
    assert len(makes) == 2
    assert index.read_bytes() == whole


def test_an_interrupted_build_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, makes: list[Path]
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Any]:
        yield from ()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(make_index, "all_pieces", interrupted)
        with pytest.raises(KeyboardInterrupt):
            TextSource(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "b.txt"]
    TextSource(folder)
    assert len(makes) == 2


def test_a_signal_ends_a_build_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def signalled(*_: object) -> Iterator[Any]:
        yield from ()
        signal.raise_signal(signal.SIGUSR1)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    stop = StopRequest()
    monkeypatch.setattr(make_index, "all_pieces", signalled)
    try:
        stop.listen()
        with pytest.raises(Stopped, match="signal 10 came while it was made") as raised:
            open_while(stop, folder)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert raised.value.exit_code == 138
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "b.txt"]


def open_while(stop: StopRequest, folder: Path) -> None:
    with stop.ends("it was made"):
        TextSource(folder)


def test_what_a_killed_build_left_is_never_taken(folder: Path, makes: list[Path]) -> None:
    text = Text.find(folder, None)
    (folder / f".{text.name[:40]}.0123.partial").write_bytes(b"half")
    assert TextSource(folder).tokens == TextSource(folder).tokens
    assert len(makes) == 1


def test_text_that_nobody_may_write_beside_has_its_index_in_the_users_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes: list[Path]
) -> None:
    refuse(monkeypatch, folder)
    source = TextSource(folder)
    assert source.index.path.parent == tmp_path / "cache" / "fsdpplan"
    assert TextSource(folder).tokens == source.tokens
    assert len(makes) == 1


def test_where_nothing_can_be_written_the_index_has_no_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, folder, tmp_path / "cache")
    source = TextSource(folder)
    assert source.read(0, 3).tolist()
    assert not list((tmp_path / "tmp").iterdir())


def test_a_long_build_says_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TextSource(folder)
    assert capsys.readouterr().err == ""
    (folder / "c.txt").write_text("more")
    monkeypatch.setattr(make_index, "SAY_SECONDS", 0.0)
    TextSource(folder)
    *further, last = capsys.readouterr().err.splitlines()
    assert further
    assert all(" GB read, 1 at a time; about" in line for line in further)
    assert "made in" in last


@pytest.mark.gloo
def test_one_rank_makes_the_index_and_the_others_wait_for_it(tmp_path: Path) -> None:
    found = jobs.measured(2, "tests.trainer.text.index_ranks:main", tmp_path / "found.json")
    assert found["one node"] == {"tokens": [8, 8], "made": 1}
    assert found["again"] == {"tokens": [8, 8], "made": 0}
    assert found["two nodes"] == {"tokens": [8, 8], "made": 1}
    assert found["two disks"] == {"tokens": [8, 8], "made": 2}
    assert found["no text"]["made"] == 1
    for said in found["no text"]["tokens"]:
        assert said.startswith("TrainerError: ")
        assert "a line must be a JSON object" in said
    assert "gives no sign of life" in found["lost"]
    assert found["kinds"] == [[False, True], [False, True]]

"""A kill or a power cut at any moment leaves what was there before, or what is new: whole.

Every kind of file that is written as a whole; what grows by lines (metrics, logs, bad nodes) may
lose its last ones, which its readers take (`tests/safety/fuzz.py`), and the ledger is SQLite's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdpplan.files import ledger
from fsdpplan.files.writing import write_folder_at_once, write_text_atomically
from fsdpplan.trainer.checkpoint import files as checkpoints
from fsdpplan.trainer.checkpoint.whole_file import write_durably, write_whole
from fsdpplan.trainer.text.make_index import Text, make_index
from fsdpplan.trainer.text.token_file import TokenFile, sidecar_of
from fsdpplan.trainer.tokenize import write_token_file
from tests.safety.power import Found, found_after

OLD, NEW = "old " * 3000, "new " * 5000


def visible(found: Found) -> dict[str, bytes]:
    """Without what nobody reads: half-written files have hidden names."""
    parts = {name: name.split("/") for name in found.files}
    return {n: found.files[n] for n in parts if not any(p.startswith(".") for p in parts[n])}


@pytest.mark.parametrize("write", [write_text_atomically, write_whole])
@pytest.mark.parametrize("old", [None, OLD])
def test_a_file_is_the_old_one_or_the_new_one(
    write: Callable[[Path, str], None], old: str | None, tmp_path: Path
) -> None:
    if old is not None:
        (tmp_path / "plan.json").write_text(old)
    before = {} if old is None else {"plan.json": old.encode()}
    after = {"plan.json": NEW.encode()}
    founds = found_after(tmp_path, lambda: write(tmp_path / "plan.json", NEW))
    assert len(founds) > 4
    for found in founds:
        assert visible(found) in ([after] if found.is_over else [before, after]), found.how
    assert before in map(visible, founds)


def test_what_is_written_in_place_is_caught(tmp_path: Path) -> None:
    """That the simulation sees what it is made for."""

    def in_place() -> None:
        (tmp_path / "plan.json").write_text(NEW)

    def without_fsync() -> None:
        (tmp_path / ".new").write_text(NEW)
        (tmp_path / ".new").rename(tmp_path / "plan.json")

    whole = {"plan.json": NEW.encode()}
    for act in (in_place, without_fsync):
        (tmp_path / "plan.json").unlink(missing_ok=True)
        assert any(visible(found) not in ({}, whole) for found in found_after(tmp_path, act))


def test_a_job_folder_is_there_with_all_its_files_or_not_at_all(tmp_path: Path) -> None:
    texts = {"job.sbatch": NEW, "fsdpplan/trainer/train.py": OLD, "plan.json": "{}"}
    whole = {f"job/{name}": text.encode() for name, text in texts.items()}
    founds = found_after(tmp_path, lambda: write_folder_at_once(tmp_path / "job", texts))
    for found in founds:
        assert visible(found) in ([whole] if found.is_over else [{}, whole]), found.how
        assert visible(found) or "job" not in found.folders, found.how


def publish(folder: Path, step: int) -> None:
    """A checkpoint of two ranks, in the order in which `checkpoint_storage` writes one."""
    path = checkpoints.checkpoint_path(folder, step)
    partial = checkpoints.partial_path(path)
    partial.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", checkpoints.TENSOR_INDEX):
        write_durably(partial / name, f"{name} of step {step} " * 200)
    records = [checkpoints.record_of(partial / f"__{rank}_0.distcp") for rank in (0, 1)]
    checkpoints.publish(partial, path, records, {"step": step})
    checkpoints.retire(path, keep=1)


def whole(folder: Path) -> list[int]:
    """Steps of the checkpoints that a run would go on from, best first, each looked through."""
    good = []
    for path in checkpoints.resumable(folder):
        records = checkpoints.read_manifest(path)
        assert records is not None
        assert checkpoints.damage(records, path, rank=0, ranks=1) == ""
        good.append(checkpoints.step_of(path))
    return good


def test_the_latest_checkpoint_is_always_whole(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    publish(folder, 5)
    founds = found_after(folder, lambda: publish(folder, 10))
    assert len(founds) > 30
    for number, found in enumerate(founds):
        place = found.lay(tmp_path / f"found-{number}")
        best = whole(place)[0]
        assert best == 10 if found.is_over else best in (5, 10), found.how
        checkpoints.prepare_folder(place)  # the next start cleans up, and goes on from the same
        assert whole(place)[0] == best, found.how
        shutil.rmtree(place)


def test_tokens_are_those_of_their_sidecar_or_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("of several words\n" * 50)
    out = tmp_path / "at" / "tokens.bin"
    out.parent.mkdir()
    write_token_file([text], out)
    first = out.read_bytes()
    text.write_text("words of another text, and of another length\n" * 50)
    for number, found in enumerate(found_after(out.parent, lambda: write_token_file([text], out))):
        place = found.lay(tmp_path / f"found-{number}")
        data = (place / out.name).read_bytes()
        if sidecar_of(place / out.name).exists():
            assert TokenFile(place / out.name).tokens == len(data) // 2, found.how
            assert data == out.read_bytes() if found.is_over else data in (first, out.read_bytes())
        else:
            assert not found.is_over, found.how


def test_the_index_of_a_text_is_whole_or_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "at"
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("of several words\n" * 500)
    founds = found_after(folder, lambda: make_index(Text.find(text, None)))
    (index,) = folder.glob(".*.fsdpplan-index")
    for found in founds:
        assert found.files.get(index.name) in (None, index.read_bytes()), found.how


def test_the_ledger_waits_for_the_disk(tmp_path: Path) -> None:
    """SQLite syncs its log at each commit: https://www.sqlite.org/pragma.html#pragma_synchronous"""
    with ledger._written(tmp_path / "ledger.sqlite") as connection:
        assert connection.execute("PRAGMA synchronous").fetchone()[0] >= 2

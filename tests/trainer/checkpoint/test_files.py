"""Checkpoints on disk: which one counts, what is found wrong with it, and in which order it comes
to the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.trainer.checkpoint import files
from fsdpplan.trainer.checkpoint.files import FileRecord
from fsdpplan.trainer.checkpoint.owner import take_folder
from fsdpplan.trainer.errors import TrainerError

TENSORS = bytes(range(256)) * 40


def write_partial(folder: Path, step: int) -> tuple[Path, Path, list[FileRecord]]:
    """A checkpoint of which the tensors are written: where, where it will be, and its records."""
    path = files.checkpoint_path(folder, step)
    partial = files.partial_path(path)
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(TENSORS)
    (partial / ".metadata").write_bytes(b"index")
    return partial, path, [files.record_of(partial / "__0_0.distcp")]


def published(folder: Path, *steps: int) -> list[Path]:
    """Whole checkpoints of some steps."""
    paths = []
    for step in steps:
        partial, path, records = write_partial(folder, step)
        files.publish(partial, path, records, {"step": step})
        paths.append(path)
    return paths


def names(folder: Path) -> list[str]:
    """All that lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


def all_damage(path: Path, *, ranks: int = 1) -> str:
    """What any of some ranks finds wrong."""
    records = files.read_manifest(path)
    assert records is not None
    found = [files.damage(records, path, rank=rank, ranks=ranks) for rank in range(ranks)]
    return "; ".join(filter(None, found))


def test_an_empty_or_missing_folder_has_none(tmp_path: Path) -> None:
    assert files.resumable(tmp_path) == []
    assert files.resumable(tmp_path / "none") == []


def test_what_is_published_is_whole_and_the_newest(tmp_path: Path) -> None:
    five, ten = published(tmp_path, 5, 10)
    assert files.resumable(tmp_path) == [ten, five]
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    assert all_damage(ten) == ""
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000010"]


def test_the_marker_decides_and_only_older_ones_stand_in(tmp_path: Path) -> None:
    five, ten, _ = published(tmp_path, 5, 10, 15)
    (tmp_path / "latest").write_text("step-00000010\n")
    assert files.resumable(tmp_path) == [ten, five]


def test_a_marker_of_what_is_gone_leaves_the_older_ones(tmp_path: Path) -> None:
    five, ten = published(tmp_path, 5, 10)
    files.remove(ten)
    assert files.resumable(tmp_path) == [ten, five]


def test_without_a_marker_the_newest_counts(tmp_path: Path) -> None:
    five, ten = published(tmp_path, 5, 10)
    (tmp_path / "latest").unlink()
    assert files.resumable(tmp_path) == [ten, five]


CLIMBS = ("../other/step-00000005", "/x/step-00000005", "./step-00000005")


@pytest.mark.parametrize("marker", ["", "step-", "nonsense", "x" * 300, *CLIMBS])
def test_a_marker_that_names_nothing_names_what_could_be(tmp_path: Path, marker: str) -> None:
    published(tmp_path, 5)
    (tmp_path / "latest").write_text(marker)
    with pytest.raises(TrainerError, match="write one of step-00000005 into it"):
        files.resumable(tmp_path)


def test_what_is_not_whole_does_not_count(tmp_path: Path) -> None:
    write_partial(tmp_path, 10)
    (tmp_path / "step-00000020").mkdir()
    assert files.resumable(tmp_path) == []


def test_a_start_cleans_up_what_killed_runs_left(tmp_path: Path) -> None:
    published(tmp_path, 5)
    write_partial(tmp_path, 10)
    (tmp_path / ".latest.partial").touch()
    trial = files.prepare_folder(tmp_path)
    assert trial.exists()
    trial.unlink()
    assert names(tmp_path) == ["latest", "step-00000005"]


def cut_short(path: Path) -> None:
    path.write_bytes(TENSORS[:-1])


def flip_a_bit(path: Path) -> None:
    path.write_bytes(TENSORS[:700] + bytes([TENSORS[700] ^ 4]) + TENSORS[701:])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut_short, "__0_0.distcp has 10239 bytes, not 10240"),
        (flip_a_bit, "__0_0.distcp has changed since it was written"),
        (Path.unlink, "__0_0.distcp is missing"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_damage_is_named_by_the_one_rank_that_looks(
    tmp_path: Path, harm: Any, words: str, ranks: int
) -> None:
    (path,) = published(tmp_path, 5)
    assert all_damage(path, ranks=ranks) == ""
    harm(path / "__0_0.distcp")
    assert all_damage(path, ranks=ranks).startswith(words)


@pytest.mark.parametrize("name", ["trainer.json", ".metadata"])
def test_small_files_are_checked_too(tmp_path: Path, name: str) -> None:
    (path,) = published(tmp_path, 5)
    (path / name).write_bytes((path / name).read_bytes()[:-1] + b"!")
    assert name in all_damage(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"a": 1}}', '{"files": [1]}', "\0"])
def test_a_broken_manifest_is_said(tmp_path: Path, text: str) -> None:
    (path,) = published(tmp_path, 5)
    (path / "manifest.json").write_text(text)
    with pytest.raises(TrainerError, match=r"manifest\.json cannot be read"):
        files.read_manifest(path)


def test_old_ones_are_deleted_and_the_new_one_never(tmp_path: Path) -> None:
    paths = published(tmp_path, 5, 10, 15)
    files.retire(paths[-1], keep=2)
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000015"]
    files.retire(paths[-1], keep=1)
    assert names(tmp_path) == ["latest", "step-00000015"]


def test_what_lies_after_the_new_one_neither_counts_nor_goes(tmp_path: Path) -> None:
    five, _, _ = published(tmp_path, 5, 15, 20)
    (six,) = published(tmp_path, 6)
    files.retire(six, keep=1)
    assert not five.exists()
    assert names(tmp_path) == ["latest", "step-00000006", "step-00000015", "step-00000020"]


def test_a_step_that_is_saved_again_replaces_what_was_there(tmp_path: Path) -> None:
    (path,) = published(tmp_path, 5)
    (path / "__0_0.distcp").unlink()
    published(tmp_path, 5)
    assert all_damage(path) == ""
    assert names(tmp_path) == ["latest", "step-00000005"]


def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        events.append(("rename", target.name))
        rename(source, target)

    partial, path, records = write_partial(tmp_path, 5)
    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_rename)
    files.publish(partial, path, records, {"step": 5})
    assert events == [
        ("sync", "trainer.json"),
        ("sync", "manifest.json"),
        ("sync", ".step-00000005.partial"),
        ("rename", "step-00000005"),
        ("sync", tmp_path.name),
        ("sync", ".latest.partial"),
        ("rename", "latest"),
        ("sync", tmp_path.name),
    ]


def test_the_manifest_says_every_other_file(tmp_path: Path) -> None:
    (path,) = published(tmp_path, 5)
    said = json.loads((path / "manifest.json").read_text())["files"]
    assert {*said, "manifest.json"} == {entry.name for entry in path.iterdir()}


@pytest.mark.parametrize("place", ["latest", "manifest.json", "__0_0.distcp"])
def test_nothing_is_waited_for_that_is_no_file(tmp_path: Path, place: str) -> None:
    (path,) = published(tmp_path, 5)
    pipe = (tmp_path if place == "latest" else path) / place
    pipe.unlink()
    os.mkfifo(pipe)
    if place == "latest":
        with pytest.raises(TrainerError, match="it is not a file"):
            files.resumable(tmp_path)
    elif place == "manifest.json":
        with pytest.raises(TrainerError, match="it is not a file"):
            files.read_manifest(path)
    else:
        assert all_damage(path) == f"__0_0.distcp cannot be read: it is not a file ({pipe})"


@pytest.mark.parametrize("name", ["/dev/zero", "../a", "..", "", "a/b"])
def test_a_manifest_names_files_of_its_folder(tmp_path: Path, name: str) -> None:
    (path,) = published(tmp_path, 5)
    (path / "manifest.json").write_text(json.dumps({"files": {name: {"bytes": 0, "crc32": 0}}}))
    with pytest.raises(TrainerError, match=r"names .* outside of its folder"):
        files.read_manifest(path)


def test_a_folder_stays_the_runs_that_began_in_it_last(tmp_path: Path) -> None:
    owner = take_folder(tmp_path)
    files.require_own(tmp_path, owner)
    take_folder(tmp_path)
    with pytest.raises(TrainerError, match=r"another run has begun in .* since"):
        files.require_own(tmp_path, owner)
    with pytest.raises(TrainerError, match="is not the folder that this run began in"):
        files.require_own(tmp_path / "gone", owner)

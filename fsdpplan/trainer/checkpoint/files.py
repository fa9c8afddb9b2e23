"""Checkpoints on disk: written aside, published by a rename, checked before they are read.

    DIR/step-00000100/__0_0.distcp ...   each rank's tensors, as torch.distributed.checkpoint writes
    DIR/step-00000100/.metadata          which tensor lies where
    DIR/step-00000100/trainer.json       where the run stands
    DIR/step-00000100/manifest.json      size and CRC-32 of every other file
    DIR/latest                           name of the newest whole checkpoint, written last
    DIR/.step-...                        half-written or half-deleted; removed at the next start

Every file, and the folder that names it, reaches the disk before the rename that publishes it, so
whatever stops the run at whatever moment, `latest` names a whole checkpoint or there is none yet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TrainerError
from .owner import OWNER, OWNER_BYTES
from .whole_file import (
    NO_SMALL_FILE,
    is_plain,
    read_small,
    require_file,
    sync_folder,
    write_durably,
)

LATEST = "latest"
PROGRESS = "trainer.json"
MANIFEST = "manifest.json"
TENSOR_INDEX = ".metadata"

_NAME = re.compile(r"step-(\d{8,})")
_PIECE_BYTES = 2**24
LATEST_BYTES = 200


class Unreadable(TrainerError):
    """A checkpoint that is not what was written; an older one may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to be trusted."""

    name: str
    num_bytes: int
    crc32: int


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is published."""
    return folder / f"step-{step:08d}"


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it is published."""
    return path.with_name(f".{path.name}.partial")


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says; -1 where it is no such name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def whole_checkpoints(folder: Path) -> list[Path]:
    """The published checkpoints, newest first."""
    found = [entry.parent for entry in folder.glob(f"step-*/{PROGRESS}")]
    return sorted((path for path in found if step_of(path) >= 0), key=step_of, reverse=True)


def resumable(folder: Path) -> list[Path]:
    """The checkpoints to resume from, best first: what `latest` names, then what is older.

    Whoever writes an older name into `latest` goes back to it. What is newer than that is another
    end of the run and is not taken up; without a marker the newest one counts.
    """
    whole = whole_checkpoints(folder)
    try:
        name = read_small(folder / LATEST, limit_bytes=LATEST_BYTES).strip()
    except FileNotFoundError:
        return whole
    except ValueError:
        name = ""
    except OSError as error:
        if error.errno not in NO_SMALL_FILE:
            raise
        name = f"something else: {reason(error)}"
    if not _NAME.fullmatch(name):  # nor a path, which could lead out of the folder
        raise TrainerError(
            f"{folder / LATEST} names {name!r}, which is no checkpoint: write one of "
            f"{', '.join(path.name for path in whole) or 'none left'} into it, or take another "
            "--checkpoint-dir"
        )
    older = [path for path in whole if step_of(path) < step_of(folder / name)]
    return [folder / name, *older]


def prepare_folder(folder: Path) -> Path:
    """Make the folder and clean up after a run that was killed; returns a file in it that is new,
    which no node remembers as missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in (*folder.glob(".step-*"), *folder.glob(f".{LATEST}.*")):
        remove(left)
    trial = folder / f".{LATEST}.{os.getpid()}-{time.time_ns()}"
    write_durably(trial, "\n")
    return trial


def require_own(folder: Path, owner: str) -> None:
    """Raise TrainerError where `folder` is no longer the one that this run began in, or no longer
    its own: a checkpoint would lie where nobody looks, or take another run's place."""
    try:
        found = read_small(folder / OWNER, limit_bytes=OWNER_BYTES).strip()
    except (OSError, ValueError) as error:
        raise TrainerError(
            f"{folder} is not the folder that this run began in ({reason(error)}): it was deleted, "
            "or its disk is not mounted any more; put it back"
        ) from error
    if found != owner:
        raise TrainerError(
            f"another run has begun in {folder} since (on {found.partition(' ')[0]}): end one of "
            "the two, or give it another --checkpoint-dir"
        )


def publish(partial: Path, path: Path, records: list[FileRecord], progress: dict[str, Any]) -> None:
    """Complete a checkpoint whose tensors are written, give it its name, let `latest` name it."""
    text = json.dumps(progress) + "\n"
    write_durably(partial / PROGRESS, text)
    of_ours = [record_of(partial / PROGRESS), record_of(partial / TENSOR_INDEX)]
    write_durably(partial / MANIFEST, manifest_text([*records, *of_ours]))
    sync_folder(partial)
    # One of the same step is of an abandoned end of this run, or damaged.
    hide(path)
    os.replace(partial, path)
    sync_folder(path.parent)
    marker = path.parent / f".{LATEST}.partial"
    write_durably(marker, path.name + "\n")
    os.replace(marker, path.parent / LATEST)
    sync_folder(path.parent)


def retire(published: Path, *, keep: int) -> None:
    """Delete what is older than the newest `keep`, of which `published` is the first."""
    older = [
        path for path in whole_checkpoints(published.parent) if step_of(path) < step_of(published)
    ]
    for path in older[keep - 1 :]:
        hide(path)


def hide(path: Path) -> None:
    """Delete a checkpoint so that a deletion that is cut short leaves nothing by its name."""
    if path.exists():
        aside = path.with_name(f".{path.name}.old")
        remove(aside)
        os.replace(path, aside)
        remove(aside)


def remove(path: Path) -> None:
    """Delete a folder or a file, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def manifest_text(records: list[FileRecord]) -> str:
    """The manifest that says `records`."""
    files = {
        record.name: {"bytes": record.num_bytes, "crc32": record.crc32}
        for record in sorted(records, key=lambda record: record.name)
    }
    return json.dumps({"files": files}, indent=1) + "\n"


def read_manifest(path: Path) -> list[FileRecord] | None:
    """What the checkpoint's files must be; None where it has no manifest."""
    try:
        files = json.loads(read_small(path / MANIFEST))["files"]
        records = [
            FileRecord(name=name, num_bytes=int(said["bytes"]), crc32=int(said["crc32"]))
            for name, said in sorted(files.items())
        ]
    except FileNotFoundError:
        return None
    except (
        *(OSError, ValueError, TypeError, KeyError, AttributeError),
        *(OverflowError, RecursionError),
    ) as error:
        raise Unreadable(f"{MANIFEST} cannot be read: {reason(error)}") from error
    outside = next((r.name for r in records if not is_plain(r.name)), None)
    if outside is not None:
        raise Unreadable(f"{MANIFEST} names {outside!r}, outside of its folder")
    return records


def damage(records: list[FileRecord], path: Path, *, rank: int, ranks: int) -> str:
    """What is wrong with the files of `path` that fall to `rank`; empty when nothing is.

    The files are dealt out over the ranks, largest first, so checking costs each rank one reading
    of its share: CRC-32 at some 4 GB/s (zlib 1.3 on one core; SHA-256 1.4), so the disk decides.
    """
    dealt = sorted(records, key=lambda record: (-record.num_bytes, record.name))[rank::ranks]
    problems = (_damage_of(record, path / record.name) for record in dealt)
    return next((problem for problem in problems if problem), "")


def _damage_of(record: FileRecord, path: Path) -> str:
    try:
        require_file(path)  # one that is read has an end
        actual_bytes = path.stat().st_size
        if actual_bytes != record.num_bytes:
            return f"{record.name} has {actual_bytes} bytes, not {record.num_bytes}"
        if record_of(path).crc32 != record.crc32:
            return f"{record.name} has changed since it was written (its CRC-32 differs)"
    except FileNotFoundError:
        return f"{record.name} is missing"
    except OSError as error:
        return f"{record.name} cannot be read: {reason(error)}"
    return ""


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file, by reading it."""
    crc32 = num_bytes = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc32 = zlib.crc32(piece, crc32)
            num_bytes += len(piece)
    return FileRecord(name=path.name, num_bytes=num_bytes, crc32=crc32)


def reason(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__

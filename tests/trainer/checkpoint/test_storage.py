"""Checkpoint files are read without running what is in them."""

from __future__ import annotations

import io
import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from fsdpplan.trainer.checkpoint.storage import (
    CheckedReader,
    OwnTensors,
    Padding,
    TensorsOnly,
    read_index,
    with_padding,
)
from fsdpplan.trainer.errors import TrainerError


class Payload:
    """Leaves a file behind when a pickle that holds it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def saved(tmp_path: Path, alone: None) -> Path:
    """A checkpoint of torch's own, with a value that is no tensor."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    path = tmp_path / "saved"
    state = {
        "model": {"layers.0.weight": torch.ones(4, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": {"state": {"layers.0.weight": {"step": torch.tensor(3.0)}}, "lr": 0.5},
    }
    dcp.save(state, storage_writer=FileSystemWriter(path))
    return path


def rewrite_index(path: Path, change: Any) -> None:
    """Change the index of a checkpoint in place."""
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def test_the_index_is_read_as_torch_reads_it(saved: Path) -> None:
    ours, theirs = read_index(saved), FileSystemReader(saved).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


class ByName(pickle.Pickler):
    """Writes members of an enumeration as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_an_index_of_debians_python_is_read(saved: Path) -> None:
    written = io.BytesIO()
    ByName(written).dump(FileSystemReader(saved).read_metadata())
    assert b"getattr" in written.getvalue()
    (saved / ".metadata").write_bytes(written.getvalue())
    theirs = FileSystemReader(saved).read_metadata()
    assert read_index(saved).state_dict_metadata == theirs.state_dict_metadata


class Reading:
    """Reads an attribute of what is not an enumeration."""

    def __reduce__(self) -> Any:
        return getattr, (Path, "unlink")


def test_no_other_attribute_is_read(saved: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Reading()))
    with pytest.raises(TrainerError, match="which no index of tensors does"):
        read_index(saved)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_in_the_index_does_not_run(saved: Path, tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "executed"
    (saved / ".metadata").write_bytes(pickle.dumps(Payload(target), protocol=protocol))
    with pytest.raises(TrainerError, match="which no index of tensors does"):
        read_index(saved)
    assert not target.exists()
    with pytest.raises(AttributeError):
        FileSystemReader(saved).read_metadata()
    assert target.exists(), "torch's reader would have run it"


def test_code_within_a_good_index_does_not_run(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    rewrite_index(saved, lambda index: setattr(index, "planner_data", Payload(target)))
    with pytest.raises(TrainerError, match=r"\.metadata cannot be read"):
        read_index(saved)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"nonsense", pickle.dumps({"a": 1})])
def test_what_is_no_index_is_said(saved: Path, content: bytes) -> None:
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(TrainerError, match=r"\.metadata"):
        read_index(saved)


def test_an_index_names_no_files_elsewhere(saved: Path) -> None:
    def point_outside(index: Any) -> None:
        next(iter(index.storage_data.values())).relative_path = "../other"

    rewrite_index(saved, point_outside)
    with pytest.raises(TrainerError, match="outside"):
        read_index(saved)


def load(path: Path, state: dict[str, Any]) -> None:
    """Read as the trainer does."""
    reader = CheckedReader(path, read_index(path))
    dcp.load(state, storage_reader=reader, planner=TensorsOnly())


def test_tensors_are_read_in_place(saved: Path) -> None:
    weight = torch.zeros(4, 3)
    load(saved, {"model": {"layers.0.weight": weight}})
    assert bool((weight == 1).all())


@pytest.mark.parametrize("is_staged", [False, True])
def test_padding_is_neither_saved_nor_read(alone: None, tmp_path: Path, is_staged: bool) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    path, rows, vocab = tmp_path / "saved", 8, 5
    table, other = torch.arange(24.0).view(rows, 3), torch.ones(rows)
    state = {"model": {"output.weight": table, "other": other}}
    padding = Padding(names=frozenset({"model.output.weight"}), rows=rows, vocab=vocab)
    copies = {"model.output.weight": table.clone(), "model.other": other.clone()}
    planner = OwnTensors(padding, copies if is_staged else None)
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)
    index = read_index(path)
    assert index.state_dict_metadata["model.output.weight"].size == (vocab, 3)  # type: ignore[union-attr]
    assert index.state_dict_metadata["model.other"].size == (rows,)  # type: ignore[union-attr]
    published = torch.zeros(vocab, 3)
    load(path, {"model": {"output.weight": published}})
    assert torch.equal(published, table[:vocab])
    padded = torch.full((rows, 3), -1.0)
    reader = CheckedReader(path, with_padding(index, padding))
    dcp.load({"model": {"output.weight": padded}}, storage_reader=reader, planner=TensorsOnly())
    assert torch.equal(padded[:vocab], published)
    assert bool((padded[vocab:] == -1).all())


def test_a_value_that_poses_as_a_tensor_is_not_unpickled(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    payload = io.BytesIO()
    torch.save(Payload(target), payload)
    (saved / "payload").write_bytes(payload.getvalue())

    def pose(index: Any) -> None:
        index.state_dict_metadata["model.layers.0.weight"] = BytesStorageMetadata()
        for info in index.storage_data.values():
            info.relative_path, info.offset = "payload", 0
            info.length = len(payload.getvalue())

    rewrite_index(saved, pose)
    with pytest.raises(dcp.api.CheckpointException, match="is not a tensor there"):
        load(saved, {"model": {"layers.0.weight": torch.zeros(4, 3)}})
    assert not target.exists()

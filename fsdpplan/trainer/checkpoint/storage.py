"""torch.distributed.checkpoint's files, written with checksums and read without running code.

Tensors are read by `torch.load(weights_only=True)`, as torch's own reader does. What that reader
does not guard is guarded here: the index `.metadata` is a pickle, which torch 2.13 hands to
`pickle.load` (filesystem.py, FileSystemReader.read_metadata); and values that are no tensors go
through `torch.load(weights_only=False)` (default_planner.py, DefaultLoadPlanner.load_bytes). Here
the index goes through an unpickler that knows only the classes an index is made of, and a
checkpoint of ours has tensors only, so nothing else is read. Torch's tools read it like any other.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..torch_versions import ReadableProperties
from .files import (
    TENSOR_INDEX,
    FileRecord,
    Unreadable,
    publish,
    reason,
    remove,
    require_own,
    retire,
)
from .owner import note_saved
from .state import written_values
from .whole_file import is_plain, require_file

INDEX_CLASSES = {
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""All that an index of torch 2.8 to 2.15 names, beside data types; none runs code of the file."""


class ShownStream(io.RawIOBase):
    """A file that sums up what is written to it, and remembers why writing failed: torch's writer
    of tensors turns that into an error without a cause."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.crc32 = 0
        self.num_bytes = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        try:
            self.file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        written = memoryview(data).nbytes
        self.num_bytes += written
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self.num_bytes

    def writable(self) -> bool:
        """It is for writing only."""
        return True

    def fileno(self) -> int:
        """For fsync, after what was buffered has gone to the file."""
        self.file.flush()
        return int(self.file.fileno())


class SummedFiles(FileSystem):
    """Files of which a record is kept as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[str, ShownStream] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; one to be written is summed up."""
        with super().create_stream(path, mode) as file:
            if "r" in mode:
                yield file
                return
            self.streams[Path(path).name] = stream = ShownStream(file)
            yield stream

    def failure(self) -> OSError | None:
        """The first error of the file system."""
        return next((s.failure for s in self.streams.values() if s.failure), None)

    def records(self) -> list[FileRecord]:
        """What was written."""
        return [
            FileRecord(name=name, num_bytes=stream.num_bytes, crc32=stream.crc32)
            for name, stream in self.streams.items()
        ]


class PublishingWriter(FileSystemWriter):
    """Writes a checkpoint aside and publishes it when all ranks have written.

    torch calls the methods in this order, and an error of one ends the saving on all ranks:
    `prepare_local_plan` everywhere, `prepare_global_plan` on the first rank, `write_data`
    everywhere, `finish` on the first rank.
    """

    def __init__(
        self,
        partial: Path,
        path: Path,
        progress: dict[str, Any],
        *,
        keep: int,
        owner: str,
        run_folder: Path | None = None,
    ) -> None:
        super().__init__(partial)
        self.owner = owner
        self.run_folder = run_folder
        self.fs: SummedFiles = SummedFiles()
        self.partial = partial
        self.published = path
        self.progress = progress
        self.keep = keep

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing: the folder is made by the first rank alone."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin with an empty folder in the run's own, which is never made anew here."""
        require_own(self.published.parent, self.owner)
        remove(self.partial)
        self.partial.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; the records of its files go with the results."""
        try:
            results = super().write_data(plan, planner).value()
        except Exception as error:
            raise (self.fs.failure() or error) from error
        records = [
            WriteResult(MetadataIndex(record.name), record.num_bytes, record)
            for record in self.fs.records()
        ]
        answer: Future[list[WriteResult]] = Future()
        answer.set_result([*results, *records])
        return answer

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, publish, and delete what is too old."""
        everything = [result for of_rank in results for result in of_rank]
        records = [r.storage_data for r in everything if isinstance(r.storage_data, FileRecord)]
        tensors = [r for r in everything if not isinstance(r.storage_data, FileRecord)]
        super().finish(metadata, [tensors])
        require_own(self.published.parent, self.owner)
        publish(self.partial, self.published, records, self.progress)
        note_saved(self.run_folder, self.published)
        retire(self.published, keep=self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Rows that tables have for the sake of the layout, and checkpoints have not: they are zero."""

    names: frozenset[str]
    """Dotted names of the tensors whose rows are the vocabulary."""
    rows: int
    """Of each, as the layout has them."""
    vocab: int
    """Of each, as it is saved: the first ones."""


class OwnTensors(DefaultSavePlanner):
    """Plans by the tensors of the run without their padding; with `copies`, writes those values."""

    def __init__(self, padding: Padding, copies: dict[str, Tensor] | None) -> None:
        super().__init__()
        self.padding = padding
        self.copies = copies

    def create_local_plan(self) -> SavePlan:
        """This rank's parts, as far as they are not padding."""
        plan = super().create_local_plan()
        items = filter(None, map(self._unpadded, plan.items))
        self.plan = replace(plan, items=list(items))
        return self.plan

    def _unpadded(self, item: WriteItem) -> WriteItem | None:
        """None of what is all padding."""
        data, vocab = item.tensor_data, self.padding.vocab
        if data is None or item.index.fqn not in self.padding.names:
            return item
        (first, *_), (rows, *others) = data.chunk.offsets, data.chunk.sizes
        if first >= vocab:
            return None
        chunk = ChunkStorageMetadata(
            offsets=data.chunk.offsets, sizes=torch.Size([min(rows, vocab - first), *others])
        )
        size = torch.Size([vocab, *data.size[1:]])
        return replace(item, tensor_data=replace(data, chunk=chunk, size=size))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's part, or the copy of it."""
        if self.copies is None:
            return super().lookup_object(index)
        return self.copies[index.fqn]

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """What is written of it."""
        values: Tensor | io.BytesIO = super().resolve_data(write_item)
        if isinstance(values, Tensor):
            values = written_values(values)
        if write_item.index.fqn in self.padding.names and isinstance(values, Tensor):
            assert write_item.tensor_data is not None
            return values[: write_item.tensor_data.chunk.sizes[0]]
        return values


def with_padding(index: Metadata, padding: Padding) -> Metadata:
    """The index of a checkpoint for reading it into padded tables: as large as they are, with no
    part of a file where the padding is, which is left as it was."""
    entries = dict(index.state_dict_metadata)
    for name in padding.names & entries.keys():
        entry = entries[name]
        if isinstance(entry, TensorStorageMetadata) and entry.size[0] == padding.vocab:
            entries[name] = replace(entry, size=torch.Size([padding.rows, *entry.size[1:]]))
    return replace(index, state_dict_metadata=entries)


def member_of(kind: object, name: object) -> Enum:
    """A member of one of the index's enumerations, which Python 3.11.2, Debian 12's, writes as
    `getattr` of its class and its name (enum.py, `Enum.__reduce_ex__`)."""
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        return kind.__members__[str(name)]
    raise pickle.UnpicklingError("it reads an attribute, which no index of tensors does")


class IndexUnpickler(pickle.Unpickler):
    """Reads `.metadata` and nothing else (docs.python.org, pickle, "Restricting Globals")."""

    def find_class(self, module: str, name: str) -> Any:
        """One of INDEX_CLASSES, or a data type."""
        if (module, name) == ("torch.distributed.checkpoint.metadata", "TensorProperties"):
            return ReadableProperties
        if (module, name) in INDEX_CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return member_of
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors does")


def read_index(path: Path) -> Metadata:
    """Which tensors the checkpoint `path` has, and where. Raises Unreadable for anything else."""
    try:
        require_file(path / TENSOR_INDEX)
        with (path / TENSOR_INDEX).open("rb") as file:
            index = IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise Unreadable(f"{TENSOR_INDEX} is no index of tensors")
        named = {str(info.relative_path) for info in index.storage_data.values()}
    except Unreadable:
        raise
    except Exception as error:
        # A damaged pickle may fail in any way.
        raise Unreadable(f"{TENSOR_INDEX} cannot be read: {reason(error)}") from error
    outside = next((name for name in named if not is_plain(name)), None)
    if outside is not None:
        raise Unreadable(f"{TENSOR_INDEX} names {outside}, outside of its folder")
    return index


class CheckedReader(FileSystemReader):
    """Reads the tensors of a checkpoint whose index was read already."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index that was given."""
        return self.index


class TensorsOnly(DefaultLoadPlanner):
    """Refuses values that are no tensors, which would be read by a pickle that runs code."""

    def create_local_plan(self) -> LoadPlan:
        """The tensors that this rank needs."""
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise ValueError(f"{item.dest_index.fqn} is not a tensor there")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor there")

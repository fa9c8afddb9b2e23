"""Weights from safetensors files: each rank reads its own parts, none a whole model.

    materialise(model, device)
    load_safetensors(model, "checkpoint/")

Source of the format: the safetensors README ("Format"): eight bytes with the length of a JSON
header, the header (name -> dtype, shape, offsets behind it), the tensors, row-major, little-endian.
"""

from __future__ import annotations

import difflib
import json
import mmap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.whole_file import is_plain, read_small, require_file
from ..errors import TrainerError
from ..parallel.shards import Box, local, own_box

INDEX_NAME = "model.safetensors.index.json"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which it begins."""


@torch.no_grad()
def load_safetensors(model: nn.Module, folder: str | PathLike[str]) -> None:
    """Fill the parameters, and the buffers that are saved, from `folder/*.safetensors` (or a file).

    Only the bytes of this rank's parts are read, and cast on the way. Names must be those of the
    model: of tied weights one of theirs is enough. Raises TrainerError, before anything is written,
    where names or shapes differ.
    """
    stored = read_headers(Path(folder))
    wanted = list(_wanted(model))
    pairs = [(tensor, _found(names, stored, folder)) for names, tensor in wanted]
    _refuse_others(model, stored, wanted)
    for tensor, source in pairs:
        if source.shape != tuple(tensor.shape):
            raise TrainerError(
                f"a weight in {source.file.name} has shape {list(source.shape)}, the model's "
                f"{list(tensor.shape)}: build the model of the checkpoint's own config"
            )
        if tensor.is_meta:
            raise TrainerError("the model has no memory yet: call materialise(model, device) first")
    with Files() as files:
        for tensor, source in pairs:
            part = files.part(source, own_box(tensor))
            local(tensor).copy_(part)


def read_headers(folder: Path) -> dict[str, Stored]:
    """Name of each tensor in the files of `folder` -> where it is."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            listed = json.loads(read_small(index))["weight_map"].values()
            files = [folder / _plain(name) for name in sorted(set(listed))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise TrainerError(
                f"{index} is not an index of safetensors files: {error}; download it again"
            ) from error
    if not files:
        raise TrainerError(
            f"there is no *.safetensors file in {folder}: name the folder that holds them"
        )
    stored: dict[str, Stored] = {}
    for file in files:
        stored |= _read_header(file)
    return stored


def _plain(name: str) -> str:
    """A file of the folder, and of no other."""
    if not is_plain(name):
        raise ValueError(f"it names {name!r}, outside of its folder")
    return name


def _read_header(file: Path) -> dict[str, Stored]:
    try:
        require_file(file)
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if length > MOST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        size_bytes = file.stat().st_size
        header.pop("__metadata__", None)
        return {
            name: _stored(file, entry, LENGTH_BYTES + length, size_bytes)
            for name, entry in header.items()
        }
    except OSError as error:
        raise TrainerError(
            f"cannot read {file}: {error.strerror or error}; check the path and its permissions"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrainerError(
            f"{file} is not a whole safetensors file: {error}; download it again"
        ) from error


def _stored(file: Path, entry: Any, offset: int, size_bytes: int) -> Stored:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if end - begin != prod(shape) * dtype.itemsize or not 0 <= begin <= end <= size_bytes - offset:
        raise ValueError("a tensor's bytes do not fit its shape, or the file")
    return Stored(file=file, dtype=dtype, shape=shape, begin=offset + begin)


def _wanted(model: nn.Module) -> Iterator[tuple[Sequence[str], Tensor]]:
    """(names, tensor) of all that a checkpoint holds; tied weights have several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name.removeprefix("module."))
    other: Mapping[str, str] = getattr(model, "copied_names", {})
    for parameter, each in names.items():
        yield [*each, *(other[name] for name in each if name in other)], parameter
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                whole = f"{path}.{name}" if path else name
                yield (whole.removeprefix("module."),), buffer


def _found(names: Sequence[str], stored: dict[str, Stored], folder: str | PathLike[str]) -> Stored:
    for name in names:
        if name in stored:
            return stored[name]
    raise TrainerError(
        f"{folder} has no weight {names[0]!r}{_nearest(names[0], stored)}: build the model of its "
        "own config, or rename it"
    )


def _refuse_others(
    model: nn.Module, stored: dict[str, Stored], wanted: list[tuple[Sequence[str], Tensor]]
) -> None:
    """Raise where files hold what the model has not: it would silently be another model."""
    known = {name for names, _ in wanted for name in names}
    # files of earlier releases hold buffers that are computed
    known |= {name.removeprefix("module.") for name, _ in model.named_buffers()}
    known |= getattr(model, "whole_names", frozenset())  # a pipeline's rank has a part of them
    for name in stored:
        if name not in known and not name.endswith(".inv_freq"):
            raise TrainerError(
                f"the model has no weight {name!r}, which the checkpoint holds"
                f"{_nearest(name, known)}: build the model of its own config, or rename it"
            )


def _nearest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; the nearest names are {', '.join(near)}" if near else ""


class Files:
    """Files mapped into memory, of which the system reads the pages that are used."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._maps.clear()

    def part(self, source: Stored, box: Box) -> Tensor:
        """A view of a part of a stored tensor."""
        count = prod(source.shape)
        if not count:
            return torch.empty(source.shape, dtype=source.dtype)[box]
        with warnings.catch_warnings():
            # that it may not be written to, which nothing does
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(
                self._map(source.file), dtype=source.dtype, count=count, offset=source.begin
            )
        return whole.view(source.shape)[box]

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]

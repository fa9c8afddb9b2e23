"""Export: the reference decoder as a folder that `from_pretrained` loads.

Each pipeline stage's first rank writes the stage's tensors, one at a time as they are gathered; the
folder gets its name when all is there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.whole_file import sync, sync_folder, write_durably
from ..config import PlanConfig
from ..errors import TrainerError
from ..model.weights import VOCABULARIES, named_parameters
from ..user.safetensors_load import DTYPES, INDEX_NAME, read_headers
from .families import FAMILIES, config_of, family_of
from .load import CONFIG_NAME, read_config
from .names import Published, published_tensors

MOST_FILE_BYTES = 5_000_000_000
"""Of one file, as transformers writes them; more where a single tensor is larger."""

WORDS = {dtype: word for word, dtype in DTYPES.items()}
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""What stands beside the weights and goes with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What is written, and as what."""

    family: str
    config: dict[str, Any]
    dtype: torch.dtype
    beside: tuple[Path, ...] = ()
    """Files to copy."""


def exported(plan: PlanConfig, folder: Path, like: Path | None) -> Exported:
    """What `folder` will hold: of the family of `like`, where the weights came from, or of the one
    that has the plan's model. Raises TrainerError where there is none, or something is in the way.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainerError(f"{folder} exists and is not empty: take another --export-hf")
    precision = plan.training.precision
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    if like is not None:
        config = read_config(like)
        family = config["model_type"]
        beside = tuple(like / name for name in TOKENIZER_FILES if (like / name).is_file())
    else:
        family = family_of(plan.model) or ""
        if not family:
            raise TrainerError(
                "no published architecture computes what the plan's model does, so nothing would "
                f"load its weights: leave --export-hf out; those that can be: {', '.join(FAMILIES)}"
            )
        config, beside = config_of(family, plan.model), ()
    word = str(dtype).removeprefix("torch.")
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return Exported(
        family=family, config={**config, "torch_dtype": word}, dtype=dtype, beside=beside
    )


@torch.no_grad()
def export(model: nn.Module, plan: PlanConfig, folder: Path, what: Exported) -> None:
    """Write the decoder of which every rank has its part; all ranks call this."""
    partial = folder.with_name(f"{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    stage, place = divmod(dist.get_rank(), dist.get_world_size() // plan.layout.pp)
    mine = _own(model)
    tensors = [each for each in _written(plan, what) if all(name in mine for name in each.ours)]
    gathered = _Gathered(mine, plan.model.vocab, what.dtype)
    for number, file in enumerate(_files(tensors, gathered)):
        name = f"model-{stage:04d}-{number:04d}.safetensors"
        _write_file(partial / name if place == 0 else None, file, gathered)
    dist.barrier()
    if dist.get_rank() == 0:
        _finish(partial, folder, what)
    dist.barrier()


def _own(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts, by their names in the whole model."""
    buffers = {name.removeprefix("module."): buffer for name, buffer in model.named_buffers()}
    return {**buffers, **dict(named_parameters(model))}


def _written(plan: PlanConfig, what: Exported) -> Iterator[Published]:
    yield from published_tensors(what.family, plan.model)


class _Gathered:
    """Whole tensors, each gathered when it is asked for; all ranks of a stage ask alike."""

    def __init__(self, mine: dict[str, Tensor], vocab: int, dtype: torch.dtype) -> None:
        self.mine, self.vocab, self.dtype = mine, vocab, dtype
        self.last: tuple[str, Tensor] | None = None
        """An expert's stack, which the next one is of, too."""

    def dtype_of(self, each: Published) -> torch.dtype:
        """Biases of experts are numbers that are compared: they stay as they are."""
        tensor = self.mine[each.ours[0]]
        return tensor.dtype if each.ours[0].endswith("expert_bias") else self.dtype

    def shape_of(self, each: Published) -> tuple[int, ...]:
        """Shape of the published tensor."""
        parts = [self._piece(each, self._like(name)) for name in each.ours]
        return tuple(each.form.join(parts).shape)

    def whole(self, each: Published) -> Tensor:
        """The published tensor."""
        parts = [self._piece(each, self._gather(name, each)) for name in each.ours]
        return each.form.join(parts)

    def _like(self, name: str) -> Tensor:
        shape = list(self.mine[name].shape)
        if name in VOCABULARIES:
            shape[0] = self.vocab
        return torch.empty(shape, device="meta")

    def _piece(self, each: Published, whole: Tensor) -> Tensor:
        return whole if each.expert is None else whole[each.expert]

    def _gather(self, name: str, each: Published) -> Tensor:
        if self.last is not None and self.last[0] == name:
            return self.last[1]
        tensor = self.mine[name].detach().to(self.dtype_of(each))
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name in VOCABULARIES:
            whole = whole[: self.vocab]
        self.last = (name, whole.cpu())
        return self.last[1]


def _files(tensors: list[Published], gathered: _Gathered) -> Iterator[list[Published]]:
    """`tensors` in files of at most `MOST_FILE_BYTES`, where several fit."""
    file: list[Published] = []
    size = 0
    for each in tensors:
        each_bytes = _bytes(each, gathered)
        if file and size + each_bytes > MOST_FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(each)
        size += each_bytes
    if file:
        yield file


def _bytes(each: Published, gathered: _Gathered) -> int:
    count = 1
    for length in gathered.shape_of(each):
        count *= length
    return count * gathered.dtype_of(each).itemsize


def _write_file(path: Path | None, tensors: list[Published], gathered: _Gathered) -> None:
    """Gather `tensors`, and write them where there is a path."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in tensors:
        begin, end = end, end + _bytes(each, gathered)
        header[each.name] = {
            "dtype": WORDS[gathered.dtype_of(each)],
            "shape": list(gathered.shape_of(each)),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at 8 bytes
    if path is None:
        for each in tensors:
            gathered.whole(each)
        return
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in tensors:
            _write_tensor(file, gathered.whole(each))
        sync(file)


def _write_tensor(file: IO[bytes], whole: Tensor) -> None:
    file.write(whole.contiguous().view(-1).view(torch.uint8).numpy().data)


def _finish(partial: Path, folder: Path, what: Exported) -> None:
    """What stands beside the tensors; then the folder has its name."""
    stored = read_headers(partial)
    files = {name: each.file.name for name, each in sorted(stored.items())}
    if len(set(files.values())) == 1:
        (only,) = set(files.values())
        os.replace(partial / only, partial / "model.safetensors")
    else:
        total = sum((partial / name).stat().st_size for name in set(files.values()))
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_durably(partial / INDEX_NAME, json.dumps(index, indent=2) + "\n")
    for source in what.beside:
        shutil.copyfile(source, partial / source.name)
    write_durably(partial / CONFIG_NAME, json.dumps(what.config, indent=2, sort_keys=True) + "\n")
    sync_folder(partial)
    if folder.is_dir():
        folder.rmdir()  # an empty one
    os.replace(partial, folder)
    sync_folder(folder.parent)

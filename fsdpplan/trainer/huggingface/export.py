"""Export: the reference decoder as a folder that `from_pretrained` loads.

Each pipeline stage's first rank writes the stage's tensors, one at a time as they are gathered; the
folder gets its name when all is there.
"""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..checkpoint.storage import CheckedReader, TensorsOnly, read_index
from ..checkpoint.whole_file import sync, sync_folder, write_durably
from ..config import DropoutConfig, ModelConfig, PlanConfig
from ..errors import TrainerError
from ..model.dropout import NOTHING
from ..model.weights import VOCABULARIES, named_parameters
from ..optimizer import Recipe
from ..options import Options
from ..user.safetensors_load import DTYPES, INDEX_NAME, read_headers
from .families import FAMILIES, config_of, family_of
from .load import CONFIG_NAME, read_config
from .names import Published, published_tensors
from .same import require_same_model

MOST_FILE_BYTES = 5_000_000_000
"""Of one file, as transformers writes them; more where a single tensor is larger."""

BIAS = "expert_bias"
"""End of the names of the biases that balance experts."""

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


def exported(
    model: ModelConfig,
    precision: str,
    like: Path | None,
    *,
    seq_len: int,
    dropout: DropoutConfig | None = NOTHING,
) -> Exported:
    """What is written: of the family of `like`, where the weights came from, or of the one that has
    such a model. Raises TrainerError where there is none, or `like` is of another model.
    """
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    if like is not None:
        config = read_config(like)
        where = str(like / CONFIG_NAME)
        family = require_same_model(config, model, seq_len=seq_len, where=where, dropout=dropout)
        beside = tuple(like / name for name in TOKENIZER_FILES if (like / name).is_file())
    else:
        family = family_of(model) or ""
        if not family:
            raise TrainerError(
                "no published architecture computes what the plan's model does, so nothing would "
                f"load its weights: leave --export-hf out; those that can be: {', '.join(FAMILIES)}"
            )
        config, beside = config_of(family, model, dropout), ()
    word = str(dtype).removeprefix("torch.")
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return Exported(
        family=family, config={**config, "torch_dtype": word}, dtype=dtype, beside=beside
    )


def require_new(folder: Path | None, flag: str) -> None:
    """Raise TrainerError where something is in the way."""
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainerError(f"{folder} exists and is not empty: take another {flag}")


def what_to_publish(plan: PlanConfig, options: Options, recipe: Recipe) -> Exported | None:
    """What the end of the run writes for others; None: nothing. Raises TrainerError where it could
    not."""
    if options.export_hf is None:
        return None
    if plan.training.adapters is not None:
        raise TrainerError(
            "--export-hf writes a whole model, and this plan trains adapters beside one: use "
            "--export-peft, and fsdpplan export --merged behind the run"
        )
    what = exported(
        plan.model,
        plan.training.precision,
        options.init_from,
        seq_len=plan.training.seq_len,
        dropout=plan.training.dropout,
    )
    require_biases_kept(what, plan.model, rate=recipe.expert_bias_rate)
    return what


def keeps_biases(what: Exported, model: ModelConfig) -> bool:
    """Whether biases that balance experts go along, or there are none."""
    if model.experts is None:
        return True
    names = (name for each in published_tensors(what.family, model) for name in each.ours)
    return any(name.endswith(BIAS) for name in names)


def require_biases_kept(what: Exported, model: ModelConfig, *, rate: float) -> None:
    """Raise TrainerError where a run that moves the biases of experts by `rate` would be exported
    without them."""
    if rate and not keeps_biases(what, model):
        raise TrainerError(
            f"a {what.family} has no place for the biases that --expert-bias-rate moves, and "
            "without them its tokens would go to other experts: leave --expert-bias-rate out, so "
            "that the auxiliary loss balances experts, or leave --export-hf out"
        )


@torch.no_grad()
def require_no_bias_lost(model: nn.Module, what: Exported, config: ModelConfig) -> None:
    """Raise TrainerError where the model has biases of experts already that would not go along; all
    ranks call this."""
    if keeps_biases(what, config):
        return
    biases = [each for name, each in model.named_buffers() if name.endswith(BIAS)]
    lost = torch.zeros((), dtype=torch.int32, device=next(model.parameters()).device)
    if biases:
        lost += torch.stack([each.any() for each in biases]).any()
    dist.all_reduce(lost, op=dist.ReduceOp.MAX)
    if lost:
        raise _lost("the run's checkpoint", "leave --export-hf out, or use", what)


def _lost(where: str, instead: str, what: Exported) -> TrainerError:
    return TrainerError(
        f"{where} has biases that balance its experts, and a {what.family} has no place for them: "
        f"without them its tokens would go to other experts; {instead} fsdpplan export "
        "--drop-expert-bias, and train on by --init-from until the loss is what it was"
    )


@torch.no_grad()
def export(model: nn.Module, plan: PlanConfig, folder: Path, what: Exported) -> None:
    """Write the decoder of which every rank has its part; all ranks call this."""
    partial = partial_folder(folder)
    if dist.get_rank() == 0:
        begin_folder(partial)
    dist.barrier()
    stage, place = divmod(dist.get_rank(), dist.get_world_size() // plan.layout.pp)
    weights = OfRanks(model, plan.model.vocab, what.dtype)
    write_stage(partial, stage, plan.model, what, weights, is_writer=place == 0)
    dist.barrier()
    if dist.get_rank() == 0:
        finish_folder(partial, folder, what)
    dist.barrier()


def export_checkpoint(
    path: Path, model: ModelConfig, folder: Path, what: Exported, *, drops_biases: bool = False
) -> None:
    """Write what a checkpoint holds of the decoder; one process, a tensor at a time. Raises
    TrainerError where biases of its experts would not go along, unless it `drops_biases`."""
    weights = OfCheckpoint(path, what.dtype)
    if not drops_biases and not keeps_biases(what, model) and weights.has_biases():
        raise _lost(path.name, "use", what)
    partial = partial_folder(folder)
    begin_folder(partial)
    write_stage(partial, 0, model, what, weights, is_writer=True)
    finish_folder(partial, folder, what)


def partial_folder(folder: Path) -> Path:
    """Where a folder is written before it has its name."""
    return folder.with_name(f"{folder.name}.partial")


def begin_folder(partial: Path) -> None:
    """Make it, without what a killed export left."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def write_stage(
    partial: Path,
    stage: int,
    model: ModelConfig,
    what: Exported,
    weights: Weights,
    *,
    is_writer: bool,
) -> None:
    """The tensors of one pipeline stage, or of all."""
    every = published_tensors(what.family, model)
    tensors = [each for each in every if all(weights.has(name) for name in each.ours)]
    for number, file in enumerate(_files(tensors, weights)):
        name = f"model-{stage:04d}-{number:04d}.safetensors"
        _write_file(partial / name if is_writer else None, file, weights)


class Weights(ABC):
    """The decoder's tensors, each whole when it is asked for, by their names in it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.last: tuple[str, Tensor] | None = None
        """An expert's stack, which the next one is of, too."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether it is here."""

    @abstractmethod
    def shape(self, name: str) -> Sequence[int]:
        """Of the whole, without padding."""

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole in CPU memory, without padding."""

    def dtype_of(self, each: Published) -> torch.dtype:
        """Biases of experts are compared with each other: they stay as exact as they are."""
        return torch.float32 if each.ours[0].endswith(BIAS) else self.dtype

    def shape_of(self, each: Published) -> tuple[int, ...]:
        """Shape of the published tensor."""
        parts = [torch.empty(tuple(self.shape(name)), device="meta") for name in each.ours]
        return tuple(each.form.join([_piece(each, part) for part in parts]).shape)

    def published(self, each: Published) -> Tensor:
        """The published tensor."""
        return each.form.join([_piece(each, self._whole(name, each)) for name in each.ours])

    def _whole(self, name: str, each: Published) -> Tensor:
        if self.last is None or self.last[0] != name:
            self.last = (name, self.read(name, self.dtype_of(each)))
        return self.last[1]


def _piece(each: Published, whole: Tensor) -> Tensor:
    return whole if each.expert is None else whole[each.expert]


class OfRanks(Weights):
    """Those of which each rank has a part; all ranks of a pipeline stage ask alike."""

    def __init__(self, model: nn.Module, vocab: int, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        buffers = {name.removeprefix("module."): each for name, each in model.named_buffers()}
        self.mine: dict[str, Tensor] = {**buffers, **dict(named_parameters(model))}
        self.vocab = vocab

    def has(self, name: str) -> bool:
        return name in self.mine

    def shape(self, name: str) -> Sequence[int]:
        rows, *others = self.mine[name].shape
        return (self.vocab if name in VOCABULARIES else rows, *others)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.mine[name].detach().to(dtype)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole[: self.shape(name)[0]].cpu()


class OfCheckpoint(Weights):
    """Those of a checkpoint, which has no padding."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.path, self.index = path, read_index(path)

    def _entry(self, name: str) -> TensorStorageMetadata | None:
        entry = self.index.state_dict_metadata.get(f"model.{name}")
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def has_biases(self) -> bool:
        """Whether a bias balances any of its experts."""
        keys = (key.removeprefix("model.") for key in self.index.state_dict_metadata)
        names = [name for name in keys if name.endswith(BIAS) and self.has(name)]
        return any(bool(self.read(name, torch.float32).any()) for name in names)

    def has(self, name: str) -> bool:
        return self._entry(name) is not None

    def shape(self, name: str) -> Sequence[int]:
        entry = self._entry(name)
        assert entry is not None
        return tuple(entry.size)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        entry = self._entry(name)
        assert entry is not None
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load(  # type: ignore[attr-defined]
            {"model": {name: whole}},
            storage_reader=CheckedReader(self.path, self.index),
            planner=TensorsOnly(),
            no_dist=True,
        )
        return whole.to(dtype)


def _files(tensors: list[Published], weights: Weights) -> Iterator[list[Published]]:
    """`tensors` in files of at most `MOST_FILE_BYTES`, where several fit."""
    file: list[Published] = []
    size = 0
    for each in tensors:
        each_bytes = _bytes(each, weights)
        if file and size + each_bytes > MOST_FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(each)
        size += each_bytes
    if file:
        yield file


def _bytes(each: Published, weights: Weights) -> int:
    return prod(weights.shape_of(each)) * weights.dtype_of(each).itemsize


def _write_file(path: Path | None, tensors: list[Published], weights: Weights) -> None:
    """Gather `tensors`, and write them where there is a path."""
    if path is None:
        for each in tensors:
            weights.published(each)
        return
    with path.open("wb") as file:
        entries = [(e.name, weights.dtype_of(e), weights.shape_of(e)) for e in tensors]
        file.write(header_of(entries))
        for each in tensors:
            write_tensor(file, weights.published(each))
        sync(file)


def header_of(entries: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """What stands before the tensors of a file: name, dtype and shape of each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in entries:
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": WORDS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at 8 bytes
    return len(text).to_bytes(8, "little") + text


def write_tensor(file: IO[bytes], whole: Tensor) -> None:
    """Its bytes."""
    file.write(whole.contiguous().view(-1).view(torch.uint8).numpy().data)


def finish_folder(partial: Path, folder: Path, what: Exported) -> None:
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

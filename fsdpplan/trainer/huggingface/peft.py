"""Adapters as PEFT's folder, which `PeftModel.from_pretrained` and vLLM load; and merged into the
base that they were trained beside.

A published matrix may hold several of ours, one above the other, each with adapters of its own. As
one it has the A of all of them, one above the other, and a B with each of theirs in columns of its
own. The rank is the same everywhere, as vLLM wants it: others are filled up with zeros, and alpha
grows with the rank.

Sources: PEFT's docs/source/developer_guides/checkpoint.md; vLLM's vllm/lora/peft_helper.py.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.base import fingerprint_of, sum_of
from ..checkpoint.whole_file import sync, sync_folder, write_durably
from ..config import AdaptersConfig, ModelConfig, PlanConfig
from ..errors import TrainerError
from ..model import nf4
from ..model.adapters import A, B, adapter_scale, target_widths, targets_of
from ..options import Options
from ..precision import TORCH_DTYPES
from .export import (
    Exported,
    OfCheckpoint,
    OfRanks,
    Weights,
    begin_folder,
    exported,
    finish_folder,
    header_of,
    partial_folder,
    write_stage,
    write_tensor,
)
from .load import published_weights
from .names import Published, published_tensors

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Adapters and what they are beside."""

    model: ModelConfig
    adapters: AdaptersConfig
    what: Exported
    """The base as it is published."""
    like: Path | None
    """The folder of the base; None: it was drawn."""


def peft_to_publish(plan: PlanConfig, options: Options) -> Beside | None:
    """What the end of the run writes for PEFT; None: nothing. Raises TrainerError where it could
    not."""
    if options.export_peft is None:
        return None
    if plan.training.adapters is None:
        raise TrainerError(
            "--export-peft writes adapters, and this plan trains all of the model: leave it out "
            "for --export-hf, or plan with --lora 16"
        )
    training = plan.training
    what = exported(
        plan.model,
        training.precision,
        options.init_from,
        seq_len=training.seq_len,
        dropout=training.dropout,
    )
    return Beside(
        model=plan.model, adapters=plan.training.adapters, what=what, like=options.init_from
    )


@torch.no_grad()
def export_peft(model: nn.Module, plan: PlanConfig, folder: Path, beside: Beside) -> None:
    """Write the adapters of which every rank has its part; all ranks call this."""
    dtype = TORCH_DTYPES[beside.adapters.dtype]
    mine = peft_tensors(beside, OfRanks(model, plan.model.vocab, dtype))
    if plan.layout.pp > 1:
        place = dist.get_rank() % (dist.get_world_size() // plan.layout.pp)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine if place == 0 else {})
        mine = {name: each for stage in gathered for name, each in stage.items()}
    if dist.get_rank() == 0:
        _write(folder, mine, beside)
    dist.barrier()


@torch.no_grad()
def export_peft_of_checkpoint(path: Path, folder: Path, beside: Beside) -> None:
    """Write the adapters that a checkpoint holds."""
    weights = OfCheckpoint(path, TORCH_DTYPES[beside.adapters.dtype])
    _write(folder, peft_tensors(beside, weights), beside)


def peft_tensors(beside: Beside, weights: Weights) -> dict[str, Tensor]:
    """PEFT's tensors by their names, of the adapters that `weights` has."""
    rank = exported_rank(beside)
    found = {}
    for each in published_tensors(beside.what.family, beside.model):
        layers = [name.removesuffix(".weight") for name in each.ours]
        if not any(weights.has(f"{layer}.{A}") for layer in layers):
            continue
        down, up = _as_one(each, layers, beside, weights)
        name = f"base_model.model.{each.name.removesuffix('.weight')}"
        room = rank - len(down)
        found[f"{name}.{A}.weight"] = nn.functional.pad(down, (0, 0, 0, room))
        found[f"{name}.{B}.weight"] = nn.functional.pad(up, (0, room))
    return found


def exported_rank(beside: Beside) -> int:
    """The rank of all exported adapters: ours times the most that a published matrix holds."""
    names = set(_adapted(beside.model, beside.adapters))
    most = max(
        sum(name in names for name in each.ours)
        for each in published_tensors(beside.what.family, beside.model)
    )
    return beside.adapters.rank * most


def _adapted(model: ModelConfig, adapters: AdaptersConfig) -> dict[str, tuple[int, int]]:
    """Name of each weight with adapters -> its shape."""
    paths, widths = targets_of(model), target_widths(model)
    return {
        f"layers.{layer}.{paths[target]}.weight": widths[target]
        for layer in range(model.layers)
        for target in adapters.targets
        if target in paths
    }


def _as_one(
    each: Published, layers: list[str], beside: Beside, weights: Weights
) -> tuple[Tensor, Tensor]:
    """(A, B) of a published matrix, in which those without adapters count nothing."""
    rank, paths = beside.adapters.rank, targets_of(beside.model)
    widths = {paths[target]: shape for target, shape in target_widths(beside.model).items()}
    present = [layer for layer in layers if weights.has(f"{layer}.{A}")]
    dtype = weights.dtype
    down = torch.cat([weights.read(f"{layer}.{A}", dtype) for layer in present])
    ups = []
    for layer in layers:
        rows, _ = widths[layer.split(".", 2)[2]]
        up = torch.zeros(rows, rank * len(present), dtype=dtype)
        if layer in present:
            first = present.index(layer) * rank
            up[:, first : first + rank] = weights.read(f"{layer}.{B}", dtype)
        ups.append(up)
    whole = each.form.join(ups)
    return down, (whole.T if _is_transposed(each, ups) else whole).contiguous()


def _is_transposed(each: Published, ups: list[Tensor]) -> bool:
    """Whether the published weight is (inputs, outputs): PEFT's A and B are not."""
    return each.form.join([up[:, :0] for up in ups]).shape[0] == 0


def peft_config(beside: Beside) -> dict[str, Any]:
    """The `adapter_config.json`."""
    adapters, rank = beside.adapters, exported_rank(beside)
    more = rank / adapters.rank
    alpha = adapters.alpha * (math.sqrt(more) if adapters.rslora else more)
    names = set(_adapted(beside.model, adapters))
    every = list(published_tensors(beside.what.family, beside.model))
    with_ = [each for each in every if names.intersection(each.ours)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if beside.like is None else str(beside.like.resolve()),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": adapters.dropout,
        "use_rslora": adapters.rslora,
        "use_dora": False,
        "bias": "none",
        "target_modules": _target_modules(every, with_),
        "modules_to_save": None,
        "fan_in_fan_out": beside.what.family == "gpt2",
        "inference_mode": True,
    }


def _target_modules(every: list[Published], adapted: list[Published]) -> list[str]:
    """The last name of each adapted layer, or the last two where another layer has the same."""
    others = {_last(each, 1) for each in every if each not in adapted}
    return sorted({_last(each, 2 if _last(each, 1) in others else 1) for each in adapted})


def _last(each: Published, number: int) -> str:
    return ".".join(each.name.removesuffix(".weight").split(".")[-number:])


def _write(folder: Path, tensors: Mapping[str, Tensor], beside: Beside) -> None:
    """The folder gets its name when all is there."""
    partial = partial_folder(folder)
    begin_folder(partial)
    with (partial / WEIGHTS_NAME).open("wb") as file:
        file.write(header_of([(name, each.dtype, each.shape) for name, each in tensors.items()]))
        for each in tensors.values():
            write_tensor(file, each)
        sync(file)
    for source in beside.what.beside:
        shutil.copyfile(source, partial / source.name)
    text = json.dumps(peft_config(beside), indent=2, sort_keys=True) + "\n"
    write_durably(partial / CONFIG_NAME, text)
    sync_folder(partial)
    if folder.is_dir():
        folder.rmdir()  # an empty one
    os.replace(partial, folder)
    sync_folder(folder.parent)


class Merged(Weights):
    """A published base with the adapters of a checkpoint in it, a matrix at a time."""

    def __init__(
        self,
        path: Path,
        beside: Beside,
        *,
        precision: str,
        as_trained: bool,
    ) -> None:
        super().__init__(beside.what.dtype)
        assert beside.like is not None
        self.beside, self.as_trained = beside, as_trained
        self.kept_in = TORCH_DTYPES[precision]
        self.trained = OfCheckpoint(path, torch.float32)
        self.base = published_weights(beside.what.family, beside.model, beside.like)
        every = replace(beside.adapters, targets=tuple(targets_of(beside.model)))
        self.quantised = set(_adapted(beside.model, every))
        self.squares = [0.0, 0.0]
        """Of what the base differs from the 4-bit one, and of that."""

    def has(self, name: str) -> bool:
        """Whether it is there."""
        return self.base.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.base.read(name).shape)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        whole = self.base.read(name)
        if self.beside.adapters.base == "nf4" and name in self.quantised:
            rounded = self._rounded(whole)
            self.squares[0] += float((rounded - whole.float()).square().sum())
            self.squares[1] += float(rounded.square().sum())
            whole = rounded if self.as_trained else whole
        layer = name.removesuffix(".weight")
        if not self.trained.has(f"{layer}.{A}"):
            return whole.to(dtype)
        down = self.trained.read(f"{layer}.{A}", torch.float32)
        up = self.trained.read(f"{layer}.{B}", torch.float32)
        return (whole.float() + adapter_scale(self.beside.adapters) * (up @ down)).to(dtype)

    def _rounded(self, whole: Tensor) -> Tensor:
        stored = nf4.quantise(whole.to(self.kept_in))
        return nf4.dequantise(stored, whole.shape, torch.float32)

    def fingerprint(self) -> str:
        """Of the base as a run keeps it: `base_fingerprint` of one that began with this folder."""
        sums: dict[str, int] = {}
        for name in self.base.names():
            whole = self.base.read(name).to(self.kept_in)
            if self.beside.adapters.base == "nf4" and name in self.quantised:
                stored = nf4.quantise(whole)
                layer = name.removesuffix(".weight")
                sums |= {
                    f"{layer}.{part}": sum_of(each)
                    for part, each in zip(nf4.PARTS, stored, strict=True)
                }
            else:
                sums[name] = sum_of(whole)
        return fingerprint_of(sums)


def export_merged(
    path: Path,
    folder: Path,
    beside: Beside,
    *,
    precision: str,
    fingerprint: str,
    as_trained: bool,
) -> str:
    """Write the base with the adapters of a checkpoint in it; returns what is to be said of the
    base. Raises TrainerError where it is another than the adapters were trained beside."""
    merged = Merged(path, beside, precision=precision, as_trained=as_trained)
    if merged.fingerprint() != fingerprint:
        raise TrainerError(
            f"{beside.like} is not the base that {path.name} was trained beside: give --init-from "
            "the folder that its run began with, as it was then"
        )
    partial = partial_folder(folder)
    begin_folder(partial)
    write_stage(partial, 0, beside.model, beside.what, merged, is_writer=True)
    finish_folder(partial, folder, beside.what)
    if beside.adapters.base != "nf4":
        return ""
    apart = math.sqrt(merged.squares[0] / merged.squares[1]) if merged.squares[1] else 0.0
    if as_trained:
        return f"; its base is the 4-bit one, dequantised, {apart:.1%} from the published weights"
    return (
        f"; its base is the published one, whose matrices are {apart:.1%} from the 4-bit ones that "
        "the adapters were trained beside (--as-trained merges into those)"
    )

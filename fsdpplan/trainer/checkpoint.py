"""Checkpoints that any layout can read: published whole, or not at all.

    DIR/step-00000100/     torch.distributed.checkpoint's files, and trainer.json
    DIR/latest             name of the newest whole checkpoint, written last

A checkpoint is written into a hidden folder and renamed when all ranks have written their part, so
a killed run leaves only whole ones. DIR must be one that all nodes share.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .distributed import agree
from .errors import TrainerError

LATEST = "latest"
PROGRESS = "trainer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; all else that a resumed run needs is in the plan and its options."""

    step: int
    """Steps done."""
    sequences: int
    """Sequences seen: the number of the next one."""
    seed: int
    seq_len: int
    steps: int
    """Steps that the learning-rate schedule was laid out for."""
    learning_rate: float
    warmup_steps: int


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of `folder`, or None where there is none."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TrainerError(f"cannot read {folder / LATEST}: {error}") from error
    path = folder / name
    if not name or not (path / PROGRESS).is_file() or not (path / ".metadata").is_file():
        whole = sorted(entry.parent.name for entry in folder.glob(f"step-*/{PROGRESS}"))
        raise TrainerError(
            f"{folder / LATEST} names {name!r}, which is not a whole checkpoint: write one of "
            f"{', '.join(whole) or 'none left'} into it, or take another --checkpoint-dir"
        )
    return path


def read_progress(path: Path) -> Progress:
    """What the checkpoint `path` says of the run that wrote it."""
    try:
        return Progress(**json.loads((path / PROGRESS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise TrainerError(
            f"{path / PROGRESS} cannot be read: {error}; write the name of an older checkpoint "
            f"into {path.parent / LATEST}"
        ) from error


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimizer state into place, whatever layout wrote them.

    What the command line says of the optimizer stands; the checkpoint's own settings are dropped.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = _state(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
    except dcp.api.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise TrainerError(
            f"{path} does not hold this model: {first}; take another --checkpoint-dir"
        ) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    keep: int,
) -> Path:
    """Write and publish a checkpoint; all ranks call this. Keeps the newest `keep`."""
    path = folder / f"step-{progress.step:08d}"
    partial = folder / f".{path.name}.partial"
    is_first_rank = dist.get_rank() == 0
    if is_first_rank:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    if not agree(partial.is_dir()):
        raise TrainerError(f"{folder} is not shared by all nodes: take a --checkpoint-dir that is")
    dcp.save(_state(model, optimizer), checkpoint_id=partial)  # type: ignore[attr-defined]
    if is_first_rank:
        _write(partial / PROGRESS, json.dumps(asdict(progress)) + "\n")
        _publish(partial, path)
        _retire(folder, keep=keep)
    dist.barrier()
    return path


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _publish(partial: Path, path: Path) -> None:
    """Give a whole checkpoint its name, then let `latest` name it."""
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)
    marker = path.parent / f".{LATEST}.partial"
    _write(marker, path.name + "\n")
    os.replace(marker, path.parent / LATEST)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _retire(folder: Path, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what killed runs left half-written."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        # Without this file it is no whole checkpoint, should the deletion be cut short.
        (old / PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)

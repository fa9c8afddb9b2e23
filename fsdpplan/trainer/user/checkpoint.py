"""Checkpoints of a user's own loop, by names of the whole model: any layout goes on from any other.

torch's format (`torch.distributed.checkpoint`); each rank writes and reads its own parts.
"""

from __future__ import annotations

from os import PathLike

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.state import Named, equalise_copies, fill_optimizer, named_tensors, tree


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | PathLike[str]
) -> None:
    """Write parameters, buffers and the optimizer's state into `folder`; all ranks call this."""
    save(tree(_named(model, optimizer)), checkpoint_id=folder)


@torch.no_grad()
def load_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | PathLike[str]
) -> None:
    """Read what `save_checkpoint` wrote, in whatever layout, in place; all ranks call this."""
    if not optimizer.state:
        fill_optimizer(optimizer)
    named = _named(model, optimizer)
    load(tree(named), checkpoint_id=folder)
    equalise_copies(named)


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return named_tensors(inner, optimizer, getattr(model, "copied_names", {}))

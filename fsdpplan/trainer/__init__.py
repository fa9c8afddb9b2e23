"""Train a plan's layout with PyTorch: torch and the standard library only.

    from fsdpplan.trainer import load_plan, parallelize

    plan = load_plan()                 # from $FSDPPLAN_PLAN, or load_plan("fsdpplan.json")
    model = parallelize(model, plan)

The copy in a job folder works wherever it is moved: `torchrun -m trainer`, or `torchrun
trainer/__main__.py`.
"""

from __future__ import annotations

import gc

_collects = gc.isenabled()
gc.disable()  # no module is garbage; to look for it would take a quarter of the imports' time

from . import floor as floor  # first: it ends where torch lacks what the others import
from .config import PlanConfig, load_plan
from .errors import TrainerError
from .parallel.data_parallel import gradient_sync
from .parallel.parallelize import parallelize
from .user.checkpoint import load_checkpoint, save_checkpoint
from .user.loss import token_loss
from .user.mistakes import check_optimizer
from .user.model import clip_grad_norm, materialise, sampler_arguments
from .user.pipeline import forward_backward
from .user.report import report_step
from .user.safetensors_load import load_safetensors
from .user.targets import targets_per_micro_batch

if _collects:
    gc.enable()

__all__ = [
    "PlanConfig",
    "TrainerError",
    "check_optimizer",
    "clip_grad_norm",
    "forward_backward",
    "gradient_sync",
    "load_checkpoint",
    "load_plan",
    "load_safetensors",
    "materialise",
    "parallelize",
    "report_step",
    "sampler_arguments",
    "save_checkpoint",
    "targets_per_micro_batch",
    "token_loss",
]

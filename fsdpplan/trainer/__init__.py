"""Train a plan's layout with PyTorch: torch and the standard library only.

    from fsdpplan.trainer import load_plan, parallelize

    plan = load_plan()                 # from $FSDPPLAN_PLAN, or load_plan("fsdpplan.json")
    model = parallelize(model, plan)

The folder works wherever it is copied: `torchrun -m trainer`, or `torchrun trainer/__main__.py`.
"""

from __future__ import annotations

from .config import PlanConfig, load_plan
from .errors import TrainerError
from .parallelize import gradient_sync, parallelize
from .weights import materialise

__all__ = [
    "PlanConfig",
    "TrainerError",
    "gradient_sync",
    "load_plan",
    "materialise",
    "parallelize",
]

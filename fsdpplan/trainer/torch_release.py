"""The torch that is here, against the oldest that the plan needs and the one that it is for."""

from __future__ import annotations

import os
import sys

import torch

from .config import PlanConfig
from .errors import WrongTorch
from .floor import newer_words, release_of, release_words


def require_torch(plan: PlanConfig) -> None:
    """Raise WrongTorch where the plan needs a newer torch than this one."""
    needed, here = plan.torch_needed, release_of(torch.__version__)
    if needed is None or here >= release_of(needed.oldest):
        return
    what = f"the plan's layout ({needed.because})" if needed.because else "the plan"
    raise WrongTorch(
        f"{newer_words(release_of(needed.oldest), what=what)}, or plan again with --torch "
        f"{release_words(here)}"
    )


def say_remark(plan: PlanConfig) -> None:
    """Say once where the plan was made for another release than this one."""
    remark = torch_remark(plan)
    if remark and os.environ.get("RANK", "0") == "0":
        print(remark, file=sys.stderr, flush=True)


def torch_remark(plan: PlanConfig) -> str:
    """What to say where the plan was made for another release than this one; empty: nothing."""
    planned, here = plan.training.torch, release_words(release_of(torch.__version__))
    if planned is None or planned == here:
        return ""
    return (
        f"this is torch {torch.__version__}, and the plan is for {planned}: nobody has searched or "
        f"rehearsed it for this one; fsdpplan recommend --torch {here} does"
    )

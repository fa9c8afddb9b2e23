"""Where a plan can be launched: each target, and the text that it takes."""

from __future__ import annotations

from importlib import import_module
from typing import Literal, get_args

from fsdpplan.emit.order import Order
from fsdpplan.spec.values import require_choice

Target = Literal[
    "slurm",
    "kubernetes",
    "pytorchjob",
    "jobset",
    "volcano",
    "torchtitan",
    "megatron",
    "accelerate",
    "skypilot",
    "ray",
    "ssh",
]
"""`kubernetes` is Kubeflow Trainer v2's TrainJob, `pytorchjob` v1's."""

_MODULES = {
    "slurm": "fsdpplan.emit.slurm.script",
    "kubernetes": "fsdpplan.emit.kubernetes.train_job",
    "pytorchjob": "fsdpplan.emit.kubernetes.pytorch_job",
    "jobset": "fsdpplan.emit.kubernetes.job_set",
    "volcano": "fsdpplan.emit.kubernetes.volcano_job",
    "torchtitan": "fsdpplan.emit.doors.torchtitan",
    "megatron": "fsdpplan.emit.doors.megatron",
    "accelerate": "fsdpplan.emit.doors.accelerate",
    "skypilot": "fsdpplan.emit.doors.skypilot",
    "ray": "fsdpplan.emit.doors.ray",
    "ssh": "fsdpplan.emit.doors.ssh",
}
"""Module of each target, with a function `render(order)`; imported only where it is asked for."""

ON_KUBERNETES = frozenset({"kubernetes", "pytorchjob", "jobset", "volcano"})
"""Targets whose ranks are in pods."""

OTHER_TRAINERS = frozenset({"torchtitan", "megatron", "accelerate"})
"""Targets whose program is neither fsdpplan's nor the user's."""


def render(target: Target, order: Order) -> str:
    """The text by which `target` launches the plan. Raises SpecError for what it cannot express."""
    require_choice("target", target, get_args(Target))
    text: str = import_module(_MODULES[target]).render(order)
    return text

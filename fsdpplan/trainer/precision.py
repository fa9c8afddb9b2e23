"""Number formats: in what blocks compute and gradients are reduced."""

from __future__ import annotations

import math
import re

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .config import PlanConfig, TrainingConfig
from .private_torch import set_dtype

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    """Of activations; with fp8, which only the operands of products have, bf16."""
    return TORCH_DTYPES["bf16" if training.precision == "fp8" else training.precision]


SWITCHED = ("bf16", "fp8")
"""Precisions between which a run can change."""


def parsed_switch(text: str) -> tuple[str, float] | None:
    """(the precision of the rest, the share of the steps before it) of `fp8@0.8`; None for what is
    no change."""
    found = re.fullmatch(r"(bf16|fp8)@(0\.[0-9]+|[0-9](?:\.[0-9]+)?e-[0-9]+)", text)
    if found is None or not 0 < float(found[2]) < 1:
        return None
    return found[1], float(found[2])


def precisions(training: TrainingConfig) -> tuple[str, ...]:
    """All that the run goes through, the first one first."""
    switch = parsed_switch(training.precision_switch)
    if switch is None:
        return (training.precision,)
    first = next(each for each in SWITCHED if each != switch[0])
    return (first, switch[0])


def precision_of_step(training: TrainingConfig, step: int, steps: int) -> str:
    """Of the step behind `step` of a run of `steps`: the later one from the first step on before
    which the share is done."""
    switch = parsed_switch(training.precision_switch)
    if switch is None:
        return training.precision
    _, share = switch
    # 0.7 * 10 is no whole number to a computer
    return precisions(training)[step >= math.ceil(round(share * steps, 6))]


def keep_parameters(model: nn.Module, training: TrainingConfig) -> None:
    """Let the parameters of `model` be in the dtype that the plan keeps them in; buffers, which are
    counts and tables of positions, stay as they are. What is frozen beside adapters is kept in what
    it is computed in."""
    dtype = TORCH_DTYPES[training.param_dtype]
    if training.adapters is not None:
        dtype = compute_dtype(training)
    for parameter in model.parameters():
        if parameter.dtype is torch.float32 and dtype is not torch.float32:
            set_dtype(parameter, dtype)


def fsdp_precision(training: TrainingConfig) -> MixedPrecisionPolicy:
    """Parameters are gathered in the compute dtype, and gradients reduced as the plan says."""
    dtype = compute_dtype(training)
    return MixedPrecisionPolicy(
        param_dtype=None if dtype is torch.float32 else dtype,
        reduce_dtype=TORCH_DTYPES[training.reduce_dtype],
    )


def apply_autocast(model: nn.Module, plan: PlanConfig, device: torch.device) -> None:
    """Let the forward of fp32 parameters compute in the plan's precision; bf16 ones compute in it
    by themselves.

    Autocast's cache would hold a copy of every weight to the end of forward. Where backward
    recomputes, nothing else does, and each copy goes with its product.
    """
    dtype = compute_dtype(plan.training)
    if plan.training.adapters is not None:  # the base is in it already
        return
    if dtype is not torch.float32 and plan.training.param_dtype == "fp32":
        keeps = plan.layout.activation_checkpointing in ("none", "attention")
        autocast = torch.autocast(device.type, dtype=dtype, cache_enabled=keeps)
        model.forward = autocast(model.forward)

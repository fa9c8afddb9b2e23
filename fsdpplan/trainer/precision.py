"""Number formats: in what blocks compute and gradients are reduced."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .config import PlanConfig, TrainingConfig
from .private_torch import set_dtype

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    """Of activations; with fp8, which only the operands of products have, bf16."""
    return TORCH_DTYPES["bf16" if training.precision == "fp8" else training.precision]


def keep_parameters(model: nn.Module, training: TrainingConfig) -> None:
    """Let the parameters of `model` be in the dtype that the plan keeps them in; buffers, which are
    counts and tables of positions, stay as they are."""
    dtype = TORCH_DTYPES[training.param_dtype]
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
    by themselves."""
    dtype = compute_dtype(plan.training)
    if dtype is not torch.float32 and plan.training.param_dtype == "fp32":
        model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)

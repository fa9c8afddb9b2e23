"""float8: products of 8-bit operands, by torchao's linear layers.

A converted layer keeps its parameter, name and dtype, so that a checkpoint of a bf16 run can be
resumed in fp8, and the other way round. The head, the router and the norms stay in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from ..config import PlanConfig
from ..errors import TrainerError
from ..torch_versions import torchao_wanted

LEAST_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs with 8-bit tensor cores (Ada; Hopper has 9.0)."""

MULTIPLE = 16
"""What both dimensions of a matrix must be multiples of, on each tensor-parallel rank.
Source: torchao torchao/float8/float8_linear_utils.py, `_auto_filter_for_tensorwise`."""


def apply_float8(blocks: Sequence[nn.Module], plan: PlanConfig, device: torch.device) -> None:
    """Convert the linear layers of `blocks`, before anything else is done to them.

    On CPU a plan for GPUs is only tried out: there products are emulated.
    """
    require_float8(plan, device)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise TrainerError(
            f"precision fp8 needs a torchao for torch {torch.__version__}, and the one here is for "
            f"another ({error}): pip install {torchao_wanted()}, or plan again with --precision "
            "bf16"
        ) from error
    recipe = Float8LinearConfig.from_recipe_name(plan.training.fp8_recipe)
    config = replace(
        recipe,
        emulate=device.type == "cpu",
        enable_fsdp_float8_all_gather=plan.training.fp8_all_gather,
    )
    for block in blocks:
        chosen = set(float8_layers(block, tp=plan.layout.tp))
        convert_to_float8_training(
            block, config=config, module_filter_fn=lambda _, name, chosen=chosen: name in chosen
        )


def require_float8(plan: PlanConfig, device: torch.device) -> None:
    """Raise TrainerError where products of fp8 cannot be computed."""
    instead = "plan again with --precision bf16"
    if plan.cluster.device.kind == "cpu":
        raise TrainerError(f"precision fp8 needs GPUs with 8-bit products, not CPUs: {instead}")
    if find_spec("torchao") is None:
        raise TrainerError(
            "precision fp8 needs torchao, which is not installed here: pip install "
            f"{torchao_wanted()}, or {instead}"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise TrainerError(f"{name} has no 8-bit products (compute capability 8.9): {instead}")


def float8_layers(block: nn.Module, *, tp: int) -> list[str]:
    """Names of the linear layers of `block` whose shapes 8-bit kernels take."""
    return [
        name
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and "router" not in name
        and all(width % (tp * MULTIPLE) == 0 for width in module.weight.shape)
    ]


def refresh_scales(parts: Sequence[nn.Module]) -> None:
    """After an optimizer step: one all-reduce for the scales of all weights that are gathered in
    fp8, in place of one each."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)

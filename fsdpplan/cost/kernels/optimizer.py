"""Optimizer: seconds of gradient norm, clipping and update over a rank's own parameters."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpplan.cost.kernels.host import NORM_BYTES_PER_PARAMETER, SCALE_BYTES_PER_PARAMETER
from fsdpplan.cost.kernels.muon import MOMENTUM_BYTES_PER_PARAMETER
from fsdpplan.cost.kernels.work import memory_bytes_per_second
from fsdpplan.spec.cluster import Device
from fsdpplan.spec.training import Optimizer

ADAMW_BYTES_PER_PARAMETER = 28
"""Fused AdamW reads parameter, gradient and two moments and writes all but the gradient, fp32."""

FOREACH_BYTES_PER_PARAMETER = 80
"""AdamW of separate operators over lists of tensors: decay (8), first moment (12), second moment
(8 + 12), root (8), two quotients and a sum (8 + 8), update (16). Source: torch 2.13
torch/optim/adamw.py `_multi_tensor_adamw`."""

ADAMW_8BIT_BYTES_PER_PARAMETER = 16
"""Parameter read and written and gradient read in fp32, two moments read and written in a byte
each. Source: torchao torchao/optim/adam.py, `single_param_adam`, compiled to one kernel a tensor;
taken to read nothing twice for the greatest element of each 256."""

UNSCALE_BYTES_PER_PARAMETER = 8
"""With loss scaling, fp32 gradients are read and written to be divided."""

CLIP_BYTES_PER_PARAMETER = NORM_BYTES_PER_PARAMETER + SCALE_BYTES_PER_PARAMETER
"""The norm reads the fp32 gradients; clipping reads and writes them."""

HALF_COPY_BYTES_PER_PARAMETER = 6
"""fp32 masters are copied to the resident half parameters: read and written."""

HALF_GRADIENT_BYTES_PER_PARAMETER = 6
"""Half gradients are copied to fp32 for the masters: read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecipe:
    """What a software does with a parameter in the optimizer's step."""

    half_parameters: bool = False
    half_gradients: bool = False
    half_states: bool = False
    fused: bool = True
    optimizer: Optimizer = "adamw"
    scales_loss: bool = False

    @property
    def bytes_per_parameter(self) -> int:
        """Memory traffic of one parameter."""
        adamw = ADAMW_BYTES_PER_PARAMETER if self.fused else FOREACH_BYTES_PER_PARAMETER
        step = {
            "adamw": adamw,
            "adamw_8bit": ADAMW_8BIT_BYTES_PER_PARAMETER,
            "muon": MOMENTUM_BYTES_PER_PARAMETER,
        }[self.optimizer]
        if self.half_states:  # every tensor that is read or written is half as wide
            return (CLIP_BYTES_PER_PARAMETER + adamw) // 2
        scaling = UNSCALE_BYTES_PER_PARAMETER if self.scales_loss else 0
        half = HALF_COPY_BYTES_PER_PARAMETER if self.half_parameters else 0
        gradient = HALF_GRADIENT_BYTES_PER_PARAMETER if self.half_gradients else 0
        return CLIP_BYTES_PER_PARAMETER + scaling + step + half + gradient


def optimizer_seconds(
    *,
    local_parameters: int,
    device: Device,
    tensors: int,
    recipe: OptimizerRecipe | None = None,
    host_bytes_per_second: float | None = None,
) -> float:
    """Gradient norm, clipping and AdamW over a rank's own fp32 parameters, by bytes.

    A few kernels a hundred tensors are launched; one a tensor is the upper bound for the norm. On
    the host, which gives a rank `host_bytes_per_second`, the step waits for its memory.
    """
    recipe = recipe or OptimizerRecipe()
    traffic = recipe.bytes_per_parameter * local_parameters
    if host_bytes_per_second is not None:
        return traffic / host_bytes_per_second
    launches = tensors * device.fit.kernel_launch_seconds
    return max(traffic / memory_bytes_per_second(device), launches)

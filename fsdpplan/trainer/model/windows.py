"""Windows: attention that looks back a number of tokens, by PyTorch's kernel for them.

It computes the tiles of a window alone, and heads may share keys. Elsewhere a mask of all scores
does (`attention.make_masks`).

Shape suffixes: B batch, T sequence, H heads, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ..private_torch import is_fake
from ..torch_versions import windowed_kernel

WIDEST_HEAD, WIDTH_STEP = 256, 8
"""Heads that the kernel takes: torch 2.13 aten/src/ATen/native/transformers/cuda/flash_attn."""

OLDEST_DEVICE = (8, 0)
"""CUDA's compute capability: Ampere."""


def takes_windows(config: ModelConfig, like: Tensor) -> bool:
    """Whether the kernel takes heads of the dtype and device of `like`: of fake tensors, as on CUDA
    devices. It knows no sinks."""
    fits = config.head_dim <= WIDEST_HEAD and config.head_dim % WIDTH_STEP == 0
    if windowed_kernel is None or config.attention_sinks or not fits:
        return False
    if like.dtype not in (torch.bfloat16, torch.float16):
        return False
    if is_fake(like):
        return True
    on_cuda = like.is_cuda and torch.version.hip is None
    return on_cuda and torch.cuda.get_device_capability(like.device) >= OLDEST_DEVICE


def attend_in_windows(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, *, window: int, scale: float
) -> Tensor:
    """Each query sees itself and the `window - 1` tokens before it."""
    assert windowed_kernel is not None
    batch, _, length, _ = q_BHTE.shape
    ends = (batch + 1) * length
    starts = torch.arange(0, ends, length, dtype=torch.int32, device=q_BHTE.device)
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q_BHTE, k_BHTE, v_BHTE))
    out = windowed_kernel(
        q,
        k,
        v,
        starts,
        starts,
        length,
        length,
        scale=scale,
        window_size=(window - 1, 0),
        enable_gqa=True,
    )
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)

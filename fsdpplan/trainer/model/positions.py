"""Positions: rotated queries and keys, or scores that fall with distance.

Shape suffixes: B batch, T sequence, H heads, E head width.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig, RopeScalingConfig

EXTRA_WIDTH = 8
"""Columns added to queries and keys at a time: fused kernels take widths that 8 divides."""

POSITION_DIGIT = 256
"""bf16 is exact up to here, so positions are split into two digits."""


def rotate(x_BTHE: Tensor, config: ModelConfig, positions_BT: Tensor | None = None) -> Tensor:
    """Rotary position embedding in the dtype of `x`; the halves of a head are the two coordinates
    (as in Hugging Face's Llama, not interleaved).

    `positions_BT` are 0, 1, 2 ... where None. The angles are computed here rather than kept in a
    buffer, so that building the model on the meta device leaves nothing to restore.
    """
    length, width = x_BTHE.shape[1], x_BTHE.shape[3]
    frequencies_E = rotary_frequencies(width, at_length(config, length, width), x_BTHE.device)
    if positions_BT is None:
        positions_BT = torch.arange(length, device=x_BTHE.device)[None]
    angles = (positions_BT.float()[..., None] * frequencies_E)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    if config.rope_scaling is not None and config.rope_scaling.amplitude != 1.0:
        cos, sin = (each * config.rope_scaling.amplitude for each in (cos, sin))
    cos, sin = cos.to(x_BTHE.dtype), sin.to(x_BTHE.dtype)
    first, second = x_BTHE.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def at_length(config: ModelConfig, tokens: int, width: int) -> ModelConfig:
    """`config` as it computes sequences of `tokens`, whose heads are turned in `width` coordinates:
    dynamic scaling is another base, whatever the positions.

        base = theta (factor tokens / original - factor + 1)^(width / (width - 2))

    Source: transformers 5, modeling_rope_utils.py (`_compute_dynamic_ntk_parameters`, and
    `dynamic_rope_update`, by which shorter sequences are as without).
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "dynamic":
        return config
    beyond = max(0.0, scaling.factor * (tokens / scaling.original_positions - 1))
    theta = config.rope_theta * (1 + beyond) ** (width / (width - 2))
    return replace(config, rope_theta=theta, rope_scaling=None)


def rotary_frequencies(width: int, config: ModelConfig, device: torch.device) -> Tensor:
    """Radians a token of each pair of coordinates, slow ones slowed down as the model says.

    Source: transformers 5, modeling_rope_utils.py (`_compute_llama3_parameters`,
    `_compute_yarn_parameters`, `_compute_linear_scaling_rope_parameters`).
    """
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    if scaling.kind == "llama3":
        # turns over the original length, from `low` to `high` as 0 to 1
        span = scaling.high - scaling.low
        turns = scaling.original_positions / (2 * math.pi)
        kept = frequencies * (turns / span) - scaling.low / span
    else:
        first = _pair_of(scaling.high, width, config.rope_theta, scaling)
        last = _pair_of(scaling.low, width, config.rope_theta, scaling)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs = torch.arange(width // 2, device=device, dtype=torch.float32)
        kept = 1 - (pairs - first) / max(last - first, 1e-3)
    return torch.lerp(slowed, frequencies, kept.clamp(0, 1))


def _pair_of(turns: float, width: int, theta: float, scaling: RopeScalingConfig) -> float:
    """Number of the pair that makes so many turns over the original length."""
    length = scaling.original_positions
    return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """How fast each head's scores fall with distance; made on the device, which the host would
    wait for to take a copy.

    A geometric sequence from 2^(-8/n) for n heads; between powers of two, every other term of the
    next longer sequence follows. Source: ALiBi (arXiv 2108.12409), section 3 and appendix A.
    """
    whole = 2 ** math.floor(math.log2(heads))
    exponents = torch.arange(1, whole + 1, device=device) * (8 / whole)
    if heads > whole:
        between = torch.arange(1, 2 * (heads - whole), 2, device=device) * (4 / whole)
        exponents = torch.cat([exponents, between])
    return torch.exp2(-exponents)


def with_alibi(
    q_BHTE: Tensor,
    k_BHTE: Tensor,
    *,
    slopes_H: Tensor,
    scale: float,
    positions_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys whose scaled product has `slope * (key's position)` added.

    The same as a bias of `-slope * distance`, since a query's own position adds one number to all
    its scores, and no matrix of T x T biases a head is kept.
    """
    batch, heads, length, _ = q_BHTE.shape
    if positions_BT is None:
        positions_BT = torch.arange(length, device=q_BHTE.device)[None]
    digits = torch.stack([positions_BT // POSITION_DIGIT, positions_BT % POSITION_DIGIT], dim=-1)
    per_score = slopes_H / scale
    slopes = torch.stack([per_score * POSITION_DIGIT, per_score], dim=-1)
    return (
        widened(q_BHTE, slopes[None, :, None].expand(batch, heads, length, 2)),
        widened(k_BHTE, digits[:, None].expand(batch, k_BHTE.shape[1], length, 2)),
    )


def widened(x_BHTE: Tensor, columns: Tensor) -> Tensor:
    """`x` with `columns` and zeros behind, EXTRA_WIDTH in all."""
    padded = F.pad(columns.to(x_BHTE.dtype), (0, EXTRA_WIDTH - columns.shape[-1]))
    return torch.cat([x_BHTE, padded], dim=-1)

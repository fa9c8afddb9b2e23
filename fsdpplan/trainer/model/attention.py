"""Attention: projections around a core that meets no weight but the sinks.

Shape suffixes: B batch, T sequence, D hidden, H heads, E head width.

Windows: attention that looks back a number of tokens, by PyTorch's kernel for them.

It computes the tiles of a window alone, and heads may share keys. Elsewhere a mask of all scores
does (`attention.make_masks`).

Shape suffixes: B batch, T sequence, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..config import ModelConfig
from ..private_torch import is_fake
from ..torch_versions import windowed_kernel
from .norms import AllHeadsNorm, RMSNorm
from .positions import alibi_slopes, rotate, widened, with_alibi

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


class AttentionKernel(nn.Module):
    """The fused kernel as a module, around which ring attention hooks itself."""

    def forward(self, q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, **given: Any) -> Tensor:
        return F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, **given)


def score_scale(config: ModelConfig) -> float:
    """What scores are multiplied by."""
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.score_factor
    scale: float = config.head_dim**-0.5 * factor
    return scale


class AttentionCore(nn.Module):
    """Causal attention over whole sequences; nothing else here calls the kernel."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.window = 0
        """Tokens that are looked back, where no mask says it; 0: all."""
        self.kernel = AttentionKernel()

    def forward(
        self,
        q_BHTE: Tensor,
        k_BHTE: Tensor,
        v_BHTE: Tensor,
        *,
        mask: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """(B, H, T, width of `v`). Key heads may be fewer than query heads, values narrower than
        keys; `mask` is what `make_masks` gives, None: what came before in the window is seen."""
        width = v_BHTE.shape[-1]
        in_window = mask is None and 0 < self.window < q_BHTE.shape[2]
        in_window &= q_BHTE.is_cuda or is_fake(q_BHTE)
        if sinks_H is not None:
            q_BHTE, k_BHTE, v_BHTE = _with_sinks(q_BHTE, k_BHTE, v_BHTE, sinks_H / self.scale)
        if v_BHTE.shape[-1] < q_BHTE.shape[-1]:  # fused kernels want them as wide as keys
            v_BHTE = F.pad(v_BHTE, (0, q_BHTE.shape[-1] - v_BHTE.shape[-1]))
        if in_window:
            heads = (q_BHTE, k_BHTE, v_BHTE)
            return attend_in_windows(*heads, window=self.window, scale=self.scale)[..., :width]
        groups = q_BHTE.shape[1] // k_BHTE.shape[1]
        if groups > 1 and (mask is not None or (q_BHTE.is_cuda and q_BHTE.dtype == torch.float32)):
            # Kernels that take a mask, or on CUDA fp32, do not share keys between heads.
            k_BHTE = k_BHTE.repeat_interleave(groups, dim=1)
            v_BHTE = v_BHTE.repeat_interleave(groups, dim=1)
            groups = 1
        out: Tensor = self.kernel(
            q_BHTE,
            k_BHTE,
            v_BHTE,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=groups > 1,
        )
        return out[:, :, 0 if sinks_H is None else 1 :, :width]


def _with_sinks(
    q_BHTE: Tensor, k_BHTE: Tensor, v_BHTE: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with a first token that all see, whose score is the head's sink and
    whose value is 0: so it joins the softmax and adds nothing."""
    batch, heads, length, _ = q_BHTE.shape
    q_BHTE = widened(q_BHTE, sinks_H[None, :, None, None].expand(batch, heads, length, 1))
    sink_key = torch.zeros_like(k_BHTE[:, :, :1])
    k_BHTE = torch.cat(
        [
            widened(sink_key, torch.ones_like(sink_key[..., :1])),
            widened(k_BHTE, torch.zeros_like(k_BHTE[..., :1])),
        ],
        dim=2,
    )
    return F.pad(q_BHTE, (0, 0, 1, 0)), k_BHTE, F.pad(v_BHTE, (0, 0, 1, 0))


def make_masks(
    config: ModelConfig,
    windows: Iterable[int],
    *,
    length: int,
    documents_BT: Tensor | None,
    like: Tensor,
) -> dict[int, Tensor]:
    """Masks of those `windows` that no kernel knows: 0 where a key is seen, -inf elsewhere.

    A query sees keys of its own document, itself and those before it, and of those the last
    `window`. They are added to scores in the dtype of `like`, so that blocks share what backward
    keeps. With sinks they have a first row and column more.
    """
    masks = {}
    for window in windows:
        is_narrow = 0 < window < length
        if documents_BT is None and (not is_narrow or takes_windows(config, like)):
            continue
        mask = like.new_full((length, length), float("-inf")).triu(1)[None, None]
        if is_narrow:
            mask += like.new_full((length, length), float("-inf")).tril(-window)
        if documents_BT is not None:
            others = documents_BT[:, None, :, None] != documents_BT[:, None, None, :]
            mask = mask.masked_fill(others, float("-inf"))
        masks[window] = F.pad(mask, (1, 0, 1, 0)) if config.attention_sinks else mask
    return masks


class Attention(nn.Module):
    """Causal attention; key and value heads may be fewer than query heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        query_dim = config.heads * config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.hidden, query_dim, bias=config.attention_bias)
        self.wk = nn.Linear(config.hidden, kv_dim, bias=config.attention_bias)
        self.wv = nn.Linear(config.hidden, kv_dim, bias=config.attention_bias)
        self.wo = nn.Linear(query_dim, config.hidden, bias=config.attention_output_bias)
        if config.qk_norm and config.qk_norm_width == "head":
            self.q_norm: nn.Module = RMSNorm(config.head_dim, eps=config.norm_epsilon)
            self.k_norm: nn.Module = RMSNorm(config.head_dim, eps=config.norm_epsilon)
        elif config.qk_norm:
            self.q_norm = AllHeadsNorm(query_dim, eps=config.norm_epsilon)
            self.k_norm = AllHeadsNorm(kv_dim, eps=config.norm_epsilon)
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.attention_sinks else None
        self.core = AttentionCore(score_scale(config))
        self.first_head = 0
        """The first of this rank's query heads, under tensor parallelism."""

    def forward(
        self, x_BTD: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        config = self.config
        q, k, v = self._heads(x_BTD)
        if config.positions == "rope":
            q = rotate(q, config, positions)
            k = rotate(k, config, positions)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if config.positions == "alibi":
            slopes = alibi_slopes(config.heads, q.device)
            slopes = slopes[self.first_head : self.first_head + q.shape[1]]
            q, k = with_alibi(q, k, slopes_H=slopes, scale=self.core.scale, positions_BT=positions)
        out: Tensor = self.core(q, k, v, mask=mask, sinks_H=local_sinks(self.sinks))
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads (B, T, H, E)."""
        config = self.config
        q, k, v = self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)
        if config.qk_norm and config.qk_norm_width == "all_heads":
            q, k = self.q_norm(q), self.k_norm(k)
        # -1: the number of local heads under tensor parallelism
        q, k, v = (heads.unflatten(-1, (-1, config.head_dim)) for heads in (q, k, v))
        if config.qk_norm and config.qk_norm_width == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


def local_sinks(sinks: nn.Parameter | None) -> Tensor | None:
    """The sinks of this rank's heads."""
    return sinks.to_local() if isinstance(sinks, DTensor) else sinks

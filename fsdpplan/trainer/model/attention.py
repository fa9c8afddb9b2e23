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
from .documents import Documents, attend_by_kernel, attend_one_by_one, window_mask
from .norms import AllHeadsNorm, RMSNorm
from .positions import EXTRA_WIDTH, alibi_slopes, rotate, widened, with_alibi

WIDEST_HEAD, WIDTH_STEP = 256, 8
"""Heads that the kernel takes: torch 2.13 aten/src/ATen/native/transformers/cuda/flash_attn."""

OLDEST_DEVICE = (8, 0)
"""CUDA's compute capability: Ampere."""


def takes_windows(config: ModelConfig, like: Tensor, dropout: float = 0.0) -> bool:
    """Whether the kernel of windows and documents takes heads of the dtype and device of `like`: of
    fake tensors, as on CUDA devices. It knows neither sinks nor dropout."""
    width = config.head_dim + EXTRA_WIDTH * (config.positions == "alibi")
    fits = width <= WIDEST_HEAD and width % WIDTH_STEP == 0
    if windowed_kernel is None or config.attention_sinks or dropout or not fits:
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
    batch, _, length, _ = q_BHTE.shape
    ends = (batch + 1) * length
    bounds = torch.arange(0, ends, length, dtype=torch.int32, device=q_BHTE.device)
    return attend_by_kernel(
        q_BHTE, k_BHTE, v_BHTE, bounds=bounds, longest=length, window=window, scale=scale
    )


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
        self.dropout = 0.0
        """Probability with which one of a query's keys is left out, in training."""
        self.kernel = AttentionKernel()

    def forward(
        self,
        q_BHTE: Tensor,
        k_BHTE: Tensor,
        v_BHTE: Tensor,
        *,
        mask: Tensor | None = None,
        documents: Documents | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """(B, H, T, width of `v`). Key heads may be fewer than query heads, values narrower than
        keys; `mask` is what `make_masks` gives, None: what came before in the window is seen, of
        the own one of `documents`."""
        if documents is not None and documents.lengths is not None:
            one_by_one: Tensor = self._one_by_one(q_BHTE, k_BHTE, v_BHTE, documents, sinks_H)
            return one_by_one
        width = v_BHTE.shape[-1]
        in_window = mask is None and 0 < self.window < q_BHTE.shape[2]
        in_window &= q_BHTE.is_cuda or is_fake(q_BHTE)
        if documents is None and not in_window:
            return self._under_mask(q_BHTE, k_BHTE, v_BHTE, mask=mask, sinks_H=sinks_H)
        heads = q_BHTE, k_BHTE, _as_wide(v_BHTE, q_BHTE)
        if documents is None:
            out = attend_in_windows(*heads, window=self.window, scale=self.scale)
        else:
            out = attend_by_kernel(
                *heads,
                bounds=documents.bounds,
                longest=documents.longest,
                window=self.window,
                scale=self.scale,
            )
        return out[..., :width]

    def _under_mask(
        self,
        q_BHTE: Tensor,
        k_BHTE: Tensor,
        v_BHTE: Tensor,
        *,
        mask: Tensor | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        width = v_BHTE.shape[-1]
        if sinks_H is not None:
            q_BHTE, k_BHTE, v_BHTE = _with_sinks(q_BHTE, k_BHTE, v_BHTE, sinks_H / self.scale)
        v_BHTE = _as_wide(v_BHTE, q_BHTE)
        groups = q_BHTE.shape[1] // k_BHTE.shape[1]
        if groups > 1 and (mask is not None or (q_BHTE.is_cuda and q_BHTE.dtype == torch.float32)):
            # Kernels that take a mask, or on CUDA fp32, do not share keys between heads.
            k_BHTE = k_BHTE.repeat_interleave(groups, dim=1)
            v_BHTE = v_BHTE.repeat_interleave(groups, dim=1)
            groups = 1
        drops = {"dropout_p": self.dropout} if self.dropout and self.training else {}
        out: Tensor = self.kernel(
            q_BHTE,
            k_BHTE,
            v_BHTE,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=groups > 1,
            **drops,
        )
        return out[:, :, 0 if sinks_H is None else 1 :, :width]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _one_by_one(
        self,
        q_BHTE: Tensor,
        k_BHTE: Tensor,
        v_BHTE: Tensor,
        documents: Documents,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Compiled blocks are cut here: the lengths of documents are other ones in every step."""

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            if mask is not None and sinks_H is not None:
                mask = F.pad(mask, (1, 0, 1, 0))
            return self._under_mask(q, k, v, mask=mask, sinks_H=sinks_H)

        heads = q_BHTE, k_BHTE, v_BHTE
        return attend_one_by_one(*heads, documents=documents, window=self.window, attend=attend)


def _as_wide(v_BHTE: Tensor, q_BHTE: Tensor) -> Tensor:
    """Values as wide as keys, which fused kernels want."""
    missing = q_BHTE.shape[-1] - v_BHTE.shape[-1]
    return F.pad(v_BHTE, (0, missing)) if missing else v_BHTE


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
    like: Tensor,
    dropout: float = 0.0,
) -> dict[int, Tensor]:
    """Masks of those `windows` that no kernel knows: 0 where a key is seen, -inf elsewhere.

    A query sees itself and the keys before it, and of those the last `window`. They are added to
    scores in the dtype of `like`, so that blocks share what backward keeps. With sinks they have a
    first row and column more.
    """
    masks = {}
    for window in windows:
        if not 0 < window < length or takes_windows(config, like, dropout):
            continue
        mask = window_mask(like, queries=length, before=0, window=window)
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
        self,
        x_BTD: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Documents | None = None,
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
        sinks = local_sinks(self.sinks)
        out: Tensor = self.core(q, k, v, mask=mask, documents=documents, sinks_H=sinks)
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

"""Multi-head latent attention: queries, keys and values from narrow projections.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import LatentConfig, ModelConfig
from .attention import AttentionCore, local_sinks, score_scale
from .documents import Documents
from .norms import RMSNorm
from .positions import alibi_slopes, rotate, with_alibi


class LatentAttention(nn.Module):
    """Causal attention whose heads each have a part that is rotated, shared by all keys, and a part
    that is not.

    Without rotary positions the shared part is as it is projected.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig) -> None:
        super().__init__()
        self.config, self.latent = config, latent
        query_dim = config.heads * config.head_dim
        plain_dim = config.head_dim - latent.rope_head_dim
        if latent.query_rank:
            self.wq_a = nn.Linear(config.hidden, latent.query_rank, bias=False)
            self.q_norm = RMSNorm(latent.query_rank, eps=config.norm_epsilon)
            self.wq_b = nn.Linear(latent.query_rank, query_dim, bias=False)
        else:
            self.wq = nn.Linear(config.hidden, query_dim, bias=False)
        self.wkv_a = nn.Linear(config.hidden, latent.kv_rank + latent.rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(latent.kv_rank, eps=config.norm_epsilon)
        self.wkv_b = nn.Linear(
            latent.kv_rank, config.heads * (plain_dim + latent.value_head_dim), bias=False
        )
        self.wo = nn.Linear(config.heads * latent.value_head_dim, config.hidden, bias=False)
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
        q, k, v = self._heads(x_BTD, positions)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if config.positions == "alibi":
            slopes = alibi_slopes(config.heads, q.device)
            slopes = slopes[self.first_head : self.first_head + q.shape[1]]
            q, k = with_alibi(q, k, slopes_H=slopes, scale=self.core.scale, positions_BT=positions)
        sinks = local_sinks(self.sinks)
        out: Tensor = self.core(q, k, v, mask=mask, documents=documents, sinks_H=sinks)
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x_BTD: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads (B, T, H, E)."""
        config, latent = self.config, self.latent
        plain = config.head_dim - latent.rope_head_dim
        q = self.wq_b(self.q_norm(self.wq_a(x_BTD))) if latent.query_rank else self.wq(x_BTD)
        q = q.unflatten(-1, (-1, config.head_dim))
        narrow, shared = self.wkv_a(x_BTD).split([latent.kv_rank, latent.rope_head_dim], dim=-1)
        wide = self.wkv_b(self.kv_norm(narrow)).unflatten(-1, (-1, plain + latent.value_head_dim))
        k, v = wide.split([plain, latent.value_head_dim], dim=-1)
        shared = shared.unsqueeze(2)
        if config.positions == "rope":
            q_plain, q_turned = q.split([plain, latent.rope_head_dim], dim=-1)
            q = torch.cat([q_plain, rotate(q_turned, config, positions)], dim=-1)
            shared = rotate(shared, config, positions)
        return q, torch.cat([k, shared.expand(-1, -1, k.shape[2], -1)], dim=-1), v

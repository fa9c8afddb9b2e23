"""The reference decoder: exactly the planned shapes, nothing else.

Shape suffixes: B batch, T sequence, D hidden, H query heads, K key/value heads, E head width,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig as ModelConfig


def outside_autocast(x: Tensor) -> torch.autocast:
    """A context in which autocast leaves `x` as it is."""
    return torch.autocast(x.device.type, enabled=False)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input; the kernel sums in fp32 whatever that is.

    DDP's autocast would make it fp32 and each projection behind it a copy of its own. FSDP gathers
    the weight in the input's dtype already.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        with outside_autocast(x):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in the dtype of its input, for the same reason."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return super().forward(x)
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with outside_autocast(x):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm of the residual stream."""
    if config.norm == "layernorm":
        return LayerNorm(config.hidden, eps=config.norm_epsilon)
    return RMSNorm(config.hidden, eps=config.norm_epsilon)


def rotate(x_BTHE: Tensor, theta: float) -> Tensor:
    """Rotary position embedding over all positions of `x`, in the dtype of `x`.

    The angles are computed here rather than kept in a buffer, so that building the model on the
    meta device leaves nothing to restore.
    """
    length, width = x_BTHE.shape[1], x_BTHE.shape[3]
    exponents = torch.arange(0, width, 2, device=x_BTHE.device, dtype=torch.float32) / width
    positions = torch.arange(length, device=x_BTHE.device, dtype=torch.float32)
    angles = torch.outer(positions, theta**-exponents)
    cos = angles.cos()[None, :, None].to(x_BTHE.dtype)
    sin = angles.sin()[None, :, None].to(x_BTHE.dtype)
    first, second = x_BTHE.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        query_dim = config.heads * config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.hidden, query_dim, bias=config.attention_bias)
        self.wk = nn.Linear(config.hidden, kv_dim, bias=config.attention_bias)
        self.wv = nn.Linear(config.hidden, kv_dim, bias=config.attention_bias)
        self.wo = nn.Linear(query_dim, config.hidden, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.norm_epsilon)
            self.k_norm = RMSNorm(config.head_dim, eps=config.norm_epsilon)

    def forward(self, x_BTD: Tensor) -> Tensor:
        config = self.config
        batch, length, _ = x_BTD.shape
        # -1: the number of local heads under tensor parallelism
        q = self.wq(x_BTD).view(batch, length, -1, config.head_dim)
        k = self.wk(x_BTD).view(batch, length, -1, config.head_dim)
        v = self.wv(x_BTD).view(batch, length, -1, config.head_dim)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if config.positions == "rope":
            q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=config.heads != config.kv_heads,
        )
        projected: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class FeedForward(nn.Module):
    """SwiGLU (w1 gate, w3 up, w2 down) or GELU (w1 up, w2 down)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.w1 = nn.Linear(config.hidden, config.ffn_hidden, bias=config.mlp_bias)
        self.w2 = nn.Linear(config.ffn_hidden, config.hidden, bias=config.mlp_bias)
        if self.gated:
            self.w3 = nn.Linear(config.hidden, config.ffn_hidden, bias=config.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gated:
            inner = F.silu(self.w1(x_BTD)) * self.w3(x_BTD)
        else:
            inner = F.gelu(self.w1(x_BTD), approximate="tanh")
        projected: Tensor = self.w2(inner)
        return projected


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.ffn_norm = make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        x_BTD = x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        return x_BTD


class Decoder(nn.Module):
    """Embedding, blocks, norm and output head; returns logits (B, T, V)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden)
        if config.positions == "learned":
            self.pos_embeddings = nn.Embedding(config.max_positions, config.hidden)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm = make_norm(config)
        self.output = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens_BT)
        if self.config.positions == "learned":
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            h = h + self.pos_embeddings(positions)
        if torch.is_autocast_enabled(h.device.type):  # or the residual stream would be fp32
            h = h.to(torch.get_autocast_dtype(h.device.type))
        for block in self.layers.values():
            h = block(h)
        logits: Tensor = self.output(self.norm(h))
        return logits

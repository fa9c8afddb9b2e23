"""Small models of somebody's own: what `parallelize` finds in them, and what it cannot take."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, VOCAB, LAYERS, LENGTH = 32, 4, 64, 4, 12


class Attention(nn.Module):
    """Causal attention that takes its number of heads from the width of its projections."""

    def __init__(self, *, adjusts: bool = True) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)
        )
        self.heads = -1 if adjusts else HEADS
        self.width = HIDDEN // HEADS if adjusts else -1

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each(x).view(batch, length, self.heads, self.width).transpose(1, 2)
            for each in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q * turn, k * turn, v, is_causal=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(x)))
        return out


class Block(nn.Module):
    """A block that is given more than the hidden states, as rotary tables are."""

    def __init__(self, *, adjusts: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.ff = Attention(adjusts=adjusts), FeedForward()

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turn)
        out: Tensor = x + self.ff(self.norm2(x))
        return out


class Flat(nn.Module):
    """A block whose matrices stand in it, and not in networks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 64, bias=False), nn.Linear(64, HIDDEN, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Own(nn.Module):
    """Two tables, blocks, a norm and a head with a bias; of other kinds a parameter of the model
    itself, or a head that is one with the table."""

    def __init__(self, kind: str = "own") -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.scale = nn.Parameter(torch.ones(HIDDEN)) if kind == "scaled" else 1.0
        make = Flat if kind == "flat" else Block
        self.layers = nn.ModuleList(make() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=kind != "tied")
        if kind == "tied":
            self.lm_head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = (self.table(tokens) + self.positions(places)) * self.scale
        turn = torch.cos(places[:, None] / 8).to(x.dtype)
        for layer in self.layers:
            x = layer(x, turn)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


TP_PLAN = {
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ff.w1": "colwise",
    "layers.*.ff.w2": "rowwise",
    "layers.*.norm1": "sequence_parallel",
    "lm_head": "colwise_rep",
    "table": "embedding_rowwise",
}
FLAT_PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Odd(Own):
    """Models that stages cannot run, each for another reason."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "shared block":
            self.layers[1].ff = self.layers[0].ff
        if kind == "head of a block":
            self.norm = self.layers[0].norm1

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.table(tokens)
        turn = torch.ones((), dtype=x.dtype)
        for number, layer in enumerate(self.layers):
            if self.kind == "between" and number == 2:
                x = x * 2
            x = layer(x, first if self.kind == "of the embedding" else turn)
            if self.kind == "twice" and number == 1:
                x = layer(x, turn)
            if self.kind == "to the end" and number == 0:
                early = x
        if self.kind == "to the end":
            x = x + early
        if self.kind == "fails":
            raise ValueError("no such shape")
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

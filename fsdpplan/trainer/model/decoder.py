"""The reference decoder: exactly the planned shapes, nothing else.

Shape suffixes: B batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..config import AdaptersConfig, DropoutConfig
from ..config import ModelConfig as ModelConfig
from .adapters import adapt
from .attention import Attention, make_masks, takes_windows
from .documents import Documents, documents_of
from .dropout import NOTHING, dropout_of
from .feed_forward import FeedForward
from .latent_attention import LatentAttention
from .moe import MixtureOfExperts
from .norms import make_norm


class Block(nn.Module):
    """Pre-norm transformer block; with `post_norms`, norms behind its two halves as well."""

    def __init__(
        self, config: ModelConfig, *, layer: int, dropout: DropoutConfig = NOTHING
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = (
            LatentAttention(config, config.latent) if config.latent else Attention(config)
        )
        self.attention.core.window = config.window(layer)
        self.attention.core.dropout = dropout.attention
        self.post_attention_norm = make_norm(config) if config.post_norms else None
        self.ffn_norm = make_norm(config)
        self.feed_forward: nn.Module
        self.has_experts = config.has_experts(layer)
        if config.experts is not None and self.has_experts:
            self.feed_forward = MixtureOfExperts(config.hidden, config.experts, mlp=config.mlp)
        else:
            self.feed_forward = FeedForward(
                config.hidden, config.ffn_hidden, mlp=config.mlp, bias=config.mlp_bias
            )
        self.post_ffn_norm = make_norm(config) if config.post_norms else None
        self.dropout = dropout_of(dropout.residual)

    def forward(
        self,
        x_BTD: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Documents | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        attended = self.attention(
            self.attention_norm(x_BTD), positions=positions, mask=mask, documents=documents
        )
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        if self.dropout is not None:
            attended = self.dropout(attended)
        x_BTD = x_BTD + attended
        # a dense network asks nothing of a row's filler
        routed = () if real is None or not self.has_experts else (real,)
        fed: Tensor = self.feed_forward(self.ffn_norm(x_BTD), *routed)
        if self.post_ffn_norm is not None:
            fed = self.post_ffn_norm(fed)
        if self.dropout is not None:
            fed = self.dropout(fed)
        return x_BTD + fed


class Decoder(nn.Module):
    """Embedding, blocks, norm and output head; or the part of it that a pipeline stage has."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        blocks: Iterable[int] | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        vocab_rows: int | None = None,
        dropout: DropoutConfig | None = None,
    ) -> None:
        """`blocks` are the numbers of those to build; None: all. `vocab_rows`: of embedding and
        head, padding included; None: there is none."""
        super().__init__()
        self.config = config
        dropout = dropout or NOTHING
        self.drops_attention = dropout.attention
        self.whole_length: int | None = None
        """Tokens of a sequence, where ranks share it; None: those that `forward` is given."""
        self._kept_masks: tuple[object, dict[int, Tensor]] = (None, {})
        self.tok_embeddings: nn.Embedding | None = None
        self.pos_embeddings: nn.Embedding | None = None
        self.embedding_norm: nn.Module | None = None
        self.embedding_dropout: nn.Module | None = None
        self.norm: nn.Module | None = None
        self.output: nn.Linear | None = None
        vocab_rows = vocab_rows or config.vocab
        if has_embedding:
            self.tok_embeddings = nn.Embedding(vocab_rows, config.hidden)
            if config.positions == "learned":
                self.pos_embeddings = nn.Embedding(config.max_positions, config.hidden)
            if config.embedding_norm:
                self.embedding_norm = make_norm(config)
            self.embedding_dropout = dropout_of(dropout.embedding)
        numbers = range(config.layers) if blocks is None else blocks
        self.layers = nn.ModuleDict(
            {str(i): Block(config, layer=i, dropout=dropout) for i in numbers}
        )
        if has_head:
            self.norm = make_norm(config)
            self.output = nn.Linear(config.hidden, vocab_rows, bias=False)
            if config.tied_embeddings and self.tok_embeddings is not None:
                self.output.weight = self.tok_embeddings.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        longest: Tensor | None = None,
        real: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, V); without the head what the last block gives. Without the embedding
        `tokens_BT` is what the block before gave (B, T, D).

        `positions` (B, T) are 0, 1, 2 ... where None. `documents` and `longest` are those of a
        `MicroBatch`: attention stays within each document. `real` is its, too: other tokens visit
        no expert.
        """
        h = self.embed(tokens_BT, positions)
        if documents is None or longest is None:
            within, masks = None, self._masks(h)
        else:
            within, masks = self._documents(h, documents, longest), {}
        given = {"documents": within, "real": real}
        given = {name: value for name, value in given.items() if value is not None}
        for number, block in self.layers.items():
            mask = masks.get(self.config.window(int(number)))
            h = block(h, positions=positions, mask=mask, **given)
        if self.norm is not None:
            h = self.norm(h)
        return h if self.output is None else self.output(h)

    def _documents(self, h_BTD: Tensor, ends_BN: Tensor, longest_BL: Tensor) -> Documents:
        return documents_of(
            ends_BN,
            longest_BL.shape[1],
            length=self.whole_length or h_BTD.shape[1],
            by_kernel=takes_windows(self.config, h_BTD, self.drops_attention),
        )

    def _masks(self, h_BTD: Tensor) -> dict[int, Tensor]:
        """Masks by window, alike for all sequences, and kept."""
        length = self.whole_length or h_BTD.shape[1]
        key = (length, h_BTD.dtype, h_BTD.device)
        if self._kept_masks[0] != key:
            windows = {self.config.window(int(number)) for number in self.layers}
            self._kept_masks = (
                key,
                make_masks(
                    self.config, windows, length=length, like=h_BTD, dropout=self.drops_attention
                ),
            )
        return self._kept_masks[1]

    def embed(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        """The residual stream before the first block of this part (B, T, D)."""
        if self.tok_embeddings is None:
            return tokens_BT
        h: Tensor = self.tok_embeddings(tokens_BT)
        if self.pos_embeddings is not None:
            if positions is None:
                positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
            h = h + self.pos_embeddings(positions)
        if self.embedding_norm is not None:
            h = self.embedding_norm(h)
        if torch.is_autocast_enabled(h.device.type):  # or the residual stream would be fp32
            h = h.to(torch.get_autocast_dtype(h.device.type))
        return h if self.embedding_dropout is None else self.embedding_dropout(h)


def trained_names(config: ModelConfig, adapters: AdaptersConfig | None = None) -> list[str]:
    """Names of the whole model's parameters that are trained, as checkpoints have them; a tied one
    comes once."""
    with torch.device("meta"):
        decoder = Decoder(config)
        if adapters is not None:
            adapt(decoder, decoder.layers.values(), config, adapters)
        return [name for name, each in decoder.named_parameters() if each.requires_grad]

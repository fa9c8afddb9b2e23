"""Model: the shapes of a dense decoder, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.checks import require_choice, require_positive, require_positive_int

Mlp = Literal["swiglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned"]

MAX_LAYERS = 10_000
MAX_WIDTH = 100_000_000
"""Beyond these a shape is a slip of the pen, and loops over it would not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shapes of a dense decoder-only transformer with `layers` identical blocks."""

    name: str
    """What to call it in output."""
    layers: int
    """Transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    ffn_hidden: int
    """Inner width of the feed-forward network."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; equal to `heads` without grouped-query attention."""
    head_dim: int
    """Width of one head; `heads * head_dim` need not equal `hidden` (Qwen 3)."""
    vocab: int
    """Rows of the embedding."""
    mlp: Mlp = "swiglu"
    """`swiglu`: gate, up and down projections; `gelu`: up and down."""
    norm: Norm = "rmsnorm"
    """`layernorm` has a bias, `rmsnorm` has none."""
    positions: Positions = "rope"
    """`learned` adds a table of `max_positions` rows."""
    max_positions: int = 131072
    """Longest sequence; rows of the learned position table."""
    tied_embeddings: bool = False
    """The output head is the embedding's weight."""
    attention_bias: bool = False
    """Bias on the query, key and value projections."""
    attention_output_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Bias on the feed-forward projections."""
    qk_norm: bool = False
    """RMSNorm of width `head_dim` on queries and keys (Qwen 3)."""
    rope_theta: float = 500000.0
    """Base of the rotary frequencies; unused with learned positions."""
    norm_epsilon: float = 1e-5
    """Added to the variance in the norms."""

    def __post_init__(self) -> None:
        require_positive_int(
            layers=self.layers,
            hidden=self.hidden,
            ffn_hidden=self.ffn_hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            max_positions=self.max_positions,
        )
        require_positive(rope_theta=self.rope_theta, norm_epsilon=self.norm_epsilon)
        require_choice("mlp", self.mlp, get_args(Mlp))
        require_choice("norm", self.norm, get_args(Norm))
        require_choice("positions", self.positions, get_args(Positions))
        widest = max(self.hidden, self.ffn_hidden, self.heads * self.head_dim, self.vocab)
        if self.layers > MAX_LAYERS or max(widest, self.max_positions) > MAX_WIDTH:
            raise SpecError(
                f"no model has more than {MAX_LAYERS} layers or a width or vocabulary above "
                f"{MAX_WIDTH:.0e}; check the shape"
            )
        if self.heads % self.kv_heads:
            raise SpecError(
                f"kv_heads must divide heads: {self.heads} query heads cannot share "
                f"{self.kv_heads} key/value heads"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise SpecError(
                f"head_dim must be even for rotary positions, not {self.head_dim} "
                f"(hidden {self.hidden} over {self.heads} heads)"
            )

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together (values are as wide)."""
        return self.kv_heads * self.head_dim

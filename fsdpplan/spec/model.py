"""Model: the shapes of a decoder, dense or with experts, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.values import (
    RemembersHash,
    remembered_hash,
    require_choice,
    require_positive,
    require_positive_int,
)

Mlp = Literal["swiglu", "geglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]
Positions = Literal["rope", "learned", "alibi"]
QkNormWidth = Literal["head", "all_heads"]

MAX_LAYERS = 10_000
MAX_WIDTH = 100_000_000
"""Beyond these a shape is a slip of the pen, and loops over it would not end."""


VOCAB_MULTIPLE = 16
"""Rows of a vocabulary that a tensor-parallel rank has are padded to a multiple of this: rows of
logits then begin at 16 bytes in any format, where tensor cores are fast (cuBLAS documentation)."""


def padded_vocab(vocab: int, tp: int, multiple: int = 1) -> int:
    """Rows of a vocabulary that `tp` ranks split evenly: the next multiple of `tp * multiple`; with
    `multiple` 1 itself, or, where `tp` does not divide it, that of `tp * VOCAB_MULTIPLE`.

    As Megatron-LM pads with `--make-vocab-size-divisible-by`, of which its default is 128
    (megatron/training/arguments.py).
    """
    step = tp if vocab % tp == 0 or multiple > 1 else tp * VOCAB_MULTIPLE
    return -(-vocab // (step * multiple)) * step * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions reach beyond the sequences that a model was first trained on: slow
    frequencies become slower by `factor`.

    Neither memory nor time hangs on it; what the model computes does. Source: transformers 5,
    modeling_rope_utils.py.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_positions: int = 0
    """Longest sequence before; 0: said by `linear`, which does without. Under `dynamic` longer
    ones raise the base of the frequencies, the more the longer they are."""
    low: float = 0.0
    """Turns over that length at which a frequency is slowed down whole (llama3: low_freq_factor,
    yarn: beta_slow)."""
    high: float = 0.0
    """Turns from which it stays as it is (high_freq_factor, beta_fast)."""
    amplitude: float = 1.0
    """What cosines and sines are multiplied by (yarn: attention_factor)."""
    score_factor: float = 1.0
    """What scores are multiplied by (DeepSeek: mscale, squared)."""

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, ("linear", "dynamic", "llama3", "yarn"))
        require_positive(
            factor=self.factor, amplitude=self.amplitude, score_factor=self.score_factor
        )
        if self.kind != "linear":
            require_positive_int(original_positions=self.original_positions)
        if self.kind in ("llama3", "yarn"):
            require_positive(low=self.low, high=self.high)
            if self.high <= self.low:
                raise SpecError(f"high must be above low {self.low:g}, not {self.high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a token's experts are chosen, and what each counts for.

    The experts' scores come from one linear layer in fp32; the `active` best are chosen, with a
    bias on each that keeps them balanced and counts for the choice only.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Over all experts, or of each by itself (DeepSeek-V3)."""
    normalised: bool = True
    """The chosen experts' weights are divided by their sum; otherwise they are their scores."""
    scaling: float = 1.0
    """What the weights are multiplied by then."""
    groups: int = 1
    """Equal groups of experts, each on a node or so; 1: a token chooses among all."""
    groups_chosen: int = 1
    """Groups that a token chooses first: it visits no more nodes than these."""
    group_best: int = 1
    """Of a group so many best scores are added up as its own: 1 in DeepSeek-V2, 2 in V3."""

    def __post_init__(self) -> None:
        require_choice("scores", self.scores, ("softmax", "sigmoid"))
        require_positive(scaling=self.scaling)
        require_positive_int(
            groups=self.groups, groups_chosen=self.groups_chosen, group_best=self.group_best
        )
        if self.groups_chosen > self.groups:
            raise SpecError(
                f"a token cannot choose {self.groups_chosen} of {self.groups} groups of experts: "
                "groups_chosen must be at most groups"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts that stands in a block where a dense model has one network."""

    experts: int
    """Routed experts of one block."""
    active: int
    """Routed experts that each token visits."""
    hidden: int
    """Inner width of one routed expert."""
    shared_hidden: int = 0
    """Inner width of the experts that every token visits, all together; 0: none."""
    shared_gate: bool = False
    """A gate of one row scales the shared experts' output (Qwen 1.5 and 2 MoE)."""
    router_bias: bool = False
    """The router has a bias (GPT-OSS)."""
    bias: bool = False
    """The experts' projections have biases (GPT-OSS)."""
    dense_layers: int = 0
    """Blocks at the start that have the dense network of width `ffn_hidden` (DeepSeek)."""
    router: Router = field(default_factory=Router)
    """How a token's experts are chosen."""

    def __post_init__(self) -> None:
        require_positive_int(experts=self.experts, active=self.active, hidden=self.hidden)
        if self.active > self.experts:
            raise SpecError(
                f"a token cannot visit {self.active} of {self.experts} experts: active must be at "
                "most experts"
            )
        self._check_groups()
        if min(self.shared_hidden, self.dense_layers) < 0:
            raise SpecError("shared_hidden and dense_layers must be at least 0")
        if max(self.experts, self.hidden, self.shared_hidden) > MAX_WIDTH:
            raise SpecError(
                f"no model has more than {MAX_WIDTH:.0e} experts or as wide ones; check the shape"
            )

    def _check_groups(self) -> None:
        router = self.router
        each, left = divmod(self.experts, router.groups)
        if left:
            raise SpecError(
                f"{self.experts} experts do not split into {router.groups} equal groups: groups "
                "must divide experts"
            )
        if router.group_best > each or self.active > each * router.groups_chosen:
            raise SpecError(
                f"{router.groups_chosen} groups of {each} experts are too few for {self.active} "
                f"chosen ones, or a group for its {router.group_best} best: choose more groups, or "
                "make fewer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention: keys and values come from a narrow shared projection.

    `Model.head_dim` is then the width of a query or key head, both of its parts together.
    """

    kv_rank: int
    """Width of the latent from which keys and values are made."""
    rope_head_dim: int
    """Part of `head_dim` that is rotated; keys share it over all heads."""
    value_head_dim: int
    """Width of one value head."""
    query_rank: int = 0
    """Width of the latent from which queries are made; 0: made from the residual stream."""

    def __post_init__(self) -> None:
        require_positive_int(
            kv_rank=self.kv_rank,
            rope_head_dim=self.rope_head_dim,
            value_head_dim=self.value_head_dim,
        )
        if self.query_rank < 0:
            raise SpecError("query_rank must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(RemembersHash):
    """Shapes of a decoder-only transformer with `layers` blocks.

    All blocks are alike, but for the first `experts.dense_layers` of a model with experts.
    """

    __hash__ = remembered_hash

    name: str
    """What to call it in output."""
    layers: int
    """Transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    ffn_hidden: int
    """Inner width of the dense feed-forward network; with experts, of the blocks without them."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; equal to `heads` without grouped-query attention."""
    head_dim: int
    """Width of one head; `heads * head_dim` need not equal `hidden` (Qwen 3)."""
    vocab: int
    """Rows of the embedding."""
    vocab_multiple: int = 1
    """Embedding and head are padded to a multiple of so many rows on each tensor-parallel rank; 1:
    only where tensor parallelism does not divide the vocabulary."""
    mlp: Mlp = "swiglu"
    """`swiglu`, `geglu`: gate, up and down projections; `gelu`: up and down."""
    norm: Norm = "rmsnorm"
    """`layernorm` has a bias, unless `norm_bias` denies it; `rmsnorm` has none."""
    norm_bias: bool = True
    """The layer norms have biases (not in MPT); nothing to RMSNorm."""
    positions: Positions = "rope"
    """`learned` adds a table of `max_positions` rows; `alibi` biases the scores and has none."""
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
    """RMSNorm on queries and keys."""
    qk_norm_width: QkNormWidth = "head"
    """What one such norm spans: a `head` (Qwen 3), or `all_heads` together (OLMo 2)."""
    post_norms: bool = False
    """A norm behind attention and behind the feed-forward network too (Gemma 2 and 3)."""
    embedding_norm: bool = False
    """A norm behind the embedding (BLOOM)."""
    attention_sinks: bool = False
    """A learned number a query head that joins the softmax (GPT-OSS)."""
    sliding_window: int = 0
    """Tokens that attention looks back in windowed blocks; 0: all blocks see everything."""
    full_attention_every: int = 1
    """The last of this many blocks sees everything, the others `sliding_window` tokens; with more
    than `layers`, none does."""
    experts: Experts | None = None
    """The mixture of experts; None: a dense model."""
    latent: LatentAttention | None = None
    """Multi-head latent attention; None: plain or grouped-query attention."""
    rope_theta: float = 500000.0
    """Base of the rotary frequencies; unused with learned positions."""
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched; None: they are not."""
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
            vocab_multiple=self.vocab_multiple,
            max_positions=self.max_positions,
        )
        require_positive(rope_theta=self.rope_theta, norm_epsilon=self.norm_epsilon)
        require_choice("mlp", self.mlp, get_args(Mlp))
        require_choice("norm", self.norm, get_args(Norm))
        require_choice("positions", self.positions, get_args(Positions))
        require_choice("qk_norm_width", self.qk_norm_width, get_args(QkNormWidth))
        require_positive_int(full_attention_every=self.full_attention_every)
        widest = max(self.hidden, self.ffn_hidden, self.heads * self.head_dim, self.vocab)
        widest = max(widest, self.vocab_multiple)
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

        if self.sliding_window < 0:
            raise SpecError(f"sliding_window must be at least 0, not {self.sliding_window}")
        if self.experts and self.experts.dense_layers > self.layers:
            raise SpecError(
                f"{self.experts.dense_layers} dense layers are more than all {self.layers}: "
                "dense_layers must be at most layers"
            )
        if self.latent and self.latent.rope_head_dim > self.head_dim:
            raise SpecError(
                f"the rotated part of a head, {self.latent.rope_head_dim}, is wider than the head, "
                f"{self.head_dim}: rope_head_dim must be at most head_dim"
            )

    @property
    def is_scaled_as_llama(self) -> bool:
        """Rotary positions are as they are, or scaled as Llama 3.1 to 3.3 do, by any factor."""
        scaling = self.rope_scaling
        return scaling is None or (
            (scaling.kind, scaling.low, scaling.high) == ("llama3", 1, 4)
            and scaling.original_positions == 8192
        )

    @property
    def has_norm_bias(self) -> bool:
        """Norms of the residual stream have biases."""
        return self.norm == "layernorm" and self.norm_bias

    def vocab_rows(self, tp: int) -> int:
        """Rows of embedding and head, and columns of the logits, over all `tp` ranks. What
        `padded_vocab` adds has no token, never learns and never wins."""
        return padded_vocab(self.vocab, tp, self.vocab_multiple)

    @property
    def windowed_blocks(self) -> int:
        """Blocks whose attention looks back `sliding_window` tokens."""
        if not self.sliding_window:
            return 0
        return self.layers - self.layers // self.full_attention_every

    @property
    def is_gated(self) -> bool:
        """The feed-forward network has a gate projection beside the up projection."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def dense_blocks(self) -> int:
        """Blocks without experts, all at the start: those of a dense model are all such."""
        return self.experts.dense_layers if self.experts else self.layers

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together (values are as wide, but under latent attention)."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of all query heads' attention outputs together: what `wo` reads."""
        return self.heads * (self.latent.value_head_dim if self.latent else self.head_dim)

"""Model: the shapes of a decoder, dense or with experts, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from fsdpplan.errors import SpecError
from fsdpplan.spec.conventions import VOCAB_MULTIPLE as VOCAB_MULTIPLE
from fsdpplan.spec.conventions import padded_vocab as padded_vocab
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
WindowKind = Literal["sliding", "chunked"]

MIXERS = {
    "A": "attention",
    "D": "gated delta rule",
    "M": "Mamba-2",
    "-": "nothing",
}
"""What carries tokens to one another in a block, by the letter of `Model.mixers`."""
NETWORKS = {"F": "feed-forward network", "E": "experts", "-": "nothing"}
"""What is behind it, by the letter of `Model.networks`."""

MAX_LAYERS = 10_000
MAX_WIDTH = 100_000_000
"""Beyond these a shape is a slip of the pen, and loops over it would not end."""


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
    truncate: bool = True
    """Of yarn: the ramp between slow and kept frequencies begins and ends at whole pairs."""

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

    The experts' scores come from one linear layer in fp32; the `active` best are chosen, where
    scores are sigmoids with a bias on each that keeps them balanced and counts for the choice only.
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
    aux_loss_coef: float | None = field(default=None, compare=False)
    """Of the auxiliary loss that balances experts whose scores are a softmax, as the model's config
    has it (router_aux_loss_coef); None: it does not say. Of training, and no part of the shape."""

    def __post_init__(self) -> None:
        require_choice("scores", self.scores, ("softmax", "sigmoid"))
        require_positive(scaling=self.scaling)
        require_positive_int(
            groups=self.groups, groups_chosen=self.groups_chosen, group_best=self.group_best
        )
        if self.aux_loss_coef is not None and self.aux_loss_coef < 0:
            raise SpecError(f"aux_loss_coef must be at least 0, not {self.aux_loss_coef:g}")
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
class Indexer:
    """What chooses the keys that a query of sparse latent attention meets: narrow heads score all
    keys before it, and the best are attended (DeepSeek-V3.2)."""

    heads: int
    """Heads of its queries; keys have one."""
    head_dim: int
    """Width of one."""
    keys: int
    """Keys that each query meets, at most."""

    def __post_init__(self) -> None:
        require_positive_int(heads=self.heads, head_dim=self.head_dim, keys=self.keys)


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
    indexer: Indexer | None = None
    """What chooses the keys that are attended; None: all of them."""

    def __post_init__(self) -> None:
        require_positive_int(
            kv_rank=self.kv_rank,
            rope_head_dim=self.rope_head_dim,
            value_head_dim=self.value_head_dim,
        )
        if self.query_rank < 0:
            raise SpecError("query_rank must be at least 0")
        if self.indexer and not self.query_rank:
            raise SpecError("an indexer reads the latent of queries: query_rank must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """Linear attention by the gated delta rule: each head has a state of `key_head_dim` x
    `value_head_dim` in place of keys and values (Yang et al. 2024, arXiv 2412.06464)."""

    key_heads: int
    """Heads of queries and of keys."""
    value_heads: int
    """Heads of values, and states: a multiple of `key_heads`."""
    key_head_dim: int
    """Width of one head of queries or of keys."""
    value_head_dim: int
    """Width of one head of values."""
    convolution: int = 4
    """Tokens that the convolution before it spans."""

    def __post_init__(self) -> None:
        require_positive_int(
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            convolution=self.convolution,
        )
        if self.value_heads % self.key_heads:
            raise SpecError(
                f"key_heads must divide value_heads: {self.value_heads} heads of values cannot "
                f"share {self.key_heads} of keys"
            )

    @property
    def key_dim(self) -> int:
        """Width of all query heads together, and of all key heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads together."""
        return self.value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A selective state space: each head has a state of `head_dim` x `state` (Dao and Gu 2024,
    arXiv 2405.21060)."""

    heads: int
    """Heads, of a state each."""
    head_dim: int
    """Channels of one."""
    groups: int
    """Heads of a group share what writes to the state and what reads of it."""
    state: int
    """Numbers that each channel remembers."""
    convolution: int = 4
    """Tokens that the convolution before it spans."""
    convolution_bias: bool = True
    """That convolution has a bias."""
    bias: bool = False
    """The projections in and out have biases."""
    chunk: int = 128
    """Tokens that are computed with one another as matmuls, before their state goes on."""

    def __post_init__(self) -> None:
        require_positive_int(
            heads=self.heads,
            head_dim=self.head_dim,
            groups=self.groups,
            state=self.state,
            convolution=self.convolution,
            chunk=self.chunk,
        )
        if self.heads % self.groups:
            raise SpecError(f"groups must divide heads: {self.heads} do not make {self.groups}")

    @property
    def inner_dim(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def group_dim(self) -> int:
        """Width of what writes to the states of all groups; what reads of them is as wide."""
        return self.groups * self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(RemembersHash):
    """Shapes of a decoder-only model with `layers` blocks.

    All blocks are alike, but for the first `experts.dense_layers` of a model with experts, or where
    `mixers` or `networks` say which is what.
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
    window_kind: WindowKind = "sliding"
    """`sliding`: each query has the window before it; `chunked`: windows begin at multiples of
    `sliding_window`, and a query sees what is before it in its own (Llama 4)."""
    attention_gate: bool = False
    """What attention returns is scaled by a gate as wide, of one more projection (Qwen 3 Next)."""
    experts: Experts | None = None
    """The mixture of experts; None: a dense model."""
    latent: LatentAttention | None = None
    """Multi-head latent attention; None: plain or grouped-query attention."""
    mixers: str = ""
    """What mixes tokens in each block, a letter a block, over and over: `A` attention, `D` the
    gated delta rule, `M` Mamba-2, `-` nothing; empty: attention in all."""
    networks: str = ""
    """What follows in each block, likewise: `F` the feed-forward network, `E` the experts, `-`
    nothing; empty: experts where there are any, but for the first `dense_layers`."""
    delta: DeltaRule | None = None
    """The gated delta rule of blocks `D`."""
    mamba: Mamba2 | None = None
    """The state space of blocks `M`."""
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
        require_choice("window_kind", self.window_kind, get_args(WindowKind))
        if self.mixers or self.networks:
            self._check_kinds()
        elif self.delta or self.mamba:
            raise SpecError("no block has them: mixers must say where delta or mamba are")
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

    def _check_kinds(self) -> None:
        for name, letters, known in (
            ("mixers", self.mixers, MIXERS),
            ("networks", self.networks, NETWORKS),
        ):
            strange = sorted(set(letters) - set(known))
            if strange:
                words = ", ".join(f"{letter} ({what})" for letter, what in known.items())
                raise SpecError(f"{name} has letters {''.join(strange)!r}: use {words}")
            if len(letters) > self.layers:
                raise SpecError(
                    f"{name} has {len(letters)} letters for {self.layers} blocks: type a letter "
                    "a block, or fewer that are repeated"
                )
        kinds = set(self.block_kinds)
        if ("-", "-") in kinds:
            raise SpecError("a block cannot be empty: mixers or networks must say what it has")
        for letter, found in (("D", self.delta), ("M", self.mamba)):
            if (found is not None) is not any(mixer == letter for mixer, _ in kinds):
                raise SpecError(
                    f"mixers has blocks {letter} ({MIXERS[letter]}) just where "
                    f"{'delta' if letter == 'D' else 'mamba'} is given: give both or neither"
                )
        if (self.experts is not None) is not any(network == "E" for _, network in kinds):
            raise SpecError(
                "networks has blocks E just where experts are given: give both or neither"
            )
        if self.networks and self.experts and self.experts.dense_layers:
            raise SpecError("dense_layers must be 0 where networks say which blocks have experts")

    @property
    def is_patterned(self) -> bool:
        """`mixers` or `networks` say what each block has."""
        return bool(self.mixers or self.networks)

    @property
    def unlike_reference(self) -> str:
        """What its blocks have that the reference decoder lacks, in words; empty: nothing."""
        kinds = self.block_kinds if self.is_patterned else ()
        mixers = {mixer for mixer, _ in kinds}
        lacking = [f"{MIXERS[letter]} blocks" for letter in "DM" if letter in mixers]
        if ("-" in mixers or any(network == "-" for _, network in kinds)) and not lacking:
            lacking.append("blocks of one branch")
        if self.attention_gate:
            lacking.append("a gate behind attention")
        if self.latent and self.latent.indexer:
            lacking.append("an indexer that chooses keys")
        return " and ".join(lacking)

    @property
    def has_unmeasured_mixers(self) -> bool:
        """Some blocks mix tokens otherwise than by attention over all keys."""
        return bool(self.delta or self.mamba or (self.latent and self.latent.indexer))

    def block_kind(self, layer: int) -> tuple[str, str]:
        """(mixer, network) of block `layer`, from 0 on, by their letters."""
        mixer = self.mixers[layer % len(self.mixers)] if self.mixers else "A"
        if self.networks:
            return mixer, self.networks[layer % len(self.networks)]
        has_experts = self.experts is not None and layer >= self.experts.dense_layers
        return mixer, "E" if has_experts else "F"

    @property
    def block_kinds(self) -> tuple[tuple[str, str], ...]:
        """`block_kind` of each block."""
        return tuple(self.block_kind(layer) for layer in range(self.layers))

    @property
    def mixer(self) -> str:
        """The mixer of all blocks, of a model whose blocks are alike."""
        return self.mixers or "A"

    @property
    def kind_words(self) -> str:
        """What its blocks are, of a model whose blocks are alike: `Mamba-2`, `attention and
        experts`."""
        network = "experts" if self.experts else "feed-forward network"
        parts = [MIXERS[self.mixer]] if self.mixer != "-" else []
        return " and ".join([*parts, *([network] if self.has_network else [])])

    @property
    def halves(self) -> int:
        """Branches of the residual stream in a block: mixer and network, or one of them; of a model
        whose blocks are alike."""
        return (self.mixers != "-") + (self.networks != "-")

    @property
    def has_network(self) -> bool:
        """Whether its blocks have a network, of a model whose blocks are alike."""
        return self.networks != "-"

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
        """Blocks with the dense network, without a pattern all at the start: those of a dense model
        are all such."""
        if self.networks:
            return sum(network == "F" for _, network in self.block_kinds)
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

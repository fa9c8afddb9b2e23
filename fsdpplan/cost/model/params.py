"""Parameters: every tensor of the model, and how many elements it has.

Names are those of torchtitan's decoders. The routed experts of a block stand in stacked tensors
(expert, out, in), as trainers hold them that multiply all experts in one grouped matmul.
Source: torchtitan torchtitan/models/moe/moe.py (`GroupedExperts`), models/deepseek_v3.

Golden: GPT-2 Small 124,439,808 and GPT-2 Large 774,030,080 (transformers on the meta device).

FLOPs: the useful work of a step, and what is executed.

One formula for MFU everywhere (planner, trainer, verification): six FLOPs a matmul weight and
token, the output head in and the embedding look-up out, of the routed experts the active ones,
plus causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import expm1, inf, prod
from typing import Literal

from fsdpplan.spec.model import Experts, LatentAttention, Model, padded_vocab

TensorParallelSplit = Literal["rows", "columns", "none"]
"""What tensor parallelism splits of a matrix (out, in): outputs, inputs, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One parameter as torch holds it."""

    name: str
    """Name within its block, or within the model."""
    shape: tuple[int, ...]
    split: TensorParallelSplit
    is_expert: bool = False
    """Stacked over the routed experts of a block: dim 0 counts experts, and `split` is about one
    expert's part."""
    vocab_multiple: int = 0
    """Its rows are a vocabulary, and padded as `padded_vocab` does with this; 0: they are not."""

    @property
    def elements(self) -> int:
        """Elements of the whole tensor, without padding."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """A weight that is multiplied with tokens: no norm, bias or table."""
        return len(self.shape) == (3 if self.is_expert else 2)

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Shape on one of `tp` tensor-parallel and `ep` expert-parallel ranks (the fullest one)."""
        shape = list(self.shape)
        first = 1 if self.is_expert else 0
        match self.split:
            case "rows":
                rows = shape[first]
                if self.vocab_multiple:
                    rows = padded_vocab(rows, tp, self.vocab_multiple)
                shape[first] = -(-rows // tp)
            case "columns":
                shape[first + 1] = -(-shape[first + 1] // tp)
            case "none":
                pass
        if self.is_expert:
            shape[0] = -(-shape[0] // ep)
        return tuple(shape)


def _linear(
    name: str, rows: int, columns: int, *, bias: bool, split: TensorParallelSplit
) -> list[ParameterTensor]:
    tensors = [ParameterTensor(name=f"{name}.weight", shape=(rows, columns), split=split)]
    if bias:
        bias_split: TensorParallelSplit = "rows" if split == "rows" else "none"
        tensors.append(ParameterTensor(name=f"{name}.bias", shape=(rows,), split=bias_split))
    return tensors


def _norm(
    name: str, width: int, *, bias: bool, split: TensorParallelSplit = "none"
) -> list[ParameterTensor]:
    tensors = [ParameterTensor(name=f"{name}.weight", shape=(width,), split=split)]
    if bias:
        tensors.append(ParameterTensor(name=f"{name}.bias", shape=(width,), split=split))
    return tensors


@lru_cache(maxsize=256)
def dense_view(model: Model) -> Model:
    """The model of which the blocks without experts are blocks."""
    return replace(model, experts=None) if model.experts else model


@lru_cache(maxsize=256)
def block_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Parameters of one transformer block, in the order in which torch registers them.

    With experts: of a block that has them. A block without is one of `dense_view(model)`.
    """
    h, bias = model.hidden, model.has_norm_bias
    tensors = _norm("attention_norm", h, bias=bias)
    tensors += _latent_attention(model, model.latent) if model.latent else _attention(model)
    if model.attention_sinks:
        tensors.append(ParameterTensor(name="sinks", shape=(model.heads,), split="rows"))
    if model.post_norms:
        tensors += _norm("post_attention_norm", h, bias=bias)
    tensors += _norm("ffn_norm", h, bias=bias)
    if model.experts:
        tensors += _mixture(model, model.experts)
    else:
        tensors += _feed_forward("", h, model.ffn_hidden, bias=model.mlp_bias, gated=model.is_gated)
    if model.post_norms:
        tensors += _norm("post_ffn_norm", h, bias=bias)
    return tuple(tensors)


def _attention(model: Model) -> list[ParameterTensor]:
    """Query, key, value and output projections, and the norms of queries and keys."""
    h, bias = model.hidden, model.attention_bias
    tensors = _linear("wq", model.query_dim, h, bias=bias, split="rows")
    tensors += _linear("wk", model.kv_dim, h, bias=bias, split="rows")
    tensors += _linear("wv", model.kv_dim, h, bias=bias, split="rows")
    tensors += _linear("wo", h, model.value_dim, bias=model.attention_output_bias, split="columns")
    if model.qk_norm and model.qk_norm_width == "head":
        tensors += _norm("q_norm", model.head_dim, bias=False)
        tensors += _norm("k_norm", model.head_dim, bias=False)
    elif model.qk_norm:
        tensors += _norm("q_norm", model.query_dim, bias=False, split="rows")
        tensors += _norm("k_norm", model.kv_dim, bias=False, split="rows")
    return tensors


def _latent_attention(model: Model, latent: LatentAttention) -> list[ParameterTensor]:
    """Projections into the latents, which every tensor-parallel rank holds, and out of them.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    h = model.hidden
    if latent.query_rank:
        tensors = _linear("wq_a", latent.query_rank, h, bias=False, split="none")
        tensors += _norm("q_norm", latent.query_rank, bias=False)
        tensors += _linear("wq_b", model.query_dim, latent.query_rank, bias=False, split="rows")
    else:
        tensors = _linear("wq", model.query_dim, h, bias=False, split="rows")
    latent_rows = latent.kv_rank + latent.rope_head_dim
    key_value_rows = model.query_dim - model.heads * latent.rope_head_dim + model.value_dim
    tensors += _linear("wkv_a", latent_rows, h, bias=False, split="none")
    tensors += _norm("kv_norm", latent.kv_rank, bias=False)
    tensors += _linear("wkv_b", key_value_rows, latent.kv_rank, bias=False, split="rows")
    return tensors + _linear("wo", h, model.value_dim, bias=False, split="columns")


def _feed_forward(
    prefix: str, hidden: int, inner: int, *, bias: bool, gated: bool
) -> list[ParameterTensor]:
    tensors = _linear(f"{prefix}w1", inner, hidden, bias=bias, split="rows")
    tensors += _linear(f"{prefix}w2", hidden, inner, bias=bias, split="columns")
    if gated:
        tensors += _linear(f"{prefix}w3", inner, hidden, bias=bias, split="rows")
    return tensors


def _mixture(model: Model, experts: Experts) -> list[ParameterTensor]:
    """Router, routed experts, and what every token visits."""
    h = model.hidden
    tensors = _linear("router", experts.experts, h, bias=experts.router_bias, split="none")
    one = _feed_forward("experts.", h, experts.hidden, bias=experts.bias, gated=model.is_gated)
    tensors += [replace(t, shape=(experts.experts, *t.shape), is_expert=True) for t in one]
    if experts.shared_hidden:
        tensors += _feed_forward(
            "shared_experts.", h, experts.shared_hidden, bias=False, gated=model.is_gated
        )
    if experts.shared_gate:
        tensors += _linear("shared_gate", 1, h, bias=False, split="none")
    return tensors


@lru_cache(maxsize=64)
def embedding_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Token table and, where there are any, position table and the norm behind them."""
    tensors = [
        ParameterTensor(
            name="tok_embeddings.weight",
            shape=(model.vocab, model.hidden),
            split="rows",
            vocab_multiple=model.vocab_multiple,
        )
    ]
    if model.positions == "learned":
        tensors.append(
            ParameterTensor(
                name="pos_embeddings.weight",
                shape=(model.max_positions, model.hidden),
                split="none",
            )
        )
    if model.embedding_norm:
        tensors += _norm("embedding_norm", model.hidden, bias=model.has_norm_bias)
    return tuple(tensors)


@lru_cache(maxsize=64)
def head_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Final norm and, unless tied, the output head."""
    tensors = _norm("norm", model.hidden, bias=model.has_norm_bias)
    if not model.tied_embeddings:
        tensors.append(
            ParameterTensor(
                name="output.weight",
                shape=(model.vocab, model.hidden),
                split="rows",
                vocab_multiple=model.vocab_multiple,
            )
        )
    return tuple(tensors)


def elements(tensors: tuple[ParameterTensor, ...]) -> int:
    """Elements of all `tensors`."""
    return sum(tensor.elements for tensor in tensors)


@lru_cache(maxsize=64)
def parameter_count(model: Model) -> int:
    """Parameters of the model; a tied head counts once."""
    return (
        model.dense_blocks * elements(block_tensors(dense_view(model)))
        + (model.layers - model.dense_blocks) * elements(block_tensors(model))
        + elements(embedding_tensors(model))
        + elements(head_tensors(model))
    )


@lru_cache(maxsize=64)
def active_parameter_count(model: Model) -> int:
    """Parameters that one token meets: all of a dense model.

        all parameters - blocks with experts * routed experts * (1 - active / experts)

    Embedding and output head are in, as in the counts of Mixtral, Qwen 3 and DeepSeek.
    """
    if model.experts is None:
        return parameter_count(model)
    routed = sum(t.elements for t in block_tensors(model) if t.is_expert)
    idle = model.experts.experts - model.experts.active
    blocks = model.layers - model.dense_blocks
    return parameter_count(model) - blocks * (routed // model.experts.experts) * idle


@lru_cache(maxsize=256)
def block_matmul_parameter_count(model: Model) -> int:
    """Weights of one block that multiply each token: of the routed experts, the active ones.

    With experts: of a block that has them, as in `block_tensors`.
    """
    matrices = [t for t in block_tensors(model) if t.is_matrix]
    routed = sum(t.elements for t in matrices if t.is_expert)
    others = sum(t.elements for t in matrices if not t.is_expert)
    if model.experts is None:
        return others
    return others + routed // model.experts.experts * model.experts.active


@lru_cache(maxsize=64)
def matmul_parameter_count(model: Model) -> int:
    """Weights that multiply each token: all matrices of the blocks and the output head.

    Of the routed experts the active ones count. The embedding look-up, norms and biases are out; a
    tied head is in.
    """
    dense = model.dense_blocks * block_matmul_parameter_count(dense_view(model))
    sparse = (model.layers - model.dense_blocks) * block_matmul_parameter_count(model)
    return dense + sparse + model.vocab * model.hidden


def attention_span_tokens(*, seq_len: int, window: int = 0, document_tokens: float = inf) -> float:
    """Keys that a query of causal attention meets, in the mean over a sequence.

        full: s / 2; windowed: w - w**2 / (2 s) where w < s

    The first w queries see a triangle, the others a band of w. Half of a diagonal counts.

    Of documents trained apart, of exponential lengths of mean m, of which a sequence is a cut: what
    a query at t meets is the least of an exponential age, t and w, whose mean is
    m (1 - exp(-min(t, w) / m)); over the sequence

        (m (w - m (1 - exp(-w / m))) + (s - w) m (1 - exp(-w / m))) / s

    w is s without a window. Long sequences: m, twice that of documents of equal lengths, since of
    an exponential sum(l**2) / (2 sum(l)) = E[l**2] / (2 E[l]) = m. Derived.
    """
    reach = window if 0 < window < seq_len else seq_len
    if document_tokens == inf:
        return reach - reach * reach / (2 * seq_len)
    ended = -document_tokens * expm1(-reach / document_tokens)
    return (document_tokens * (reach - ended) + (seq_len - reach) * ended) / seq_len


def mean_attention_span_tokens(
    *, model: Model, seq_len: int, document_tokens: float = inf
) -> float:
    """`attention_span_tokens` in the mean over the blocks, windowed or not."""
    windowed = model.windowed_blocks
    full = model.layers - windowed
    kinds = ((full, 0), (windowed, model.sliding_window))
    spans = sum(
        blocks
        * attention_span_tokens(seq_len=seq_len, window=window, document_tokens=document_tokens)
        for blocks, window in kinds
    )
    return spans / model.layers


def attention_forward_flops_per_token(
    *, model: Model, seq_len: int, document_tokens: float = inf
) -> float:
    """FLOPs of causal attention in one block's forward, a token; the mean over blocks.

        2 FLOPs * span * (query_dim + value_dim), which is 2 * seq_len * query_dim
        without windows and with values as wide as keys

    The masked half of the score matrix is left out.
    """
    span = mean_attention_span_tokens(model=model, seq_len=seq_len, document_tokens=document_tokens)
    return 2.0 * span * (model.query_dim + model.value_dim)


def useful_flops_per_token(*, model: Model, seq_len: int, document_tokens: float = inf) -> float:
    """FLOPs of forward and backward without recomputation, a token; of packed documents whose mean
    length is known attention inside these.

        6 * matmul parameters + 3 * layers * (causal attention forward)

    A multiplication and an addition a weight in forward, twice that in backward; the definition is
    commonly credited to PaLM (arXiv 2204.02311). Norms, rotations, activations, softmax and the
    loss are left out (below 1 % for hidden >= 1024).
    """
    attention = (
        3
        * model.layers
        * attention_forward_flops_per_token(
            model=model, seq_len=seq_len, document_tokens=document_tokens
        )
    )
    return 6.0 * matmul_parameter_count(model) + attention


def mfu_fraction(
    *,
    model: Model,
    seq_len: int,
    tokens_per_second_per_gpu: float,
    peak_flops_per_second: float,
    document_tokens: float = inf,
) -> float:
    """Model FLOPs utilisation: useful FLOPs a second over the dense peak."""
    per_token = useful_flops_per_token(
        model=model, seq_len=seq_len, document_tokens=document_tokens
    )
    return per_token * tokens_per_second_per_gpu / peak_flops_per_second

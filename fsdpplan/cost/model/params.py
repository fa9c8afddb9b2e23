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
from typing import Literal, get_args

from fsdpplan.spec.adapters import AdaptedModel, Adapters, nf4_parts, plain
from fsdpplan.spec.model import Experts, LatentAttention, Model, padded_vocab
from fsdpplan.spec.training import DTYPE_BYTES

TensorParallelSplit = Literal["rows", "columns", "none"]
"""What tensor parallelism splits of a matrix (out, in): outputs, inputs, or nothing."""

Role = Literal[
    "query", "key", "value", "output", "gate", "up", "down", "latent", "indexer", "router", ""
]
"""What a matrix, with its bias, is to its block; empty: another tensor. What makes a state's inputs
counts as queries, what makes its steps as keys; `gate` is what the activation is applied to;
`latent` narrows the block's input; `router` makes scores of tokens and experts."""

StoredFormat = Literal["", "bf16", "fp32", "nf4"]

Place = Literal["attention_in", "attention", "attention_out", "ffn_in", "ffn_out"]
"""A stretch of a block, in the order of forward."""

PLACES: tuple[Place, ...] = get_args(Place)


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
    role: Role = ""
    stacks_on: str = ""
    """The matrix of the same input that software with joined projections stacks it on."""
    reads_latents: bool = False
    """It widens what a `latent` matrix has made."""
    stored: StoredFormat = ""
    """Its format where it is frozen; empty: it is trained, and stored as the training says."""
    adapts: str = ""
    """Of an adapter, the name of the matrix that it stands beside."""

    @property
    def is_trained(self) -> bool:
        """It has a gradient and states of the optimizer."""
        return not self.stored

    def stored_parts(self, elements: int) -> tuple[tuple[int, int], ...]:
        """(length, bytes of one) of the tensors that `elements` of it are stored in, where it is
        frozen: of 4 bits codes, scales, and their scales."""
        match self.stored:
            case "":
                return ()
            case "nf4":
                return nf4_parts(elements)
            case _:
                return ((elements, DTYPE_BYTES[self.stored]),)

    @property
    def elements(self) -> int:
        """Elements of the whole tensor, without padding."""
        return prod(self.shape)

    @property
    def place(self) -> Place:
        """Where in its block a matrix is multiplied with tokens; what weighs the output of shared
        experts comes behind them."""
        match self.role:
            case "output":
                return "attention_out"
            case "gate" | "up":
                return "ffn_in"
            case "down":
                return "ffn_out"
            case "router":
                return "ffn_in" if self.name.startswith("router.") else "ffn_out"
            case _:
                return "attention_in"

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


def linear(
    name: str,
    rows: int,
    columns: int,
    *,
    role: Role,
    bias: bool,
    split: TensorParallelSplit,
    stacks_on: str = "",
    reads_latents: bool = False,
) -> list[ParameterTensor]:
    """A matrix, and its bias where it has one."""
    tensors = [
        ParameterTensor(
            name=f"{name}.weight",
            shape=(rows, columns),
            split=split,
            role=role,
            stacks_on=stacks_on,
            reads_latents=reads_latents,
        )
    ]
    if bias:
        bias_split: TensorParallelSplit = "rows" if split == "rows" else "none"
        tensors.append(
            ParameterTensor(name=f"{name}.bias", shape=(rows,), split=bias_split, role=role)
        )
    return tensors


def norm(
    name: str, width: int, *, bias: bool, split: TensorParallelSplit = "none"
) -> list[ParameterTensor]:
    """A norm's scale, and its bias where it has one."""
    tensors = [ParameterTensor(name=f"{name}.weight", shape=(width,), split=split)]
    if bias:
        tensors.append(ParameterTensor(name=f"{name}.bias", shape=(width,), split=split))
    return tensors


@lru_cache(maxsize=256)
def dense_view(model: Model) -> Model:
    """The model of which the blocks without experts are blocks."""
    return replace(model, experts=None) if model.experts else model


def kind_views(model: Model) -> tuple[Model, ...]:
    """For each kind of block in `model`, the model whose blocks are all of that kind: those without
    experts first; where a pattern says which is what, those with fewer parameters before others.
    """
    if model.is_patterned:
        return _patterned_views(model)
    if model.experts is None or not model.dense_blocks:
        return (model,)
    return dense_view(model), model


@lru_cache(maxsize=256)
def _patterned_views(model: Model) -> tuple[Model, ...]:
    views = [_kind_view(model, *kind) for kind in sorted(set(model.block_kinds))]
    return tuple(sorted(views, key=lambda view: elements(block_tensors(view))))


def _kind_view(model: Model, mixer: str, network: str) -> Model:
    view = replace(
        model,
        mixers="" if mixer == "A" else mixer,
        networks="-" if network == "-" else "",
        experts=_in_each_block(model.experts) if network == "E" else None,
        delta=model.delta if mixer == "D" else None,
        mamba=model.mamba if mixer == "M" else None,
    )
    if mixer == "A":
        return view
    return replace(
        view,
        latent=None,
        qk_norm=False,
        attention_sinks=False,
        attention_gate=False,
        sliding_window=0,
    )


def _in_each_block(experts: Experts | None) -> Experts | None:
    if experts is None or not experts.dense_layers:
        return experts
    return replace(experts, dense_layers=0)


@lru_cache(maxsize=256)
def kind_places(model: Model) -> tuple[int, ...]:
    """For each block its kind, as its place in `kind_views`."""
    views = kind_views(model)
    if not model.is_patterned:
        first = model.dense_blocks if len(views) > 1 else 0
        return (0,) * first + (len(views) - 1,) * (model.layers - first)
    place = {_kind_of_view(view): index for index, view in enumerate(views)}
    return tuple(place[kind] for kind in model.block_kinds)


def _kind_of_view(view: Model) -> tuple[str, str]:
    if not view.has_network:
        return view.mixer, "-"
    return view.mixer, "E" if view.experts else "F"


@lru_cache(maxsize=256)
def kind_counts(model: Model) -> tuple[tuple[Model, int], ...]:
    """(model whose blocks are all of a kind, how many `model` has)."""
    places = kind_places(model)
    return tuple((view, places.count(index)) for index, view in enumerate(kind_views(model)))


@lru_cache(maxsize=256)
def block_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Parameters of one block, in the order in which torch registers them.

    With experts: of a block that has them. A block without is one of `dense_view(model)`; of a
    model with a pattern each kind is one of `kind_views(model)`.
    """
    assert not model.is_patterned or len(set(model.block_kinds)) == 1, "blocks of several kinds"
    h, bias = model.hidden, model.has_norm_bias
    tensors: list[ParameterTensor] = []
    if model.mixer != "-":
        tensors += norm("attention_norm", h, bias=bias)
        tensors += _mixer(model)
        if model.post_norms:
            tensors += norm("post_attention_norm", h, bias=bias)
    if not model.has_network:
        return _as_trained(model, tensors)
    tensors += norm("ffn_norm", h, bias=bias)
    if model.experts:
        tensors += _mixture(model, model.experts)
    else:
        tensors += _feed_forward("", h, model.ffn_hidden, bias=model.mlp_bias, gated=model.is_gated)
    if model.post_norms:
        tensors += norm("post_ffn_norm", h, bias=bias)
    return _as_trained(model, tensors)


def _as_trained(model: Model, tensors: list[ParameterTensor]) -> tuple[ParameterTensor, ...]:
    """`tensors` with adapters behind the matrices that have some, and else frozen."""
    if not isinstance(model, AdaptedModel):
        return tuple(tensors)
    found: list[ParameterTensor] = []
    for tensor in tensors:
        is_base = tensor.is_matrix and tensor.role not in ("", "router")
        stored: StoredFormat = model.frozen_dtype
        if is_base and model.adapters.base == "nf4":
            stored = "nf4"
        found.append(replace(tensor, stored=stored))
        if is_base and adapter_target(model, tensor) in model.adapters.targets:
            found += _adapters(tensor, model.adapters)
    return tuple(found)


TARGETS_OF_MATRICES = {
    "wq": "q",
    "wk": "k",
    "wv": "v",
    "wo": "o",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
"""Name of a matrix in its block -> the target that it is; without a gate `w1` is the way up."""


def adapter_target(model: Model, tensor: ParameterTensor) -> str:
    """The target that a matrix of a block is; empty: none."""
    name = tensor.name.removesuffix(".weight")
    if name == "w1" and not model.is_gated:
        return "up"
    return TARGETS_OF_MATRICES.get(name, "")


def _adapters(matrix: ParameterTensor, adapters: Adapters) -> list[ParameterTensor]:
    """A, which reads the matrix's input, and B, which adds to its output; tensor parallelism splits
    B with the outputs or A with the inputs, and gives the other to every rank."""
    name, (rows, columns) = matrix.name.removesuffix(".weight"), matrix.shape
    down = ParameterTensor(
        name=f"{name}.lora_A",
        shape=(adapters.rank, columns),
        split="columns" if matrix.split == "columns" else "none",
        role=matrix.role,
        adapts=matrix.name,
    )
    up = replace(
        down,
        name=f"{name}.lora_B",
        shape=(rows, adapters.rank),
        split="rows" if matrix.split == "rows" else "none",
    )
    return [down, up]


def _frozen_ends(model: Model, tensors: list[ParameterTensor]) -> tuple[ParameterTensor, ...]:
    """Embedding and head are frozen in the compute dtype where adapters are trained."""
    if not isinstance(model, AdaptedModel):
        return tuple(tensors)
    return tuple(replace(tensor, stored=model.frozen_dtype) for tensor in tensors)


def trains_ends(model: Model) -> bool:
    """Embedding, final norm and head have gradients."""
    return not isinstance(model, AdaptedModel)


@lru_cache(maxsize=256)
def trained_tensors(model: Model) -> int:
    """Parameters of one block that are trained, counted as tensors."""
    return sum(each.is_trained for each in block_tensors(model))


def _mixer(model: Model) -> list[ParameterTensor]:
    """What mixes tokens in a block."""
    if model.mixer != "A":
        from fsdpplan.cost.model.mixers import mixer_tensors  # of few models

        return mixer_tensors(model)
    tensors = _latent_attention(model, model.latent) if model.latent else _attention(model)
    if model.attention_sinks:
        tensors.append(ParameterTensor(name="sinks", shape=(model.heads,), split="rows"))
    return tensors


def _attention(model: Model) -> list[ParameterTensor]:
    """Query, key, value and output projections, and the norms of queries and keys."""
    h, bias = model.hidden, model.attention_bias

    def read(name: str, role: Role, rows: int) -> list[ParameterTensor]:
        onto = "" if name == "wq" else "wq"
        return linear(name, rows, h, role=role, bias=bias, split="rows", stacks_on=onto)

    tensors = read("wq", "query", model.query_dim)
    tensors += read("wk", "key", model.kv_dim)
    tensors += read("wv", "value", model.kv_dim)
    if model.attention_gate:
        tensors += read("wg", "query", model.query_dim)
    tensors += _output(h, model.value_dim, bias=model.attention_output_bias)
    if model.qk_norm and model.qk_norm_width == "head":
        tensors += norm("q_norm", model.head_dim, bias=False)
        tensors += norm("k_norm", model.head_dim, bias=False)
    elif model.qk_norm:
        tensors += norm("q_norm", model.query_dim, bias=False, split="rows")
        tensors += norm("k_norm", model.kv_dim, bias=False, split="rows")
    return tensors


def _output(hidden: int, width: int, *, bias: bool) -> list[ParameterTensor]:
    """Back into the residual stream."""
    return linear("wo", hidden, width, role="output", bias=bias, split="columns")


def _latent_attention(model: Model, latent: LatentAttention) -> list[ParameterTensor]:
    """Projections into the latents, which every tensor-parallel rank holds, and out of them.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
    """
    h = model.hidden

    def narrow(name: str, rows: int) -> list[ParameterTensor]:
        return linear(name, rows, h, role="latent", bias=False, split="none")

    def widen(name: str, role: Role, rows: int, rank: int) -> list[ParameterTensor]:
        return linear(name, rows, rank, role=role, bias=False, split="rows", reads_latents=True)

    if latent.query_rank:
        tensors = narrow("wq_a", latent.query_rank)
        tensors += norm("q_norm", latent.query_rank, bias=False)
        tensors += widen("wq_b", "query", model.query_dim, latent.query_rank)
    else:
        tensors = linear("wq", model.query_dim, h, role="query", bias=False, split="rows")
    latent_rows = latent.kv_rank + latent.rope_head_dim
    key_value_rows = model.query_dim - model.heads * latent.rope_head_dim + model.value_dim
    tensors += narrow("wkv_a", latent_rows)
    tensors += norm("kv_norm", latent.kv_rank, bias=False)
    tensors += widen("wkv_b", "key", key_value_rows, latent.kv_rank)
    if latent.indexer:
        from fsdpplan.cost.model.mixers import indexer_tensors  # of few models

        tensors += indexer_tensors(h, latent, latent.indexer)
    return tensors + _output(h, model.value_dim, bias=False)


def _feed_forward(
    prefix: str, hidden: int, inner: int, *, bias: bool, gated: bool
) -> list[ParameterTensor]:
    first = f"{prefix}w1"
    tensors = linear(first, inner, hidden, role="gate", bias=bias, split="rows")
    tensors += linear(f"{prefix}w2", hidden, inner, role="down", bias=bias, split="columns")
    if gated:
        tensors += linear(
            f"{prefix}w3", inner, hidden, role="up", bias=bias, split="rows", stacks_on=first
        )
    return tensors


def _mixture(model: Model, experts: Experts) -> list[ParameterTensor]:
    """Router, routed experts, and what every token visits."""
    h = model.hidden
    bias = experts.router_bias
    tensors = linear("router", experts.experts, h, role="router", bias=bias, split="none")
    one = _feed_forward("experts.", h, experts.hidden, bias=experts.bias, gated=model.is_gated)
    tensors += [replace(t, shape=(experts.experts, *t.shape), is_expert=True) for t in one]
    if experts.shared_hidden:
        tensors += _feed_forward(
            "shared_experts.", h, experts.shared_hidden, bias=False, gated=model.is_gated
        )
    if experts.shared_gate:
        tensors += linear("shared_gate", 1, h, role="router", bias=False, split="none")
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
        tensors += norm("embedding_norm", model.hidden, bias=model.has_norm_bias)
    return _frozen_ends(model, tensors)


@lru_cache(maxsize=64)
def head_tensors(model: Model) -> tuple[ParameterTensor, ...]:
    """Final norm and, unless tied, the output head."""
    tensors = norm("norm", model.hidden, bias=model.has_norm_bias)
    if not model.tied_embeddings:
        tensors.append(
            ParameterTensor(
                name="output.weight",
                shape=(model.vocab, model.hidden),
                split="rows",
                vocab_multiple=model.vocab_multiple,
            )
        )
    return _frozen_ends(model, tensors)


def elements(tensors: tuple[ParameterTensor, ...]) -> int:
    """Elements of all `tensors`."""
    return sum(tensor.elements for tensor in tensors)


@lru_cache(maxsize=64)
def adapter_parameter_count(model: Model) -> int:
    """Parameters of adapters; 0 where all of the model is trained."""
    return sum(
        number * elements(tuple(each for each in block_tensors(view) if each.adapts))
        for view, number in kind_counts(model)
    )


@lru_cache(maxsize=64)
def parameter_count(model: Model) -> int:
    """Parameters of the model, adapters not among them; a tied head counts once."""
    model = plain(model)
    blocks = sum(number * elements(block_tensors(view)) for view, number in kind_counts(model))
    return blocks + elements(embedding_tensors(model)) + elements(head_tensors(model))


@lru_cache(maxsize=64)
def active_parameter_count(model: Model) -> int:
    """Parameters that one token meets: all of a dense model.

        all parameters - blocks with experts * routed experts * (1 - active / experts)

    Embedding and output head are in, as in the counts of Mixtral, Qwen 3 and DeepSeek.
    """
    if model.experts is None:
        return parameter_count(model)
    idle = model.experts.experts - model.experts.active
    routed = sum(
        number * (sum(t.elements for t in block_tensors(view) if t.is_expert))
        for view, number in kind_counts(model)
    )
    return parameter_count(model) - routed // model.experts.experts * idle


@lru_cache(maxsize=256)
def block_matmul_parameter_count(model: Model) -> int:
    """Weights of one block that multiply each token: of the routed experts, the active ones.

    With experts: of a block that has them, as in `block_tensors`.
    """
    matrices = [t for t in block_tensors(plain(model)) if t.is_matrix]
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
    blocks = sum(n * block_matmul_parameter_count(view) for view, n in kind_counts(model))
    return blocks + model.vocab * model.hidden


def attention_span_tokens(
    *, seq_len: int, window: int = 0, document_tokens: float = inf, chunked: bool = False
) -> float:
    """Keys that a query of causal attention meets, in the mean over a sequence.

        full: s / 2; windowed: w - w**2 / (2 s) where w < s; chunked: w / 2, of whole chunks

    The first w queries see a triangle, the others a band of w. Half of a diagonal counts. Where
    windows are chunks of the sequence, each is a triangle, of w and of what is left at the end.

    Of documents trained apart, of exponential lengths of mean m, of which a sequence is a cut: what
    a query at t meets is the least of an exponential age, t and w, whose mean is
    m (1 - exp(-min(t, w) / m)); over the sequence

        (m (w - m (1 - exp(-w / m))) + (s - w) m (1 - exp(-w / m))) / s

    w is s without a window. Long sequences: m, twice that of documents of equal lengths, since of
    an exponential sum(l**2) / (2 sum(l)) = E[l**2] / (2 E[l]) = m. Derived.
    """
    reach = window if 0 < window < seq_len else seq_len
    if chunked and reach < seq_len:
        whole, rest = divmod(seq_len, reach)
        pieces = ((whole, reach), (1, rest)) if rest else ((whole, reach),)
        return (
            sum(
                number * size * attention_span_tokens(seq_len=size, document_tokens=document_tokens)
                for number, size in pieces
            )
            / seq_len
        )
    if document_tokens == inf:
        return reach - reach * reach / (2 * seq_len)
    ended = -document_tokens * expm1(-reach / document_tokens)
    return (document_tokens * (reach - ended) + (seq_len - reach) * ended) / seq_len


def mean_attention_span_tokens(
    *, model: Model, seq_len: int, document_tokens: float = inf
) -> float:
    """`attention_span_tokens` in the mean over the blocks, windowed or not; of chosen keys no more
    than are chosen."""
    windowed = model.windowed_blocks
    full = model.layers - windowed
    chosen = model.latent.indexer.keys if model.latent and model.latent.indexer else 0
    kinds = ((full, chosen), (windowed, model.sliding_window))
    spans = sum(
        blocks
        * attention_span_tokens(
            seq_len=seq_len,
            window=window,
            document_tokens=document_tokens,
            chunked=model.window_kind == "chunked" and window == model.sliding_window,
        )
        for blocks, window in kinds
    )
    return spans / model.layers


def attention_forward_flops_per_token(
    *, model: Model, seq_len: int, document_tokens: float = inf
) -> float:
    """FLOPs of causal attention in one block's forward, a token; the mean over blocks.

        2 FLOPs * span * (query_dim + value_dim), which is 2 * seq_len * query_dim
        without windows and with values as wide as keys

    The masked half of the score matrix is left out. Of blocks that mix tokens by other means: what
    these multiply beside their weights (`cost/model/mixers.py`).
    """
    if model.is_patterned and len(counts := kind_counts(model)) > 1:
        each = (
            number
            * attention_forward_flops_per_token(
                model=view, seq_len=seq_len, document_tokens=document_tokens
            )
            for view, number in counts
        )
        return sum(each) / model.layers
    if model.mixer == "-":
        return 0.0
    if model.mixer != "A":
        from fsdpplan.cost.model.mixers import state_flops_per_token  # of few models

        return state_flops_per_token(model)
    span = mean_attention_span_tokens(model=model, seq_len=seq_len, document_tokens=document_tokens)
    indexer = 0.0
    if model.latent and model.latent.indexer:
        from fsdpplan.cost.model.mixers import indexer_flops_per_token  # of few models

        indexer = indexer_flops_per_token(model, seq_len=seq_len, document_tokens=document_tokens)
    return 2.0 * span * (model.query_dim + model.value_dim) + indexer


def useful_flops_per_token(*, model: Model, seq_len: int, document_tokens: float = inf) -> float:
    """FLOPs of forward and backward without recomputation, a token; of packed documents whose mean
    length is known attention inside these.

        6 * matmul parameters + 3 * layers * (causal attention forward)
        with adapters: 6 * adapters + 4 * frozen matmul parameters + the same of attention

    A multiplication and an addition a weight in forward, twice that in backward, once for what has
    no gradient of its own; the definition is commonly credited to PaLM (arXiv 2204.02311). Norms,
    rotations, activations, softmax and the loss are left out (below 1 % for hidden >= 1024).
    """
    adapters = adapter_parameter_count(model)
    whole = matmul_parameter_count(model)
    trained, frozen = (adapters, whole) if adapters else (whole, 0)
    attention = (
        3
        * model.layers
        * attention_forward_flops_per_token(
            model=model, seq_len=seq_len, document_tokens=document_tokens
        )
    )
    return 6.0 * trained + 4.0 * frozen + attention


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

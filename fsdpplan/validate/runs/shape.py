"""Shape: the model of a row. What the columns leave open is inferred and stated.

Known: a row's model as the catalogue has it, where name and shape say that it is that one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.cost.model.shape import infer_model
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.files.runs.table import MeasuredRun
from fsdpplan.spec.model import Experts, LatentAttention, Mlp, Model, Norm, Positions
from fsdpplan.validate.runs.skipped import NotExpressed, given

MIXTURE = re.compile(r"(\d{1,5})/(\d{1,5})(?:\+(\d{1,3}))?")
"""Routed experts, those that a token visits, and shared ones: `128/8`, `64/6+2`."""

NEAR = 0.05
"""Counts of parameters that are further apart are not of the same model."""

WIDTH_MULTIPLE = 64
"""Experts are as wide as a multiple of this: a tile of matmuls."""


def catalogue_model(run: MeasuredRun, *, seq_len: int) -> Model | None:
    """The catalogue's model of that name with every column's number; None where there is none.

    A row whose notes say `catalogue shape` has its blocks, fewer or more of them, and maybe another
    vocabulary.
    """
    name = _by_plain_name().get(_plain(run.model_name))
    if name is None:
        return None
    model = load_model(name)
    if "catalogue shape" in run.notes:
        model = replace(model, layers=run.layers or model.layers, vocab=run.vocab or model.vocab)
    expert_width = model.experts.hidden if model.experts else None
    same = (
        (run.layers, run.hidden, run.heads) == (model.layers, model.hidden, model.heads)
        and run.kv_heads in (None, model.kv_heads)
        and run.vocab in (None, model.vocab)
        and run.head_dim in (None, model.head_dim)
        and run.tied in (None, model.tied_embeddings)
        and run.ffn_hidden in (None, model.ffn_hidden, expert_width)
        and _same_mixture(run, model)
        and (run.parameters is None or abs(run.parameters / parameter_count(model) - 1) < NEAR)
        and (run.attention_type == "mla") == (model.latent is not None)
    )
    return replace(model, name=run.model_name, max_positions=seq_len) if same else None


def _same_mixture(run: MeasuredRun, model: Model) -> bool:
    if not run.moe or model.experts is None:
        return not run.moe and model.experts is None
    routed, active, _ = mixture_of(run)
    return (routed, active) == (model.experts.experts, model.experts.active)


@lru_cache(maxsize=1)
def _by_plain_name() -> dict[str, str]:
    return {_plain(name): name for name in model_names()}


def _plain(name: str) -> str:
    """Letters and digits alone: `Llama3.1-8B` and `llama-3.1-8b` are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def mixture_of(run: MeasuredRun) -> tuple[int, int, int]:
    """(routed experts, those that a token visits, shared experts) of a row with experts."""
    found = MIXTURE.fullmatch(run.moe)
    if found is None:
        raise NotExpressed("moe is not written as 128/8", run.moe)
    return int(found[1]), int(found[2]), int(found[3] or 0)


def experts_by_columns(run: MeasuredRun, said: list[str]) -> Experts | None:
    """The experts of a model that the catalogue does not have, in every block."""
    if not run.moe:
        return None
    routed, active, shared = mixture_of(run)
    if run.ffn_hidden is None and run.parameters is None:
        raise NotExpressed("the width of an expert is not given", "nor params_b")
    width = run.ffn_hidden or 1
    if run.ffn_hidden is not None:
        said.append(f"each expert {width} wide, as ffn_hidden, in every block")
    return Experts(experts=routed, active=active, hidden=width, shared_hidden=shared * width)


def with_expert_width(run: MeasuredRun, model: Model, said: list[str]) -> Model:
    """Experts as wide as the count of parameters needs, where no column gives their width."""
    if model.experts is None or run.ffn_hidden is not None or run.parameters is None:
        return model
    step = replace(model, experts=_widened(model.experts, WIDTH_MULTIPLE))
    twice = replace(model, experts=_widened(model.experts, 2 * WIDTH_MULTIPLE))
    one, two = parameter_count(step), parameter_count(twice)
    width = WIDTH_MULTIPLE * max(1, round(1 + (run.parameters - one) / (two - one)))
    said.append(f"each expert {width} wide, by params_b, in every block")
    return replace(model, ffn_hidden=width, experts=_widened(model.experts, width))


def _widened(experts: Experts, width: int) -> Experts:
    shared = experts.shared_hidden // experts.hidden
    return replace(experts, hidden=width, shared_hidden=shared * width)


USUAL_HEAD_DIM = 128
VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to this many rows a tensor-parallel rank.
Source: Megatron-LM, megatron/training/arguments.py, make-vocab-size-divisible-by."""

VOCABULARIES = (
    (re.compile(r"llama-?_?(?:v?1|v?2|[0-9]+b|65b)|mi[sx]tral|vicuna", re.I), 32_000, "Llama 2"),
    (re.compile(r"llama-?_?v?[34]", re.I), 128_256, "Llama 3"),
    (re.compile(r"qwen", re.I), 152_064, "Qwen"),
    (re.compile(r"deepseek|kimi|moonlight", re.I), 129_280, "DeepSeek"),
    (re.compile(r"gpt|opt\b|megatron|mpt", re.I), 50_304, "GPT-2"),
)
"""Vocabularies by the model's name, the first that matches, padded to a multiple of 128: configs of
these models on Hugging Face, and GPT-2's 50,257 tokens."""

STATE_SPACE = re.compile(r"mamba|\bjamba|rwkv|nemotron-?h\b|\bhybrid\b", re.I)
"""Models with blocks that are not a transformer's."""

DEEPSEEK: dict[str, Any] = {"kv_rank": 512, "rope_head_dim": 64, "value_head_dim": 128}
DEEPSEEK_QUERY_RANK = 1536
DEEPSEEK_HEAD_DIM = 192
SMALL_HIDDEN = 4096
"""Latent attention as DeepSeek-V2 and V3 and Kimi K2 have it; models narrower than this, such as
DeepSeek-V2-Lite and Moonlight, make queries without a latent of their own. Source: their
config.json on Hugging Face."""


class Expressed(NamedTuple):
    """A model and what was assumed for it."""

    model: Model
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What the columns cannot say of an architecture."""

    name: str
    mlp: Mlp
    norm: Norm
    positions: Positions
    has_bias: bool


GPT = Style(name="GPT", mlp="gelu", norm="layernorm", positions="learned", has_bias=True)
MPT = Style(name="MPT", mlp="gelu", norm="layernorm", positions="learned", has_bias=False)
NEMOTRON = Style(name="Nemotron", mlp="gelu", norm="layernorm", positions="rope", has_bias=False)
LLAMA = Style(name="Llama", mlp="swiglu", norm="rmsnorm", positions="rope", has_bias=False)

NAMED_STYLES = (
    (re.compile(r"\bmpt", re.I), MPT),
    (re.compile(r"nemotron", re.I), NEMOTRON),
    (re.compile(r"llama|mistral|qwen|internlm|gemma|olmo|yi-|deepseek", re.I), LLAMA),
    (re.compile(r"gpt|opt-|bloom|megatron", re.I), GPT),
)
"""Styles by model name, the first that matches."""


def model_of(run: MeasuredRun) -> Expressed:
    """The model of `run`; raises NotExpressed where the columns do not make one."""
    seq_len = given(run.seq_len, "seq_len")
    if STATE_SPACE.search(run.model_name):
        raise NotExpressed("state-space blocks are not priced", run.model_name)
    if run.hidden is None:
        return _by_count(run, seq_len)
    hidden = run.hidden
    known = catalogue_model(run, seq_len=seq_len)
    if known is not None:
        return Expressed(*_known(run, known))
    said: list[str] = []
    style = _style(run, hidden, said)
    vocab = _vocab(run, said)
    heads = _heads(run, hidden, said)
    latent = _latent(run, hidden, said)
    model = Model(
        name=run.model_name,
        layers=run.layers or 1,
        hidden=hidden,
        ffn_hidden=_ffn_hidden(run, style, hidden, said),
        heads=heads,
        kv_heads=_kv_heads(run, heads, said),
        head_dim=run.head_dim or (DEEPSEEK_HEAD_DIM if latent else hidden // heads),
        latent=latent,
        vocab=vocab,
        mlp=style.mlp,
        norm=style.norm,
        positions=style.positions,
        max_positions=seq_len,
        tied_embeddings=style.positions == "learned",
        attention_bias=style.has_bias,
        attention_output_bias=style.has_bias,
        mlp_bias=style.has_bias,
        experts=experts_by_columns(run, said),
    )
    model = with_expert_width(run, _with_layers(run, model, said), said)
    return Expressed(_with_tying(run, model, said), tuple(said))


def _known(run: MeasuredRun, known: Model) -> tuple[Model, tuple[str, ...]]:
    """A catalogue model with a vocabulary that tensor parallelism divides."""
    said = [f"shape of {known.name} as in the catalogue"]
    vocab = _padded(known.vocab, run.tp, said)
    return replace(known, vocab=vocab), tuple(said)


def _by_count(run: MeasuredRun, seq_len: int) -> Expressed:
    """The usual dense decoder of as many parameters, where no width is given."""
    if run.parameters is None or run.moe or run.heads or run.layers:
        raise NotExpressed("hidden is not given")
    said: list[str] = []
    model = infer_model(round(run.parameters))
    said.append(f"shape of the usual decoder of {run.parameters / 1e9:g}e9 parameters")
    vocab = _padded(run.vocab or model.vocab, run.tp, said)
    model = replace(model, name=run.model_name, vocab=vocab, max_positions=seq_len)
    return Expressed(model, tuple(said))


def _latent(run: MeasuredRun, hidden: int, said: list[str]) -> LatentAttention | None:
    """Latent attention of a model that the catalogue does not have."""
    if run.attention_type != "mla":
        return None
    query_rank = DEEPSEEK_QUERY_RANK if hidden >= SMALL_HIDDEN else 0
    said.append(f"latent attention as DeepSeek's: {DEEPSEEK}, query_rank {query_rank}")
    return LatentAttention(**DEEPSEEK, query_rank=query_rank)


def _style(run: MeasuredRun, hidden: int, said: list[str]) -> Style:
    for pattern, style in NAMED_STYLES:
        if pattern.search(run.model_name):
            said.append(f"{_words(style)} ({style.name} style), by the model's name")
            return style
    style = GPT if run.ffn_hidden in (None, 4 * hidden) and not run.moe else LLAMA
    why = "as models with experts have" if run.moe else "by ffn_hidden over hidden"
    said.append(f"{_words(style)} ({style.name} style), {why}")
    return style


def _words(style: Style) -> str:
    return f"{style.mlp} feed-forward, {style.norm}, {style.positions} positions"


def _vocab(run: MeasuredRun, said: list[str]) -> int:
    """As given, or as the notes say; padded where tensor parallelism splits it unevenly."""
    vocab = run.vocab
    in_notes = re.search(r"\bvocab\b[^;,]*?(\d+)k\b", run.notes)
    if vocab is None and in_notes:
        vocab = 1000 * int(in_notes[1][:9])
        said.append(f"vocabulary {vocab}, by the notes")
    if vocab is None:
        found = (one for one in VOCABULARIES if one[0].search(run.model_name))
        _, vocab, whose = next(found, (None, None, ""))
        if vocab is not None:
            said.append(f"vocabulary {vocab}: that of {whose}, a multiple of {VOCAB_MULTIPLE}")
    return _padded(given(vocab, "vocab"), run.tp, said)


def _padded(vocab: int, tp: int, said: list[str]) -> int:
    if vocab % tp == 0:
        return vocab
    step = VOCAB_MULTIPLE * tp
    padded = -(-vocab // step) * step
    said.append(f"vocabulary {vocab} padded to {padded} for tp {tp}")
    return padded


def _heads(run: MeasuredRun, hidden: int, said: list[str]) -> int:
    heads = run.heads
    sibling = run.sibling_heads
    if heads is None and sibling and not hidden % sibling and not sibling % run.tp:
        heads = sibling
        said.append(f"{heads} heads, as the nearest row of the source with that width")
    if heads is None:
        usual = max(1, round(hidden / USUAL_HEAD_DIM))
        near = [n for n in range(usual, 2 * usual) if not hidden % n and not n % run.tp]
        if not near:
            raise NotExpressed("heads is not given", f"none fits tp {run.tp}, hidden {hidden}")
        heads = near[0]
        said.append(f"{heads} heads of {hidden // heads}")
    if hidden % heads and run.attention_type != "mla" and run.head_dim is None:
        raise NotExpressed("heads do not divide hidden", f"{heads} heads, hidden {hidden}")
    return heads


def _kv_heads(run: MeasuredRun, heads: int, said: list[str]) -> int:
    if run.attention_type == "mla":
        return heads
    if run.attention_type not in ("", "mha", "gqa", "mqa"):
        raise NotExpressed("this attention is not priced", run.attention_type)
    if run.kv_heads is None and run.attention_type == "gqa":
        raise NotExpressed("kv_heads is not given", "attention_type is gqa")
    if run.attention_type == "mqa":
        return run.kv_heads or 1
    if run.kv_heads is None:
        said.append("as many key/value heads as query heads")
    return run.kv_heads or heads


def _ffn_hidden(run: MeasuredRun, style: Style, hidden: int, said: list[str]) -> int:
    if run.ffn_hidden is not None:
        return run.ffn_hidden
    if run.moe:
        return WIDTH_MULTIPLE  # no block has the dense network; see with_expert_width
    if style.mlp == "swiglu":
        raise NotExpressed("ffn_hidden is not given")
    said.append(f"ffn_hidden {4 * hidden}: four times hidden")
    return 4 * hidden


def _with_layers(run: MeasuredRun, model: Model, said: list[str]) -> Model:
    """As many layers as given, or as the count of parameters needs."""
    if run.layers is not None:
        return model
    if run.parameters is None:
        raise NotExpressed("layers is not given", "nor params_b")
    one, two = (parameter_count(replace(model, layers=n)) for n in (1, 2))
    layers = max(1, round(1 + (run.parameters - one) / (two - one)))
    said.append(f"{layers} layers, by params_b")
    return replace(model, layers=layers)


def _with_tying(run: MeasuredRun, model: Model, said: list[str]) -> Model:
    """Tied or not, as the table says, else whichever is nearer to the count of parameters."""
    if run.tied is not None:
        return replace(model, tied_embeddings=run.tied)
    if run.parameters is not None and run.layers is not None:
        sizes = {
            tied: parameter_count(replace(model, tied_embeddings=tied)) for tied in (True, False)
        }
        parameters = run.parameters
        tied = min(sizes, key=lambda one: abs(math.log(sizes[one] / parameters)))
        model = replace(model, tied_embeddings=tied)
        reason = "nearer to params_b"
    else:
        reason = "as is usual for the style"
    said.append(f"embeddings {'tied' if model.tied_embeddings else 'not tied'}, {reason}")
    return model

"""Names: each tensor of a published checkpoint as parameters of the reference decoder.

A published tensor may hold several of ours (query, key and value in one matrix), have its rows in
another order, or be one of many that we have stacked (an expert's). `split` and `join` of its form
lead there and back; both are exact.

Sources: the modules of transformers 5 (models/*/modeling_*.py), and what their `save_pretrained`
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import LatentConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Form:
    """How a published tensor holds ours."""

    split: Callable[[Tensor], Sequence[Tensor]]
    """Ours, as views where there are any: of a file only the pages that are read are touched."""
    join: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A tensor of a checkpoint."""

    name: str
    ours: tuple[str, ...]
    """Names of ours that it holds."""
    form: Form
    expert: int | None = None
    """Of ours, which is stacked, it is this expert's."""


PLAIN = Form(lambda whole: (whole,), lambda parts: parts[0])
TRANSPOSED = Form(lambda whole: (whole.T,), lambda parts: parts[0].T)


def rows(*lengths: int) -> Form:
    """Several one above the other."""
    return Form(
        lambda whole: torch.split(whole, list(lengths)), lambda parts: torch.cat(tuple(parts))
    )


def columns(*lengths: int) -> Form:
    """Several side by side, each transposed: layers whose weight is (inputs, outputs)."""
    return Form(
        lambda whole: torch.split(whole.T, list(lengths)),
        lambda parts: torch.cat(tuple(parts)).T,
    )


def heads_in_turn(heads: int, width: int) -> Form:
    """Query, key and value of the first head, then those of the next."""

    def split(whole: Tensor) -> Sequence[Tensor]:
        by_head = whole.view(heads, 3, width, *whole.shape[1:])
        return [by_head[:, part].flatten(0, 1) for part in range(3)]

    def join(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(
            [part.reshape(heads, width, *part.shape[1:]) for part in parts], 1
        ).flatten(0, 2)

    return Form(split, join)


def pairs_as_halves(total: int, *, heads: int, turned: int) -> Form:
    """The last `turned` rows of each head are rotated in pairs (0, 1), (2, 3) ...: ours in halves
    (0, n / 2), (1, n / 2 + 1) ..., and so the even rows come first."""
    order = torch.arange(total, device="cpu").view(heads, -1)
    last = order[:, -turned:]
    order = torch.cat([order[:, :-turned], last[:, 0::2], last[:, 1::2]], 1).flatten()
    back = order.argsort()
    return Form(lambda whole: (whole[order],), lambda parts: parts[0][back.to(parts[0].device)])


def published_tensors(family: str, model: ModelConfig) -> Iterator[Published]:
    """All tensors of a checkpoint of `family` (its `model_type`) with the shape of `model`."""
    naming = {"gpt2": _gpt2, "bloom": _bloom}.get(family, _decoder)
    return naming(family, model)


def _plain(name: str, ours: str, kinds: Sequence[str] = ("weight",)) -> Iterator[Published]:
    for kind in kinds:
        yield Published(name=f"{name}.{kind}", ours=(f"{ours}.{kind}",), form=PLAIN)


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _decoder(family: str, model: ModelConfig) -> Iterator[Published]:
    """The families whose names are Llama's."""
    norm = _kinds(model.norm == "layernorm")
    yield from _plain("model.embed_tokens", "tok_embeddings")
    for layer in range(model.layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        yield from _plain(f"{theirs}.input_layernorm", f"{ours}.attention_norm", norm)
        yield from _attention(family, model, f"{theirs}.self_attn", f"{ours}.attention")
        yield from _plain(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm", norm)
        if model.has_experts(layer):
            yield from _mixture(family, model, theirs, f"{ours}.feed_forward")
        else:
            yield from _feed_forward(family, model, f"{theirs}.mlp", f"{ours}.feed_forward")
    yield from _plain("model.norm", "norm", norm)
    if not model.tied_embeddings:
        yield from _plain("lm_head", "output")


def _attention(family: str, model: ModelConfig, theirs: str, ours: str) -> Iterator[Published]:
    if model.latent is not None:
        yield from _latent_attention(model, model.latent, theirs, ours)
        return
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if family == "phi3":
        names = tuple(f"{ours}.{each}.weight" for each in ("wq", "wk", "wv"))
        form = rows(query, key, key)
        yield Published(name=f"{theirs}.qkv_proj.weight", ours=names, form=form)
    else:
        for letter in "qkv":
            kinds = _kinds(model.attention_bias)
            yield from _plain(f"{theirs}.{letter}_proj", f"{ours}.w{letter}", kinds)
    yield from _plain(f"{theirs}.o_proj", f"{ours}.wo", _kinds(model.attention_output_bias))
    if model.qk_norm:
        yield from _plain(f"{theirs}.q_norm", f"{ours}.q_norm")
        yield from _plain(f"{theirs}.k_norm", f"{ours}.k_norm")


def _latent_attention(
    model: ModelConfig, latent: LatentConfig, theirs: str, ours: str
) -> Iterator[Published]:
    turned = latent.rope_head_dim
    queries = pairs_as_halves(model.heads * model.head_dim, heads=model.heads, turned=turned)
    keys = pairs_as_halves(latent.kv_rank + turned, heads=1, turned=turned)
    if latent.query_rank:
        yield from _plain(f"{theirs}.q_a_proj", f"{ours}.wq_a")
        yield from _plain(f"{theirs}.q_a_layernorm", f"{ours}.q_norm")
        last, name = "q_b_proj", "wq_b"
    else:
        last, name = "q_proj", "wq"
    yield Published(name=f"{theirs}.{last}.weight", ours=(f"{ours}.{name}.weight",), form=queries)
    yield Published(
        name=f"{theirs}.kv_a_proj_with_mqa.weight", ours=(f"{ours}.wkv_a.weight",), form=keys
    )
    yield from _plain(f"{theirs}.kv_a_layernorm", f"{ours}.kv_norm")
    yield from _plain(f"{theirs}.kv_b_proj", f"{ours}.wkv_b")
    yield from _plain(f"{theirs}.o_proj", f"{ours}.wo")


def _feed_forward(family: str, model: ModelConfig, theirs: str, ours: str) -> Iterator[Published]:
    kinds = _kinds(model.mlp_bias)
    if family == "starcoder2":
        yield from _plain(f"{theirs}.c_fc", f"{ours}.w1", kinds)
        yield from _plain(f"{theirs}.c_proj", f"{ours}.w2", kinds)
    elif family == "phi3":
        names = (f"{ours}.w1.weight", f"{ours}.w3.weight")
        form = rows(model.ffn_hidden, model.ffn_hidden)
        yield Published(name=f"{theirs}.gate_up_proj.weight", ours=names, form=form)
        yield from _plain(f"{theirs}.down_proj", f"{ours}.w2")
    else:
        yield from _gated(theirs, ours, kinds)


def _gated(theirs: str, ours: str, kinds: Sequence[str] = ("weight",)) -> Iterator[Published]:
    for name, own in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        yield from _plain(f"{theirs}.{name}", f"{ours}.{own}", kinds)


def _mixture(family: str, model: ModelConfig, theirs: str, ours: str) -> Iterator[Published]:
    experts = model.experts
    assert experts is not None
    theirs += ".block_sparse_moe" if family == "mixtral" else ".mlp"
    yield from _plain(f"{theirs}.gate", f"{ours}.router")
    if family == "deepseek_v3":
        bias = f"{theirs}.gate.e_score_correction_bias"
        yield Published(name=bias, ours=(f"{ours}.expert_bias",), form=PLAIN)
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for own, name in names.items():  # a stack at a time: it is gathered once
        for number in range(experts.experts):
            name = own if family == "mixtral" else name
            yield Published(
                name=f"{theirs}.experts.{number}.{name}.weight",
                ours=(f"{ours}.experts.{own}.weight",),
                form=PLAIN,
                expert=number,
            )
    if experts.shared_hidden:
        shared = "shared_expert" if family == "qwen2_moe" else "shared_experts"
        yield from _gated(f"{theirs}.{shared}", f"{ours}.shared_experts")
    if experts.shared_gate:
        yield from _plain(f"{theirs}.shared_expert_gate", f"{ours}.shared_gate")


def _gpt2(family: str, model: ModelConfig) -> Iterator[Published]:
    both = ("weight", "bias")
    yield from _plain("transformer.wte", "tok_embeddings")
    yield from _plain("transformer.wpe", "pos_embeddings")
    for layer in range(model.layers):
        theirs, ours = f"transformer.h.{layer}", f"layers.{layer}"
        yield from _plain(f"{theirs}.ln_1", f"{ours}.attention_norm", both)
        widths = (model.hidden,) * 3
        for kind, form in (("weight", columns(*widths)), ("bias", rows(*widths))):
            names = tuple(f"{ours}.attention.{each}.{kind}" for each in ("wq", "wk", "wv"))
            yield Published(name=f"{theirs}.attn.c_attn.{kind}", ours=names, form=form)
        yield from _transposed(f"{theirs}.attn.c_proj", f"{ours}.attention.wo")
        yield from _plain(f"{theirs}.ln_2", f"{ours}.ffn_norm", both)
        yield from _transposed(f"{theirs}.mlp.c_fc", f"{ours}.feed_forward.w1")
        yield from _transposed(f"{theirs}.mlp.c_proj", f"{ours}.feed_forward.w2")
    yield from _plain("transformer.ln_f", "norm", both)


def _transposed(name: str, ours: str) -> Iterator[Published]:
    yield Published(name=f"{name}.weight", ours=(f"{ours}.weight",), form=TRANSPOSED)
    yield from _plain(name, ours, ("bias",))


def _bloom(family: str, model: ModelConfig) -> Iterator[Published]:
    both = ("weight", "bias")
    form = heads_in_turn(model.heads, model.head_dim)
    yield from _plain("transformer.word_embeddings", "tok_embeddings")
    yield from _plain("transformer.word_embeddings_layernorm", "embedding_norm", both)
    for layer in range(model.layers):
        theirs, ours = f"transformer.h.{layer}", f"layers.{layer}"
        yield from _plain(f"{theirs}.input_layernorm", f"{ours}.attention_norm", both)
        for kind in both:
            names = tuple(f"{ours}.attention.{each}.{kind}" for each in ("wq", "wk", "wv"))
            name = f"{theirs}.self_attention.query_key_value.{kind}"
            yield Published(name=name, ours=names, form=form)
        yield from _plain(f"{theirs}.self_attention.dense", f"{ours}.attention.wo", both)
        yield from _plain(f"{theirs}.post_attention_layernorm", f"{ours}.ffn_norm", both)
        yield from _plain(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.feed_forward.w1", both)
        yield from _plain(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.feed_forward.w2", both)
    yield from _plain("transformer.ln_f", "norm", both)

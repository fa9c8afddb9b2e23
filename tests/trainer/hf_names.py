"""Weights of Hugging Face's models under the names of the reference decoder."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

Weights = dict[str, Tensor]

PROJECTIONS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.sinks": "attention.sinks",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "feed_forward.router",
    "mlp.router": "feed_forward.router",
    "mlp.shared_expert_gate": "feed_forward.shared_gate",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
SHARED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FOUR_NORMS = PROJECTIONS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
ROOT = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}


def llama_names(
    weights: Weights, names: dict[str, str] = PROJECTIONS
) -> Iterator[tuple[str, Tensor]]:
    """Weights of the Llama family under our names."""
    for name, weight in weights.items():
        if name in ROOT:
            yield ROOT[name], weight
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        where = f"layers.{layer}."
        if rest.startswith("mlp.experts."):
            yield from expert_weights(f"{where}feed_forward.experts.", rest, weight)
        elif "shared_expert" in rest and "shared_expert_gate" not in rest:
            yield (
                f"{where}feed_forward.shared_experts.{SHARED[module.split('.')[-1]]}.{kind}",
                weight,
            )
        elif rest in names:
            yield where + names[rest], weight
        elif kind == "e_score_correction_bias":
            yield f"{where}feed_forward.expert_bias", weight
        else:
            yield f"{where}{names[module]}.{kind}", weight


def expert_weights(where: str, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Experts, whose gate and up projections are one tensor."""
    kind = "bias" if name.endswith("bias") else "weight"
    if "down_proj" in name:
        yield f"{where}w2.{kind}", weight
    else:
        gate, up = weight.chunk(2, dim=1)
        yield f"{where}w1.{kind}", gate
        yield f"{where}w3.{kind}", up


def gpt_oss_names(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Its experts stand (in, out), gate and up in turn, and it adds 1 to what the up projection
    gives."""
    changed = {}
    for name, weight in weights.items():
        if ".experts." in name:
            if not name.endswith("bias"):
                weight = weight.transpose(1, 2)
            if "gate_up" in name:
                weight = torch.cat([weight[:, ::2], weight[:, 1::2]], dim=1)
                if name.endswith("bias"):
                    weight[:, weight.shape[1] // 2 :] += 1
        changed[name] = weight
    yield from llama_names(changed)


def gemma_names(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Its norms multiply by 1 + weight, its embedding is scaled by sqrt(hidden)."""
    for name, weight in llama_names(weights, FOUR_NORMS):
        if "norm" in name:
            weight = weight + 1
        yield name, weight * 48**0.5 if name == "tok_embeddings.weight" else weight


GPT2_NAMES = {
    "ln_1": "attention_norm",
    "attn.c_proj": "attention.wo",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "feed_forward.w1",
    "mlp.c_proj": "feed_forward.w2",
}


def gpt2_names(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Its linear layers stand (in, out)."""
    root = {"wte": "tok_embeddings", "wpe": "pos_embeddings", "ln_f": "norm"}
    for name, weight in weights.items():
        module, _, kind = name.removeprefix("transformer.").rpartition(".")
        if name == "lm_head.weight":
            yield "output.weight", weight
        elif module in root:
            yield f"{root[module]}.{kind}", weight
        else:
            _, layer, rest = module.split(".", 2)
            weight = weight.T if weight.ndim == 2 else weight
            if rest == "attn.c_attn":
                for ours, part in zip("qkv", weight.chunk(3), strict=True):
                    yield f"layers.{layer}.attention.w{ours}.{kind}", part
            else:
                yield f"layers.{layer}.{GPT2_NAMES[rest]}.{kind}", weight


BLOOM_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attention.dense": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "feed_forward.w1",
    "mlp.dense_4h_to_h": "feed_forward.w2",
    "norm_1": "attention_norm",
    "attn.out_proj": "attention.wo",
    "norm_2": "ffn_norm",
    "ffn.up_proj": "feed_forward.w1",
    "ffn.down_proj": "feed_forward.w2",
}


def alibi_names(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """BLOOM, whose queries, keys and values alternate by head, and MPT, whose do not."""
    root = {
        "word_embeddings": "tok_embeddings",
        "word_embeddings_layernorm": "embedding_norm",
        "ln_f": "norm",
        "wte": "tok_embeddings",
        "norm_f": "norm",
    }
    for name, weight in weights.items():
        module, _, kind = name.removeprefix("transformer.").rpartition(".")
        if name == "lm_head.weight":
            yield "output.weight", weight
        elif module in root:
            yield f"{root[module]}.{kind}", weight
        else:
            _, layer, rest = module.split(".", 2)
            where = f"layers.{layer}."
            if rest in BLOOM_NAMES:
                yield f"{where}{BLOOM_NAMES[rest]}.{kind}", weight
                continue
            if rest == "attn.Wqkv":
                parts = weight.chunk(3)
            else:
                by_head = weight.unflatten(0, (4, 3, 12))
                parts = tuple(by_head[:, i].flatten(0, 1) for i in range(3))
            for ours, part in zip("qkv", parts, strict=True):
                yield f"{where}attention.w{ours}.{kind}", part

"""The reference decoder against Hugging Face's models with the same weights, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from fsdpplan.cost.params import parameter_count
from fsdpplan.files.catalogue import load_model, model_names
from fsdpplan.spec.model import Model
from fsdpplan.trainer.attention import Attention, AttentionCore, make_masks
from fsdpplan.trainer.model import Decoder
from fsdpplan.trainer.positions import alibi_slopes, with_alibi
from fsdpplan.trainer.weights import initialise
from tests.strategies import any_models, models
from tests.trainer import plans

transformers = pytest.importorskip("transformers")

Weights = dict[str, Tensor]
TOKENS, VOCAB = 24, 61


WIDTHS = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OURS = {"layers": 3, "ffn_hidden": 40, "head_dim": 16, "qk_norm": False}
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
        elif kind != "e_score_correction_bias":
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


MIXTURE = {"num_experts_per_tok": 2, "norm_topk_prob": True}
ALIBI = {"positions": "alibi", "mlp": "gelu", "norm": "layernorm", "kv_heads": 4, "qk_norm": False}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[..., Any]]] = {
    "llama": ("Llama", WIDTHS, OURS, llama_names),
    "qwen2": ("Qwen2", WIDTHS, OURS | {"attention_bias": True}, llama_names),
    "qwen3": ("Qwen3", WIDTHS, OURS | {"qk_norm": True}, llama_names),
    "mistral_window": (
        "Mistral",
        WIDTHS | {"sliding_window": 7},
        OURS | {"sliding_window": 7, "full_attention_every": 99},
        llama_names,
    ),
    "mixtral": (
        "Mixtral",
        WIDTHS | {"num_local_experts": 6, "num_experts_per_tok": 2},
        OURS | {"experts": {"experts": 6, "active": 2, "hidden": 40}},
        llama_names,
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        WIDTHS | MIXTURE | {"num_experts": 6, "moe_intermediate_size": 20, "mlp_only_layers": [0]},
        OURS
        | {
            "qk_norm": True,
            "experts": {"experts": 6, "active": 2, "hidden": 20, "dense_layers": 1},
        },
        llama_names,
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        WIDTHS
        | MIXTURE
        | {
            "num_experts": 6,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "qkv_bias": True,
        },
        OURS
        | {
            "attention_bias": True,
            "experts": {
                "experts": 6,
                "active": 2,
                "hidden": 20,
                "shared_hidden": 28,
                "shared_gate": True,
            },
        },
        llama_names,
    ),
    "deepseek_v3": (
        "DeepseekV3",
        WIDTHS
        | {
            "num_key_value_heads": 4,
            "head_dim": 6,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 14,
            "n_routed_experts": 6,
            "num_local_experts": 6,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
        },
        OURS
        | {
            "kv_heads": 4,
            "latent": {"kv_rank": 24, "rope_head_dim": 6, "value_head_dim": 14, "query_rank": 20},
            "experts": {
                "experts": 6,
                "active": 1,
                "hidden": 20,
                "shared_hidden": 40,
                "dense_layers": 1,
            },
        },
        llama_names,
    ),
    "gpt_oss": (
        "GptOss",
        WIDTHS
        | {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "swiglu_alpha": 1.0,
            "swiglu_limit": 1e9,
            "attention_bias": True,
        },
        OURS
        | {
            "attention_bias": True,
            "attention_output_bias": True,
            "attention_sinks": True,
            "sliding_window": 7,
            "full_attention_every": 2,
            "experts": {
                "experts": 6,
                "active": 2,
                "hidden": 40,
                "router_bias": True,
                "bias": True,
            },
        },
        gpt_oss_names,
    ),
    "gemma2": (
        "Gemma2",
        WIDTHS
        | {
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 7,
        },
        OURS
        | {
            "mlp": "geglu",
            "post_norms": True,
            "sliding_window": 7,
            "full_attention_every": 2,
        },
        gemma_names,
    ),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 48,
            "n_layer": 4,
            "n_head": 4,
            "n_inner": 96,
            "vocab_size": VOCAB,
            "n_positions": 64,
        },
        plans.GPT2_STYLE,
        gpt2_names,
    ),
    "bloom": (
        "Bloom",
        {"hidden_size": 48, "n_layer": 4, "n_head": 4, "vocab_size": VOCAB},
        plans.GPT2_STYLE | ALIBI | {"ffn_hidden": 192, "embedding_norm": True},
        alibi_names,
    ),
    "mpt": (
        "Mpt",
        {"d_model": 48, "n_layers": 4, "n_heads": 4, "vocab_size": VOCAB, "max_seq_len": 64},
        ALIBI | {"ffn_hidden": 192, "norm_bias": False, "tied_embeddings": True},
        alibi_names,
    ),
}
"""Hugging Face class, its config, our model, and what renames the weights."""


def with_tanh_gelu(model: nn.Module) -> None:
    """Give MPT, which has no option for it, the tanh form of GELU."""
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.approximate = "tanh"


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_hugging_face_with_the_same_weights(name: str) -> None:
    family, widths, fields, rename = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **widths, attn_implementation="eager", use_cache=False
    )
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    with_tanh_gelu(theirs)
    ours = Decoder(plans.config_of(**fields))
    weights = dict(rename({key: value.clone() for key, value in theirs.state_dict().items()}))
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(key.endswith("expert_bias") for key in missing)
    tokens = torch.randint(VOCAB, (2, TOKENS))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=2e-4, atol=2e-4)


def test_queries_and_keys_of_all_heads_are_normed_as_in_olmo2() -> None:
    torch.manual_seed(0)
    config = transformers.Olmo2Config(**WIDTHS, attn_implementation="eager")
    from transformers.models.olmo2 import modeling_olmo2

    theirs = modeling_olmo2.Olmo2Attention(config, layer_idx=0)
    ours = Attention(
        plans.config_of(**OURS | {"head_dim": 16, "qk_norm": True}, qk_norm_width="all_heads")
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    weights = {
        PROJECTIONS[f"self_attn.{name.rpartition('.')[0]}"].removeprefix("attention.")
        + ".weight": w
        for name, w in theirs.state_dict().items()
    }
    ours.load_state_dict(weights)
    x = torch.randn(2, TOKENS, 48)
    turns = modeling_olmo2.Olmo2RotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=turns, attention_mask=mask)
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-4)


def test_slopes_between_powers_of_two_are_those_of_bloom() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (4, 6, 12, 112):
        bias = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)
        torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bias[:, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_fall_with_distance_far_beyond_what_bf16_counts_to(dtype: torch.dtype) -> None:
    length, slope = 3000, 0.25
    q, k = torch.zeros(1, 1, length, 8, dtype=dtype), torch.zeros(1, 1, length, 8, dtype=dtype)
    q, k = with_alibi(q, k, slopes_H=torch.tensor([slope]), scale=0.5)
    scores = 0.5 * (q[0, 0, -1].float() @ k[0, 0].float().T)
    expected = slope * torch.arange(length)
    torch.testing.assert_close(scores - scores[0], expected.float())


FORMS: dict[str, dict[str, Any]] = {
    "rope": {},
    "learned": plans.GPT2_STYLE,
    "alibi": ALIBI,
    "window": {"sliding_window": 5, "full_attention_every": 2},
    "sinks": {"attention_sinks": True},
    "latent": {
        "kv_heads": 4,
        "qk_norm": False,
        "latent": {"kv_rank": 8, "rope_head_dim": 4, "value_head_dim": 8},
    },
}


def tiny(form: str) -> Decoder:
    decoder = Decoder(plans.config_of(**FORMS[form]))
    initialise(decoder, seed=0, layers=4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(10) if parameter.ndim > 1 else parameter.add_(torch.rand_like(parameter))
    return decoder


@pytest.mark.parametrize("form", FORMS)
def test_documents_in_one_sequence_are_as_apart(form: str) -> None:
    decoder = tiny(form)
    tokens = torch.randint(VOCAB, (2, 16))
    lengths = (5, 1, 10)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].expand(2, -1)
    packed = decoder(tokens, positions=positions, documents=documents)
    apart = torch.cat([decoder(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_no_token_sees_a_later_one(form: str) -> None:
    decoder = tiny(form)
    tokens = torch.randint(VOCAB, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % VOCAB
    torch.testing.assert_close(decoder(tokens)[:, :9], decoder(changed)[:, :9])


def test_a_decoder_in_two_parts_is_the_decoder() -> None:
    decoder = tiny("rope")
    first = Decoder(decoder.config, blocks=range(3), has_head=False)
    last = Decoder(decoder.config, blocks=[3], has_embedding=False)
    weights = decoder.state_dict()
    for part in (first, last):
        part.load_state_dict({name: weights[name] for name in part.state_dict()})
    assert set(first.state_dict()) | set(last.state_dict()) == set(weights)
    tokens = torch.randint(VOCAB, (2, 8))
    torch.testing.assert_close(last(first(tokens)), decoder(tokens))


def test_blocks_share_masks_and_need_none_for_whole_sequences() -> None:
    config = plans.config_of(sliding_window=5, full_attention_every=2)
    like = torch.zeros(0)
    masks = make_masks(config, range(4), length=24, documents_BT=None, like=like)
    assert set(masks) == {5}
    assert not make_masks(config, range(4), length=5, documents_BT=None, like=like)
    seen = (masks[5][0, 0] == 0).sum(1)
    assert seen.tolist() == [1, 2, 3, 4] + [5] * 20


def test_a_head_with_a_large_sink_gives_nothing() -> None:
    core = AttentionCore(0.5)
    q = k = v = torch.ones(1, 2, 6, 8)
    out = core(q, k, v, sinks_H=torch.tensor([60.0, -60.0]))
    torch.testing.assert_close(out[:, 0], torch.zeros(1, 6, 8))
    torch.testing.assert_close(out[:, 1], torch.ones(1, 6, 8))


def built(model: Model) -> Decoder:
    with torch.device("meta"):
        return Decoder(plans.config_of_model(model))


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", model_names())
def test_the_decoder_has_as_many_parameters_as_the_planner_counts(name: str) -> None:
    model = replace(load_model(name), layers=min(load_model(name).layers, 6))
    assert parameters_of(built(model)) == parameter_count(model)


@settings(max_examples=25, deadline=None)
@given(any_models() | models())
def test_any_shape_has_as_many_parameters_as_the_planner_counts(model: Model) -> None:
    model = replace(model, layers=max(model.layers % 7, model.dense_blocks if model.experts else 1))
    assert parameters_of(built(model)) == parameter_count(model)

"""The plan's model in Megatron-LM's arguments: dense GPTs, and mixtures with whole experts."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpplan.spec.model import Experts, Model, Router
from fsdpplan.spec.plan import Plan

_UNSAID = {
    "qk_norm_width": "head",
    "post_norms": False,
    "embedding_norm": False,
    "attention_sinks": False,
    "sliding_window": 0,
    "full_attention_every": 1,
    "latent": None,
}
"""Fields of a model that the arguments say in one way only."""


def model_problems(plan: Plan) -> Iterator[str]:
    """What of the model the arguments do not say."""
    model = plan.model
    unlike = [name for name, value in _UNSAID.items() if getattr(model, name) != value]
    unlike += [] if model.mlp in ("swiglu", "gelu") else ["mlp"]
    unlike += [] if model.positions in ("rope", "learned") else ["positions"]
    unlike += [] if model.norm == "rmsnorm" or model.norm_bias else ["norm_bias"]
    unlike += [] if _biases(model) is not None else ["biases"]
    if model.positions == "rope" and not float(model.rope_theta).is_integer():
        unlike.append("rope_theta")
    if model.experts and (model.experts.bias or model.experts.router_bias):
        unlike.append("experts")
    if model.experts and not _routes_alike(model.experts):
        unlike.append("experts.router")
    if unlike:
        yield (
            f"{' and '.join(unlike)} of model {model.name} (this script writes out models like "
            "Llama, Qwen and GPT): use --target slurm, whose trainer has them"
        )


def model_arguments(plan: Plan) -> list[tuple[str, ...]]:
    """Shapes, without dropout."""
    model = plan.model
    rotary = model.positions == "rope"
    found: list[tuple[str, ...]] = [
        ("--transformer-impl", "transformer_engine"),
        ("--num-layers", str(model.layers)),
        ("--hidden-size", str(model.hidden)),
        ("--ffn-hidden-size", str(model.ffn_hidden)),
        ("--num-attention-heads", str(model.heads)),
        ("--kv-channels", str(model.head_dim)),
        ("--group-query-attention",),
        ("--num-query-groups", str(model.kv_heads)),
        ("--vocab-size", str(model.vocab)),
        ("--max-position-embeddings", str(max(model.max_positions, plan.training.seq_len))),
        ("--position-embedding-type", "rope" if rotary else "learned_absolute"),
        *([("--rotary-base", str(int(model.rope_theta)))] if rotary else []),
        ("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        ("--norm-epsilon", str(model.norm_epsilon)),
        ("--attention-dropout", "0"),
        ("--hidden-dropout", "0"),
        *([("--swiglu",)] if model.mlp == "swiglu" else []),
        *((flag,) for flag in _biases(model) or ()),
        *([("--qk-layernorm",)] if model.qk_norm else []),
        *([] if model.tied_embeddings else [("--untie-embeddings-and-output-weights",)]),
    ]
    return found + (_experts(model, model.experts) if model.experts else [])


def _biases(model: Model) -> tuple[str, ...] | None:
    """Flags for the biases of projections; None: there are none for these."""
    match (model.attention_bias, model.attention_output_bias, model.mlp_bias):
        case (False, False, False):
            return ("--disable-bias-linear",)
        case (True, False, False):
            return ("--disable-bias-linear", "--add-qkv-bias")
        case (True, True, True):
            return ()
    return None


def _routes_alike(experts: Experts) -> bool:
    """Megatron adds up the best `active / groups_chosen` scores of a group, and divides sigmoids of
    several experts by their sum.

    Source: Megatron Core 0.14, transformer/moe/moe_utils.py.
    """
    router = experts.router
    groups = router.groups == 1 or router.group_best == experts.active // router.groups_chosen
    return groups and (router.scores == "softmax" or router.normalised == (experts.active > 1))


def _router(router: Router) -> list[tuple[str, ...]]:
    """Beside a softmax over the chosen experts, which is the default."""
    found: list[tuple[str, ...]] = []
    if router.scores == "sigmoid":
        found += [("--moe-router-score-function", "sigmoid"), ("--moe-router-enable-expert-bias",)]
    elif not router.normalised:
        found.append(("--moe-router-pre-softmax",))
    if router.scaling != 1.0:
        found.append(("--moe-router-topk-scaling-factor", f"{router.scaling:g}"))
    if router.groups > 1:
        found.append(("--moe-router-num-groups", str(router.groups)))
        found.append(("--moe-router-group-topk", str(router.groups_chosen)))
    return found


def _experts(model: Model, experts: Experts) -> list[tuple[str, ...]]:
    dense = experts.dense_layers
    found: list[tuple[str, ...]] = [
        ("--num-experts", str(experts.experts)),
        ("--moe-router-topk", str(experts.active)),
        ("--moe-ffn-hidden-size", str(experts.hidden)),
        ("--moe-router-load-balancing-type", "none"),
        ("--moe-token-dispatcher-type", "alltoall"),
        ("--moe-grouped-gemm",),
    ]
    if dense:
        found.append(("--moe-layer-freq", f"([0]*{dense}+[1]*{model.layers - dense})"))
    found += _router(experts.router)
    if experts.shared_hidden:
        found.append(("--moe-shared-expert-intermediate-size", str(experts.shared_hidden)))
        found += [("--moe-shared-expert-gate",)] if experts.shared_gate else []
    return found

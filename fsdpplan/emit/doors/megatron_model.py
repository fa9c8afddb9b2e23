"""The plan's model in Megatron-LM's arguments: dense GPTs, and mixtures with whole experts."""

from __future__ import annotations

from fsdpplan.emit.trainer_program import Trainer, router_aux_loss_coef
from fsdpplan.spec.model import VOCAB_MULTIPLE, Experts, Model, Router
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.programs.megatron import bias_flags


def model_arguments(plan: Plan, program: Trainer) -> list[tuple[str, ...]]:
    """Shapes, without dropout, and what keeps experts busy."""
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
        *_padding(plan),
        ("--max-position-embeddings", str(max(model.max_positions, plan.training.seq_len))),
        ("--position-embedding-type", "rope" if rotary else "learned_absolute"),
        *([("--rotary-base", str(int(model.rope_theta)))] if rotary else []),
        *_scaling(model),
        ("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm"),
        ("--norm-epsilon", str(model.norm_epsilon)),
        ("--attention-dropout", "0"),
        ("--hidden-dropout", "0"),
        *([("--swiglu",)] if model.mlp == "swiglu" else []),
        *((flag,) for flag in bias_flags(model) or ()),
        *([("--qk-layernorm",)] if model.qk_norm else []),
        *([] if model.tied_embeddings else [("--untie-embeddings-and-output-weights",)]),
    ]
    if model.experts is None:
        return found
    return found + _experts(model, model.experts) + _balance(model, model.experts, program)


def _scaling(model: Model) -> list[tuple[str, ...]]:
    """Its other numbers are Llama's (megatron/core/models/common/embeddings)."""
    if model.rope_scaling is None:
        return []
    return [("--use-rope-scaling",), ("--rope-scaling-factor", str(model.rope_scaling.factor))]


def _padding(plan: Plan) -> list[tuple[str, ...]]:
    """So many rows a tensor-parallel rank as are priced, where they are padded."""
    multiple = plan.model.vocab_multiple
    if multiple == 1 and plan.model.vocab % plan.layout.tp:
        multiple = VOCAB_MULTIPLE
    return [("--make-vocab-size-divisible-by", str(multiple))] if multiple > 1 else []


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


def _balance(model: Model, experts: Experts, program: Trainer) -> list[tuple[str, ...]]:
    """The reference trainer's balance: biases beside sigmoids, else the auxiliary loss, as strong.

    Its loss is that of each block, from the shares of a token's choices, and all blocks' are added
    up; the reference trainer's is one of all blocks, from their mean and the choices themselves.
    Source: core/transformer/moe/moe_utils.py, `switch_load_balancing_loss_func`.
    """
    if experts.router.scores == "sigmoid":
        rate = program.expert_bias_rate
        told = [] if rate is None else [("--moe-router-bias-update-rate", f"{rate:g}")]
        return [("--moe-router-load-balancing-type", "none"), *told]
    coefficient = router_aux_loss_coef(program, model)
    if not coefficient:
        return [("--moe-router-load-balancing-type", "none")]
    each = coefficient * experts.active / (model.layers - experts.dense_layers)
    return [
        ("--moe-router-load-balancing-type", "aux_loss"),
        ("--moe-aux-loss-coeff", f"{each:g}"),
    ]

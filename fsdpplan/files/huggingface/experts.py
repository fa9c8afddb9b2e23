"""Hugging Face configs of mixtures of experts.

Defaults of absent keys are those of the configuration classes of transformers 5; numbers and
widths of experts must be written.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpplan.errors import SpecError
from fsdpplan.files.huggingface.fields import (
    either,
    head_dim,
    letters,
    optional_flag,
    optional_integer,
    optional_number,
    require_flag,
    rope_scaling,
    whole_pattern,
    windows,
)
from fsdpplan.files.huggingface.llama import (
    Fields,
    all_windowed,
    attention_bias,
    decoder,
    qwen_windows,
)
from fsdpplan.files.table import Table
from fsdpplan.spec.model import Experts, LatentAttention, Router

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def experts_of(table: Table) -> int:
    """How many experts a block has, by whichever key says it."""
    return table.integer(either(table, *EXPERT_KEYS))


def mixtral(table: Table, notes: list[str]) -> Fields:
    """Mixtral: each block has experts as wide as a dense network."""
    experts = Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=table.integer("intermediate_size"),
        router=Router(aux_loss_coef=auxiliary_loss(table)),
    )
    fields = decoder(table, notes, kv_heads=8, max_positions=131072, epsilon=1e-5, theta=1000000.0)
    windowed = all_windowed(table, notes)
    return fields | {"head_dim": head_dim(table), "experts": experts} | windowed


def dense_at_start(table: Table, key: str) -> int:
    """How many blocks at the start lack experts, by a list of their numbers."""
    numbers = table.values.get(key)
    if numbers is None:
        return 0
    if not isinstance(numbers, list) or numbers != list(range(len(numbers))):
        raise table.wrong(key, "a list 0, 1, ... of blocks at the start, or empty")
    return len(numbers)


def with_places(table: Table, experts: Experts, *, dense_layers: int) -> Fields:
    """`experts`, and which blocks have them: by `mlp_layer_types`, else those behind the first
    `first_k_dense_replace`, `dense_layers` where that is absent."""
    layers = table.integer("num_hidden_layers")
    if table.values.get("mlp_layer_types") is None:
        first = optional_integer(table, "first_k_dense_replace", dense_layers, lowest=0)
        return {"experts": replace(experts, dense_layers=first)}
    found = letters(table, "mlp_layer_types", layers, {"dense": "F", "sparse": "E"})
    kinds = whole_pattern(found, layers)
    if "E" not in kinds:
        return {"experts": None}
    first = kinds.index("E")
    if "F" not in kinds[first:]:
        return {"experts": replace(experts, dense_layers=first)}
    return {"experts": experts, "networks": found}


def require_every_block(table: Table, key: str) -> None:
    """Raise where `key` says that some blocks between the others have none."""
    if optional_integer(table, key, 1) != 1:
        raise table.wrong(key, "1: experts in each block, but for some at the start")


def plain_router(table: Table) -> Router:
    """A softmax over all experts, divided by the sum of the chosen where the config says so."""
    return Router(
        normalised=optional_flag(table, "norm_topk_prob", False),
        aux_loss_coef=auxiliary_loss(table),
    )


def auxiliary_loss(table: Table, key: str = "router_aux_loss_coef") -> float | None:
    """The coefficient of the loss that balances experts; None: the config does not say."""
    return None if table.values.get(key) is None else optional_number(table, key, 0.0)


def qwen2_moe(table: Table, notes: list[str]) -> Fields:
    """Qwen 1.5 and 2 with experts: narrow ones, and a gated one that every token visits."""
    require_every_block(table, "decoder_sparse_step")
    experts = Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=table.integer("moe_intermediate_size"),
        shared_hidden=table.integer("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=dense_at_start(table, "mlp_only_layers"),
        router=plain_router(table),
    )
    return (
        decoder(table, notes, kv_heads=16, max_positions=32768)
        | {
            "head_dim": head_dim(table),
            "attention_bias": optional_flag(table, "qkv_bias", True),
            "experts": experts,
        }
        | _qwen2_moe_windows(table, notes)
    )


def _qwen2_moe_windows(table: Table, notes: list[str]) -> Fields:
    """Every other block is windowed, up to block `max_window_layers`."""
    if not optional_flag(table, "use_sliding_window", False):
        return {}
    layers = table.integer("num_hidden_layers")
    if optional_integer(table, "max_window_layers", 28, lowest=0) < layers:
        raise table.wrong("max_window_layers", f"at least {layers}: a pattern of all blocks")
    window = optional_integer(table, "sliding_window", 4096)
    return windows(table, notes, window=window, layers=layers, full_every=2)


def qwen3_moe(table: Table, notes: list[str]) -> Fields:
    """Qwen 3 with experts."""
    require_every_block(table, "decoder_sparse_step")
    experts = Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=table.integer("moe_intermediate_size"),
        dense_layers=dense_at_start(table, "mlp_only_layers"),
        router=plain_router(table),
    )
    windowed = qwen_windows(table, notes)
    return (
        decoder(table, notes, kv_heads=4, max_positions=32768)
        | attention_bias(table)
        | {"head_dim": head_dim(table), "qk_norm": True, "experts": experts}
        | windowed
    )


def gpt_oss(table: Table, notes: list[str]) -> Fields:
    """GPT-OSS: every other block looks back 128 tokens; sinks; biases everywhere.

    Its router_aux_loss_coef of 0.9 is a default of its class that nobody trains with: transformers
    5 adds the loss where it is asked for alone (output_router_logits), and Megatron-Bridge's
    provider balances by nothing.
    """
    experts = Experts(
        experts=experts_of(table),
        active=table.integer(either(table, "num_experts_per_tok", "experts_per_token")),
        hidden=table.integer("intermediate_size"),
        router_bias=True,
        bias=True,
    )
    layers = table.integer("num_hidden_layers")
    window = 128
    if "sliding_window" in table.values:
        window = optional_integer(table, "sliding_window", 0)
    return (
        decoder(table, notes, kv_heads=8, max_positions=131072, epsilon=1e-5, theta=150000.0)
        | attention_bias(table, default=True)
        | {
            "head_dim": optional_integer(table, "head_dim", 64),
            "attention_sinks": True,
            "experts": experts,
        }
        | windows(table, notes, window=window, layers=layers, full_every=2)
    )


def deepseek_v2(table: Table, notes: list[str]) -> Fields:
    """DeepSeek-V2 and V2-Lite."""
    method = table.values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise table.wrong("topk_method", "greedy or group_limited_greedy")
    grouped = method == "group_limited_greedy"
    router = Router(
        normalised=False,  # whatever norm_topk_prob says: transformers does not divide
        scaling=optional_number(table, "routed_scaling_factor", 1.0),
        groups=groups_of(table, "n_group", 1) if grouped else 1,
        groups_chosen=groups_of(table, "topk_group", 1) if grouped else 1,
        aux_loss_coef=auxiliary_loss(table, "aux_loss_alpha"),
    )
    return _deepseek(table, notes, dense_layers=0, shared=2, router=router)


def groups_of(table: Table, key: str, default: int) -> int:
    """A number of groups; null: one."""
    return 1 if table.values.get(key, default) is None else optional_integer(table, key, default)


def grouped_sigmoid(table: Table, *, scaling: float, groups: int, chosen: int) -> Router:
    """Sigmoid scores; of groups of experts those are chosen whose two best are highest. The numbers
    are what absent keys mean."""
    number = groups_of(table, "n_group", groups)
    return Router(
        scores="sigmoid",
        normalised=optional_flag(table, "norm_topk_prob", True),
        scaling=optional_number(table, "routed_scaling_factor", scaling),
        groups=number,
        groups_chosen=groups_of(table, "topk_group", chosen),
        group_best=2 if number > 1 else 1,
    )


SECOND_TOKEN = "the layer that predicts a second token is left out, as transformers does"


def deepseek_v3(table: Table, notes: list[str]) -> Fields:
    """DeepSeek-V3 and R1, without the extra layer that predicts a second token."""
    if optional_integer(table, "num_nextn_predict_layers", 0, lowest=0):
        notes.append(SECOND_TOKEN)
    router = grouped_sigmoid(table, scaling=2.5, groups=8, chosen=4)
    return _deepseek(table, notes, dense_layers=3, shared=1, router=router)


def _deepseek(
    table: Table, notes: list[str], *, dense_layers: int, shared: int, router: Router
) -> Fields:
    why = "its projections are planned without"
    for key in ("attention_bias", "mlp_bias"):
        require_flag(table, key, False, why)
    require_every_block(table, "moe_layer_freq")
    width = table.integer("moe_intermediate_size")
    experts = Experts(
        experts=experts_of(table),
        active=table.integer("num_experts_per_tok"),
        hidden=width,
        shared_hidden=width * optional_integer(table, "n_shared_experts", shared, lowest=0),
        router=router,
    )
    return latent_attention(table, notes) | with_places(table, experts, dense_layers=dense_layers)


def latent_attention(table: Table, notes: list[str]) -> Fields:
    """A decoder with latent attention, without its experts."""
    rotated = table.integer("qk_rope_head_dim")
    latent = LatentAttention(
        kv_rank=table.integer("kv_lora_rank"),
        rope_head_dim=rotated,
        value_head_dim=table.integer("v_head_dim"),
        query_rank=_query_rank(table),
    )
    fields = decoder(table, notes, kv_heads=None, max_positions=4096)
    if fields["kv_heads"] != fields["heads"]:
        raise SpecError(
            f"{table.field('num_key_value_heads')} must be num_attention_heads "
            f"{fields['heads']}: latent attention makes a key and a value for each query head"
        )
    return fields | {
        "rope_scaling": rope_scaling(table, of_scores=True),
        "head_dim": table.integer("qk_nope_head_dim") + rotated,
        "latent": latent,
    }


def _query_rank(table: Table) -> int:
    """`q_lora_rank`; null: queries are made without a latent."""
    return optional_integer(table, "q_lora_rank", 0 if "q_lora_rank" in table.values else 1536)

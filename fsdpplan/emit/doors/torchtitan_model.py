"""The plan's model in torchtitan's own parts: dense decoders like Llama 3 and Qwen 3."""

from __future__ import annotations

from fsdpplan.spec.model import Model
from fsdpplan.spec.plan import Plan


def model_lines(plan: Plan) -> list[str]:
    """`model_spec()`: the shapes of the plan, with torchtitan's initial values."""
    model = plan.model
    rows = model.vocab_rows(plan.layout.tp)
    said = "" if rows == model.vocab else f"  # of {model.vocab}, padded"
    family = "Qwen3" if model.qk_norm else "Llama3"
    parallelize = "parallelize_qwen3" if model.qk_norm else "parallelize_llama"
    return [
        *_initial_values(model),
        "",
        "",
        "def norm(width: int) -> RMSNorm.Config:",
        f"    return RMSNorm.Config(normalized_shape=width, eps={model.norm_epsilon!r}, "
        "param_init=ONES)",
        "",
        "",
        *_block(plan, family=family),
        "",
        "",
        "def model_spec() -> ModelSpec:",
        f"    model = {family}Model.Config(",
        f"        dim={model.hidden},",
        f"        vocab_size={rows},{said}",
        f"        enable_weight_tying={model.tied_embeddings},",
        "        tok_embeddings=Embedding.Config(",
        f"            num_embeddings={rows},",
        f"            embedding_dim={model.hidden},",
        "            param_init=EMBEDDING,",
        "        ),",
        f"        norm=norm({model.hidden}),",
        "        lm_head=Linear.Config(",
        f"            in_features={model.hidden},",
        f"            out_features={rows},",
        "            param_init=linear(0.02),",
        "        ),",
        f"        layers=[block(i) for i in range({model.layers})],",
        "    )",
        *_fp8(plan),
        "    return ModelSpec(",
        f'        name="{family.lower()}",',
        f"        flavor={model.name!r},",
        "        model=model,",
        f"        parallelize_fn={parallelize},",
        "        pipelining_fn=pipeline_llm,",
        "        post_optimizer_build_fn=None,",
        f"        state_dict_adapter={family}StateDictAdapter,",
        "    )",
    ]


def _initial_values(model: Model) -> list[str]:
    embedding = '{"weight": partial(nn.init.normal_, std=1.0)}'
    if model.tied_embeddings:
        embedding = '{"weight": skip_param_init}'
    return [
        "",
        'ONES = {"weight": nn.init.ones_}',
        f"EMBEDDING = {embedding}",
        "",
        "",
        "def linear(std: float) -> dict:",
        '    return {"weight": partial(nn.init.trunc_normal_, std=std), "bias": nn.init.zeros_}',
    ]


def _block(plan: Plan, *, family: str) -> list[str]:
    model = plan.model
    rope = "CosSinRoPE" if model.qk_norm else "ComplexRoPE"
    longest = max(model.max_positions, plan.training.seq_len)
    return [
        f"def block(number: int) -> {family}TransformerBlock.Config:",
        "    deep = linear(depth_scaled_std(0.02, number))",
        f"    return {family}TransformerBlock.Config(",
        f"        attention_norm=norm({model.hidden}),",
        f"        ffn_norm=norm({model.hidden}),",
        "        attention=make_gqa_config(",
        f"            dim={model.hidden},",
        f"            n_heads={model.heads},",
        f"            n_kv_heads={model.kv_heads},",
        f"            head_dim={model.head_dim},",
        "            wqkv_param_init=linear(0.02),",
        "            wo_param_init=deep,",
        '            inner_attention=get_attention_config("flex"),',
        "            fuse_qkv=True,",
        *([f"            qk_norm=norm({model.head_dim}),"] if model.qk_norm else []),
        f"            rope={rope}.Config(",
        f"                dim={model.head_dim}, max_seq_len={longest}, theta={model.rope_theta!r},",
        *(['                scaling="llama",'] if model.rope_scaling else []),
        "            ),",
        "        ),",
        "        feed_forward=make_ffn_config(",
        f"            dim={model.hidden},",
        f"            hidden_dim={model.ffn_hidden},",
        "            w1_param_init=linear(0.02),",
        "            w2w3_param_init=deep,",
        "        ),",
        "    )",
    ]


def _fp8(plan: Plan) -> list[str]:
    if plan.training.precision != "fp8":
        return []
    return [
        "    model = (",
        "        Float8LinearConverter.Config(",
        f'            recipe_name="{plan.training.fp8_recipe}",',
        '            filter_fqns=["lm_head"],',
        f"            model_compile_enabled={plan.layout.compile},",
        "        )",
        "        .build()",
        "        .convert(model)",
        "    )",
    ]

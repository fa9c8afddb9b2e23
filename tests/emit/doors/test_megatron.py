"""Megatron-LM's arguments, read back by a parser that knows the names of the real one."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.emit.targets import render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.model import Experts, RopeScaling, Router
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.trainer_options import AUXILIARY_COEFFICIENT
from fsdpplan.spec.training import Training
from tests.emit.bench import shellcheck
from tests.emit.doors.orders import make_order, plan_of

SWITCHES = """
--group-query-attention --swiglu --disable-bias-linear --add-qkv-bias --qk-layernorm
--untie-embeddings-and-output-weights --sequence-parallel --tp-comm-overlap --use-torch-fsdp2
--torch-fsdp2-no-reshard-after-forward --no-gradient-accumulation-fusion --overlap-grad-reduce
--use-distributed-optimizer --overlap-param-gather --bf16 --fp16 --grad-reduce-in-bf16
--accumulate-allreduce-grads-in-fp32 --use-rope-scaling --mock-data --moe-grouped-gemm
--moe-shared-expert-gate --moe-router-enable-expert-bias --moe-router-pre-softmax
"""
VALUES = """
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels
--num-query-groups --vocab-size --max-position-embeddings --rotary-base --norm-epsilon
--make-vocab-size-divisible-by
--attention-dropout --hidden-dropout --tensor-model-parallel-size --context-parallel-size
--pipeline-model-parallel-size --pipeline-model-parallel-layout --expert-model-parallel-size
--expert-tensor-parallel-size --num-distributed-optimizer-instances --recompute-num-layers
--seq-length --micro-batch-size --global-batch-size --train-iters --lr --adam-beta1 --adam-beta2
--adam-eps --lr-warmup-iters --lr-wsd-decay-iters --min-lr
--weight-decay --clip-grad --seed --eval-iters --log-interval --save --load --save-interval
--num-experts --moe-router-topk --moe-ffn-hidden-size --moe-layer-freq
--moe-shared-expert-intermediate-size --recompute-modules --rope-scaling-factor
--moe-aux-loss-coeff --moe-router-bias-update-rate
"""
CHOICES = {
    "--transformer-impl": "local transformer_engine inference_optimized",
    "--position-embedding-type": "learned_absolute rope yarn mrope relative none",
    "--normalization": "LayerNorm RMSNorm",
    "--ckpt-format": "torch torch_dist torch_dcp fsdp_dtensor",
    "--fp8-format": "e4m3 hybrid",
    "--fp8-recipe": "tensorwise delayed mxfp8 blockwise custom",
    "--recompute-granularity": "full selective",
    "--recompute-method": "uniform block",
    "--optimizer": "adam sgd muon dist_muon lion soap adaptive_muon",
    "--lr-decay-style": "constant linear cosine inverse-square-root WSD",
    "--lr-wsd-decay-style": "exponential linear cosine minus_sqrt",
    "--tokenizer-type": "HuggingFaceTokenizer NullTokenizer",
    "--moe-router-score-function": "softmax sigmoid sqrtsoftplus",
    "--moe-token-dispatcher-type": "allgather alltoall flex",
    "--moe-router-load-balancing-type": "aux_loss seq_aux_loss global_aux_loss sinkhorn "
    "quantile_balancing none",
}
"""Names of options that the script uses, as the parser of NVIDIA/Megatron-LM d98e8a64
(megatron/training/arguments.py, add_megatron_arguments) has them, with what they take."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in SWITCHES.split():
        found.add_argument(name, action="store_true")
    for name in VALUES.split():
        found.add_argument(name)
    for name, choices in CHOICES.items():
        found.add_argument(name, choices=choices.split())
    return found


def arguments(script: str, folder: Path) -> list[str]:
    """What the script would give pretrain_gpt.py, by a python that prints it."""
    python = folder / "python3"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "HEAD_NODE": "n1",
        "NODE_RANK": "0",
    }
    done = subprocess.run(
        ["bash", "-s", "--", "--exit-interval", "5"],
        input=script,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.split("\0")[:-1]
    assert words[-2:] == ["--exit-interval", "5"]
    return words[words.index("pretrain_gpt.py") + 1 : -2]


def parsed(plan: Plan, folder: Path, **job: Any) -> argparse.Namespace:
    script = render("megatron", make_order(plan, **job))
    return parser().parse_args(arguments(script, folder))


def zero1(**layout: Any) -> Layout:
    return Layout(**{"sharding": "zero1", "gradient_sync": "last", **layout})


BF16 = Training(seq_len=128, global_batch=1)


@pytest.mark.parametrize(("blocks", "method", "number"), [("all", "uniform", 1), (3, "block", 3)])
def test_the_first_layers_of_each_stage_are_recomputed(
    blocks: Any, method: str, number: int, tmp_path: Path
) -> None:
    layout = zero1(activation_checkpointing="full", checkpoint_blocks=blocks)
    found = parsed(plan_of(layout, BF16, layers=6), tmp_path)
    assert found.recompute_granularity == "full"
    assert found.recompute_method == method
    assert int(found.recompute_num_layers) == number


@pytest.mark.parametrize(("vocab", "multiple"), [(50257, "16"), (50304, None)])
def test_a_vocabulary_is_padded_to_as_many_rows_as_are_priced(
    vocab: int, multiple: str | None, tmp_path: Path
) -> None:
    layout = zero1(tp=8, sequence_parallel=True, loss_parallel=True)
    plan = plan_of(layout, BF16, vocab=vocab)
    found = parsed(plan, tmp_path)
    assert found.vocab_size == str(vocab)
    assert found.make_vocab_size_divisible_by == multiple
    assert plan.model.vocab_rows(8) == 50304


def test_embedding_and_loss_can_be_stages_of_their_own(tmp_path: Path) -> None:
    layout = zero1(
        pp=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
        num_microbatches=4,
        stage_blocks=(0, 2, 2, 0),
    )
    found = parsed(plan_of(layout, BF16, layers=4), tmp_path)
    assert found.pipeline_model_parallel_layout == "E|tt|tt|L"


def test_a_pipeline_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    layout = zero1(
        dp_shard=2,
        dp_replicate=2,
        tp=2,
        pp=2,
        schedule="interleaved_1f1b",
        virtual_stages=2,
        num_microbatches=4,
        sequence_parallel=True,
        loss_parallel=True,
        activation_checkpointing="attention",
        stage_blocks=(1, 2, 2, 1),
    )
    found = parsed(plan_of(layout, BF16, layers=6), tmp_path)
    assert found.tensor_model_parallel_size == "2"
    assert found.pipeline_model_parallel_size == "2"
    assert found.pipeline_model_parallel_layout == "Et|tt|tt|tL"
    assert found.use_distributed_optimizer
    assert found.num_distributed_optimizer_instances == "2"
    assert found.sequence_parallel
    assert found.bf16
    assert found.accumulate_allreduce_grads_in_fp32
    assert found.recompute_modules == "core_attn"
    assert found.global_batch_size == "16"
    assert found.micro_batch_size == "1"
    assert found.seq_length == "128"


def test_fully_shard_is_its_torch_fsdp2(tmp_path: Path) -> None:
    training = Training(seq_len=64, global_batch=1, reduce_dtype="bf16")
    layout = Layout(dp_shard=4, reshard_after_forward="never")
    found = parsed(plan_of(layout, training), tmp_path)
    assert found.use_torch_fsdp2
    assert found.torch_fsdp2_no_reshard_after_forward
    assert found.grad_reduce_in_bf16
    assert not found.use_distributed_optimizer


def test_its_defaults_have_no_overlaps(tmp_path: Path) -> None:
    lm = Training(seq_len=64, global_batch=1, runtime="megatron_lm")
    megatron = Training(seq_len=64, global_batch=1, runtime="megatron")
    assert not parsed(plan_of(zero1(dp_shard=2), lm), tmp_path).overlap_grad_reduce
    assert parsed(plan_of(zero1(dp_shard=2), megatron), tmp_path).overlap_param_gather


def test_whole_experts_on_tensor_parallel_ranks_are_expert_parallel_ranks(tmp_path: Path) -> None:
    plan = plan_of(
        zero1(
            dp_shard=2, tp=2, ep=2, experts_over_tp=True, sequence_parallel=True, loss_parallel=True
        ),
        BF16,
        experts=Experts(experts=8, active=2, hidden=32),
    )
    found = parsed(plan, tmp_path)
    assert found.expert_model_parallel_size == "4"
    assert found.expert_tensor_parallel_size == "1"


def test_the_model_is_said(tmp_path: Path) -> None:
    experts = Experts(
        experts=8, active=2, hidden=32, shared_hidden=64, shared_gate=True, dense_layers=1
    )
    plan = plan_of(
        zero1(dp_shard=2, ep=2),
        BF16,
        layers=3,
        qk_norm=True,
        tied_embeddings=True,
        attention_bias=True,
        experts=experts,
    )
    found = parsed(plan, tmp_path)
    assert found.num_layers == "3"
    assert found.num_query_groups == "2"
    assert found.kv_channels == "16"
    assert found.qk_layernorm
    assert found.add_qkv_bias
    assert not found.untie_embeddings_and_output_weights
    assert found.num_experts == "8"
    assert found.expert_model_parallel_size == "2"
    assert found.moe_layer_freq == "([0]*1+[1]*2)"
    assert found.moe_shared_expert_intermediate_size == "64"


BALANCED: list[tuple[Router, Trainer, float | None]] = [
    (Router(), Trainer(), AUXILIARY_COEFFICIENT),
    (Router(aux_loss_coef=0.02), Trainer(), 0.02),
    (Router(aux_loss_coef=0.02, normalised=False), Trainer(router_aux_loss_coef=0.5), 0.5),
    (Router(aux_loss_coef=0.02), Trainer(router_aux_loss_coef=0.0), None),
    (Router(scores="sigmoid"), Trainer(), None),
]


@pytest.mark.parametrize(("router", "program", "coefficient"), BALANCED)
def test_experts_are_balanced_as_the_reference_trainer_does(
    router: Router, program: Trainer, coefficient: float | None, tmp_path: Path
) -> None:
    """In blocks that route alike, the sum of Megatron-LM's losses is the loss of all blocks."""
    experts = Experts(experts=8, active=2, hidden=32, dense_layers=1, router=router)
    plan = plan_of(zero1(dp_shard=2), BF16, layers=4, experts=experts)
    found = parsed(plan, tmp_path, program=program)
    assert found.moe_router_enable_expert_bias == (router.scores == "sigmoid")
    if coefficient is None:
        assert found.moe_router_load_balancing_type == "none"
        assert found.moe_aux_loss_coeff is None
        return
    assert found.moe_router_load_balancing_type == "aux_loss"
    tokens, mixtures = 5, 3
    chosen, probable = [4, 3, 2, 1, 0, 0, 0, 0], [0.5, 0.2, 0.1, 0.1, 0.1, 0, 0, 0]
    # `switch_load_balancing_loss_func`, of sums over tokens
    scale = 8 * float(found.moe_aux_loss_coeff) / (2 * tokens * tokens)
    of_block = sum(f * p * tokens for f, p in zip(chosen, probable, strict=True)) * scale
    ours = 8 * sum(f / tokens * p for f, p in zip(chosen, probable, strict=True))
    assert mixtures * of_block == pytest.approx(coefficient * ours, rel=1e-5)


def test_biases_are_said_where_it_has_them(tmp_path: Path) -> None:
    program = Trainer(expert_bias_rate=0.01)
    plans = [
        plan_of(
            zero1(dp_shard=2),
            BF16,
            experts=Experts(experts=8, active=2, hidden=32, router=Router(scores=scores)),
        )
        for scores in ("sigmoid", "softmax")
    ]
    found = parsed(plans[0], tmp_path, program=program)
    assert found.moe_router_bias_update_rate == "0.01"
    with pytest.raises(SpecError, match="--router-aux-loss-coef"):
        render("megatron", make_order(plans[1], program=program))


def test_positions_are_scaled_as_llamas(tmp_path: Path) -> None:
    llama = RopeScaling(kind="llama3", factor=8.0, original_positions=8192, low=1, high=4)
    found = parsed(plan_of(zero1(dp_shard=2), BF16, rope_scaling=llama), tmp_path)
    assert (found.use_rope_scaling, found.rope_scaling_factor) == (True, "8.0")
    assert not parsed(plan_of(zero1(dp_shard=2), BF16), tmp_path).use_rope_scaling


def test_steps_follow_from_tokens_unless_given(tmp_path: Path) -> None:
    training = Training(seq_len=100, global_batch=1, tokens=1001)
    plan = plan_of(zero1(dp_shard=2), training)
    assert parsed(plan, tmp_path).train_iters == "6"
    trainer = Trainer(steps=3, checkpoint_dir="/c k", checkpoint_every=2, seed=9)
    found = parsed(plan, tmp_path, program=trainer)
    assert (found.train_iters, found.save, found.save_interval) == ("3", "/c k", "2")
    assert found.seed == "9"


def test_the_recipe_is_the_trainers_unless_told(tmp_path: Path) -> None:
    plan = plan_of(zero1(dp_shard=2), BF16)
    found = parsed(plan, tmp_path, program=Trainer(steps=50))
    assert (found.lr, found.lr_decay_style, found.lr_warmup_iters) == ("0.0003", "cosine", "5")
    assert float(found.min_lr) == pytest.approx(3e-5)
    assert (found.adam_beta1, found.adam_beta2, found.adam_eps) == ("0.9", "0.95", "1e-08")
    told = Trainer(
        steps=50, lr_schedule="wsd", decay_steps=9, min_lr=0.0, adam_beta2=0.99, adam_eps=1e-6
    )
    found = parsed(plan, tmp_path, program=told)
    assert (found.lr_decay_style, found.lr_wsd_decay_style) == ("WSD", "minus_sqrt")
    assert (found.lr_wsd_decay_iters, found.min_lr, found.adam_eps) == ("9", "0.0", "1e-06")
    constant = parsed(plan, tmp_path, program=Trainer(lr_schedule="constant"))
    assert (constant.lr_decay_style, constant.min_lr) == ("constant", None)


def test_a_warm_up_that_never_ends_is_refused() -> None:
    order = make_order(plan_of(zero1(dp_shard=2), BF16), program=Trainer(steps=5, warmup_steps=5))
    with pytest.raises(SpecError, match="--warmup-steps 5 of 5 steps is refused by Megatron-LM"):
        render("megatron", order)


@pytest.mark.parametrize(
    ("layout", "training", "model", "words"),
    [
        (zero1(dp_shard=2), BF16, {"mlp": "geglu"}, "mlp of model tiny"),
        (zero1(dp_shard=2), BF16, {"sliding_window": 8}, "sliding_window of model"),
        (zero1(dp_shard=2), BF16, {"rope_theta": 1.5}, "rope_theta of model"),
        (
            zero1(dp_shard=2),
            BF16,
            {"rope_scaling": RopeScaling(kind="linear", factor=2)},
            "rope_scaling of model",
        ),
        (zero1(dp_shard=2), BF16, {"attention_output_bias": True}, "biases of model"),
        (zero1(tp=2), BF16, {}, "use --loss-parallel"),
        (Layout(dp_shard=2), BF16, {}, "use --reduce-dtype bf16"),
        (
            zero1(activation_checkpointing="attention", checkpoint_blocks=2),
            BF16,
            {},
            "use --checkpoint-blocks all",
        ),
        (Layout(dp_shard=2, dp_replicate=2), BF16, {}, "sharding fsdp with dp_replicate 2"),
        (Layout(dp_shard=2), BF16, {"tied_embeddings": True}, "tied embeddings"),
        (zero1(dp_shard=2, num_microbatches=2, gradient_sync="every"), BF16, {}, "sync last"),
    ],
)
def test_what_it_cannot_run_is_refused(
    layout: Layout, training: Training, model: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        render("megatron", make_order(plan_of(layout, training, **model)))


def test_shellcheck_finds_nothing() -> None:
    order = make_order(plan_of(zero1(dp_shard=2), BF16), env=(("A", "`b`"),), env_setup=("x y",))
    assert shellcheck(render("megatron", order)) == ""


def test_another_runtime_is_said_in_the_head() -> None:
    text = render("megatron", make_order(plan_of(zero1(dp_shard=2), BF16)))
    assert "# WARNING: the prediction is for runtime fsdp2" in text
    training = Training(seq_len=64, global_batch=1, runtime="megatron")
    assert "WARNING" not in render("megatron", make_order(plan_of(zero1(dp_shard=2), training)))


def test_it_stops_where_the_node_is_not_named(tmp_path: Path) -> None:
    script = render("megatron", make_order(plan_of(zero1(dp_shard=2), BF16)))
    done = subprocess.run(
        ["bash", "-s"],
        input=script,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "HEAD_NODE: the address of the first node" in done.stderr


def test_tensor_parallel_ranks_keep_the_order_of_kernels() -> None:
    layout = zero1(dp_shard=2, tp=2, loss_parallel=True)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in render("megatron", make_order(plan_of(layout, BF16)))
    plain = render("megatron", make_order(plan_of(zero1(dp_shard=2), BF16)))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in plain

"""torchtitan's module: its names are torchtitan's, and torchtitan itself takes it where it is.

FSDPPLAN_TORCHTITAN_PYTHON names a Python that has torchtitan 0.3.0: it wants older packages than
ours, so it lives in an environment of its own.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cost.model.params import parameter_count
from fsdpplan.emit.doors.trainer_words import stage_ranges
from fsdpplan.emit.job import UserProgram
from fsdpplan.emit.targets import render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout, Schedule
from fsdpplan.spec.model import RopeScaling
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.programs.torchtitan import SCHEDULES
from fsdpplan.spec.training import Training
from tests.emit.doors.orders import make_order, plan_of

CALLS = {
    "Trainer.Config": "model_spec hf_assets_path dataloader loss optimizer lr_scheduler training "
    "parallelism "
    "checkpoint activation_checkpoint compile debug",
    "HuggingFaceTextDataLoader.Config": "dataset",
    "CrossEntropyLoss.Config": "global_vocab_size",
    "ChunkedLossWrapper.Config": "num_chunks loss_fn",
    "default_adamw": "lr betas eps",
    "LRSchedulersContainer.Config": "warmup_steps decay_ratio decay_type min_lr_factor",
    "TrainingConfig": "local_batch_size global_batch_size seq_len steps max_norm "
    "mixed_precision_param mixed_precision_reduce enable_cpu_offload disable_cuda_graphs",
    "ParallelismConfig": "data_parallel_replicate_degree data_parallel_shard_degree "
    "fsdp_reshard_after_forward tensor_parallel_degree enable_sequence_parallel "
    "context_parallel_degree pipeline_parallel_degree pipeline_parallel_schedule "
    "pipeline_parallel_microbatch_size module_fqns_per_model_part",
    "CheckpointManager.Config": "enable folder keep_latest_k last_save_model_only interval",
    "FullAC.Config": "",
    "SelectiveAC.Config": "",
    "CompileConfig": "enable components enable_async_tensor_parallel",
    "DebugConfig": "seed",
    "RMSNorm.Config": "normalized_shape eps param_init",
    "Llama3TransformerBlock.Config": "attention_norm ffn_norm attention feed_forward",
    "Qwen3TransformerBlock.Config": "attention_norm ffn_norm attention feed_forward",
    "Llama3Model.Config": "dim vocab_size enable_weight_tying tok_embeddings norm lm_head layers",
    "Qwen3Model.Config": "dim vocab_size enable_weight_tying tok_embeddings norm lm_head layers",
    "make_gqa_config": "dim n_heads n_kv_heads head_dim wqkv_param_init wo_param_init "
    "inner_attention fuse_qkv qk_norm rope",
    "make_ffn_config": "dim hidden_dim w1_param_init w2w3_param_init",
    "ComplexRoPE.Config": "dim max_seq_len theta scaling",
    "CosSinRoPE.Config": "dim max_seq_len theta",
    "Embedding.Config": "num_embeddings embedding_dim param_init",
    "Linear.Config": "in_features out_features param_init",
    "Float8LinearConverter.Config": "recipe_name filter_fqns model_compile_enabled",
    "ModelSpec": "name flavor model parallelize_fn pipelining_fn post_optimizer_build_fn "
    "state_dict_adapter",
}
"""Names of torchtitan 0.3.0 and those of their arguments that the module uses."""

BF16 = Training(seq_len=128, global_batch=1)

PLANS: dict[str, Plan] = {
    "hsdp": plan_of(Layout(dp_shard=4, dp_replicate=2, num_microbatches=2), BF16),
    "pipeline": plan_of(
        Layout(
            dp_shard=2,
            tp=2,
            pp=2,
            schedule="interleaved_1f1b",
            virtual_stages=2,
            num_microbatches=4,
            gradient_sync="last",
            reshard_after_forward="never",
            sequence_parallel=True,
            loss_parallel=True,
            async_tp=True,
            activation_checkpointing="full",
            stage_blocks=(1, 2, 2, 1),
        ),
        BF16,
        layers=6,
    ),
    "qwen": plan_of(
        Layout(dp_shard=2, cp=2, loss_chunks=2, activation_checkpointing="op", offload="cpu"),
        Training(seq_len=128, global_batch=1, precision="fp32"),
        qk_norm=True,
        tied_embeddings=True,
        head_dim=32,
    ),
    "zbv": plan_of(
        Layout(
            dp_shard=2,
            pp=2,
            schedule="zbv",
            virtual_stages=2,
            num_microbatches=4,
            gradient_sync="last",
            compile=False,
        ),
        BF16,
        layers=5,
    ),
}


def calls(text: str) -> dict[str, set[str]]:
    """Name of each function that the text calls with arguments by name -> those names."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.keywords:
            names = {keyword.arg or "" for keyword in node.keywords}
            found.setdefault(ast.unparse(node.func), set()).update(names)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_it_uses_only_names_of_torchtitan(name: str) -> None:
    text = render("torchtitan", make_order(PLANS[name]))
    for function, names in calls(text).items():
        if function != "partial":
            assert names <= set(CALLS[function].split()), function


def parallelism(plan: Plan) -> dict[str, Any]:
    text = render("torchtitan", make_order(plan))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ParallelismConfig":
            return {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}
    raise AssertionError("no ParallelismConfig")


def test_the_degrees_are_the_plans() -> None:
    found = parallelism(PLANS["pipeline"])
    assert found["data_parallel_shard_degree"] == 2
    assert found["tensor_parallel_degree"] == 2
    assert found["pipeline_parallel_degree"] == 2
    assert found["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert found["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
        ["layers.5", "norm", "lm_head"],
    ]


def arguments_of(function: str, text: str) -> dict[str, Any]:
    """What a function is called with, whose arguments are values."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    )
    return {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}


@pytest.mark.parametrize(
    ("said", "kind", "share"),
    [
        ({}, "cosine", None),
        ({"lr_schedule": "linear"}, "linear", None),
        ({"lr_schedule": "wsd", "decay_steps": 37}, "sqrt", 37),
        ({"lr_schedule": "constant"}, "linear", 0),
    ],
)
def test_the_schedule_is_the_trainers(said: dict[str, Any], kind: str, share: int | None) -> None:
    trainer = Trainer(steps=300, learning_rate=2e-4, warmup_steps=40, **said)
    text = render("torchtitan", make_order(PLANS["hsdp"], program=trainer))
    found = arguments_of("LRSchedulersContainer.Config", text)
    assert (found["warmup_steps"], found["decay_type"]) == (40, kind)
    assert found["min_lr_factor"] == 0.1
    ratio = found["decay_ratio"]
    assert (ratio if ratio is None else round(300 * ratio)) == share  # as torchtitan rounds it


def test_adamw_is_told() -> None:
    trainer = Trainer(adam_beta1=0.8, adam_beta2=0.99, adam_eps=1e-6)
    text = render("torchtitan", make_order(PLANS["hsdp"], program=trainer))
    assert arguments_of("default_adamw", text) == {"lr": 3e-4, "betas": (0.8, 0.99), "eps": 1e-6}


def test_the_ends_can_be_stages_of_their_own() -> None:
    layout = replace(PLANS["pipeline"].layout, stage_blocks=(0, 2, 2, 0))
    found = parallelism(plan_of(layout, BF16, layers=4))
    assert found["module_fqns_per_model_part"] == [
        ["tok_embeddings"],
        ["layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["norm", "lm_head"],
    ]


def test_tables_have_the_rows_that_are_priced() -> None:
    plan = plan_of(Layout(tp=2, sequence_parallel=True, loss_parallel=True), BF16, vocab=50257)
    text = render("torchtitan", make_order(plan))
    assert "vocab_size=50272,  # of 50257, padded" in text
    assert "global_vocab_size=50272" in text
    assert text.count("50272") == 4


def test_scaled_positions_are_llamas_or_refused() -> None:
    llama = RopeScaling(kind="llama3", factor=8, original_positions=8192, low=1, high=4)
    layout = Layout(dp_shard=2)
    text = render("torchtitan", make_order(plan_of(layout, BF16, rope_scaling=llama)))
    assert 'scaling="llama"' in text
    assert "scaling" not in render("torchtitan", make_order(plan_of(layout, BF16)))
    other = replace(llama, factor=32)
    with pytest.raises(SpecError, match="rope_scaling of model"):
        render("torchtitan", make_order(plan_of(layout, BF16, rope_scaling=other)))


def test_every_block_is_in_one_stage() -> None:
    ranges = stage_ranges(PLANS["zbv"].layout)
    assert [block for blocks in ranges for block in blocks] == list(range(5))


@pytest.mark.parametrize(("schedule", "name"), SCHEDULES.items())
def test_torch_knows_the_schedule(schedule: Schedule, name: str) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert get_schedule_class(name) is not None


def test_strings_of_a_person_stay_strings() -> None:
    hostile = "x'''\"\"\"\n#{}\\"
    plan = plan_of(Layout(dp_shard=2), BF16, name=hostile)
    trainer = Trainer(checkpoint_dir=hostile)
    text = render("torchtitan", make_order(plan, program=trainer, env=(("A", "b\n$(c)"),)))
    constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    assert constants.count(hostile) == 2
    assert "export A=$'b\\n$(c)'" in text


@pytest.mark.parametrize(
    ("layout", "training", "model", "words"),
    [
        (Layout(dp_shard=2), BF16, {"mlp": "gelu"}, "mlp of model tiny"),
        (Layout(dp_shard=2), BF16, {"norm": "layernorm", "mlp_bias": True}, "norm and mlp_bias"),
        (Layout(tp=2), BF16, {}, "use --loss-parallel"),
        (Layout(dp_shard=2, num_microbatches=2, gradient_sync="last"), BF16, {}, "sync every"),
        (Layout(dp_shard=2, loss_chunks=3), BF16, {}, "loss_chunks 3"),
        (
            Layout(dp_shard=2, activation_checkpointing="full", checkpoint_blocks=2),
            BF16,
            {},
            "plan again with --checkpoint-blocks all",
        ),
        (
            Layout(dp_shard=2),
            Training(seq_len=128, global_batch=1, precision="fp8"),
            {},
            "use --fp8-recipe rowwise",
        ),
        (
            Layout(pp=2, schedule="gpipe"),
            BF16,
            {"tied_embeddings": True},
            "tied embeddings",
        ),
    ],
)
def test_what_it_cannot_run_is_refused(
    layout: Layout, training: Training, model: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        render("torchtitan", make_order(plan_of(layout, training, **model)))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"program": UserProgram(script="train.py")}, "its own training program, not train.py"),
        ({"program": Trainer(data="x.txt")}, "--data is of the reference trainer"),
        ({"program": Trainer(param_group=("*:lr=1",))}, "--param-group is of the reference"),
        ({"partition": "gpu"}, "--partition has no meaning"),
    ],
)
def test_options_without_a_meaning_are_refused(job: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        render("torchtitan", make_order(**job))


REHEARSAL = """
import json, sys
import torch
from fsdpplan_torchtitan import train

config = train()
with torch.device("meta"):
    model = config.model_spec.model.build()
config.model_spec.model.update_from_config(config=config)
unique = {id(p): p.numel() for p in model.parameters()}
print(json.dumps({"parameters": sum(unique.values()), "parts":
    config.parallelism.module_fqns_per_model_part, "steps": config.training.steps}))
"""


@pytest.mark.parametrize("name", PLANS)
def test_torchtitan_takes_the_module(name: str, tmp_path: Path) -> None:
    python = os.environ.get("FSDPPLAN_TORCHTITAN_PYTHON")
    if python is None:
        pytest.skip("FSDPPLAN_TORCHTITAN_PYTHON names no Python with torchtitan 0.3.0")
    text = render("torchtitan", make_order(PLANS[name]))
    (tmp_path / "fsdpplan_torchtitan.py").write_text(text)
    done = subprocess.run(
        [python, "-c", REHEARSAL],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameters"] == parameter_count(PLANS[name].model)
    assert found["steps"] == 20

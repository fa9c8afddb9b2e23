"""Accelerate's file, read by Accelerate's own loader where it is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdpplan.emit.doors.accelerate import configuration
from fsdpplan.emit.job import UserProgram
from fsdpplan.emit.targets import render
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.errors import SpecError
from fsdpplan.spec.layout import Layout
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.training import Training
from tests.emit.doors.orders import make_order, plan_of
from tests.emit.plans import make_plan

BF16 = Training(seq_len=128, global_batch=1, reduce_dtype="bf16")

KEYS = """
compute_environment distributed_type mixed_precision num_machines num_processes machine_rank
same_network rdzv_backend main_training_function use_cpu debug fsdp_config parallelism_config
dynamo_config
"""
"""Fields of accelerate 1.15.0's ClusterConfig that the file uses."""

PLANS: dict[str, Plan] = {
    "hsdp": make_plan("cuda", nodes=2, per_node=4, num_microbatches=2),
    "never": plan_of(Layout(dp_shard=4, reshard_after_forward="never", compile=False), BF16),
    "tp": plan_of(Layout(dp_shard=2, tp=2), BF16),
    "cp": plan_of(Layout(dp_shard=2, cp=2, offload="cpu"), BF16),
    "full": plan_of(Layout(dp_shard=2, activation_checkpointing="full"), BF16),
    "ddp": plan_of(Layout(dp_replicate=4, sharding="ddp", gradient_sync="last")),
    "autocast": plan_of(
        Layout(dp_replicate=4, sharding="ddp"),
        Training(seq_len=128, global_batch=1, runtime="autocast"),
    ),
    "one": plan_of(Layout(sharding="ddp")),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_file_says_the_configuration(name: str) -> None:
    text = render("accelerate", make_order(PLANS[name]))
    found = yaml.safe_load(text)
    assert found == configuration(PLANS[name])
    assert set(found) <= set(KEYS.split())


@pytest.mark.parametrize("name", PLANS)
def test_its_own_loader_takes_the_file(name: str, tmp_path: Path) -> None:
    arguments = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    path = tmp_path / "accelerate.yaml"
    path.write_text(render("accelerate", make_order(PLANS[name])))
    loaded = arguments.load_config_from_file(str(path))
    plan = PLANS[name]
    assert loaded.num_processes == plan.cluster.gpus
    assert loaded.num_machines == plan.cluster.nodes
    assert (loaded.distributed_type.value == "FSDP") == (plan.layout.sharding == "fsdp")
    if loaded.parallelism_config:
        degrees = {
            key.removeprefix("parallelism_config_"): value
            for key, value in loaded.parallelism_config.items()
            if key.endswith("_size")
        }
        built = importlib.import_module("accelerate").ParallelismConfig(**degrees)
        assert built.total_size == plan.cluster.gpus


def test_an_unknown_key_would_be_caught(tmp_path: Path) -> None:
    """What the test above rests on."""
    arguments = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_version: 2\n")
    with pytest.raises(ValueError, match="unknown keys"):
        arguments.load_config_from_file(str(path))


def test_fsdp_is_version_2() -> None:
    found = configuration(PLANS["never"])
    assert found["fsdp_config"]["fsdp_version"] == 2  # type: ignore[index,call-overload]
    assert found["fsdp_config"]["fsdp_reshard_after_forward"] is False  # type: ignore[index,call-overload]
    assert "dynamo_config" not in found
    assert found["mixed_precision"] == "bf16"


def test_what_is_left_to_the_script_is_said() -> None:
    text = render("accelerate", make_order(PLANS["hsdp"]))
    assert "#   sequences of 64 tokens, 1 a batch of each process" in text
    assert "GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)" in text


def test_the_line_that_starts_it() -> None:
    program = UserProgram(script="my train.py", args=("--x", "$(y)"))
    text = render("accelerate", make_order(program=program, port=4321))
    assert "--main_process_port 4321 'my train.py' --x '$(y)'" in text
    assert '--machine_rank "$NODE_RANK" --main_process_ip "$HEAD_NODE"' in text
    assert "YOUR_SCRIPT.py" in render("accelerate", make_order())


@pytest.mark.parametrize(
    ("layout", "training", "words"),
    [
        (
            Layout(dp_shard=2),
            Training(seq_len=64, global_batch=1),
            "use --reduce-dtype bf16",
        ),
        (Layout(dp_replicate=2), BF16, "over one rank"),
        (
            Layout(dp_shard=2, activation_checkpointing="full", checkpoint_blocks=2),
            BF16,
            "plan again with --checkpoint-blocks all",
        ),
        (Layout(dp_replicate=2, cp=2), BF16, "use --dp-shard 2"),
        (Layout(dp_replicate=2, tp=2, sharding="ddp"), None, "use --sharding fsdp"),
        (Layout(dp_shard=2, reshard_after_forward=2), BF16, "reshard_after_forward 2"),
    ],
)
def test_what_it_cannot_run_is_refused(
    layout: Layout, training: Training | None, words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        render("accelerate", make_order(plan_of(layout, training)))


def test_a_padded_vocabulary_is_refused_for_a_model_with_tables_of_its_own() -> None:
    plan = plan_of(Layout(dp_shard=2), BF16, vocab=61, vocab_multiple=64)
    with pytest.raises(SpecError, match=r"padded to 64 rows.*--program hf"):
        render("accelerate", make_order(plan))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({"program": Trainer(steps=3)}, "--steps is of the reference trainer"),
        ({"program": Trainer(lr_schedule="wsd")}, "--lr-schedule is of the reference trainer"),
        ({"time": "10"}, "--time has no meaning for --target accelerate"),
    ],
)
def test_options_without_a_meaning_are_refused(job: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        render("accelerate", make_order(**job))

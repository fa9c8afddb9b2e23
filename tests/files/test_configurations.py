from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpplan.errors import SpecError
from fsdpplan.files.configurations import accelerate, deepspeed, torchtitan
from fsdpplan.files.configurations.configuration import Configuration, Sorting
from fsdpplan.files.configurations.read import read_configuration
from fsdpplan.files.configurations.tree import configuration_fields

ZERO_3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "steps_per_print": 10,
}
FSDP_2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_reshard_after_forward: false
  fsdp_version: 2
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
TITAN = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
mixed_precision_param = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
[compile]
enable = true
[activation_checkpoint]
mode = "full"
[experimental]
custom_import = "mine"
"""


def read(text: str, name: str = "config") -> Configuration:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / name
        place.write_text(text, encoding="utf-8", errors="surrogatepass")
        return read_configuration(place)


def test_deepspeed() -> None:
    found = read(json.dumps(ZERO_3))
    assert found.tool == "DeepSpeed"
    assert found.accumulation == 4
    assert found.options == {
        "precision": "bf16",
        "sharding": "fsdp",
        "micro_batch": "2",
        "optimizer": "adamw",
        "reduce_dtype": "bf16",
        "runtime": "fsdp2_others",
        "compile": "no",
    }
    assert found.not_understood == (
        "zero_optimization.overlap_comm = True",
        "zero_optimization.reduce_bucket_size = auto",
    )
    assert "steps_per_print" in found.idle


@pytest.mark.parametrize(("stage", "sharding"), [(0, "ddp"), (1, "zero1"), (2, "zero2")])
def test_stages_of_zero(stage: int, sharding: str) -> None:
    assert read(json.dumps({"zero_optimization": {"stage": stage}})).options["sharding"] == sharding


def test_state_on_the_host_is_read_where_all_of_it_is_there() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    alone = read(json.dumps({"zero_optimization": zero}))
    assert "offload" not in alone.options
    assert "zero_optimization.offload_optimizer.device = cpu" in alone.not_understood
    both = read(json.dumps({"zero_optimization": {**zero, "offload_param": {"device": "cpu"}}}))
    assert both.options["offload"] == "cpu"


def test_accelerate() -> None:
    found = read(FSDP_2)
    assert found.tool == "Accelerate"
    assert found.options == {
        "sharding": "fsdp",
        "precision": "bf16",
        "gpus": "16",
        "gpus_per_node": "8",
        "reshard_after_forward": "never",
        "activation_checkpointing": "full",
        "program": "accelerate",
        "compile": "no",
    }
    assert found.not_understood == ()


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "4"])
def test_fsdp_1_and_its_hybrid_strategy(strategy: str) -> None:
    text = FSDP_2.replace("fsdp_version: 2", f"fsdp_sharding_strategy: {strategy}")
    options = read(text.replace("  fsdp_reshard_after_forward: false\n", "")).options
    assert (options["runtime"], options["dp_shard"], options["dp_replicate"]) == ("fsdp1", "8", "2")
    assert options["reduce_dtype"] == "bf16"
    assert "program" not in options


def test_deepspeed_inside_of_accelerate() -> None:
    head = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\n"
    found = read(f"{head}deepspeed_config:\n  zero_stage: 3\n  gradient_accumulation_steps: 2\n")
    assert (found.options["sharding"], found.accumulation) == ("fsdp", 2)
    with pytest.raises(SpecError, match=r"settings are in ds\.json"):
        read(f"{head}deepspeed_config:\n  deepspeed_config_file: ds.json\n")


def test_torchtitan() -> None:
    found = read(TITAN)
    assert found.tool == "torchtitan"
    assert found.options == {
        "model": "llama-3.1-70b",
        "seq_len": "8192",
        "precision": "bf16",
        "dp_replicate": "1",
        "tp": "8",
        "async_tp": "yes",
        "pp": "1",
        "compile": "yes",
        "activation_checkpointing": "full",
        "micro_batch": "8",
        "program": "torchtitan",
        "sharding": "fsdp",
    }
    assert found.accumulation == 1
    assert found.not_understood == ("experimental.custom_import = mine",)


def test_a_pipeline_of_torchtitan_splits_the_local_batch() -> None:
    text = TITAN.replace(
        "pipeline_parallel_degree = 1",
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "1F1B"\n'
        "pipeline_parallel_microbatch_size = 2",
    )
    found = read(text)
    assert (found.options["schedule"], found.options["micro_batch"]) == ("1f1b", "2")
    assert found.accumulation == 4


REFUSED = [
    ("import torch\nconfig = 1\n", "c", "Python program, which is not run"),
    ("class Config:\n  x: int\n", "c.yaml", "Python program, which is not run"),
    ("a: &x [1]\nb: *x\n", "c.yaml", "line 1: anchors"),
    ("a: !!python/object/apply:os.system [ls]\n", "c.yaml", "line 1: the tag"),
    ("a: [" * 40 + "]" * 40, "c.yaml", "nests more than"),
    ("a: b: c\n", "c.yaml", "line 1: it is not YAML"),
    ("a: 1\na: 2\n", "c.yaml", "line 2: a key"),
    ('{"zero_optimization": {"stage": 3}', "c.json", "line 1"),
    ('{"a": ' * 100_000, "c.json", "c.json"),
    ("[model\n", "c.toml", r"not TOML.*line 1"),
    ("a = " + "[" * 5000, "c.toml", "c.toml"),
    ("#SBATCH -N 2\n", "c", "a Slurm script"),
    ('{"model_type": "llama"}', "c.json", "Hugging Face model"),
    ("x: 1\n", "c.yaml", "read are configurations of"),
    ("distributed_type: XLA\n", "c.yaml", "distributed_type XLA is not read"),
    ("distributed_type: FSDP\nnum_processes: 7\nnum_machines: 2\n", "c.yaml", "does not fill"),
    ('{"bf16":{"enabled":true},"fp16":{"enabled":true},"train_batch_size":1}', "c", "refuses"),
]


@pytest.mark.parametrize(("text", "name", "message"), REFUSED)
def test_what_is_no_configuration_is_refused_in_one_line(
    text: str, name: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as refused:
        read(text, name)
    assert "\n" not in str(refused.value)


PLAIN = st.one_of(
    st.booleans(),
    st.none(),
    st.integers(-(10**15), 10**15),
    st.text("abcxyzABC_-", max_size=8),
    st.sampled_from(["yes", "no", "1e-5", "0.5", "off", "12", "null", "bf16"]),
)
KEYS = st.text("abcdefg_", min_size=1, max_size=6)
TREES = st.dictionaries(
    KEYS, st.one_of(PLAIN, st.dictionaries(KEYS, PLAIN, min_size=1, max_size=3)), min_size=1
)


@given(TREES)
def test_yaml_and_json_of_the_same_values_have_the_same_fields(tree: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, other = Path(folder) / "a.yaml", Path(folder) / "b.json"
        one.write_text(yaml.safe_dump(tree), encoding="utf-8")
        other.write_text(json.dumps(tree), encoding="utf-8")
        assert configuration_fields(one) == configuration_fields(other)


WHOLE = (json.dumps(ZERO_3, indent=1), FSDP_2, TITAN)
JUNK = ("", "{", "]" * 50, ": ", "!!x ", "&a ", "\x00", "9" * 5000, "- ", "\t", "= 1", "-1", "é")


@settings(max_examples=300)
@given(st.sampled_from(WHOLE), st.integers(0, 2000), st.integers(0, 40), st.sampled_from(JUNK))
def test_no_changed_file_ends_otherwise_than_read_or_in_one_line(
    text: str, at: int, cut: int, junk: str
) -> None:
    at %= len(text)
    try:
        found = read(text[:at] + junk + text[at + cut :])
    except SpecError as error:
        refused = str(error)
    else:
        refused = ""
        assert all(isinstance(value, str) for value in found.options.values())
    assert "\n" not in refused


def test_the_texts_here_are_of_their_formats() -> None:
    assert yaml.safe_load(FSDP_2)["num_processes"] == 16
    assert tomllib.loads(TITAN)["training"]["seq_len"] == 8192


@pytest.mark.parametrize(
    "tool", [deepspeed, accelerate, torchtitan], ids=lambda tool: tool.__name__
)
def test_a_value_that_a_reader_does_not_know_is_listed_and_never_idle(tool: ModuleType) -> None:
    """Also where its table is one of those that change nothing, such as `optimizer.`."""
    for name in tool.READERS:
        sorting = Sorting(fields={name: "auto"})
        sorting.read(tool.READERS, tool.IDLE)
        assert sorting.not_understood == [f"{name} = auto"]
        assert not sorting.idle
        assert not sorting.options


def test_a_precision_that_the_program_around_fills_in_is_none_of_deepspeeds() -> None:
    left_open = deepspeed.deepspeed_configuration(
        {"bf16.enabled": "auto", "fp16.enabled": "auto"}, where="ds.json"
    )
    assert "precision" not in left_open.options
    assert left_open.not_understood == ("bf16.enabled = auto", "fp16.enabled = auto")
    unsaid = deepspeed.deepspeed_configuration({}, where="ds.json")
    assert unsaid.options["precision"] == "fp32"

"""A row becomes the layout that ran, each filled gap is said, each skip has its reason."""

from __future__ import annotations

import pytest

from fsdpplan.cost.params import parameter_count
from fsdpplan.validate.express import Expressed, express
from fsdpplan.validate.skipped import Skipped
from tests.validate.tables import GPT_PIPELINE, LLAMA_8B, run


def expressed(base: dict[str, str] = LLAMA_8B, **changes: str) -> Expressed:
    result = express(run(base, **changes))
    assert isinstance(result, Expressed), result
    return result


def skipped(base: dict[str, str] = LLAMA_8B, **changes: str) -> Skipped:
    result = express(run(base, **changes))
    assert isinstance(result, Skipped)
    return result


# --- the layout ---------------------------------------------------------------------------------


def test_fsdp_is_expressed_as_it_ran() -> None:
    (layout,) = expressed().layouts
    assert (layout.sharding, layout.dp_shard, layout.reshard_after_forward) == (
        "fsdp",
        64,
        "always",
    )
    assert (layout.gradient_sync, layout.activation_checkpointing, layout.compile) == (
        "every",
        "op",
        True,
    )
    assert layout.global_batch == 64


def test_hsdp_keeps_its_replicas() -> None:
    (layout,) = expressed(zero_stage="hsdp", dp_replicate="8", dp_shard="8").layouts
    assert (layout.sharding, layout.dp_replicate, layout.dp_shard) == ("fsdp", 8, 8)


def test_zero_2_keeps_parameters_after_forward() -> None:
    row = expressed(zero_stage="2")
    assert row.layouts[0].reshard_after_forward == "never"
    assert any("ZeRO-2" in sentence for sentence in row.assumptions)


@pytest.mark.parametrize("zero_stage", ["0", "1"])
def test_zero_0_and_1_replicate_over_all_data_parallel_ranks(zero_stage: str) -> None:
    row = expressed(zero_stage=zero_stage, dp_replicate="8", dp_shard="8")
    (layout,) = row.layouts
    assert (layout.sharding, layout.dp_replicate, layout.gradient_sync) == ("ddp", 64, "last")
    assert row.sharded_optimizer_ranks == (8 if zero_stage == "1" else 1)
    assert any("memory not predicted" in s for s in row.assumptions) == (zero_stage == "1")


def test_one_gpu_shards_nothing() -> None:
    (layout,) = expressed(gpus="1", dp_shard="1", global_batch="4").layouts
    assert (layout.sharding, layout.world, layout.num_microbatches) == ("ddp", 1, 4)


def test_a_pipeline_of_megatron_is_expressed() -> None:
    row = expressed(GPT_PIPELINE)
    (layout,) = row.layouts
    assert (layout.tp, layout.pp, layout.dp_replicate) == (8, 2, 4)
    assert (layout.schedule, layout.virtual_stages, layout.num_microbatches) == ("1f1b", 1, 16)
    assert (layout.sequence_parallel, layout.loss_parallel) == (False, True)
    assert "schedule 1f1b" in row.assumptions


@pytest.mark.parametrize(
    ("changes", "schedule", "stages"),
    [
        ({"vpp": "4"}, "interleaved_1f1b", 4),
        ({"schedule": "1f1b", "vpp": "1"}, "1f1b", 1),
        ({"schedule": "interleaved-1f1b"}, "interleaved_1f1b", 2),
        ({"schedule": "gpipe"}, "gpipe", 1),
    ],
)
def test_schedules_keep_their_stages(changes: dict[str, str], schedule: str, stages: int) -> None:
    (layout,) = expressed(GPT_PIPELINE, **changes).layouts
    assert (layout.schedule, layout.virtual_stages) == (schedule, stages)


def test_fsdp_in_a_pipeline_keeps_parameters_and_reduces_last() -> None:
    changes = {"zero_stage": "3", "dp_replicate": "1", "dp_shard": "4"}
    (layout,) = expressed(GPT_PIPELINE, **changes).layouts
    assert (layout.reshard_after_forward, layout.gradient_sync) == ("never", "last")


# --- the model ----------------------------------------------------------------------------------


def test_names_and_shapes_tell_the_style() -> None:
    assert expressed().model.mlp == "swiglu"
    gpt = expressed(GPT_PIPELINE).model
    assert (gpt.mlp, gpt.positions, gpt.tied_embeddings) == ("gelu", "learned", True)
    assert gpt.ffn_hidden == 4 * gpt.hidden
    nameless = expressed(model_name="ours", ffn_hidden="16384").model
    assert nameless.mlp == "gelu"


@pytest.mark.parametrize(("params_b", "tied"), [("8.03", False), ("7.5", True)])
def test_tying_is_what_the_count_says(params_b: str, tied: bool) -> None:
    assert expressed(params_b=params_b).model.tied_embeddings is tied


def test_gpt2_large_has_its_published_parameters() -> None:
    # Hugging Face gpt2-large: 774,030,080
    gpt2_large = {
        "model_name": "GPT-2 Large",
        "params_b": "0.774",
        "layers": "36",
        "hidden": "1280",
        "ffn_hidden": "5120",
        "heads": "20",
        "kv_heads": "20",
        "vocab": "50257",
        "seq_len": "1024",
        "attention_type": "mha",
    }
    assert parameter_count(expressed(**gpt2_large).model) == 774_030_080


def test_missing_layers_and_heads_are_inferred_and_said() -> None:
    row = expressed(layers="", heads="", kv_heads="", attention_type="mha", params_b="9.3")
    assert row.model.heads == 32
    assert parameter_count(row.model) == pytest.approx(9.3e9, rel=0.03)
    assert any("layers, by params_b" in sentence for sentence in row.assumptions)


def test_a_vocabulary_is_taken_from_the_notes_and_padded_for_tp() -> None:
    row = expressed(GPT_PIPELINE, vocab="", notes="vocab stated as 250k; other")
    assert row.model.vocab == 250_000
    padded = expressed(GPT_PIPELINE, vocab="50257").model.vocab
    assert padded == 51_200  # of Megatron: a multiple of 128 * 8


# --- the cluster --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ports", "gigabytes"),
    [
        ("4x100 Gb RoCE per node", 4, 12.5),
        ("4x Omni-Path links/node", 4, 12.5),
        ("1600 Gbps RoCE per node", 8, 25.0),
        ("400 Gb/s RDMA per GPU", 8, 50.0),
        ("400 Gbps", 8, 6.25),
    ],
)
def test_the_network_is_read_from_its_words(words: str, ports: int, gigabytes: float) -> None:
    request = expressed(inter_net_note=words).cluster_request
    assert request.ports == ports
    assert request.port_bandwidth_bytes_per_second == gigabytes * 1e9


@pytest.mark.parametrize("words", ["", "AWS EFA", "0 Gb/s", "fast", "9" * 500])
def test_without_a_bandwidth_the_network_is_the_profiles(words: str) -> None:
    row = expressed(inter_net_note=words)
    assert row.cluster_request.ports is None
    assert any("network of profile dgx-h100" in sentence for sentence in row.assumptions)


def test_one_node_assumes_no_network() -> None:
    row = expressed(gpus="8", dp_shard="8", global_batch="8")
    assert not any("network" in sentence for sentence in row.assumptions)


def test_two_h100_are_a_machine_of_their_own() -> None:
    changes = {"gpus": "2", "gpus_per_node": "2", "dp_shard": "2", "global_batch": "2"}
    assert expressed(**changes).cluster_request.profile == "lambda-2xh100"


# --- the recipe ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "reduce_dtype"),
    [
        (LLAMA_8B, {}, "fp32"),
        (LLAMA_8B, {"notes": "MixedPrecision mode PURE (params+reduce bf16)"}, "bf16"),
        (LLAMA_8B, {"notes": "reduce_dtype=bf16"}, "bf16"),
        (LLAMA_8B, {"notes": "grad-reduce dtype depends on version: bf16 or fp32"}, "fp32"),
        (GPT_PIPELINE, {}, "bf16"),
        (GPT_PIPELINE, {"dtype": "bf16"}, "fp32"),
        (LLAMA_8B, {"framework": "InternEvo", "zero_stage": "1"}, "bf16"),
        (LLAMA_8B, {"framework": "fms-fsdp (PyTorch FSDP1)"}, "bf16"),
        (LLAMA_8B, {"framework": "NeMo/Megatron-Core", "dtype": "fp16"}, "fp32"),
    ],
)
def test_gradients_are_reduced_as_the_software_does(
    base: dict[str, str], changes: dict[str, str], reduce_dtype: str
) -> None:
    assert expressed(base, **changes).training.reduce_dtype == reduce_dtype


def test_megatron_reduces_in_one_piece() -> None:
    row = expressed(GPT_PIPELINE)
    (layout,) = row.layouts
    assert layout.ddp_bucket_bytes > 4 * parameter_count(row.model) / (layout.tp * layout.pp)


def test_autocast_is_a_runtime_of_its_own() -> None:
    row = expressed(dtype="mixed (fp32 parameters, half-precision autocast)")
    assert (row.training.runtime, row.training.precision) == ("autocast", "bf16")


# --- gaps ---------------------------------------------------------------------------------------


def test_a_missing_micro_batch_leaves_each_that_fills_the_batch() -> None:
    layouts = expressed(micro_batch="", global_batch="768").layouts
    assert [one.micro_batch for one in layouts] == [12, 6, 4, 3, 2, 1]
    assert all(one.global_batch == 768 for one in layouts)


def test_missing_checkpointing_tries_none_first() -> None:
    modes = [one.activation_checkpointing for one in expressed(act_ckpt="").layouts]
    assert modes == ["none", "full"]


@pytest.mark.parametrize(
    ("replicate", "shard", "degrees"), [("", "", (1, 64)), ("", "8", (8, 8)), ("4", "", (4, 16))]
)
def test_missing_degrees_follow_from_the_gpus(
    replicate: str, shard: str, degrees: tuple[int, int]
) -> None:
    (layout,) = expressed(dp_replicate=replicate, dp_shard=shard).layouts
    assert (layout.dp_replicate, layout.dp_shard) == degrees


# --- skips --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe": "128/8"}, "mixture of experts"),
        ({"cp": "2", "dp_shard": "64"}, "context parallelism"),
        ({"ep": "8"}, "expert parallelism"),
        ({"dtype": "fp8 (TE)"}, "fp8"),
        ({"dtype": "int4"}, "number format"),
        ({"async_tp": "y"}, "async tensor parallelism"),
        ({"offload": "cpu"}, "offload"),
        ({"gpu": "V100-32GB"}, "no hardware profile for the GPU: V100-32GB"),
        ({"gpu": ""}, "GPU is not named"),
        ({"gpus": ""}, "gpus is not given"),
        ({"hidden": ""}, "hidden is not given"),
        ({"vocab": ""}, "vocab is not given"),
        ({"ffn_hidden": ""}, "ffn_hidden is not given"),
        ({"layers": "", "params_b": ""}, "layers is not given"),
        ({"kv_heads": ""}, "kv_heads is not given"),
        ({"attention_type": "mla"}, "attention"),
        ({"zero_stage": ""}, "zero_stage is not given"),
        ({"global_batch": ""}, "global_batch is not given"),
        ({"global_batch": "65"}, "whole micro-batches"),
        ({"dp_shard": "32"}, "do not multiply"),
        ({"heads": "30", "kv_heads": "30"}, "heads do not divide hidden"),
        ({"kv_heads": "7"}, "contradicts itself"),
    ],
)
def test_a_row_is_skipped_for_a_stated_reason(changes: dict[str, str], says: str) -> None:
    assert says in skipped(**changes).sentence


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schedule": "zbv"}, "schedule is not priced: zbv"),
        ({"schedule": "gpipe", "vpp": "2"}, "schedule is not priced"),
        ({"layers": "1"}, "more pipeline stages than layers"),
        ({"kv_heads": "6"}, "tp does not divide kv_heads"),
        ({"dtype": "mixed"}, "autocast"),
    ],
)
def test_a_pipeline_is_skipped_for_a_stated_reason(changes: dict[str, str], says: str) -> None:
    assert says in skipped(GPT_PIPELINE, **changes).sentence


def test_reasons_have_no_numbers_so_that_rows_are_counted_by_them() -> None:
    assert skipped(dp_shard="32").reason == skipped(dp_shard="16").reason

"""A row becomes the layout that ran, each filled gap is said, each skip has its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpplan.cost.memory.ledger import is_without_ddp
from fsdpplan.cost.model.params import parameter_count
from fsdpplan.files.runs.table import parse_runs
from fsdpplan.validate.compare.predict import Prediction, predict
from fsdpplan.validate.runs.express import Expressed, express
from fsdpplan.validate.runs.skipped import Skipped
from tests.validate.tables import GPT_PIPELINE, LLAMA_8B, run, table


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


def test_zero_0_replicates_over_all_data_parallel_ranks() -> None:
    (layout,) = expressed(zero_stage="0", dp_replicate="8", dp_shard="8").layouts
    assert (layout.sharding, layout.dp_replicate, layout.gradient_sync) == ("ddp", 64, "last")


def test_zero_1_shards_the_optimizer_over_its_own_ranks() -> None:
    (layout,) = expressed(zero_stage="1", dp_replicate="8", dp_shard="8").layouts
    assert (layout.sharding, layout.dp_replicate, layout.dp_shard) == ("zero1", 8, 8)
    assert layout.gradient_sync == "last"


def test_zero_2_of_deepspeed_is_its_own() -> None:
    (layout,) = expressed(framework="Megatron-DeepSpeed", zero_stage="2", act_ckpt="none").layouts
    assert (layout.sharding, layout.reshard_after_forward) == ("zero2", "always")


def test_context_parallel_ranks_are_taken_out_of_the_shard_group() -> None:
    row = expressed(cp="4", global_batch="16")
    (layout,) = row.layouts
    assert (layout.dp_shard, layout.cp, layout.shard_ranks, layout.world) == (16, 4, 64, 64)
    assert any("counts the 4 context-parallel ranks" in sentence for sentence in row.assumptions)


ONE_GPU = {"gpus": "1", "dp_shard": "1", "global_batch": "4"}


@pytest.mark.parametrize(
    ("changes", "sharding", "is_wrapped"),
    [
        ({"zero_stage": "3"}, "fsdp", False),
        ({"zero_stage": "0"}, "ddp", True),
        ({"zero_stage": "", "framework": "PyTorch DDP"}, "ddp", True),
        ({"zero_stage": "", "framework": "PyTorch"}, "ddp", False),
        ({"zero_stage": "", "framework": "torchtitan"}, "ddp", False),
        ({"zero_stage": "0", "date": "2024-12", "framework": "PyTorch"}, "ddp", True),
        ({"zero_stage": "0", "framework": "Megatron-LM"}, "ddp", True),
    ],
)
def test_one_gpu_is_bare_wrapped_or_a_shard_group_as_the_row_says(
    changes: dict[str, str], sharding: str, is_wrapped: bool
) -> None:
    row = expressed(**{"date": "2026-11", **ONE_GPU, **changes})
    (layout, *_) = row.layouts
    assert (layout.sharding, layout.world, layout.num_microbatches) == (sharding, 1, 4)
    without = is_without_ddp(training=row.training, layout=layout)
    assert without == (sharding == "ddp" and not is_wrapped)


def test_a_row_under_the_wrapper_needs_a_second_set_of_gradients() -> None:
    """Accumulated beside the buckets, as before one GPU was bare."""

    def peak(**changes: str) -> int:
        plain = {"date": "2026-11", "act_ckpt": "none"}
        found = predict(expressed(**{**plain, **ONE_GPU, **changes}))
        assert isinstance(found, Prediction)
        return found.memory.peak_allocated_bytes

    wrapped = peak(zero_stage="0")
    bare = peak(zero_stage="", framework="PyTorch")
    assert wrapped - bare == pytest.approx(4 * parameter_count(expressed().model), rel=0.01)


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


@pytest.mark.parametrize(
    ("framework", "changes", "blocks"),
    [
        # torchtitan's 405B in 8 stages: 126 blocks (its generate_split_points)
        ("torchtitan", {"layers": "126", "pp": "8", "gpus": "256"}, (15, *[16] * 6, 15)),
        # nanotron counts the head as work: 32 blocks of 243 M, head of 537 M multiplications
        (
            "nanotron",
            {"layers": "32", "hidden": "4096", "ffn_hidden": "14336", "vocab": "131072",
             "heads": "32", "kv_heads": "32"},
            (18, 14),
        ),
        ("Megatron-LM", {}, (20, 20)),
        ("Megatron-LM", {"notes": "one fewer layer in first/last stage", "pp": "6",
                         "gpus": "192"}, (6, 7, 7, 7, 7, 6)),
        ("Megatron-DeepSpeed", {"notes": "type:transformer|embed", "pp": "6", "gpus": "192"},
         (6, 7, 7, 7, 7, 6)),
        # all stages of Megatron Core hold as many: here with embedding and head counted
        ("NeMo/Megatron-Core", {"layers": "30", "pp": "4", "gpus": "128", "vpp": "8",
                                "schedule": "interleaved-1f1b"}, (0, *[1] * 30, 0)),
        ("NeMo/Megatron-Core", {"layers": "126", "pp": "8", "gpus": "256"}, (15, *[16] * 6, 15)),
    ],
)  # fmt: skip
def test_blocks_are_given_to_stages_as_the_software_does(
    framework: str, changes: dict[str, str], blocks: tuple[int, ...]
) -> None:
    (layout,) = expressed(GPT_PIPELINE, framework=framework, **changes).layouts
    assert layout.stage_blocks == blocks


def test_nemo_interleaves_as_far_as_it_can_where_nothing_is_said() -> None:
    recipe = {"framework": "NeMo/Megatron-Core", "schedule": "", "vpp": ""}
    row = expressed(GPT_PIPELINE, **recipe)
    assert (row.layouts[0].schedule, row.layouts[0].virtual_stages) == ("interleaved_1f1b", 20)
    tuning = expressed(GPT_PIPELINE, **recipe, notes="task=SFT; packed").layouts[0]
    assert (tuning.schedule, tuning.virtual_stages) == ("1f1b", 1)


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


MOE = {
    "model_name": "ours-moe",
    "framework": "Megatron-LM",
    "moe": "64/4",
    "ep": "8",
    "ffn_hidden": "1024",
    "params_b": "",
    "zero_stage": "1",
    "act_ckpt": "none",
}


def test_experts_are_as_wide_as_the_column_or_as_the_count_needs() -> None:
    by_column = expressed(**MOE)
    assert by_column.model.experts is not None
    assert (by_column.model.experts.experts, by_column.model.experts.active) == (64, 4)
    assert by_column.model.experts.hidden == 1024
    assert by_column.layouts[0].ep == 8
    size = parameter_count(by_column.model)
    by_count = expressed(**(MOE | {"ffn_hidden": "", "params_b": str(size / 1e9)})).model
    assert by_count.experts is not None
    assert by_count.experts.hidden == 1024


def test_a_model_of_the_catalogue_has_what_no_column_says() -> None:
    row = expressed(
        model_name="Qwen3-235B-A22B",
        framework="Megatron-LM",
        params_b="235",
        layers="94",
        hidden="4096",
        ffn_hidden="",
        heads="64",
        kv_heads="4",
        vocab="151936",
        moe="128/8",
        zero_stage="1",
        act_ckpt="none",
    )
    experts = row.model.experts
    assert experts is not None
    assert (row.model.head_dim, experts.experts, experts.hidden) == (128, 128, 1536)
    assert "shape of Qwen3-235B-A22B as in the catalogue" in row.assumptions


OVER_TP = {"tp": "2", "dp_shard": "4", "gpus": "8", "global_batch": "4"}


def test_experts_beyond_the_ranks_that_share_state_are_whole_on_tensor_parallel_ones() -> None:
    (layout,) = expressed(**MOE, **OVER_TP).layouts
    assert (layout.ep, layout.experts_over_tp, layout.expert_ranks) == (4, True, 8)


@pytest.mark.parametrize(
    ("notes", "spreads"),
    [
        ("", [False, True]),
        ("expert TP=1; by the launch script", [True]),
        ("expert_tensor_parallel_size=2", [False]),
        ("etp 1", [True]),
    ],
)
def test_how_tensor_parallelism_splits_experts_is_read_or_left_open(
    notes: str, spreads: list[bool]
) -> None:
    layouts = expressed(**(MOE | OVER_TP | {"ep": "4", "notes": notes})).layouts
    assert [layout.experts_over_tp for layout in layouts] == spreads
    assert {layout.expert_ranks for layout in layouts} == {4}


def test_a_row_that_contradicts_itself_about_experts_is_skipped() -> None:
    changes = {"ep": "4", "notes": "expert TP=4"}
    assert "tensor parallelism" in skipped(**(MOE | OVER_TP | changes)).reason


def test_heads_are_those_of_the_nearest_row_of_the_source() -> None:
    wide = {"hidden": "14400", "params_b": "200", "kv_heads": "", "attention_type": "mha"}
    rows = parse_runs(
        table(
            GPT_PIPELINE | wide | {"heads": "96"},
            GPT_PIPELINE | wide | {"heads": "32", "params_b": "20"},
            GPT_PIPELINE | wide | {"heads": ""},
        ),
        where="runs.csv",
    )
    row = express(rows[2])
    assert isinstance(row, Expressed)
    assert row.model.heads == 96
    assert any("nearest row of the source" in sentence for sentence in row.assumptions)


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


@pytest.mark.parametrize("words", ["", "Ethernet", "0 Gb/s", "fast", "9" * 500])
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
        (GPT_PIPELINE, {"date": "2020-09"}, "bf16"),
        (GPT_PIPELINE, {}, "fp32"),
        (GPT_PIPELINE, {"dtype": "bf16"}, "fp32"),
        (LLAMA_8B, {"framework": "InternEvo", "zero_stage": "1", "act_ckpt": "none"}, "bf16"),
        (LLAMA_8B, {"framework": "fms-fsdp (PyTorch FSDP1)"}, "bf16"),
        (LLAMA_8B, {"framework": "NeMo/Megatron-Core", "dtype": "fp16", "act_ckpt": ""}, "fp32"),
        (LLAMA_8B, {"framework": "NeMo", "dtype": "fp8 (TE)", "act_ckpt": ""}, "bf16"),
        (
            GPT_PIPELINE,
            {"framework": "Megatron-DeepSpeed", "notes": "fp32 grad accumulation"},
            "fp32",
        ),
    ],
)
def test_gradients_are_reduced_as_the_software_does(
    base: dict[str, str], changes: dict[str, str], reduce_dtype: str
) -> None:
    assert expressed(base, **changes).training.reduce_dtype == reduce_dtype


@pytest.mark.parametrize(
    ("changes", "runtime"),
    [
        ({}, "fsdp2_others"),
        ({"framework": "fsdpplan (FSDP2), torch 2.11"}, "fsdp2"),
        ({"date": "2024-12"}, "fsdp2_2024"),
        ({"date": "2025-12"}, "fsdp2_others"),
        ({"framework": "llm-foundry/Composer (PyTorch FSDP1)"}, "composer"),
        ({"framework": "fms-fsdp (PyTorch FSDP1)"}, "fsdp1"),
        ({"framework": "NeMo/Megatron-Core", "act_ckpt": "full"}, "megatron"),
        ({"framework": "Megatron-LM", "act_ckpt": "full"}, "megatron_lm"),
        ({"framework": "Megatron-LM", "act_ckpt": "full", "notes": "zero overlap"}, "megatron"),
        ({"framework": "Megatron-LM", "act_ckpt": "full", "date": "2020-09-11"}, "megatron_2020"),
        ({"framework": "Megatron-DeepSpeed", "act_ckpt": "full"}, "megatron_deepspeed"),
        ({"framework": "Megatron-DeepSpeed", "act_ckpt": "full", "date": "2024-01"}, "megatron_lm"),
        ({"framework": "Megatron-LM", "act_ckpt": "full", "date": "2023-02",
          "notes": "with FlashAttention"}, "megatron_lm"),
        ({"framework": "Megatron-LM", "act_ckpt": "full", "date": "2023-02",
          "notes": "no FlashAttention"}, "megatron_2020"),
        ({"framework": "InternEvo", "act_ckpt": "full"}, "internevo"),
        ({"framework": "nanotron", "act_ckpt": "full", "zero_stage": "0"}, "nanotron"),
        ({"framework": "nanotron", "act_ckpt": "full", "zero_stage": "1"}, "nanotron_zero1"),
        ({"framework": "LiBai/OneFlow", "act_ckpt": "full"}, "libai"),
        ({"framework": "a script (FSDP1)"}, "fsdp1"),
        ({"framework": "something new"}, "fsdp2_others"),
        ({"framework": "something new", "date": "2024-01"}, "fsdp2_2024"),
    ],
)  # fmt: skip
def test_the_framework_and_its_date_tell_the_runtime(changes: dict[str, str], runtime: str) -> None:
    assert expressed(**changes).training.runtime == runtime


@pytest.mark.parametrize(
    ("framework", "dtype", "recipe", "gathers"),
    [
        ("torchtitan (FSDP2)", "fp8 (torchao)", "tensorwise", True),
        ("torchtitan (FSDP2)", "fp8 (torchao tensorwise)", "tensorwise", False),
        ("torchtitan (FSDP2)", "fp8 (torchao tensorwise+fp8 all-gather)", "tensorwise", True),
        ("torchtitan (FSDP2)", "fp8 (torchao rowwise)", "rowwise", False),
        ("llm-foundry/Composer", "fp8 (TransformerEngine)", "delayed", False),
        ("NeMo/Megatron-Core", "fp8 (TE)", "delayed", False),
    ],
)
def test_the_words_on_fp8_tell_the_recipe(
    framework: str, dtype: str, recipe: str, gathers: bool
) -> None:
    training = expressed(framework=framework, dtype=dtype, act_ckpt="full").training
    assert training.precision == "fp8"
    assert (training.fp8_recipe, training.fp8_all_gather) == (recipe, gathers)


def test_autocast_is_a_runtime_of_its_own() -> None:
    row = expressed(dtype="mixed (fp32 parameters, half-precision autocast)")
    assert (row.training.runtime, row.training.precision) == ("autocast", "bf16")


# --- gaps ---------------------------------------------------------------------------------------


def test_a_missing_micro_batch_leaves_each_that_fills_the_batch() -> None:
    layouts = expressed(micro_batch="", global_batch="768").layouts
    assert [one.micro_batch for one in layouts] == [12, 6, 4, 3, 2, 1]
    assert all(one.global_batch == 768 for one in layouts)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.5),  # torchtitan: every second block
        ({"mfu": "0.51", "hfu": "0.59"}, 0.47),
        ({"mfu": "0.5", "hfu": "0.9"}, 1.0),
    ],
)
def test_selective_checkpointing_of_pytorch_is_a_share_of_the_blocks(
    changes: dict[str, str], share: float
) -> None:
    row = expressed(act_ckpt="selective", **changes)
    assert row.layouts[0].activation_checkpointing == "full"
    assert row.recomputed_share == pytest.approx(share, abs=0.005)


def test_selective_checkpointing_of_megatron_is_of_attention() -> None:
    row = expressed(GPT_PIPELINE, act_ckpt="selective")
    assert row.layouts[0].activation_checkpointing == "attention"
    assert row.recomputed_share is None


def test_megatron_recomputes_nothing_unless_told_to() -> None:
    (layout,) = expressed(GPT_PIPELINE, act_ckpt="").layouts
    assert layout.activation_checkpointing == "none"


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
        ({"moe": "many"}, "moe is not written as 128/8"),
        ({"moe": "128/8", "ffn_hidden": "", "params_b": ""}, "the width of an expert"),
        ({"cp": "3"}, "cp does not divide dp_shard"),
        ({"cp": "2", "zero_stage": "0"}, "context parallelism without shared state"),
        ({"ep": "8"}, "expert parallelism without experts"),
        ({"moe": "96/8", "ep": "48"}, "ep does not divide the ranks"),
        ({"dtype": "int4"}, "number format"),
        ({"offload": "nvme"}, "offload"),
        ({"gpu": "TPU v5"}, "no hardware profile for the GPU: TPU v5"),
        ({"notes": "task=LoRA"}, "adapters"),
        ({"dtype": "nvfp4"}, "4-bit matmuls"),
        ({"model_name": "nemotron-h-56b"}, "state-space blocks"),
        ({"gpu": ""}, "GPU is not named"),
        ({"gpus": ""}, "gpus is not given"),
        ({"hidden": ""}, "hidden is not given"),
        ({"model_name": "ours", "vocab": ""}, "vocab is not given"),
        ({"model_name": "llama", "ffn_hidden": ""}, "ffn_hidden is not given"),
        ({"layers": "", "params_b": ""}, "layers is not given"),
        ({"model_name": "ours", "kv_heads": ""}, "kv_heads is not given"),
        ({"framework": "PyTorch", "zero_stage": "", "act_ckpt": "full"}, "zero_stage is not given"),
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
        ({"schedule": "chimera"}, "schedule is not priced: chimera"),
        ({"schedule": "gpipe", "vpp": "2"}, "schedule is not priced"),
        ({"layers": "1"}, "more pipeline stages than layers"),
        ({"kv_heads": "6"}, "tp does not divide kv_heads"),
        ({"dtype": "mixed", "framework": "PyTorch"}, "autocast"),
    ],
)
def test_a_pipeline_is_skipped_for_a_stated_reason(changes: dict[str, str], says: str) -> None:
    assert says in skipped(GPT_PIPELINE, **changes).sentence


def test_reasons_have_no_numbers_so_that_rows_are_counted_by_them() -> None:
    assert skipped(dp_shard="32").reason == skipped(dp_shard="16").reason


# --- words and blanks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("framework", "dtype", "precision", "recipe"),
    [
        ("Megatron-LM", "bf16 (TE)", "bf16", None),
        ("Megatron-LM", "fp16 (O2)", "fp16", None),
        ("Megatron-LM", "amp", "bf16", None),
        ("NeMo", "bf16-mixed", "bf16", None),
        ("NeMo", "fp8-cs", "fp8", "tensorwise"),
        ("NeMo", "fp8-ds", "fp8", "delayed"),
        ("NeMo", "mxfp8", "fp8", "delayed"),
        ("NeMo", "fp8 (blockwise)", "fp8", "rowwise"),
        ("torchtitan", "bfloat16", "bf16", None),
    ],
)
def test_number_formats_are_read_in_the_softwares_words(
    framework: str, dtype: str, precision: str, recipe: str | None
) -> None:
    row = expressed(framework=framework, dtype=dtype, act_ckpt="full")
    assert row.training.precision == precision
    assert recipe is None or row.training.fp8_recipe == recipe


@pytest.mark.parametrize(
    "words",
    [
        {"dtype": "pure bf16"},
        {"notes": "bf16 parameters and optimizer states"},
        {"notes": "AdamW states in bf16; no fp32 master weights"},
        {"notes": "model loaded in bf16"},
    ],
)
def test_states_in_half_precision_are_half_the_memory(words: dict[str, str]) -> None:
    row = expressed(framework="transformers Trainer (FSDP)", act_ckpt="full", **words)
    assert row.training.runtime == "half_states"
    usual = expressed(framework="transformers Trainer (FSDP)", act_ckpt="full")
    peaks = []
    for one in (row, usual):
        outcome = predict(one)
        assert isinstance(outcome, Prediction)
        peaks.append(outcome.memory.parameters_bytes + outcome.memory.optimizer_bytes)
    assert 2 * peaks[0] == peaks[1]


def test_megatrons_masters_are_fp32_whatever_is_said_of_the_model() -> None:
    row = expressed(GPT_PIPELINE, notes="model loaded in bf16", dtype="bf16")
    assert row.training.runtime == "megatron_lm"


def test_fsdps_pure_mode_is_not_taken_for_half_states() -> None:
    row = expressed(notes="FSDP MixedPrecision mode PURE (params+reduce bf16)")
    assert row.training.runtime != "half_states"


@pytest.mark.parametrize(
    ("notes", "share"),
    [
        ("recompute 2 of 10 layers", 0.2),
        ("recompute_num_layers=5; recompute_method=block", 0.25),
        ("recompute_num_layers=5; recompute_method=uniform", None),
        ("recomputes 50% of the blocks", 0.5),
        ("", None),
    ],
)
def test_partial_recomputation_is_a_share_of_the_blocks(notes: str, share: float | None) -> None:
    row = expressed(GPT_PIPELINE, act_ckpt="full", notes=notes)
    assert row.recomputed_share == (share if share is None else pytest.approx(share))


def test_modules_that_megatron_recomputes_cost_half_of_all() -> None:
    row = expressed(GPT_PIPELINE, act_ckpt="op")
    assert row.recomputed_share == 0.5


def test_latent_attention_outside_the_catalogue_is_deepseeks() -> None:
    model = expressed(model_name="ours", attention_type="mla", kv_heads="").model
    assert model.latent is not None
    assert (model.latent.kv_rank, model.head_dim) == (512, 192)


def test_a_width_that_is_not_given_is_that_of_the_usual_decoder() -> None:
    columns = ("hidden", "layers", "heads", "kv_heads", "ffn_hidden", "attention_type")
    row = expressed(model_name="ours", params_b="13", **dict.fromkeys(columns, ""))
    assert parameter_count(row.model) == pytest.approx(13e9, rel=0.02)


def test_a_blank_zero_stage_of_megatron_is_the_distributed_optimizer_or_none() -> None:
    row = expressed(GPT_PIPELINE, zero_stage="", dp_replicate="", dp_shard="")
    assert row.layouts[0].sharding == "zero1"
    (unknown,) = [one for one in row.unknown if one.what == "ZeRO stage"]
    assert [case.zero_stage for case in unknown.cases] == ["0"]


def test_what_is_said_is_not_unknown() -> None:
    row = expressed(inter_net_note="8x400 Gb/s")
    assert row.unknown == ()


def test_a_blank_widens_the_band_of_memory_where_it_changes_the_peak() -> None:
    def width(**columns: str) -> float:
        row = predict(expressed(**({"inter_net_note": "8x400 Gb/s"} | columns)))
        assert isinstance(row, Prediction)
        band = row.memory.peak_device_band_bytes
        assert band is not None
        return band.upper / band.expected

    assert width(act_ckpt="full") < width(act_ckpt="")
    said = {"act_ckpt": "full", "inter_net_note": ""}
    assert width(act_ckpt="full") == pytest.approx(width(**said))


def test_each_blank_widens_the_band() -> None:
    known = predict(expressed(inter_net_note="8x400 Gb/s", act_ckpt="full"))
    for blank in ({"inter_net_note": "", "act_ckpt": "full"}, {"act_ckpt": ""}):
        row = predict(expressed(**({"inter_net_note": "8x400 Gb/s"} | blank)))
        assert isinstance(row, Prediction)
        assert isinstance(known, Prediction)
        widths = [one.step_seconds.upper / one.step_seconds.expected for one in (known, row)]
        assert row.unknown_log_error > 0
        assert widths[1] > widths[0]


OWN = LLAMA_8B | {
    "framework": "fsdpplan (FSDP2)",
    "model_name": "of our own",
    "params_b": "",
    "layers": "6",
    "hidden": "2560",
    "heads": "8",
    "kv_heads": "4",
    "seq_len": "1024",
    "gpus": "1",
    "gpus_per_node": "1",
    "dp_shard": "1",
    "global_batch": "1",
}
"""One GPU; a head's width is not that of the stream over the heads."""


def test_columns_that_are_optional_say_what_else_is_taken() -> None:
    plain = expressed(OWN)
    said = expressed(OWN, head_dim="256", tied="y", torch="2.11", allocator="fixed")
    assert (plain.model.head_dim, plain.model.tied_embeddings) == (320, False)
    assert (said.model.head_dim, said.model.tied_embeddings) == (256, True)
    assert said.training.torch == "2.11"
    assert [one.sharding for one in said.layouts] == ["fsdp"]
    assert replace(said.training, torch=plain.training.torch) == plain.training


def test_an_allocator_of_fixed_segments_reserves_more() -> None:
    grows, fixed = (predict(expressed(OWN, allocator=name)) for name in ("growing", "fixed"))
    assert isinstance(grows, Prediction)
    assert isinstance(fixed, Prediction)
    assert grows.memory.peak_allocated_bytes == fixed.memory.peak_allocated_bytes
    assert grows.memory.peak_reserved_bytes < fixed.memory.peak_reserved_bytes

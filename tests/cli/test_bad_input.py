"""Bad input ends in one line that says what to type next, the right exit code, and no file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import DEMO, on_a_machine_without_gpus, words

B8 = ("recommend", "--model", "llama-3.1-8b", "--gpus", "64", "--hardware", "dgx-h100")
ONE = ("estimate", *B8[1:])
BARE = ("recommend", "--gpus", "64", "--hardware", "dgx-h100")


@dataclass(frozen=True, slots=True)
class Case:
    """One command line and what its one line of complaint must hold."""

    words: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 2


CASES = {
    # quantities and their units
    "bandwidth_without_unit": Case((*B8, "--inter-bw", "400"), ("--inter-bw", "GB/s", "Gb/s")),
    "bandwidth_as_amount": Case((*B8, "--intra-bw", "450GB"), ("--intra-bw", "450GB/s")),
    "bandwidth_ambiguous": Case((*B8, "--inter-bw", "400gb/s"), ("400Gb/s", "400GB/s")),
    "bandwidth_negative": Case(
        (
            *B8,
            "--inter-bw=-400Gb/s",
        ),
        ("negative", "400Gb/s"),
    ),
    "bandwidth_nan": Case((*B8, "--inter-bw", "nan"), ("--inter-bw", "450GB/s")),
    "params_in_bytes": Case((*BARE, "--params", "70GB"), ("--params", "70e9")),
    "params_zero": Case((*BARE, "--params", "0"), ("--params", "above 0")),
    "params_negative": Case((*BARE, "--params", "-70e9"), ("--params", "70e9")),
    "params_nan": Case((*BARE, "--params", "nan"), ("--params", "70e9 or 70B")),
    "params_infinite": Case((*BARE, "--params", "inf"), ("--params", "70e9")),
    "params_overflow": Case((*BARE, "--params", "1e999"), ("--params",)),
    "params_with_comma": Case((*BARE, "--params", "70,000"), ("--params", "70e9")),
    "params_tiny": Case((*BARE, "--params", "12"), ("--layers",)),
    "tokens_in_words": Case((*B8, "--tokens", "many"), ("--tokens", "70e9")),
    "headroom_over_one": Case((*B8, "--headroom", "120%"), ("--headroom", "8%")),
    "headroom_nan": Case((*B8, "--headroom", "nan"), ("--headroom", "8%")),
    "gpus_zero": Case(("recommend", "--params", "7B", "--gpus", "0"), ("--gpus", "such as 64")),
    "gpus_negative": Case(("recommend", "--params", "7B", "--gpus", "-8"), ("--gpus", "at least")),
    "gpus_fraction": Case(("recommend", "--params", "7B", "--gpus", "8.5"), ("--gpus", "whole")),
    "gpus_digits": Case(("recommend", "--params", "7B", "--gpus", "9" * 5000), ("--gpus", "999")),
    "gpus_odd_node": Case((*B8, "--gpus", "65"), ("65", "--gpus 64")),
    "seq_len_zero": Case((*B8, "--seq-len", "0"), ("--seq-len", "4096")),
    "seq_len_past_learned": Case(
        ("recommend", "--model", "gpt2", "--gpus", "8", "--seq-len", "2048"), ("--seq-len 1024",)
    ),
    # names
    "model_unknown": Case((*BARE, "--model", "llama-3.1-8c"), ("llama-3.1-8b", "fsdpplan models")),
    "model_of_experts": Case((*BARE, "--model", "grok-1"), ("mixture of experts", "--params")),
    "active_alone": Case((*BARE, "--active-params", "22e9"), ("--params 235e9",)),
    "active_and_model": Case(
        (*BARE, "--model", "mixtral-8x7b", "--active-params", "13e9"), ("--model", "leave out")
    ),
    "active_and_shape": Case(
        (*BARE, "--layers", "4", "--active-params", "13e9"), ("--layers", "leave out")
    ),
    "active_over_total": Case(
        (*BARE, "--params", "7e9", "--active-params", "9e9"), ("--params", "exchange")
    ),
    "active_is_total": Case(
        (*BARE, "--params", "7e9", "--active-params", "7e9"), ("dense", "5.6b")
    ),
    "active_too_few": Case(
        (*BARE, "--params", "7e9", "--active-params", "1e6"), ("at least 175m",)
    ),
    "active_in_words": Case((*B8, "--active-params", "few"), ("--active-params", "70e9")),
    "model_empty": Case((*BARE, "--model", ""), ("--model",)),
    "hardware_unknown": Case((*B8, "--hardware", "dgx-h1000"), ("dgx-h100", "fsdpplan profiles")),
    "hardware_is_a_device": Case((*B8, "--hardware", "h100-sxm-80g"), ("dgx-h100",)),
    "hardware_missing_file": Case((*B8, "--hardware", "./no.toml"), ("no.toml", "does not exist")),
    "gpu_unknown": Case((*B8, "--gpu", "h100-pciee"), ("h100-pcie-80g",)),
    "gpu_without_hardware": Case(
        ("recommend", "--params", "7B", "--gpus", "8", "--gpu", "h100-sxm-80g"), ("--hardware",)
    ),
    "precision_unknown": Case((*B8, "--precision", "bf61"), ("--precision", "bf16")),
    "fp8_on_a100": Case(
        words(
            "recommend --model llama-3.1-8b --gpus 8 --hardware dgx-a100-80g-hdr --precision fp8"
        ),
        ("a100-sxm-80g has no fp8", "--precision bf16"),
    ),
    "fp8_recipe_of_bf16": Case((*B8, "--fp8-recipe", "rowwise"), ("--precision fp8", "leave")),
    "fp8_recipe_unknown": Case((*B8, "--fp8-recipe", "blockwise"), ("tensorwise", "delayed")),
    "documents_of_whole_sequences": Case(
        (*B8, "--mean-document-tokens", "700"), ("--pack", "leave")
    ),
    "packed_elsewhere": Case((*B8, "--pack", "--program", "own"), ("--pack", "--program")),
    "fp8_all_gather_of_bf16": Case((*B8, "--fp8-all-gather"), ("--precision fp8",)),
    "fp8_all_gather_rowwise": Case(
        (*B8, *words("--precision fp8 --fp8-recipe rowwise --fp8-all-gather")), ("tensorwise",)
    ),
    "runtime_unknown": Case((*B8, "--runtime", "horovod"), ("--runtime", "fsdp2")),
    "optimizer_unknown": Case((*B8, "--optimizer", "moun"), ("--optimizer", "muon")),
    "reduce_dtype_unknown": Case((*B8, "--reduce-dtype", "fp16"), ("--reduce-dtype", "fp32")),
    "command_unknown": Case(("recomend",), ("recomend", "fsdpplan --help")),
    "option_unknown": Case((*B8, "--paramz", "7B"), ("--paramz", "--params")),
    "option_without_value": Case((*B8, "--tp"), ("--tp",)),
    "argument_extra": Case((*B8, "70B"), ("70B", "fsdpplan recommend --help")),
    # layouts
    "dp_shard_zero": Case((*B8, "--dp-shard", "0"), ("--dp-shard", "at least 1")),
    "dp_shard_negative": Case((*B8, "--dp-shard", "-8"), ("--dp-shard", "at least 1")),
    "dp_shard_7_of_64": Case((*B8, "--dp-shard", "7"), ("--dp-shard 4", "--dp-shard 8")),
    "product_past_the_gpus": Case(
        (*B8, "--dp-shard", "64", "--tp", "8"), ("--dp-shard 64 x --tp 8 = 512",)
    ),
    "cp_of_an_odd_sequence": Case(
        (*B8, "--cp", "8", "--seq-len", "4100"), ("cp 8", "--seq-len 4096"), code=3
    ),
    "cp_of_an_odd_sequence_estimated": Case(
        (*ONE, *words("--cp 8 --dp-shard 8 --seq-len 4100")), ("4100", "--seq-len 4096")
    ),
    "ep_of_a_dense_model": Case((*B8, "--ep", "2"), ("ep 2", "is dense", "--ep 1")),
    "ep_that_divides_nothing": Case(
        (*BARE, "--model", "mixtral-8x7b", "--ep", "3"), ("8 experts", "--ep 2")
    ),
    "ep_beyond_the_shards": Case(
        (*BARE, "--model", "mixtral-8x7b", *words("--ep 8 --dp-shard 4")), ("--ep 8", "= 4")
    ),
    "zero1_over_one_rank": Case(
        (*ONE, *words("--sharding zero1 --dp-shard 1 --dp-replicate 64")),
        ("--dp-shard of at least",),
    ),
    "zero2_that_reshards": Case(
        (*ONE, *words("--sharding zero2 --dp-shard 64 --reshard-after-forward never")),
        ("nothing to reshard", "leave"),
    ),
    "async_without_tp": Case(
        (*ONE, "--dp-shard", "64", "--async-tp"), ("--tp 2", "leave --async-tp out")
    ),
    "async_without_compile": Case(
        (*ONE, *words("--dp-shard 32 --tp 2 --async-tp --no-compile")),
        ("torch.compile", "--compile"),
    ),
    "offload_of_ddp": Case(
        (*ONE, *words("--sharding ddp --offload cpu")), ("--sharding fsdp", "--offload")
    ),
    "offload_on_a_cpu": Case(
        (*DEMO, "--offload", "cpu"), ("on a CPU", "leave --offload out"), code=3
    ),
    "wrap_blocks_of_ddp": Case(
        (*ONE, *words("--sharding ddp --wrap-blocks 2")), ("--wrap-blocks", "--sharding fsdp")
    ),
    "wrap_blocks_too_many": Case(
        (*ONE, *words("--dp-shard 64 --wrap-blocks 99")), ("32 blocks", "--wrap-blocks 32")
    ),
    "checkpoint_no_blocks": Case((*B8, "--checkpoint-blocks", "0"), ("all or a whole number",)),
    "checkpoint_blocks_of_nothing": Case(
        (*B8, *words("--checkpoint-blocks 4 --activation-checkpointing none")),
        ("--activation-checkpointing full",),
    ),
    "checkpoint_more_blocks_than_there_are": Case(
        (*ONE, *words("--dp-shard 64 --checkpoint-blocks 33")), ("--checkpoint-blocks 32 or less",)
    ),
    "checkpoint_more_blocks_than_a_stage_has": Case(
        (*ONE, *words("--dp-shard 16 --pp 4 --checkpoint-blocks 10")),
        ("--checkpoint-blocks 9 or less",),
    ),
    "stage_blocks_of_words": Case((*B8, "--stage-blocks", "many"), ("9,8,8,7",)),
    "stage_blocks_without_a_pipeline": Case((*B8, "--stage-blocks", "16,16"), ("--pp 2",)),
    "stage_blocks_that_ranks_do_not_share": Case(
        (*B8, *words("--pp 4 --stage-blocks 11,11,10")), ("a multiple of --pp 4",)
    ),
    "stage_blocks_of_other_stages": Case(
        (*B8, *words("--pp 2 --stage-blocks 8,8,8,8 --virtual-stages 4")), ("--virtual-stages 2",)
    ),
    "stage_blocks_that_leave_some_out": Case(
        (*ONE, *words("--dp-shard 16 --pp 4 --stage-blocks 8,8,8,7")), ("add up to 31", "32 blocks")
    ),
    "stage_blocks_that_leave_a_rank_out": Case(
        (*ONE, *words("--dp-shard 16 --pp 4 --stage-blocks 16,0,8,8")), ("give each rank a block",)
    ),
    "bucket_of_fsdp": Case(
        (*ONE, *words("--dp-shard 64 --ddp-bucket 100MiB")), ("--ddp-bucket", "--wrap-blocks")
    ),
    "bucket_without_unit": Case((*B8, "--ddp-bucket", "100"), ("--ddp-bucket", "100GiB")),
    "ddp_with_shards": Case((*B8, "--sharding", "ddp", "--dp-shard", "8"), ("--sharding fsdp",)),
    "reshard_one": Case((*B8, "--reshard-after-forward", "1"), ("always, never", "at least 2")),
    "reshard_word": Case((*B8, "--reshard-after-forward", "often"), ("always, never",)),
    "schedule_split_backward": Case(
        (*ONE, *words("--pp 2 --dp-shard 32 --schedule zbv --reshard-after-forward always")),
        ("silently wrong", "--reshard-after-forward never"),
    ),
    "schedule_of_two_stages": Case(
        (*ONE, *words("--pp 2 --dp-shard 32 --schedule zbv --virtual-stages 3")),
        ("--virtual-stages 2",),
    ),
    "schedule_without_pipeline": Case((*B8, "--schedule", "1f1b", "--pp", "1"), ("--pp 2",)),
    "pipeline_without_schedule": Case((*B8, "--schedule", "none", "--pp", "2"), ("1f1b",)),
    "virtual_stages_of_gpipe": Case(
        (*B8, "--pp", "2", "--schedule", "gpipe", "--virtual-stages", "2"), ("interleaved_1f1b",)
    ),
    "estimate_too_few_ranks": Case(
        (*ONE, "--dp-shard", "8", "--dp-replicate", "4"), ("leaves 2 of 64", "--gpus 32")
    ),
    "estimate_batch_does_not_split": Case(
        (*ONE, "--dp-shard", "64", "--global-batch", "100"), ("--global-batch 128",)
    ),
    "estimate_tp_past_the_heads": Case(
        (*ONE, "--dp-shard", "1", "--dp-replicate", "1", "--tp", "64"), ("tp",)
    ),
    # what is asked for twice, or not at all
    "no_model": Case(BARE, ("--params 70e9", "--model")),
    "two_models": Case((*B8, "--params", "8B"), ("--params and --model", "keep one")),
    "half_a_shape": Case((*BARE, "--layers", "4", "--hidden", "64"), ("--ffn-hidden", "--vocab")),
    "shape_and_model": Case((*B8, "--layers", "4"), ("--model and --layers",)),
    "heads_do_not_divide": Case(
        (
            *BARE,
            *words("--layers 4 --hidden 100 --ffn-hidden 64 --heads 3 --kv-heads 3 --vocab 9"),
        ),
        ("hidden 100", "3 heads", "--hidden"),
    ),
    "no_gpus": Case(("recommend", "--params", "7B"), ("--gpus 64", "--hardware")),
    "inter_bw_on_one_node": Case(
        words("recommend --params 1B --gpus 8 --hardware dgx-h100 --inter-bw 400Gb/s"),
        ("--inter-bw", "leave it out"),
    ),
    # nothing fits
    "nothing_fits": Case(
        words("recommend --params 70e9 --gpus 8 --hardware dgx-h100 --offload none"),
        ("GiB", "too much"),
        code=3,
    ),
    "nothing_is_legal": Case(
        words("recommend --params 7B --gpus 64 --hardware dgx-h100 --tp 64"),
        ("is legal", "leave out --tp"),
        code=3,
    ),
    # files
    "config_missing": Case((*BARE, "--config", "no.json"), ("no.json", "does not exist")),
    "config_is_a_folder": Case((*BARE, "--config", "folder"), ("config.json",)),
    "config_truncated": Case((*BARE, "--config", "truncated.json"), ("not JSON",)),
    "config_binary": Case((*BARE, "--config", "binary.json"), ("not text",)),
    "config_huge": Case((*BARE, "--config", "huge.json"), ("larger than",)),
    "config_deep": Case((*BARE, "--config", "deep.json"), ("deep.json",)),
    "config_nan": Case((*BARE, "--config", "nan.json"), ("NaN",)),
    "config_wrong_types": Case(
        (*BARE, "--config", "wrong_types.json"), ("num_attention_heads", "whole number")
    ),
    "config_of_experts": Case((*BARE, "--config", "experts.json"), ("experts",)),
    "config_escape_codes": Case((*BARE, "--config", "escape.json"), ("model_type",)),
    "profile_truncated": Case((*B8, "--hardware", "./truncated.toml"), ("truncated.toml",)),
    "profile_unknown_key": Case((*B8, "--hardware", "./unknown.toml"), ("colour",)),
    "profile_wrong_types": Case((*B8, "--hardware", "./wrong_types.toml"), ("gpus_per_node",)),
    "profile_huge": Case((*B8, "--hardware", "./huge.toml"), ("larger than",)),
    "plan_missing": Case(("emit-launch",), ("fsdpplan.json", "fsdpplan recommend")),
    "plan_truncated": Case(("emit-launch", "cut_plan.json"), ("not JSON",)),
    "plan_huge": Case(("emit-launch", "huge_plan.json"), ("larger than",)),
    "plan_unknown_key": Case(("emit-launch", "extra_plan.json"), ("colour",)),
    "plan_wrong_type": Case(("emit-launch", "text_plan.json"), ("layout.dp_shard",)),
    "plan_nonsense": Case(("emit-launch", "odd_plan.json"), ("8 ranks",)),
    "plan_is_a_list": Case(("emit-launch", "list_plan.json"), ("one JSON object",)),
    "plan_rank_past_the_list": Case(("emit-launch", "plan.json", "--rank", "999"), ("rank 999",)),
    "plan_rank_zero": Case(("emit-launch", "plan.json", "--rank", "0"), ("--rank", "at least 1")),
    "folder_unwritable": Case((*DEMO, "--save", "/proc/plan.json"), ("/proc/plan.json", "--save")),
    "folder_below_a_file": Case((*DEMO, "--save", "plan.json/below"), ("plan.json/below",)),
    "save_nowhere": Case((*DEMO, "--save", ""), ("--save", "fsdpplan.json")),
    "save_onto_a_folder": Case((*DEMO, "--save", "folder"), ("folder", "--save")),
    "job_folder_below_a_file": Case(
        ("emit-launch", "plan.json", "--out", "plan.json/job"), ("plan.json/job", "--out")
    ),
    # jobs
    "time_in_words": Case(("emit-launch", "plan.json", "--time", "tomorrow"), ("08:00:00",)),
    "args_without_script": Case(("emit-launch", "plan.json", "--args", "-x"), ("--script",)),
    "args_open_quote": Case(
        ("emit-launch", "plan.json", "--script", "t.py", "--args", "'a"), ("--args", "quotes")
    ),
    "trainer_option_for_a_script": Case(
        ("emit-launch", "plan.json", "--script", "t.py", "--steps", "5"), ("--steps", "--args")
    ),
    "env_without_value": Case(("emit-launch", "plan.json", "--env", "A"), ("--env", "=")),
    "env_bad_name": Case(("emit-launch", "plan.json", "--env", "1A=b"), ("variable", "--env")),
    "output_with_variable": Case(("emit-launch", "plan.json", "--output", "$HOME/x"), ("%j",)),
    "job_name_of_two_lines": Case(
        ("emit-launch", "plan.json", "--job-name", "a\nb"), ("--job-name", "line")
    ),
    "learning_rate_nan": Case(
        ("emit-launch", "plan.json", "--learning-rate", "nan"), ("--learning-rate", "3e-4")
    ),
    "sbatch_option_of_ours": Case(
        ("emit-launch", "plan.json", "--sbatch=--nodes=3"), ("--nodes", "plan")
    ),
    "profile_to_show_unknown": Case(("profiles", "nope"), ("nope", "fsdpplan profiles")),
    "model_to_show_unknown": Case(("models", "nope"), ("nope", "fsdpplan models")),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good plan and every kind of broken file."""
    folder = tmp_path_factory.mktemp("bad_input")
    with pytest.MonkeyPatch.context() as patch:
        on_a_machine_without_gpus(patch)
        assert exit_code_of([*DEMO, "--save", str(folder / "plan.json")]) == 0
    text = (folder / "plan.json").read_text()
    config = {"model_type": "llama", "hidden_size": 64}
    files: dict[str, str | bytes] = {
        "truncated.json": '{"model_type": "lla',
        "binary.json": b"\x80\x04\x95\xff\x00",
        "huge.json": " " * 2**21,
        "deep.json": '{"a":' * 100_000,
        "nan.json": '{"model_type": "llama", "hidden_size": NaN}',
        "wrong_types.json": json.dumps(config | {"num_attention_heads": "4"}),
        "experts.json": json.dumps(config | {"model_type": "mixtral", "num_local_experts": 8}),
        "escape.json": json.dumps(config | {"model_type": "\x1b[2J\nllama"}),
        "truncated.toml": 'schema_version = 1\nname = "',
        "unknown.toml": f'colour = "red"\n{_profile("dgx-h100")}',
        "wrong_types.toml": _profile("dgx-h100").replace(
            "gpus_per_node = { value = 8", 'gpus_per_node = { value = "8"'
        ),
        "huge.toml": "#" * 2**20,
        "cut_plan.json": text[: len(text) // 2],
        "huge_plan.json": " " * (9 * 2**20),
        "extra_plan.json": _edited(text, lambda plan: plan["layout"].update(colour="red")),
        "text_plan.json": _edited(text, lambda plan: plan["layout"].update(dp_shard="2")),
        "odd_plan.json": _edited(text, lambda plan: plan["layout"].update(dp_shard=4)),
        "list_plan.json": "[]",
    }
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(data)
    (folder / "folder").mkdir()
    return folder


def _profile(name: str) -> str:
    from fsdpplan.files.profiles.catalogue import profile_text

    return profile_text(name)


def _edited(text: str, edit: Callable[[dict[str, Any]], None]) -> str:
    plan = json.loads(text)
    edit(plan)
    return json.dumps(plan)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input_is_refused_in_one_line(
    case: Case,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(workplace)
    before = _listing(workplace)
    code = exit_code_of(case.words)
    out, err = capsys.readouterr()
    assert code == case.code, err
    assert out == ""
    assert err.startswith("fsdpplan: ")
    assert err.count("\n") == 1, "one line"
    assert err.rstrip("\n").isprintable()
    assert len(err) < 700
    for said in case.says:
        assert said in err, err
    assert _listing(workplace) == before, "nothing half-written"


def _listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((path, os.stat(path).st_mtime_ns) for path in map(str, folder.rglob("*")))


def test_there_are_at_least_forty_of_them() -> None:
    assert len(CASES) >= 40


def test_json_gives_the_error_as_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of([*B8, "--dp-shard", "7", "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["kind"] == "SpecError"
    assert error["exit_code"] == 2
    assert error["message"] in err

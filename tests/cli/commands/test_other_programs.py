"""`--program` of others: `emit-launch --target` takes what is recommended as it is, and the own
parser of the target takes that."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import on_a_machine_without_gpus
from tests.emit.doors.test_megatron import arguments, parser
from tests.emit.doors.test_torchtitan import CALLS, calls

PROGRAMS = {"torchtitan": "torchtitan", "megatron": "Megatron-LM", "accelerate": "Accelerate"}
"""With what they are called in a sentence."""

QUESTIONS = {
    "llama-3.2-1b --gpus 1 --hardware dgx-h100": "torchtitan",
    "llama-3.2-1b --gpus 8 --hardware dgx-a100-80g-hdr": "",
    "qwen3-0.6b --gpus 4 --hardware pcie-8xrtx4090": "",
    "gpt2-xl --gpus 8 --hardware dgx-a100-80g-hdr --seq-len 1024": "torchtitan",
    "llama-3.1-8b --gpus 8 --hardware dgx-h100": "",
    "llama-3.1-8b --gpus 8 --hardware dgx-h100 --precision fp8": "accelerate",
    "llama-3.1-8b --gpus 16 --hardware dgx-h100 --precision fp32": "",
    "gemma-2-9b --gpus 16 --hardware dgx-h100": "torchtitan megatron",
    "qwen3-8b --gpus 16 --hardware azure-nd-mi300x-v5": "",
    "mistral-nemo-12b --gpus 16 --hardware p5-48xlarge": "",
    "qwen3-14b --gpus 24 --hardware oci-bm-gpu-h200-8": "",
    "qwen3-32b --gpus 64 --hardware dgx-a100-80g-hdr": "",
    "llama-3.1-70b --gpus 64 --hardware dgx-h100": "",
    "llama-3.1-70b --gpus 16 --hardware dgx-h200 --seq-len 32768": "",
    "llama-3.1-70b --gpus 128 --hardware gb300-nvl72": "",
    "qwen2.5-72b --gpus 128 --hardware dgx-b200": "torchtitan",
    "llama-3.1-405b --gpus 1024 --hardware dgx-h100": "",
    "mixtral-8x7b --gpus 64 --hardware dgx-h100": "torchtitan",
    "qwen3-30b-a3b --gpus 64 --hardware dgx-h100": "torchtitan",
    "qwen3-235b-a22b --gpus 256 --hardware gb200-nvl72": "torchtitan",
    "deepseek-v3 --gpus 512 --hardware gb200-nvl72": "torchtitan megatron",
}
"""A question -> the programs that cannot do it."""

CASES = [
    pytest.param(question, program, id=f"{program}: {question}")
    for question in QUESTIONS
    for program in PROGRAMS
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def asked(question: str, program: str, *, command: str = "recommend") -> int:
    return exit_code_of([command, "--model", *question.split(), "--program", program])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("question", "program"), CASES)
def test_what_is_recommended_the_target_takes_as_it_is(
    question: str, program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = asked(question, program)
    err = capsys.readouterr().err
    if program in QUESTIONS[question].split():
        assert code == 2
        assert len(err.strip().splitlines()) == 1
        assert err.startswith(f"fsdpplan: {PROGRAMS[program]} ")
        return
    assert code == 0, err
    assert f"next: fsdpplan emit-launch --target {program}" in err
    assert exit_code_of(["emit-launch", "--target", program]) == 0, capsys.readouterr().err
    READS[program](capsys.readouterr().out, tmp_path, json.loads(Path("fsdpplan.json").read_text()))


def _megatron(text: str, folder: Path, plan: dict[str, Any]) -> None:
    found = parser().parse_args(arguments(text, folder))
    assert int(found.global_batch_size) == plan["training"]["global_batch"]
    assert int(found.tensor_model_parallel_size) == plan["layout"]["tp"]


def _torchtitan(text: str, _folder: Path, plan: dict[str, Any]) -> None:
    for function, names in calls(text).items():
        if function != "partial":
            assert names <= set(CALLS[function].split()), function
    assert f"data_parallel_shard_degree={plan['layout']['dp_shard']}" in text


def _accelerate(text: str, folder: Path, plan: dict[str, Any]) -> None:
    reader = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="accelerate is not installed"
    )
    path = folder / "accelerate.yaml"
    path.write_text(text)
    loaded = reader.load_config_from_file(str(path))
    assert loaded.num_processes == plan["cluster"]["gpus"]
    if loaded.parallelism_config:
        degrees = {
            key.removeprefix("parallelism_config_"): value
            for key, value in loaded.parallelism_config.items()
            if key.endswith("_size")
        }
        built = importlib.import_module("accelerate").ParallelismConfig(**degrees)
        assert built.total_size == plan["cluster"]["gpus"]


READS = {"megatron": _megatron, "torchtitan": _torchtitan, "accelerate": _accelerate}


def test_an_estimate_follows_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--dp-shard", "4", "--tp", "2", "--activation-checkpointing", "full"]
    question = "qwen3-4b --gpus 8 --hardware dgx-h100"
    for program, sharding in {"megatron": "zero1", "torchtitan": "fsdp"}.items():
        words = ["estimate", "--model", *question.split(), *layout, "--program", program, "--json"]
        assert exit_code_of(words) == 0
        assert json.loads(capsys.readouterr().out)["layout"]["sharding"] == sharding
    words = ["estimate", "--model", *question.split(), *layout, "--program", "accelerate"]
    assert exit_code_of(words) == 2
    assert "plan again with --tp 1; or leave --program out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--program megatron --runtime fsdp2", "is trained by runtime megatron, not by fsdp2"),
        ("--program torchtitan --optimizer muon", "torchtitan cannot express optimizer muon"),
        ("--program megatron --offload cpu", "Megatron-LM cannot express offload cpu"),
        ("--program accelerate --pp 2", "Accelerate cannot express pp 2"),
        ("--program torchtitan --hardware cpu --gpus 2", "devices of kind cpu"),
    ],
)
def test_what_a_program_cannot_do_is_said(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["recommend", "--model", "llama-3.2-1b", *words.split()]
    if "--hardware" not in given:
        given += ["--hardware", "dgx-h100", "--gpus", "8"]
    assert exit_code_of(given) in (2, 3)
    err = " ".join(capsys.readouterr().err.split())
    assert said in err


def test_a_plan_for_another_program_is_not_given_to_the_trainer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked("qwen3-0.6b --gpus 8 --hardware dgx-h100", "megatron") == 0
    for command in ("emit-launch", "rehearse"):
        capsys.readouterr()
        assert exit_code_of([command]) == 2
        assert "emit-launch --target megatron" in capsys.readouterr().err

"""No dead end: what is said to be typed works when it is typed."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import SHAPE, on_a_machine_without_gpus, words


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


def typed(given: list[str], remedy: str) -> list[str]:
    """The command line after doing what a remedy says."""
    told, _, dropped = remedy.partition(", without ")
    if told.startswith("leave out "):
        told, dropped = "", told.removeprefix("leave out ")
    options = _options(given)
    for flag in shlex.split(dropped):
        options.pop(flag)
    said = shlex.split(told.split(" (")[0].replace(",", " ").replace(":", " "))
    options |= _options(said[next((i for i, w in enumerate(said) if w.startswith("--")), 0) :])
    return [word for flag, value in options.items() for word in (flag, value) if word is not None]


def _options(given: list[str]) -> dict[str, str | None]:
    """Flag -> its value; None: it takes none."""
    found: dict[str, str | None] = {}
    for word, after in pairwise([*given, ""]):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") or not after else after
    return found


MISSES = [
    "--model llama-3.1-70b --gpus 16 --hardware dgx-h100",
    "--model llama-3.1-70b --gpus 8 --hardware dgx-h100 --tp 8",
    "--model llama-3.1-70b --gpus 8 --hardware dgx-h100 --dp-shard 8",
    "--model llama-3.1-8b --gpus 4 --hardware pcie-8xrtx4090",
    "--model llama-3.1-8b --gpus 1 --hardware dgx-h100",
    "--model llama-3.1-8b --gpus 8 --hardware dgx-h100 --sharding ddp --dp-replicate 8",
    "--model llama-3.1-8b --gpus 8 --hardware dgx-h100 --micro-batch 32 --tp 1 --pp 1 --cp 1",
    "--model llama-3.1-8b --gpus 8 --hardware dgx-h100 --global-batch 3 --dp-shard 8",
    "--model llama-3.1-8b --gpus 8 --hardware dgx-h100 --program own --cp 2",
    "--model llama-3.1-8b --gpus 8 --hardware dgx-h100 --seq-len 128k --program own --tp 1 --pp 1 "
    "--loss-chunks 1",
    "--model mixtral-8x7b --gpus 8 --hardware dgx-h100",
    "--model mixtral-8x7b --gpus 8 --hardware dgx-h100 --global-batch 64",
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", MISSES)
def test_a_remedy_is_a_plan_that_can_be_made(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list(words(f"{given} --offload none"))
    assert exit_code_of(["recommend", *asked, "--no-ledger"]) == 3
    message = capsys.readouterr().err.partition(" (searched:")[0].strip()
    remedy = message.rpartition("; ")[2]
    assert exit_code_of(["recommend", *typed(asked, remedy), "--no-ledger"]) == 0, remedy


MODELS = ("qwen3-8b", "qwen3-14b", "llama-3.1-70b", "mixtral-8x7b", "gpt-oss-120b")
MACHINES = ("pcie-8xrtx4090", "gcp-g2-standard-96", "dgx-a100-40g-hdr", "dgx-h100")
PINNED = (
    "",
    "--optimizer muon",
    "--offload none",
    "--precision fp8 --offload none",
    "--tp 4 --offload none",
    "--sharding ddp",
    "--seq-len 64k --offload none",
    "--micro-batch 16 --tp 1 --pp 1 --cp 1",
)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("pinned", PINNED)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_no_remedy_leads_to_another_refusal(
    model: str, machine: str, gpus: int, pinned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"--model {model} --hardware {machine} --gpus {gpus} {pinned}"
    asked = list(words(given))
    if exit_code_of(["recommend", *asked, "--no-ledger", "--no-save"]) != 3:
        return  # it fits, or cannot be asked on that device
    message = capsys.readouterr().err.partition(" (searched:")[0].strip()
    remedy = message.rpartition("; ")[2]
    if "nothing that was tried fits" in message:
        return
    then = typed(asked, remedy)
    assert exit_code_of(["recommend", *then, "--no-ledger", "--no-save"]) == 0, remedy


@pytest.mark.parametrize(
    "given",
    [
        "--model llama-3.1-8b --gpus 1531 --gpus-per-node 1",
        "--model llama-3.1-8b --gpus 14",
        "--model llama-3.1-8b --gpus 6000",
        "--model llama-3.2-1b --gpus 4k --seq-len 128k",
    ],
)
def test_the_default_batch_has_a_legal_layout_and_says_when_it_is_unusual(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["recommend", *words(given), "--hardware", "dgx-h100", "--no-ledger"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    unusual = "unusually large" in out or "several of them work on each sequence" in out
    assert unusual == ("--gpus 14" not in given)
    assert ("7 GPUs on each of 2 nodes" in out) == ("--gpus 14" in given)


@pytest.mark.parametrize("save", ["fsdpplan.json", "cpu2.json", "a plan.json"])
def test_each_next_step_works(save: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SHAPE, *words("--seq-len 128 --global-batch 8 --precision fp32 --hardware cpu")]
    assert exit_code_of(["recommend", *small, "--gpus", "2", "--save", save, "--no-ledger"]) == 0
    _, _, steps = capsys.readouterr().err.strip().rpartition("next: ")
    emit, run = steps.split(", or ")
    assert exit_code_of(shlex.split(emit)[1:-2]) == 0
    assert exit_code_of([*shlex.split(run)[1:], "--dry-run"]) == 0
    # also where a script of another plan stands
    Path("job.sbatch").write_text(capsys.readouterr().out)
    assert exit_code_of(["run", save, "--dry-run"]) == 0


def test_a_plan_in_the_place_of_a_script_is_not_both(capsys: pytest.CaptureFixture[str]) -> None:
    Path("cpu2.json").write_text("{}")
    assert exit_code_of(["run", "cpu2.json", "--from", "script"]) == 2
    assert "cpu2.json is a plan" in capsys.readouterr().err
    assert exit_code_of(["run", "cpu2.json", "other.json"]) == 2
    assert "name one of them" in capsys.readouterr().err


def test_a_part_of_one_name_is_enough_and_of_several_lists_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned = ["recommend", "--gpus", "64", "--no-ledger", "--model", "llama-3.2-1b", "--hardware"]
    assert exit_code_of([*planned, "superpod"]) == 0
    assert "dgx-h100-superpod-unit" in capsys.readouterr().out
    assert exit_code_of([*planned, "azure"]) == 2
    said = capsys.readouterr().err
    assert "azure-nd-a100-v4" in said
    assert "azure-nd-h100-v5" in said
    assert exit_code_of(["models", "llama"]) == 0
    listed = capsys.readouterr().out
    assert "llama-3.1-405b" in listed
    assert "qwen" not in listed
    assert exit_code_of(["models", "405b"]) == 0
    assert "16384" in capsys.readouterr().out


@pytest.mark.parametrize(("runtime", "mode"), [("fsdp2", "op"), ("megatron", "attention")])
def test_selective_is_what_the_runtime_calls_so(
    runtime: str, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words(
        "estimate --model llama-3.2-1b --gpus 8 --hardware dgx-h100 --dp-replicate 8 --sharding "
        "zero0 --activation-checkpointing selective --no-ledger --micro-batch 2 --runtime"
    )
    assert exit_code_of([*given, runtime]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"checkpointing {mode}" in out
    assert f"selective recomputation is {mode}" in out

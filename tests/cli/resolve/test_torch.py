"""The torch that will run: given, asked or assumed; what follows for the plan and its job."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from fsdpplan.spec.training import NEWEST_TESTED, TorchRelease, torch_release
from tests.cli.small import DEMO, on_a_machine_without_gpus, words
from tests.topology.read.test_torch_found import python_with

HERE = str(torch_release(torch.__version__))
ASKED = words(
    "recommend --model llama-3.2-1b --gpus 8 --seq-len 4096 --global-batch 64 --no-ledger"
)
RING = (*ASKED, "--cp", "2", "--cp-attention", "ring")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], given: tuple[str, ...], code: int = 0) -> str:
    """All that a command prints, on one line."""
    ended = exit_code_of(given)
    out, err = capsys.readouterr()
    assert ended == code, err
    return " ".join((out + err).split())


def document(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    assert exit_code_of((*given, "--json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_torch_installed_here_is_assumed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, ASKED)
    assert f"torch {HERE}, installed here (--torch)" in text
    plan = read_plan("fsdpplan.json")
    assert (plan.training.torch, plan.torch_source) == (HERE, "default")
    assert plan.known_torch is None


@pytest.mark.parametrize(
    ("found", "assumed"),
    [
        (None, f"torch {NEWEST_TESTED}, as none is installed here"),
        (TorchRelease(2, 6), "torch 2.8, the oldest that the trainer runs under: 2.6 is installed"),
    ],
)
def test_what_is_assumed_without_one_that_would_do(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: TorchRelease | None,
    assumed: str,
) -> None:
    monkeypatch.setattr("fsdpplan.topology.probe.installed_torch", lambda: found)
    assert assumed in said(capsys, ASKED)


def test_a_release_that_is_given_is_no_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, (*ASKED, "--torch", "2.9.1"))
    assert "bf16, torch 2.9" in text
    assert "(--torch)" not in text
    assert read_plan("fsdpplan.json").torch_source == "flag --torch"


def test_a_python_and_an_image_are_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    python = python_with(tmp_path, "2.9.1")
    found = document(capsys, *ASKED, "--python", python)
    assert found["training"]["torch"] == "2.9"
    assert found["sources"]["training.torch"] == f"asked {python}"
    image = "nvcr.io/nvidia/pytorch:25.11-py3"
    found = document(capsys, *ASKED, "--container", image)
    assert found["training"]["torch"] == "2.10"
    assert found["sources"]["training.torch"] == f"image {image}"
    text = said(capsys, (*ASKED, "--container", "team.sqsh"))
    assert f"torch {HERE}, installed here, since nothing is known of team.sqsh" in text


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ("--torch 2.x", 2, "--torch: torch '2.x' is no version of PyTorch"),
        ("--torch 2.7", 2, "torch 2.7 is older than 2.8, the oldest that the trainer runs under"),
        ("--torch 2.9 --python p", 2, "--torch and --python each say which torch will run"),
        ("--python /no/python", 4, "/no/python does not say which torch it has (not found)"),
        ("--torch 2.8 --schedule dualpipev --pp 2", 3, "which came with 2.9: use --schedule zbv"),
        ("--container u:ghp_abcdefghijklmnopqrstuvwxyz0123456789@r/i", 2, "token"),
        (
            "--torch 2.9 --cp 2 --cp-attention ring",
            3,
            "torch 2.9 has no ring attention by module (2.10 has)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], options: str, code: int, sentence: str
) -> None:
    assert sentence in said(capsys, (*ASKED, *words(options)), code)


def test_one_layout_that_the_release_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("estimate", *RING[1:], "--dp-shard", "4")
    text = said(capsys, (*asked, "--torch", "2.9"), 2)
    assert "torch 2.9 has no ring attention by module, which came with 2.10: use --cp 1" in text
    found = document(capsys, *asked, "--torch", "2.10")
    assert found["torch_needed"] == {"oldest": "2.10", "because": "ring attention by module"}


def test_a_release_that_nobody_has_tried_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, (*ASKED, "--torch", "9.9"))
    assert f"torch 9.9 (flag --torch) is newer than {NEWEST_TESTED}" in text


def test_what_an_older_torch_does_more_slowly_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    mixture = words("recommend --model qwen1.5-moe-a2.7b --gpus 8 --no-ledger")
    warning = "torch 2.9 has no grouped matmuls (2.10 has): the trainer multiplies the experts one"
    assert warning in said(capsys, (*mixture, "--torch", "2.9"))
    assert "grouped" not in said(capsys, (*mixture, "--torch", "2.10"))


def test_a_script_says_its_torch_and_asks_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, (*RING, "--torch", "2.10"))
    script = said(capsys, ("emit-launch", "--torch", "2.11"))
    assert (
        "# Torch: 2.11 (flag --torch); needs 2.10 or newer, for ring attention by module" in script
    )
    assert "'torch=2.10,ring attention by module'" in script
    assert "the plan is for torch 2.10 (flag --torch), and the job runs 2.11" in script


def test_a_release_that_cannot_run_the_plan_gets_no_script(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said(capsys, (*RING, "--torch", "2.10"))
    python = python_with(tmp_path, "2.9.1")
    image = "nvcr.io/nvidia/pytorch:25.08-py3"
    for options in (
        ("--torch", "2.9"),
        ("--python", python),
        ("--container", image),
        ("--target", "kubernetes", "--image", image),
    ):
        text = said(capsys, ("emit-launch", *options), 2)
        assert "needs torch 2.10 or newer, for ring attention by module" in text
        assert "plan again with fsdpplan recommend --torch 2." in text
    (tmp_path / "mine.py").write_text("")
    mine = str(tmp_path / "mine.py")
    script = said(capsys, ("emit-launch", "--torch", "2.9", "--script", mine))
    assert "# Torch: 2.9 (flag --torch) " in script
    assert "torch=2.10" not in script


def test_the_python_of_the_job_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, ASKED)
    script = said(capsys, ("emit-launch",))
    assert f"# Torch: {HERE} (the Python of the job); needs 2.8 or newer" in script
    script = said(capsys, ("emit-launch", "--env-setup", "module load torch"))
    assert f"# Torch: {HERE} (assumed); needs 2.8 or newer" in script


def test_a_script_for_another_torch_still_runs_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said(capsys, words(f"{shlex.join(DEMO)} --torch 2.9"))
    assert exit_code_of(("emit-launch", "--torch", "2.10")) == 0
    Path("job.sbatch").write_text(capsys.readouterr().out)
    assert "# Torch: 2.10" in said(capsys, ("run", "--dry-run"))


def test_explain_tells_the_variables_of_another_release(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said(capsys, ASKED)
    names = {
        torch: {v["name"] for v in document(capsys, "explain", "--nccl", *torch)["variables"]}
        for torch in ((), ("--torch", "2.9"), ("--torch", "2.10"))
    }
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    assert {new, old} <= names[()]
    assert names["--torch", "2.9"] & {new, old} == {old}
    assert names["--torch", "2.10"] & {new, old} == {new}

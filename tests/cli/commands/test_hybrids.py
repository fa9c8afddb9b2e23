"""Models with blocks that the trainer cannot build: planned for a program that can, and said so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.run.plans import read_plan
from tests.cli.small import on_a_machine_without_gpus
from tests.files.huggingface.test_hybrids import NEMOTRON, NEXT


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)


ASK = ("--gpus", "8", "--hardware", "dgx-h100", "--seq-len", "256", "--global-batch", "16")


@pytest.mark.parametrize(
    ("config", "words"),
    [(NEXT, "gated delta rule blocks and a gate behind attention"), (NEMOTRON, "Mamba-2 blocks")],
)
def test_a_plan_is_for_a_program_that_has_such_blocks_and_its_next_step_works(
    config: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("config.json").write_text(json.dumps(config))
    assert exit_code_of(["recommend", "--config", "config.json", *ASK]) == 0
    out, err = capsys.readouterr()
    said = " ".join(out.split())
    assert f"since fsdpplan's own trainer cannot build {words} (--program)" in said
    assert "no measured run is behind it" in said
    plan = read_plan("fsdpplan.json")
    assert plan.training.program == "hf"
    assert not plan.estimate.runnable
    assert plan.model.block_kinds[0] == (
        "D" if config is NEXT else "M",
        "E" if config is NEXT else "-",
    )
    _, _, step = err.strip().rpartition("next: fsdpplan ")
    Path("train.py").write_text("")
    assert exit_code_of(step.removesuffix(" > job.sbatch").split()) == 0
    capsys.readouterr()
    for command in (["emit-launch"], ["rehearse"], ["run", "--smoke"]):
        assert exit_code_of(command) != 0
        assert f"cannot build {words}" in " ".join(capsys.readouterr().err.split())


def test_what_was_asked_for_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(NEMOTRON))
    ask = ["recommend", "--config", "config.json", *ASK, "--runtime", "megatron"]
    assert exit_code_of(ask) == 0
    assert "cannot build" in capsys.readouterr().err
    assert read_plan("fsdpplan.json").training.program == "reference"


def test_states_are_not_split_over_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(NEXT))
    ask = ["estimate", "--config", "config.json", *ASK, "--dp-shard", "4", "--cp", "2"]
    assert exit_code_of(ask) == 2
    said = capsys.readouterr().err
    assert "has gated delta rule blocks, whose state would go from rank to rank" in said
    assert "use --cp 1" in said

"""`replan`: a saved plan for other GPUs keeps the batch, or says what is near; its run goes on."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from fsdpplan.trainer.checkpoint.files import manifest_text, record_of
from fsdpplan.trainer.checkpoint.progress import recorded
from fsdpplan.trainer.options import parse_options
from tests.cli.small import answer, on_a_machine_without_gpus, show, words

QUESTION = (
    "recommend --model llama-3.2-1b --gpus 16 --hardware dgx-h100 --cp 1 --pp 1 --micro-batch 1 "
    "--dp-shard 8 --seq-len 2048 --global-batch 96 --no-ledger --torch 2.13 --save plan.json"
)


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("plan") / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        on_a_machine_without_gpus(patch)
        assert exit_code_of(words(QUESTION.replace("plan.json", str(place)))) == 0
    return place.read_text()


@pytest.fixture(autouse=True)
def in_a_folder_with_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)
    Path("plan.json").write_text(plan_text)


def checkpoint(options: str, *, step: int) -> Path:
    """What the run of the plan leaves at a step, but for its tensors."""
    from fsdpplan.trainer.checkpoint.progress import written_by
    from fsdpplan.trainer.config import parse_plan

    plan = parse_plan(Path("plan.json").read_text())
    said = parse_options(words(options))
    recipe = said.recipe(plan)
    folder = Path("saved") / f"step-{step:08d}"
    folder.mkdir(parents=True)
    progress = {
        "schema_version": 3,
        "step": step,
        "sequences": step * plan.training.global_batch,
        "seed": said.seed,
        "seq_len": plan.training.seq_len,
        "steps": recipe.steps,
        "learning_rate": recipe.learning_rate,
        "warmup_steps": recipe.warmup_steps,
        "recipe": recorded(recipe),
        **written_by(plan),
    }
    (folder / "trainer.json").write_text(json.dumps(progress))
    (folder / "__0_0.distcp").write_bytes(bytes(10**6))
    records = [record_of(folder / name) for name in ("trainer.json", "__0_0.distcp")]
    (folder / "manifest.json").write_text(manifest_text(records))
    Path("saved/latest").write_text(f"{folder.name}\n")
    return Path("saved")


def replanned(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    return answer(capsys, *words(f"replan plan.json --no-ledger {options}"))


def test_the_batch_and_the_torch_are_kept_and_the_plan_is_emitted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = replanned(capsys, "--gpus 24 --keep-global-batch")
    new, old = read_plan("plan-24gpus.json"), read_plan("plan.json")
    assert found["saved"] == "plan-24gpus.json"
    assert found["global_batch_kept"]
    assert (new.training, new.model) == (old.training, old.model)
    assert (new.layout.world, new.layout.global_batch) == (24, 96)
    assert new.torch_source == old.torch_source
    assert found["even_batch"] is None
    assert any("--dp-shard 8 of the plan not kept" in one for one in found["assumptions"])
    assert "plan-24gpus.json" in found["command"]
    assert show(capsys, "emit-launch", "plan-24gpus.json").startswith("#!/bin/bash")


def test_a_batch_that_cannot_be_kept_is_said_with_what_is_near(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(words("replan plan.json --gpus 56 --no-ledger")) == 3
    err = capsys.readouterr().err
    assert "96 sequences cannot be kept on 56 GPUs" in err
    assert "--global-batch 56 (-41.7 %), --global-batch 112 (+16.7 %), --gpus 48" in err
    assert not list(Path().glob("plan-*.json"))
    found = replanned(capsys, "--gpus 56 --no-keep-global-batch")
    assert found["training"]["global_batch"] == 112
    assert not found["global_batch_kept"]
    assert read_plan("plan-56gpus.json").layout.global_batch == 112


def test_an_uneven_batch_is_kept_where_some_layout_takes_it_and_the_gain_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = replanned(capsys, "--gpus 64 --save new.json")
    assert found["training"]["global_batch"] == 96
    other = found["even_batch"]
    assert other["global_batch"] == 64
    gain = other["estimate"]["tokens_per_second"] / found["after"]["estimate"]["tokens_per_second"]
    out = " ".join(show(capsys, *words("replan plan.json --no-ledger --gpus 64")).split())
    assert f"would train {(gain - 1) * 100:+.1f} % tokens a second" in out


def test_a_checkpoint_says_where_the_run_stands_and_how_it_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = (
        "--steps 500 --learning-rate 0.002 --warmup-steps 20 --lr-schedule wsd --adam-beta2 0.99 "
        "--seed 7 --param-group 'tok_embeddings*:lr=0.5'"
    )
    folder = checkpoint(options, step=100)
    found = replanned(capsys, f"--gpus 8 --checkpoint-dir {folder} --storage-bw 1GB/s")
    stands = found["checkpoint"]
    assert (stands["step"], stands["steps"]) == (100, 500)
    assert stands["said"] == []
    assert stands["saved_bytes_known"]
    size = sum(path.stat().st_size for path in folder.glob("*/*") if path.name != "manifest.json")
    assert stands["saved_bytes"] == size
    assert stands["seconds"] == pytest.approx((2 * size + stands["read_bytes"]) / 1e9)
    given = shlex.split(found["command"])
    assert given[:3] == ["fsdpplan", "emit-launch", "plan-8gpus.json"]
    typed = parse_options([word for word in given[3:] if "checkpoint-dir" not in word])
    before = parse_options(words(options))
    assert replace(typed, given=before.given) == before
    # which the job would accept, and the script carries
    script = show(capsys, *given[1:])
    assert "--checkpoint-dir=saved" in script


def test_another_batch_goes_over_the_same_tokens_and_says_that_the_rate_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = checkpoint("--steps 500 --learning-rate 0.002", step=100)
    found = replanned(capsys, f"--gpus 16 --global-batch 192 --checkpoint-dir {folder}")
    stands = found["checkpoint"]
    assert stands["steps"] == 100 + 400 // 2
    assert any("global_batch 96 there, 192" in one for one in stands["said"])
    assert any("learning rate of step 101" in one for one in stands["said"])
    assert "--allow-changes" in found["command"]
    assert exit_code_of(shlex.split(found["command"])[1:]) == 0


def test_what_was_fixed_is_searched_where_that_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = replanned(capsys, "--gpus 24")
    free = replanned(capsys, "--gpus 24 --free --micro-batch 2 --hardware dgx-h200")
    assert "layout.pp" in kept["sources"]
    assert "layout.pp" not in free["sources"]
    assert free["after"]["layout"]["micro_batch"] == 2
    assert free["cluster"]["device"]["name"] == "h200-sxm-141g"


def test_another_program_is_asked_about_its_checkpoints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    question = QUESTION.replace("plan.json", "mega.json") + " --program megatron"
    assert exit_code_of(words(question)) == 0
    capsys.readouterr()
    out = show(capsys, *words("replan mega.json --gpus 24 --no-ledger"))
    assert "the checkpoints of Megatron-LM are its own" in " ".join(out.split())
    assert "emit-launch mega-24gpus.json --target megatron" in out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("replan plan.json", "such as --gpus 56"),
        ("replan plan.json --gpus 8 --keep-global-batch --global-batch 64", "leave one of them"),
        ("replan plan.json --gpus 8 --checkpoint-dir nowhere", "nowhere has no checkpoint"),
        ("replan plan.json --gpus 8 --save plan.json", "replace the plan itself"),
        ("replan none.json --gpus 8", "none.json"),
        ("replan plan.json --gpus 8 --storage-bw 3GB", "--storage-bw"),
    ],
)
def test_bad_input_is_one_error(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words(f"{given} --no-ledger")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_it_fits_the_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = show(capsys, *words("replan plan.json --no-ledger --gpus 32"))
    assert max(len(line) for line in out.splitlines() if "emit-launch" not in line) <= 60

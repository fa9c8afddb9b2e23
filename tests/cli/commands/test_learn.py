"""`learn`, `--runs` and `--leave-one-out`: measured runs by three doors, into one ledger."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import answer, on_a_machine_without_gpus, words

ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests" / "recordings" / "0.2.0"
HEADER = (
    "source_id,framework,model_name,layers,hidden,ffn_hidden,heads,kv_heads,vocab,gpu,gpus,dtype,"
    "seq_len,zero_stage,micro_batch,global_batch,act_ckpt,compile,step_time_s,date"
)
SHAPE = "llama-3.1-8b,32,4096,14336,32,8,128256,H100-80GB"
ESTIMATE = words(
    "estimate --model llama-3.1-8b --gpus 64 --hardware dgx-h100 --seq-len 8192 --global-batch 64 "
    "--dp-shard 64 --activation-checkpointing full"
)


def row(seconds: float, *, framework: str = "torchtitan", checkpointing: str = "full") -> str:
    """One run, of 64 GPUs."""
    tail = f"64,bf16,8192,3,1,64,{checkpointing},y,{seconds},2026-01"
    return f"mine,{framework},{SHAPE},{tail}"


def table(path: Path, *rows: str) -> str:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return str(path)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """Three runs of one job that take half as long again as predicted, and one that waits."""
    return table(tmp_path / "mine.csv", *[row(2.0)] * 3, row(1.7, checkpointing="op"))


def test_a_table_is_learned_from_without_being_kept(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, told = answer(capsys, *ESTIMATE), answer(capsys, *ESTIMATE, "--runs", mine)
    assert plain["learned"] is None
    # theirs are slower than our own trainer, by what runs of both would tell
    expected = plain["step_seconds"]["expected"]
    assert expected < told["step_seconds"]["expected"] <= 2.0 * 1.03
    assert told["learned"]["runs"] == 4
    assert told["learned"]["nearest"] == "same model, 64 GPUs, dp_shard 64"
    assert told["learned"]["without"] == plain["step_seconds"]
    width, before = (
        one["step_seconds"]["upper"] / one["step_seconds"]["expected"] for one in (told, plain)
    )
    assert width < before
    assert not Path(os.environ["FSDPPLAN_LEDGER"]).exists()
    assert exit_code_of([*ESTIMATE, "--runs", mine]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "from 4 of your runs, nearest: same model, 64 GPUs, dp_shard 64; without" in screen
    assert "your runs of torchtitan are of the software that this plan is for" in screen


def test_runs_of_other_software_are_learned_from_by_their_share(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = answer(capsys, *ESTIMATE, "--runs", mine, "--software", "my own trainer")["learned"]
    assert told["runs"] == 0
    assert 0.93 < told["factor"] < 1.07
    assert "is of other software (torchtitan)" in told["far"]
    same = answer(capsys, *ESTIMATE, "--runs", mine, "--software", "TorchTitan")["learned"]
    assert same["factor"] > 1.3


def test_far_from_all_runs_it_says_so(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    far = words(
        "estimate --model llama-3.1-8b --gpus 512 --hardware dgx-h100 --seq-len 8192 "
        "--global-batch 512 --dp-shard 512"
    )
    told = answer(capsys, *far, "--runs", mine)
    assert told["learned"]["far"] == "nearest run has 8 times fewer GPUs"


def test_learned_runs_stay_and_none_is_added_twice(
    mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = answer(capsys, "learn", mine), answer(capsys, "learn", mine)
    assert (first["added"], again["added"], again["known_before"]) == (4, 0, 4)
    assert first["stacks"] == [
        {"software": "torchtitan", "precision": "bf16", "device": "h100-sxm-80g", "runs": 4}
    ]
    kept = answer(capsys, *ESTIMATE)
    both = answer(capsys, *ESTIMATE, "--runs", mine)  # not counted twice
    assert kept["learned"]["runs"] == 4
    assert both["learned"]["factor"] == pytest.approx(kept["learned"]["factor"], rel=1e-3)
    rows = answer(capsys, "ledger")["runs"]
    assert {(one["origin"], one["software"]) for one in rows} == {("mine.csv", "torchtitan")}
    assert exit_code_of(["ledger", "--export", "all.jsonl"]) == 0
    capsys.readouterr()
    assert answer(capsys, "learn", "all.jsonl")["added"] == 0
    round_trip = answer(capsys, "learn", "all.jsonl", "--ledger", "other.sqlite")
    assert round_trip["added"] == 4
    there = answer(capsys, "ledger", "--ledger", "other.sqlite")["runs"]
    assert [one["cells"] for one in there] == [one["cells"] for one in rows]
    assert answer(capsys, "learn", "other.sqlite")["added"] == 0


def test_a_runs_folder_and_an_old_ledger_are_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RECORDED / "folder", tmp_path / "job")
    (run,) = (tmp_path / "job" / "fsdpplan-runs").iterdir()
    assert answer(capsys, "learn", str(run))["added"] == 1
    assert answer(capsys, "learn", str(tmp_path / "job"))["added"] == 0
    old = answer(capsys, "learn", str(RECORDED / "ledger.sqlite"))
    assert old["runs"] == 5
    assert old["known_before"] <= 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"{HEADER}\n{row(1.0).replace('H100-80GB', 'TPU')}\n", "no hardware profile"),
        ("", "is empty"),
        ("a,b\n1,2\n", "unknown column"),
        (f"{HEADER}\n{row(1.0)}\n".replace(",", ";"), "semicolons"),
        (f"{HEADER}\n{row(1.0)}\n".replace("1.0", "NaN"), "must be a number above 0"),
        (f"{HEADER}\n{row(1.0)}\n".replace("1.0", "1000 ms"), "with a point and no unit"),
        (f"{HEADER}\n", "no rows"),
    ],
    ids=["another device", "empty", "another table", "semicolons", "NaN", "a unit", "no rows"],
)
def test_what_cannot_be_learned_from_is_one_sentence(
    content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text(content)
    for command in (["learn", "bad.csv"], [*ESTIMATE, "--runs", "bad.csv"]):
        assert exit_code_of(command) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert exit_code_of(["learn", "bad.csv"]) == 2
    assert words in capsys.readouterr().err
    assert exit_code_of(["learn", "nowhere.csv"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_one_table_is_predicted_after_learning_from_another(
    mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = table(tmp_path / "test.csv", row(1.95), row(2.05))
    report = answer(capsys, "validate", test, "--runs", mine)
    assert report["learned"]["runs"] == 4
    shipped, after = report["learned"]["as_shipped"], report["learned"]["after_learning"]
    assert after["median_abs_error_fraction"] < 0.04 < shipped["median_abs_error_fraction"]
    first = report["rows"][0]
    plain = answer(capsys, "validate", test)["rows"][0]
    assert first["without_runs_step_seconds"] == plain["predicted_step_seconds"]
    assert first["predicted_step_seconds"]["expected"] > plain["predicted_step_seconds"]["expected"]
    assert exit_code_of(["validate", test, "--runs", mine]) == 0
    assert "after learning from 4 runs" in " ".join(capsys.readouterr().out.split())


def test_each_row_is_predicted_from_the_others(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = answer(capsys, "validate", mine, "--leave-one-out")
    assert report["learned"]["runs"] == 3
    shipped, after = report["learned"]["as_shipped"], report["learned"]["after_learning"]
    assert after["median_abs_error_fraction"] < 0.2 * shipped["median_abs_error_fraction"]
    assert exit_code_of(["validate", mine, "--leave-one-out", "--runs", mine]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_runs_decide_what_is_recommended_and_what_to_run_next(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(
        "recommend --model llama-3.1-8b --gpus 64 --hardware dgx-h100 --seq-len 8192 "
        "--global-batch 64 --tp 1 --pp 1 --cp 1"
    )
    told = answer(capsys, *asked, "--runs", mine)
    assert all(plan["estimate"]["learned"]["runs"] for plan in told["plans"])
    assert told["next_run"] is None or 1 < told["next_run"]["rank"] <= len(told["plans"])
    assert exit_code_of(["explain"]) == 0
    assert "of your runs, nearest: " in " ".join(capsys.readouterr().out.split())
    assert answer(capsys, *asked)["next_run"] is None


def test_without_runs_nothing_is_loaded_to_learn(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from fsdpplan.cli.app import exit_code_of\n"
        f"assert exit_code_of({[*ESTIMATE]!r}) == 0\n"
        "assert not {'numpy', 'scipy', 'torch'} & sys.modules.keys()\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, env=env, cwd=tmp_path)

"""`what-if`: a saved plan under other inputs says what asking directly says."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cli.options.question import TrainingOptions
from fsdpplan.cli.resolve.again import (
    NAMED_OTHERWISE,
    OF_THE_QUESTION,
    cluster_options,
    training_options,
)
from fsdpplan.files.plans import read_plan, write_plan
from fsdpplan.spec.cluster import Cluster
from tests.cli.small import answer, on_a_machine_without_gpus, words

QUESTION = (
    "--model llama-3.2-1b --gpus 16 --hardware dgx-h100 --inter-bw 100Gb/s --cp 1 --pp 1 "
    "--micro-batch 1"
)
PLAN = "plan.json"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)


def saved(capsys: pytest.CaptureFixture[str], question: str, *more: str) -> dict[str, Any]:
    """The answer of a question, whose plan is saved."""
    given = words(f"recommend {question} --no-ledger --save {PLAN}")
    return answer(capsys, *given, *more)


def what_if(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    """What it says of the saved plan."""
    return answer(capsys, *words(f"what-if {PLAN} --no-ledger {options}"))


def test_nothing_changed_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    direct = saved(capsys, QUESTION)
    found = what_if(capsys, "")
    assert found["changed"] == []
    assert found["same_is_best"]
    best = found["best"]
    assert best["layout"] == found["plan"]["layout"] == direct["plans"][0]["layout"]
    assert best["estimate"] == found["plan"]["estimate"] == direct["plans"][0]["estimate"]
    change = best["difference"]
    assert (change["ratio"], change["told_apart"], change["faster_chance"]) == (1, False, 0.5)
    assert not any(term["change"] for term in change["time_seconds"] + change["memory_bytes"])
    assert not any(Path().glob("fsdpplan.json"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("question", "change", "direct"),
    [
        (QUESTION, "--gpus 64", QUESTION.replace("16", "64")),
        (QUESTION, "--inter-bw 20Gb/s", QUESTION.replace("100Gb", "20Gb")),
        (QUESTION, "--intra-bw 50GB/s", f"{QUESTION} --intra-bw 50GB/s"),
        (QUESTION, "--seq-len 8k", f"{QUESTION} --seq-len 8k"),
        (QUESTION, "--model llama-3.2-3b", QUESTION.replace("1b", "3b")),
        (
            QUESTION,
            "--hardware dgx-b200",
            QUESTION.replace("h100", "b200").replace("--inter-bw 100Gb/s", ""),
        ),
        (QUESTION, "--gpu h200-sxm-141g", f"{QUESTION} --gpu h200-sxm-141g"),
        (f"{QUESTION} --tp 2 --tokens 1T", "--gpus 32", f"{QUESTION.replace('16', '32')} --tp 2"),
        (f"{QUESTION} --tp 2", "--tp 4", f"{QUESTION} --tp 4"),
        (f"{QUESTION} --precision fp8 --fp8-recipe rowwise", "--precision bf16", QUESTION),
        (f"{QUESTION} --global-batch 512", "--optimizer muon", f"{QUESTION} --optimizer muon"),
    ],
    ids=lambda text: text[-24:],
)
def test_it_says_what_asking_directly_says(
    question: str, change: str, direct: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(capsys, question)
    found = what_if(capsys, f"{change} --save best.json")
    if "--global-batch" in question:
        direct += " --global-batch 512"
    asked = saved(capsys, direct)
    assert found["best"]["layout"] == asked["plans"][0]["layout"]
    assert found["best"]["estimate"] == asked["plans"][0]["estimate"]
    assert found["cluster"] == asked["cluster"]
    assert {**found["training"], "tokens": None} == asked["training"]
    plan = read_plan("best.json")
    assert (plan.cluster, plan.layout) == (read_plan(PLAN).cluster, read_plan(PLAN).layout)
    told = found["same_layout"] or found["best"]
    steps = [one["estimate"]["step_seconds"]["expected"] for one in (found["plan"], told)]
    change_seconds = sum(term["change"] for term in told["difference"]["time_seconds"])
    assert change_seconds == pytest.approx(steps[1] - steps[0], rel=1e-9, abs=1e-9)


def test_the_same_layout_is_what_estimate_says(capsys: pytest.CaptureFixture[str]) -> None:
    saved(capsys, f"{QUESTION} --dp-replicate 2 --dp-shard 8")
    same = what_if(capsys, "--gpus 32 --dp-replicate 4")["same_layout"]
    assert (same["layout"]["dp_replicate"], same["layout"]["dp_shard"]) == (4, 8)
    layout = same["layout"]
    given = [
        *("--dp-replicate", "4", "--dp-shard", "8"),
        *("--reshard-after-forward", str(layout["reshard_after_forward"])),
        *("--gradient-sync", layout["gradient_sync"]),
        *("--activation-checkpointing", layout["activation_checkpointing"]),
        *("--loss-chunks", str(layout["loss_chunks"]), "--no-ledger"),
        *("--wrap-blocks", str(layout["wrap_blocks"])),
    ]
    asked = answer(capsys, *words(f"estimate {QUESTION.replace('16', '32')}"), *given)
    assert asked["step_seconds"] == same["estimate"]["step_seconds"]
    assert asked["memory"] == same["estimate"]["memory"]


def test_free_searches_what_the_plan_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    saved(capsys, f"{QUESTION.replace('16', '2').replace('--inter-bw 100Gb/s', '')} --tp 2")
    assert what_if(capsys, "")["best"]["layout"]["tp"] == 2
    assert what_if(capsys, "--free")["best"]["layout"]["tp"] == 1


def test_what_cannot_be_kept_and_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    saved(capsys, "--model llama-3.1-8b --gpus 8 --hardware dgx-h100 --dp-shard 8")
    other = f"what-if {PLAN} --no-ledger --gpus 1 --dp-shard 1 --global-batch 1 --optimizer muon"
    assert exit_code_of(words(other)) == 3
    out, err = capsys.readouterr()
    assert "The plan's layout cannot be kept" in out
    assert "no layout of llama-3.1-8b on 1 x h100-sxm-80g" in err
    assert exit_code_of(words(f"{other} --json")) == 3
    document = json.loads(capsys.readouterr().out)
    assert document["best"] is None
    assert document["same_layout_problem"]


@pytest.mark.parametrize(
    ("words_", "said"),
    [
        (f"what-if {PLAN} --gpus 12x", "--gpus"),
        (f"what-if {PLAN} --hardware nothing", "nothing"),
        (f"what-if {PLAN} --dp-shard 5", "does not divide 16 GPUs"),
        ("what-if missing.json --gpus 8", "missing.json"),
        (f"what-if {PLAN} --precision bf16 --fp8-recipe rowwise", "--fp8-recipe needs"),
    ],
)
def test_bad_input_is_one_error(words_: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    saved(capsys, QUESTION)
    assert exit_code_of(words(f"{words_} --no-ledger")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_machines_that_no_profile_has(capsys: pytest.CaptureFixture[str]) -> None:
    saved(capsys, QUESTION)
    plan = read_plan(PLAN)
    assert cluster_options(plan) is not None
    ours: Cluster = replace(plan.cluster, name="ours")
    write_plan(replace(plan, cluster=ours), PLAN)
    found = what_if(capsys, "--gpus 64 --inter-bw 200Gb/s")
    assert found["cluster"]["name"] == "ours"
    assert found["cluster"]["gpus"] == 64
    direct = saved(capsys, QUESTION.replace("16", "64").replace("100Gb", "200Gb"))
    assert found["best"]["estimate"] == direct["plans"][0]["estimate"]
    write_plan(replace(plan, cluster=ours), PLAN)
    for change in ("--gpus 8", "--gpus 60", "--gpu h200-sxm-141g"):
        assert exit_code_of(words(f"what-if {PLAN} --no-ledger {change}")) == 2
        assert "name them by --hardware" in capsys.readouterr().err


def test_every_option_of_a_training_is_one_of_its_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(capsys, QUESTION)
    plan = replace(read_plan(PLAN), sources=())
    given = training_options(plan)
    for field in fields(TrainingOptions):
        if field.name in ("fp8_recipe", "fp8_all_gather", *OF_THE_QUESTION):
            continue
        value = getattr(plan.training, NAMED_OTHERWISE.get(field.name, field.name))
        assert getattr(given, field.name) == value


@pytest.mark.parametrize("columns", ["60", "80"])
def test_it_fits_the_screen(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(capsys, QUESTION)
    monkeypatch.setenv("COLUMNS", columns)
    assert exit_code_of(words(f"what-if {PLAN} --no-ledger --gpus 8 --tokens 15T")) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "gpus 8 in place of 16" in " ".join(out.split())

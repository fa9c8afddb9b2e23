"""`trace`: a saved plan's step as a file, and what a measured one does otherwise."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import read_plan
from tests.cli.small import answer, saved_plan, words
from tests.run.trace.format_rules import problems
from tests.schemas import obeys

QUESTION = (
    "--model llama-3.2-1b --gpus 16 --hardware dgx-h100 --cp 1 --pp 2 --tp 1 --micro-batch 4 "
    "--global-batch 128 --seq-len 2048 --schedule 1f1b --no-ledger"
)
PLAN = "plan.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan, searched once."""
    return saved_plan(tmp_path_factory.mktemp("plan") / PLAN, QUESTION)


@pytest.fixture(autouse=True)
def in_its_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)


def test_it_writes_a_trace_of_the_saved_plan(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    found = answer(capsys, *words(f"trace {PLAN} --out step.json --micro-batches 1"))
    obeys("trace", found)
    plan = read_plan(PLAN)
    assert found["step_seconds"] == plan.estimate.step_seconds.expected
    assert sum(found["terms_seconds"].values()) == pytest.approx(found["step_seconds"])
    document = json.loads(Path("step.json").read_text())
    assert found["events"] == len(document["traceEvents"])
    assert found["bytes"] == Path("step.json").stat().st_size
    assert problems(document) == []
    assert exit_code_of(words(f"trace {PLAN} --out step.json.gz --micro-batches 1")) == 0
    said = capsys.readouterr().out
    assert "the others pass by pass (--micro-batches)" in " ".join(said.split())
    packed = json.loads(gzip.decompress(Path("step.json.gz").read_bytes()))
    assert packed["traceEvents"] == document["traceEvents"]


def test_over_its_own_trace_nothing_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words(f"trace {PLAN} --out whole.json --micro-batches 99")) == 0
    assert exit_code_of(words(f"trace {PLAN} --overlay whole.json --out both.json")) == 0
    said = capsys.readouterr().out
    assert "No kind differs by more than 0.1 % of the step." in said
    both = json.loads(Path("both.json").read_text())["traceEvents"]
    assert {event["pid"] < 1_000_000 for event in both} == {True, False}
    capsys.readouterr()
    found = answer(capsys, *words(f"trace {PLAN} --overlay whole.json"))
    obeys("trace_overlay", found)
    assert max(abs(one["difference_seconds"]) for one in found["differences"]) < 1e-9
    assert found["explanations"] == []


def test_the_plan_is_named_in_either_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, *words(f"trace --plan {PLAN} --out step.json")) == answer(
        capsys, *words(f"trace {PLAN} --plan {PLAN} --out step.json")
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("", "give --out plan.trace.json, or --overlay"),
        ("--out x.json --rank 1", "--rank says whose trace --overlay is"),
        ("--overlay none.json", "none.json does not exist"),
        ("--overlay plan.json", "no list traceEvents"),
        ("--overlay none.json --micro-batches 2", "leave out --micro-batches"),
        ("--out none/x.json", "choose another --out"),
        ("--overlay none.json --out none/x.json", "choose another --out"),
        ("--out x.json --micro-batches 0", "--micro-batches"),
        ("--out x.json --plan other.json", "leave one of them out"),
        ("--overlay plan.json --out none/x.json", "none"),
    ],
)
def test_what_cannot_be_is_one_error(
    capsys: pytest.CaptureFixture[str], options: str, why: str
) -> None:
    assert exit_code_of(words(f"trace {PLAN} {options}")) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    assert not Path("x.json").exists()

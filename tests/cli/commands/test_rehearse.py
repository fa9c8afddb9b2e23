"""`rehearse` and `emit-launch --rehearsed`: what they print, and what their exit codes say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.run.rehearse.compare import ComparedCalls, ComparedRank
from fsdpplan.run.rehearse.rehearse import Rehearsal
from tests.cli.small import DEMO, on_a_machine_without_gpus, words
from tests.schemas import obeys

ROOT = Path(__file__).resolve().parents[3]
AGREED = ComparedCalls(
    collective="all_gather",
    axis="dp_shard",
    ranks=2,
    dtype="fp32",
    count=17,
    bytes=1000,
    predicted_count=17,
    predicted_bytes=1000,
)
FIRST = ComparedRank(
    rank=0,
    stage=0,
    stands_for="ranks 0 to 3",
    calls=(AGREED,),
    peak_bytes=2**30,
    predicted_peak_bytes=2**30,
    peak_bytes_of={"step": 2**30},
    device_bytes=2**30,
    available_bytes=2**34,
    state_bytes=2**20,
    parameters=1000,
    without_gradient=(),
)
GOOD = Rehearsal(
    world=4,
    micro_batches=1,
    planned_micro_batches=1,
    ranks=(FIRST,),
    errors=(),
    mismatches=(),
    differences=("nothing is compiled",),
    not_seen=("speed",),
    torch_version="2.13.0",
    planned_torch="2.13",
    seconds=3.0,
    own_model=False,
)
OTHER = replace(GOOD, ranks=(replace(FIRST, calls=(replace(AGREED, count=18),)),))
HANGS = replace(GOOD, mismatches=("ranks 0 and 3 do not make the same calls",))
OLDER = replace(GOOD, planned_torch="2.9")
FAILS = replace(GOOD, ranks=(), errors=("rank 0: in a step: shapes do not go together",))


@pytest.fixture(autouse=True)
def _with_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(DEMO) == 0
    capsys.readouterr()


def outcome(monkeypatch: pytest.MonkeyPatch, found: Rehearsal) -> list[dict[str, Any]]:
    """Let every rehearsal end as `found`; what each was asked, in order."""
    asked: list[dict[str, Any]] = []

    def rehearse(plan: Any, ranks: Any, *, build: str | None = None, **given: Any) -> Rehearsal:
        numbers, torch = [one.rank for one in ranks], plan.training.torch
        asked.append({"ranks": numbers, "build": build, "torch": torch, **given})
        return replace(found, own_model=build is not None)

    monkeypatch.setattr("fsdpplan.run.rehearse.rehearse.rehearse", rehearse)
    return asked


def test_a_plan_is_rehearsed_by_its_own_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["rehearse", "--json"]) == 0, capsys.readouterr()
    found = json.loads(capsys.readouterr().out)
    obeys("rehearse", found)
    assert found["agrees"]
    assert found["world"] == 4
    assert [rank["rank"] for rank in found["ranks"]] == [0, 3]
    calls = {(call["axis"], call["collective"]) for call in found["ranks"][0]["calls"]}
    assert ("dp_shard", "reduce_scatter") in calls
    assert all(call["agrees"] for rank in found["ranks"] for call in rank["calls"])


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (GOOD, 0, "Every collective is as predicted"),
        (OTHER, 6, "18 times with 1,000 bytes, predicted are 17 times with 1,000"),
        (HANGS, 6, "ranks 0 and 3 do not make the same calls"),
        (FAILS, 5, "shapes do not go together"),
    ],
    ids=["as predicted", "other counts", "ranks that do not match", "a program that fails"],
)
def test_the_exit_code_says_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Rehearsal,
    code: int,
    said: str,
) -> None:
    outcome(monkeypatch, found)
    assert exit_code_of(["rehearse"]) == code
    out, err = capsys.readouterr()
    assert said in out + err
    assert max(map(len, out.splitlines())) <= 80


def test_what_differs_is_shown_beside_what_was_predicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome(monkeypatch, OTHER)
    exit_code_of(["rehearse"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "all_gather" in line]
    assert line.split()[4:] == ["18", "1.00", "kB", "17,", "1.00", "kB"]


def test_each_option_reaches_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = outcome(monkeypatch, GOOD)
    given = words("rehearse --ranks 1,last --build mine.py:build --whole-step")
    assert exit_code_of(given) == 0
    (wish,) = asked
    assert (wish["ranks"], wish["build"], wish["whole_step"]) == ([1, 3], "mine.py:build", True)
    assert "predicted" not in capsys.readouterr().out


@pytest.mark.parametrize(("found", "code"), [(GOOD, 0), (OTHER, 6), (HANGS, 6), (FAILS, 6)])
def test_what_did_not_rehearse_is_not_emitted(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: Rehearsal,
    code: int,
) -> None:
    outcome(monkeypatch, found)
    assert exit_code_of(["emit-launch", "--rehearsed"]) == code
    out, err = capsys.readouterr()
    assert bool(out) == (code == 0)
    assert ("nothing is emitted" in err) == (code == 6)


def test_a_program_of_ones_own_is_not_rehearsed_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text("")
    assert exit_code_of(words("emit-launch --rehearsed --script train.py")) == 2
    assert "--build" in capsys.readouterr().err


def test_it_does_not_vouch_for_another_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome(monkeypatch, OLDER)
    assert exit_code_of(("rehearse",)) == 6
    said = " ".join(capsys.readouterr().out.split())
    assert "Rehearsed under torch 2.13, the plan is for 2.9: this says nothing about it" in said
    assert "torch 2.9 by --python" in said
    assert "Every collective" not in said
    assert exit_code_of(("rehearse", "--json")) == 6
    document = json.loads(capsys.readouterr().out)
    obeys("rehearse", document)
    assert document["error"]["kind"] == "GateFailed"
    assert document["planned_torch"] == "2.9"
    assert document["other_torch"].startswith("rehearsed under torch 2.13")
    assert document["agrees"] is False


def test_a_plan_that_says_no_torch_is_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome(monkeypatch, replace(GOOD, planned_torch=None))
    assert exit_code_of(("rehearse",)) == 0


def test_another_python_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = outcome(monkeypatch, GOOD)
    exit_code_of(("rehearse", "--python", "/some/python"))
    assert asked[0]["python"] == "/some/python"


def test_the_plan_is_rehearsed_for_the_torch_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = outcome(monkeypatch, GOOD)
    exit_code_of(("rehearse", "--torch", "2.9.1"))
    assert asked[0]["torch"] == "2.9"

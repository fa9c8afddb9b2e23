"""`verify`: what it prints, and the exit code that its gates decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import words
from tests.run.test_verify import ON_GPUS, PLAN, a_run
from tests.schemas import obeys


@pytest.fixture(autouse=True)
def _beside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    seen = {"event": "communication", "axis": "dp_shard", "collective": "all_gather"}
    more = json.dumps({**seen, "seconds": 0.05, "exposed_seconds": 0.01, "bytes": 10**9})
    a_run(tmp_path, metrics=f"{ON_GPUS}{more}\n")


def test_a_run_within_its_limits_is_success(capsys: pytest.CaptureFixture[str]) -> None:
    given = words("verify --min-mfu 20% --max-reserved 75GiB --max-error 25%")
    assert exit_code_of([*given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    obeys("verify", document)
    assert document["predicted"]["step_seconds"]["expected"] == 0.2
    assert document["measured"]["step_seconds"] == 0.25
    assert document["communication"][-1]["measured"]["seconds"] == 0.05
    assert document["gates"] == [
        {"name": "min_mfu", "limit": 0.2, "value": 0.2, "passed": True},
        {"name": "max_reserved", "limit": 75 * 2**30, "value": 2000, "passed": True},
        {"name": "max_error", "limit": 0.25, "value": pytest.approx(0.2), "passed": True},
    ]


def test_a_failed_gate_is_exit_code_6_and_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words("verify --min-mfu 0.4 --max-error 15% --json")) == 6
    out, err = capsys.readouterr()
    document = json.loads(out)
    obeys("verify", document)
    assert [gate["passed"] for gate in document["gates"]] == [False, False]
    assert document["error"]["exit_code"] == 6
    assert err.count("\n") == 1
    assert "MFU is 20.0 %, below 40.0 %" in err


def test_the_screen_shows_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words("verify --min-mfu 0.4")) == 6
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    flat = " ".join(out.split())
    assert PLAN.model.name in flat
    assert "all_gather over dp_shard" in flat
    assert "of 7 steps is inside the 80 % band" in flat
    assert "--min-mfu: FAILED" in flat


def test_a_run_and_its_plan_may_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words("verify fsdpplan-runs/1/metrics.jsonl")) == 0
    assert exit_code_of(words("verify nowhere")) == 2
    assert exit_code_of(words("verify fsdpplan-runs/1 --plan nothing.json")) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_overlap_and_waits_stand_beside_their_prediction_and_have_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(words("verify --min-overlap 80% --json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["overlap"]["measured_fraction"] == pytest.approx(0.8)
    (waits,) = [one for one in document["waits"] if one["axis"] == "dp_shard"]
    assert waits["measured_seconds"] == 0.01
    assert document["idle_seconds"] is None
    assert exit_code_of(words("verify --min-overlap 95%")) == 6
    out, err = capsys.readouterr()
    assert "80.0 % of communication is hidden, less than 95.0 %" in err
    assert ["overlap", "80.0", "%"] in [
        [*row[:1], *row[-2:]] for row in map(str.split, out.splitlines())
    ]
    assert "waits for dp_shard" in out
    # this run's profile does not say how long nothing ran
    assert exit_code_of(words("verify --max-idle 100ms")) == 2
    assert "--profile 10:3" in capsys.readouterr().err
    with open("fsdpplan-runs/1/metrics.jsonl", "a") as metrics:
        event = {"event": "profiled", "idle_seconds": 0.12, "step_seconds": 0.25}
        metrics.write(json.dumps(event) + "\n")
    assert exit_code_of(words("verify --max-idle 100ms")) == 6
    assert "the device is idle for 120 ms of a step" in capsys.readouterr().err

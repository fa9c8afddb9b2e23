"""Rules of the field, as each command and the job say them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.files.plans import plan_from_json, plan_json, read_plan
from fsdpplan.trainer.config import parse_plan
from fsdpplan.trainer.report import MOST_RULES, rules_words
from tests.cli.small import on_a_machine_without_gpus, saved_plan, words

SLOW = (
    "--params 1e9 --gpus 16 --hardware dgx-a100-80g-hdr1 --dp-shard 16 --sharding fsdp "
    "--micro-batch 1 --activation-checkpointing none --tp 1 --pp 1 --cp 1 --no-ledger"
)
BROKEN = {"exposed-communication", "shards-across-islands", "sharded-although-whole"}


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best that is sharded over two nodes behind one port each."""
    return saved_plan(tmp_path_factory.mktemp("plan") / "fsdpplan.json", SLOW)


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys: pytest.CaptureFixture[str], command: str, *more: str) -> str:
    capsys.readouterr()
    assert exit_code_of([*words(command), *more]) == 0
    return str(capsys.readouterr().out)


def test_an_estimate_has_all_in_json_and_the_dearest_on_a_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = json.loads(printed(capsys, f"estimate {SLOW} --json"))["rules"]
    assert {one["rule"] for one in found} == BROKEN
    assert all(one["source"] and one["says"] and one["advice"] for one in found)
    screen = printed(capsys, f"estimate {SLOW}")
    assert "Warnings\n  - exposed-communication: " in screen
    # a remedy of several is said once
    assert screen.count("--sharding ddp") == 1
    assert " more: --json has all" in screen


def test_a_plan_carries_what_it_breaks_and_explain_says_it_again(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_plan(plan_file)
    carried = json.loads(plan_file.read_text())["rules"]
    assert {one.rule for one in plan.rules} >= {"shards-across-islands"}
    assert json.loads(printed(capsys, "explain --rules --json", str(plan_file))) == {
        "rules": carried
    }
    assert json.loads(printed(capsys, "explain --json", str(plan_file)))["rules"] == carried
    screen = printed(capsys, "explain --rules", str(plan_file))
    for one in plan.rules:
        assert f"{one.rule}\n" in screen
    assert screen.count("source") >= len(plan.rules)
    assert "fsdpplan explain --rules has all" not in screen


def test_the_trainer_says_what_the_plan_carries(plan_file: Path) -> None:
    text = plan_file.read_text()
    said = rules_words(parse_plan(text))
    plan = read_plan(plan_file)
    assert said[0].startswith(f"the plan breaks {plan.rules[0].rule}: {plan.rules[0].says}; ")
    document = json.loads(text)
    document["rules"] = [{**document["rules"][0], "rule": f"r{n}", "change": ""} for n in range(5)]
    said = rules_words(parse_plan(json.dumps(document)))
    assert len(said) == MOST_RULES + 1
    assert said[-1] == "2 more: fsdpplan explain --rules"


def test_a_plan_from_before_breaks_nothing_that_it_knows_of(plan_file: Path) -> None:
    plan = read_plan(plan_file)
    assert plan_from_json(plan_json(plan), where="plan") == plan
    document = json.loads(plan_file.read_text())
    del document["rules"]
    assert plan_from_json(json.dumps(document), where="plan").rules == ()
    assert rules_words(parse_plan(json.dumps(document))) == []


def test_two_pages_at_once_are_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["explain", str(plan_file), "--rules", "--nccl"]) == 2
    assert "give one of them" in capsys.readouterr().err

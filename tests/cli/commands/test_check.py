"""`check` and `diff`: plans in continuous integration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cost.estimate import estimate
from fsdpplan.files.plans import read_plan
from fsdpplan.validate.check.quantities import plan_quantities
from tests.cli.small import answer, show, words

RECORDED = Path(__file__).parents[2] / "recordings" / "0.2.0" / "plans"


@pytest.fixture(autouse=True)
def in_a_folder_with_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for one, name in (("fp8", "a.json"), ("pieces", "b.json")):
        shutil.copy(RECORDED / f"{one}.json", name)


def test_true_conditions_end_with_0_and_false_ones_with_6(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        exit_code_of(["check", "a.json", "--assert", "mfu >= 0.2 and peak_reserved <= 72GiB"]) == 0
    )
    assert "holds: mfu >= 0.2 and peak_reserved <= 72GiB" in capsys.readouterr().out
    asked = ["check", "a.json", "--assert", "mfu >= 38%", "--assert", "gpus == 256"]
    assert exit_code_of(asked) == 6
    out, err = capsys.readouterr()
    assert "FALSE: mfu >= 38% (mfu 0.2497)" in out
    assert "mfu >= 38% is false" in err
    assert exit_code_of([*asked, "--json"]) == 6
    document = json.loads(capsys.readouterr().out)
    assert [one["holds"] for one in document["conditions"]] == [False, True]
    assert document["error"]["exit_code"] == 6


def test_each_quantity_is_the_plans_own_value(capsys: pytest.CaptureFixture[str]) -> None:
    listed = answer(capsys, "check", "a.json", "--list")["quantities"]
    plan = read_plan("a.json")
    assert listed["peak_reserved"] == plan.estimate.memory.peak_reserved_bytes
    assert listed["step"] == listed["estimate.step_seconds.expected"]
    assert listed["exposed_communication"] == plan.estimate.time.exposed_communication_seconds
    assert (listed["tp"], listed["gpus"], listed["layers"]) == (8, 256, 80)
    assert listed.keys() == plan_quantities(plan).keys() | {"goodput", "cost"}
    assert "peak_reserved " in show(capsys, "check", "a.json", "--list")


def test_predicting_again_takes_todays_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    saved = answer(capsys, "check", "a.json", "--list")["quantities"]["step"]
    again = answer(capsys, "check", "a.json", "--list", "--again")
    plan = read_plan("a.json")
    assert saved == plan.estimate.step_seconds.expected
    assert again["quantities"]["step"] == estimate(plan.case).step_seconds.expected != saved
    assert again["predicted_again"]
    assert exit_code_of(["check", "a.json", "--assert", "tokens > 1"]) == 2
    assert "tokens is not known of this plan" in capsys.readouterr().err


def test_a_cost_without_a_price_or_tokens_says_what_to_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(["check", "a.json", "--assert", "cost < 1"]) == 2
    assert "--price 2.10, or --provider" in capsys.readouterr().err
    priced = ["check", "a.json", "--assert", "cost < 1", "--price", "2.10"]
    assert exit_code_of(priced) == 2
    assert "--tokens" in capsys.readouterr().err
    assert exit_code_of(["check", "a.json", "--assert", "gpu_hours < 1"]) == 2
    assert "--tokens" in capsys.readouterr().err


def test_a_lock_is_written_kept_and_missed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words("check a.json --lock plan.lock")) == 2
    assert "add --write-lock" in capsys.readouterr().err
    false = ["check", "a.json", "--lock", "plan.lock", "--write-lock", "--assert", "tp == 1"]
    assert exit_code_of(false) == 6
    assert not Path("plan.lock").exists()
    assert "plan.lock was not written" in capsys.readouterr().out
    assert exit_code_of(words("check a.json --lock plan.lock --write-lock")) == 0
    assert exit_code_of(words("check a.json --lock plan.lock")) == 0
    assert "As locked in plan.lock" in capsys.readouterr().out
    assert exit_code_of(words("check b.json --lock plan.lock")) == 6
    out, err = capsys.readouterr()
    assert "cluster.gpus: 256 -> 8" in out
    assert "take it with --write-lock" in err
    assert exit_code_of(words("check b.json --lock plan.lock --write-lock")) == 0
    assert "cluster.gpus: 256 -> 8" in capsys.readouterr().out
    assert exit_code_of(words("check b.json --lock plan.lock")) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("check a.json", "nothing is to be checked"),
        ("check a.json --write-lock --assert 'mfu > 0'", "add --lock"),
        ("check a.json --assert 'peak_reservd > 1GiB'", "nearest: peak_reserved"),
        ("check none.json --assert 'mfu > 0'", "none.json"),
        ("diff a.json none.json", "none.json"),
    ],
)
def test_bad_input_is_one_error(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words(given)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("given", ["diff", "diff a.json"])
def test_diff_of_fewer_than_two_plans_is_one_error(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(given.split()) == 2
    assert "type fsdpplan diff a.json b.json" in capsys.readouterr().err


def test_an_option_without_its_value_is_told_where_its_options_stand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code_of(["check", "--assert"]) == 2
    assert "`fsdpplan check --help`" in capsys.readouterr().err


def test_diff_shows_all_that_differs_and_says_where_nothing_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "are the same plan" in show(capsys, "diff", "a.json", "a.json")
    assert answer(capsys, "diff", "a.json", "a.json")["differences"] == []
    plan = json.loads(Path("a.json").read_text())
    plan["versions"]["fsdpplan"] = "0.1.9"
    Path("newer.json").write_text(json.dumps(plan))
    out = show(capsys, "diff", "a.json", "newer.json")
    assert "fsdpplan: 0.2.0 -> 0.1.9" in out
    assert "The prediction is the same" in out
    out = show(capsys, "diff", "a.json", "b.json")
    for part in ("Inputs", "Layout", "exposed tp", "activations", "tp: 8 -> 1", "memory"):
        assert part in out
    assert max(map(len, out.splitlines())) <= 80
    found = answer(capsys, "diff", "a.json", "b.json")
    change = sum(term["change"] for term in found["terms"]["time_seconds"])
    steps = [read_plan(name).estimate.step_seconds.expected for name in ("a.json", "b.json")]
    assert change == pytest.approx(steps[1] - steps[0])

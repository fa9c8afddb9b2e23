"""`run --fallback` and `emit-launch --alerts`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import DEMO, on_a_machine_without_gpus, words
from tests.schemas import obeys

PROGRAM = """
import json, os, sys, time
layout = json.loads(os.environ["FSDPPLAN_PLAN"])["layout"]
fits = layout["activation_checkpointing"] == "full"
with open(os.environ["FSDPPLAN_METRICS"], "a") as file:
    if not fits and os.environ["RANK"] == "0":
        event = {"event": "oom", "step": 2, "rank": 0, "host": "n1", "phase": "backward"}
        beyond = {"working_bytes": 3 * 2**30}
        print(json.dumps({**event, "needed_bytes": 2**20, "beyond_prediction": beyond}), file=file)
if not fits and os.environ["RANK"] != "0":
    time.sleep(60)  # torchrun ends it when rank 0 fails, and would end rank 0 if this failed first
sys.exit(0 if fits else 1)
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(PROGRAM)
    assert exit_code_of([*DEMO, "--global-batch", "16"]) == 0


def run(*given: str) -> int:
    return exit_code_of(["run", "--target", "here", "--script", "own.py", "--no-ledger", *given])


@pytest.mark.gloo
def test_it_tries_leaner_layouts_and_says_which_one_ran(
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert run("--fallback", "60", "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    obeys("run", document)
    *failed, last = document["attempts"]
    assert all(each["ran_out_of_memory"] for each in failed)
    assert document["layout"] == last["layout"]
    assert last["layout"]["activation_checkpointing"] == "full"
    assert document["out_of_memory"] is None
    assert failed
    assert "out of memory; attempt 2 of at most 61: --" in err


@pytest.mark.gloo
def test_without_it_the_postmortem_names_the_next_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert run() == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Rank 0 ran out of memory in backward, in step 3." in said
    assert "wrong most in activations, logits and gathered parameters: 3" in said
    assert "Next to try: --" in said
    assert "fsdpplan run --from plan --fallback 2 does so" in said


def test_a_script_that_stands_here_cannot_be_emitted_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert exit_code_of(["emit-launch"]) == 0
    Path("job.sbatch").write_text(capsys.readouterr().out)
    assert exit_code_of(words("run --fallback 1 --target here")) == 2
    assert "--from plan" in capsys.readouterr().err


def test_a_smoke_run_has_no_fallback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words("run --fallback 1 --smoke")) == 2
    assert "--smoke" in capsys.readouterr().err


def test_alerts_are_of_the_plan_that_the_script_carries(
    capsys: pytest.CaptureFixture[str],
) -> None:
    capsys.readouterr()
    assert (
        exit_code_of([*words("emit-launch --alerts rules.yml --json --python"), sys.executable])
        == 0
    )
    digest = json.loads(capsys.readouterr().out)["plan_sha256"]
    (group,) = yaml.safe_load(Path("rules.yml").read_text())["groups"]
    assert all(f'plan="{digest[:12]}"' in rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("window", ["3", "0:2", "2:0", "a:b"])
def test_a_window_to_profile_is_two_numbers(
    window: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["emit-launch", "--profile", window]) == 2
    assert "START:STEPS" in capsys.readouterr().err

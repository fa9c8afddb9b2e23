"""`what-if --sensitivities`: the derivatives of the saved plan, and what to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from fsdpplan.cost.estimate import estimate
from fsdpplan.files.plans import read_plan
from fsdpplan.search.advice.sensitivity import with_value
from tests.cli.small import answer, on_a_machine_without_gpus, saved_plan, words
from tests.schemas import obeys

QUESTION = (
    "--model llama-3.2-1b --gpus 16 --hardware dgx-h100 --inter-bw 100Gb/s --cp 1 --pp 1 --tp 1 "
    "--micro-batch 1 --no-ledger"
)
PLAN = "plan.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan, searched once."""
    return saved_plan(tmp_path_factory.mktemp("plan") / PLAN, QUESTION)


@pytest.fixture(autouse=True)
def in_its_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    on_a_machine_without_gpus(monkeypatch)


def followed(capsys: pytest.CaptureFixture[str], options: str = "") -> dict[str, Any]:
    """What it says of the saved plan."""
    capsys.readouterr()
    return answer(capsys, *words(f"what-if {PLAN} --sensitivities --no-ledger {options}"))


def test_it_is_of_the_saved_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found, plan = followed(capsys), read_plan(PLAN)
    obeys("what_if_sensitivities", found)
    assert found["estimate"]["step_seconds"]["expected"] == plan.estimate.step_seconds.expected
    by_field = {one["field"]: one for one in found["sensitivities"]}
    field = "cluster.levels.infiniband.port_bandwidth_bytes_per_second"
    network = by_field[field]
    assert network["evidence"] == "typed"
    assert network["source"].startswith("flag --inter-bw")
    slower = estimate(with_value(plan.case, field, network["value"] * 0.9))
    assert network["far_less"]["step_factor"] == pytest.approx(
        slower.step_seconds.expected / plan.estimate.step_seconds.expected
    )
    gpus = by_field["cluster.gpus"]
    assert gpus["counted"]
    assert gpus["more"]["factor"] == 2
    kinds = {one["error"]: one for one in found["measurements"]}
    assert kinds["across_fraction"]["command"].startswith(f"fsdpplan calibrate --plan {PLAN} --no")
    assert kinds["stack_fraction"]["command"].startswith(f"fsdpplan run {PLAN}")
    assert found["measured_by"][0]["band_fraction"] < found["band_fraction"]


def test_under_other_inputs_it_is_of_the_best_layout_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = followed(capsys, "--gpus 32 --global-batch 512")
    capsys.readouterr()
    then = answer(capsys, *words(f"what-if {PLAN} --no-ledger --gpus 32 --global-batch 512"))
    assert found["layout"] == then["best"]["layout"]
    assert found["estimate"] == then["best"]["estimate"]
    assert found["cluster"]["gpus"] == 32
    assert found["measured_by"][0]["command"].split()[2:3] == ["PLAN,"]  # no saved one is meant
    assert read_plan(PLAN).cluster.gpus == 16


@pytest.mark.parametrize("columns", ["60", "80"])
def test_it_fits_the_screen(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    capsys.readouterr()
    assert exit_code_of(words(f"what-if {PLAN} --sensitivities --no-ledger")) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "What is worth measuring" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--save x.json", 2, "leave --save out"),
        ("--gpus 12x", 2, "--gpus"),
        ("--model llama-3.1-405b --gpus 8", 3, "no layout of llama-3.1-405b"),
    ],
)
def test_bad_input_is_one_error(
    options: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    given = words(f"what-if {PLAN} --sensitivities --no-ledger {options}")
    assert exit_code_of(given) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1

"""`what-if --gain`: each change, typed by itself, brings its claim; the cheapest come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import answer, on_a_machine_without_gpus, saved_plan, words
from tests.schemas import obeys

QUESTION = (
    "--model llama-3.2-1b --gpus 16 --hardware dgx-h100 --inter-bw 20Gb/s --global-batch 192 "
    "--cp 1 --pp 1 --tp 1 --micro-batch 1 --wrap-blocks 1 --loss-chunks 1 --no-ledger"
)
PLAN = "plan.json"
ORDER = ("setting", "recipe", "hardware")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plan is."""
    return saved_plan(tmp_path_factory.mktemp("plan") / PLAN, QUESTION).parent


@pytest.fixture(autouse=True)
def in_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    on_a_machine_without_gpus(monkeypatch)


def what_if(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    """What it says of the saved plan."""
    capsys.readouterr()
    return answer(capsys, *words(f"what-if {PLAN} --no-ledger {options}"))


def test_each_change_brings_its_claim(capsys: pytest.CaptureFixture[str]) -> None:
    found = what_if(capsys, "--gain 10%")
    obeys("what_if_gain", found)
    enough = found["enough"]
    assert enough
    costs = [(ORDER.index(one["kind"]), one["relative"]) for one in enough]
    assert costs == sorted(costs)
    for one in enough:
        if one["change"] == "--free":  # the dearest to search once more
            assert one["kind"] == "setting"
            continue
        direct = what_if(capsys, one["change"])["best"]
        assert direct["layout"] == one["best"]["layout"], one["change"]
        assert direct["estimate"] == one["best"]["estimate"]
        assert one["gain_fraction"] == pytest.approx(1 / direct["difference"]["ratio"] - 1)
        assert one["gain_fraction"] >= 0.1
    for one in found["others"]:
        assert one["problem"] if one["best"] is None else one["gain_fraction"] < 0.1
    changes = {one["change"].split()[0]: one for one in enough}
    assert {"--inter-bw", "--gpus", "--hardware"} <= set(changes)
    # of hardware no less would do: a tenth less of the bandwidth, fewer whole nodes
    gigabits = int(changes["--inter-bw"]["change"].split()[1].removesuffix("Gb/s"))
    less = what_if(capsys, f"--inter-bw {gigabits * 0.9:.1f}Gb/s")["best"]["difference"]
    assert 1 / less["ratio"] - 1 < 0.1
    assert changes["--gpus"]["change"] == "--gpus 24 --global-batch 192" or (
        changes["--gpus"]["relative"] > 1.5
    )


def test_it_fits_the_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    capsys.readouterr()
    given = f"what-if {PLAN} --no-ledger --gain 20% --gpus 8 --dp-shard 8 --precision fp8"
    assert exit_code_of(words(given)) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    gains = out[out.index("Less than that") :].split("+")[1:]
    shares = [float(one.split()[0]) for one in gains]
    assert shares == sorted(shares, reverse=True)
    assert all(share < 20 for share in shares)
    numbered = [line for line in out.splitlines() if line[:5].strip().endswith(".")]
    assert [line.split()[0] for line in numbered] == ["1.", "2."][: len(numbered)]
    assert "--hardware dgx-b200" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gain 10% --save x.json", "leave --save out"),
        ("--gain 0", "more than nothing"),
        ("--gain 10% --sensitivities", "two answers"),
        ("--gain 10x", "--gain"),
    ],
)
def test_bad_input_is_one_error(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert exit_code_of(words(f"what-if {PLAN} --no-ledger {options}")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1

"""`compare`: plans or questions side by side say what `recommend` says of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import answer, on_a_machine_without_gpus, words

PINS = "--pp 1 --cp 1 --micro-batch 1 --no-ledger"
MODEL = "--model llama-3.2-1b"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)


def test_questions_and_plans_say_what_recommend_says(capsys: pytest.CaptureFixture[str]) -> None:
    machines = (("dgx-h100", 16), ("dgx-b200", 8))
    direct = [
        answer(
            capsys,
            *words(f"recommend {MODEL} --hardware {name} --gpus {gpus} {PINS} --save {name}.json"),
        )
        for name, gpus in machines
    ]
    asked = answer(
        capsys,
        *words(f"compare {MODEL} --hardware dgx-h100,dgx-b200 --gpus 16,8 --tokens 1T {PINS}"),
    )
    plans = answer(capsys, *words("compare dgx-h100.json dgx-b200.json --tokens 1T --no-ledger"))
    for found in (asked, plans):
        assert [one["name"] for one in found["compared"]] == ["A", "B"]
        for one, plan, (_, gpus) in zip(found["compared"], direct, machines, strict=True):
            assert one["layout"] == plan["plans"][0]["layout"]
            assert one["estimate"] == plan["plans"][0]["estimate"]
            training = one["training"]
            steps = -(-(10**12) // (training["seq_len"] * training["global_batch"]))
            seconds = steps * one["estimate"]["step_seconds"]["expected"]
            assert one["seconds_to_train"] == pytest.approx(seconds)
            assert one["gpu_seconds_to_train"] == pytest.approx(gpus * seconds)
        (between,) = found["differences"]
        changed = {one["name"]: one["after"] for one in between["changed"]}
        assert (changed["gpus"], changed["hardware"]) == (8, "dgx-b200")
        rates = [one["estimate"]["tokens_per_second"] for one in found["compared"]]
        assert between["ratio"] == pytest.approx(rates[0] / rates[1])
    assert asked["differences"] == plans["differences"]


def test_what_does_not_fit_is_said_beside_what_does(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(
        f"compare --model llama-3.1-8b --gpus 1,8 --hardware dgx-h100 {PINS} --offload none"
    )
    found = answer(capsys, *given)
    assert found["compared"][0]["layout"] is None
    assert "fits" in found["compared"][0]["problem"]
    assert found["differences"] == []
    none = words(
        f"compare --model llama-3.1-70b --gpus 1,2 --hardware dgx-h100 {PINS} --offload none"
    )
    assert exit_code_of(none) == 3


@pytest.mark.parametrize("columns", ["60", "80"])
def test_it_fits_the_screen(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    given = words(f"compare {MODEL} --tp 1,2,4 --gpus 8 --hardware dgx-h100 {PINS}")
    assert exit_code_of(given) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert "C beside A" in out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (f"compare {MODEL} --gpus 8", "two or more saved plans"),
        (f"compare {MODEL} --gpus 8,16 --hardware dgx-h100,dgx-h200,dgx-b200", "2 values"),
        (f"compare {MODEL} --gpus 8,,16", "--gpus"),
        ("compare missing.json other.json", "missing.json"),
        ("compare missing.json", "2 to 8 saved plans"),
        ("compare a.json b.json --gpus 8", "leave --gpus"),
    ],
)
def test_bad_input_is_one_error(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(words(given)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1

"""`sweep`: its points are those of `recommend`, its CSV parses, what does not fit says why."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.small import answer, on_a_machine_without_gpus, show, words

QUESTION = "--model llama-3.2-1b --pp 1 --cp 1 --micro-batch 1 --no-ledger"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_a_machine_without_gpus(monkeypatch)


def test_a_point_is_what_recommend_says(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(f"sweep {QUESTION} --gpus 4:16 --hardware dgx-h100,dgx-b200")
    found = answer(capsys, *given)
    curves = {(one["hardware"], one["scaling"]): one for one in found["curves"]}
    assert len(curves) == 4
    for (hardware, scaling), curve in curves.items():
        assert [point["gpus"] for point in curve["points"]] == [4, 8, 16]
        batches = [point["global_batch"] for point in curve["points"]]
        assert batches == ([1024] * 3 if scaling == "strong" else [256, 512, 1024])
        for point in curve["points"]:
            if hardware == "dgx-h100":
                direct = answer(
                    capsys,
                    *words(f"recommend {QUESTION} --no-save --hardware {hardware}"),
                    *("--gpus", str(point["gpus"])),
                    *("--global-batch", str(point["global_batch"])),
                )
                assert point["estimate"] == direct["plans"][0]["estimate"]
                assert point["layout"] == direct["plans"][0]["layout"]
        first = curve["points"][0]["estimate"]["tokens_per_second_per_gpu"]
        for point in curve["points"]:
            own = point["estimate"]["tokens_per_second_per_gpu"]
            assert point["efficiency_fraction"] == pytest.approx(own / first)


def test_csv_parses_and_says_why_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    given = words(
        f"sweep {QUESTION} --gpus 1,6,8,16 --hardware dgx-h100 --precision fp32 --dp-shard 8 "
        "--scaling strong --tokens 1T --csv"
    )
    rows = list(csv.DictReader(io.StringIO(show(capsys, *given))))
    assert [row["gpus"] for row in rows] == ["1", "6", "8", "16"]
    for row in rows[:2]:
        assert "does not divide" in row["problem"]
        assert row["step_seconds"] == row["efficiency_fraction"] == ""
    assert all(not row["problem"] and float(row["seconds_to_train"]) > 0 for row in rows[2:])
    assert float(rows[2]["efficiency_fraction"]) == 1
    assert (rows[3]["dp_replicate"], rows[3]["dp_shard"]) == ("2", "8")


def test_the_knee_of_a_slow_network_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    options = "--inter-bw 1Gb/s --hardware dgx-h100 --gpus 16,32,64 --global-batch 64"
    out = show(capsys, *words(f"sweep {QUESTION} {options} --scaling strong"))
    assert max(map(len, out.splitlines())) <= 60
    assert out.count(" knee") == 1
    assert "Knee: 16 GPUs" in out
    assert "GPU hours for each doubling" in " ".join(out.split())


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--gpus 16:8", 2, "no range"),
        ("--gpus 9:15 --hardware dgx-h100", 2, "no power of two"),
        ("--hardware dgx-h100", 2, "--gpus 8:1024"),
        ("--gpus 8:x", 2, "--gpus"),
        ("--gpus 8 --hardware dgx-h100,nothing", 2, "nothing"),
        ("--gpus 8 --csv --json", 2, "contradict"),
        ("--gpus 8 --hardware dgx-h100 --global-batch 1,2", 2, "--global-batch"),
        ("--gpus 1 --hardware dgx-h100 --sharding fsdp", 3, "nothing fits"),
    ],
)
def test_bad_input_is_one_error(
    options: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(words(f"sweep {QUESTION} {options}")) == code
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert code == 3 or "--json" in options or out == ""

"""Measured peaks of memory: in the band, in the chance to fit and in what is recommended."""

from __future__ import annotations

from math import exp
from pathlib import Path

import pytest

from fsdpplan.cli.app import exit_code_of
from tests.cli.commands.test_learn import ESTIMATE, HEADER, SHAPE
from tests.cli.small import answer, on_a_machine_without_gpus, words

GIB = 2**30
TABLE = f"{HEADER},peak_mem_gib,oom,notes"
DEGREES = "64,bf16,8192,3,1,64"


def row(gib: float | str, *, out: str = "n", checkpointing: str = "full", seconds: str = "") -> str:
    """One run on 64 GPUs, whose peak is what torch had reserved."""
    head = f"mine,torchtitan,{SHAPE},{DEGREES},{checkpointing},y,{seconds},2026-01"
    return f"{head},{gib},{out},mem_kind=reserved"


def table(path: Path, *rows: str) -> str:
    path.write_text("\n".join([TABLE, *rows]) + "\n")
    return str(path)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def reserved(capsys: pytest.CaptureFixture[str]) -> float:
    """What is predicted of `ESTIMATE`, in GiB."""
    predicted: int = answer(capsys, *ESTIMATE)["memory"]["peak_reserved_bytes"]
    return predicted / GIB


def test_peaks_alone_move_and_narrow_the_band(
    reserved: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = table(tmp_path / "mine.csv", row(1.04 * reserved), row("", seconds="2.0"))
    plain, told = answer(capsys, *ESTIMATE), answer(capsys, *ESTIMATE, "--runs", mine)
    before, after = (one["memory"]["peak_device_band_bytes"] for one in (plain, told))
    assert before["expected"] == plain["memory"]["peak_device_bytes"]
    assert told["memory"]["peak_device_bytes"] == plain["memory"]["peak_device_bytes"]
    assert before["expected"] < after["expected"] < 1.04 * before["expected"]
    assert after["upper"] / after["lower"] < before["upper"] / before["lower"]
    shift = told["cluster"]["device"]["learned_peaks"]["shift_log"]
    assert after["expected"] == pytest.approx(exp(shift) * before["expected"], abs=1)
    assert exit_code_of([*ESTIMATE, "--runs", mine]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "predicted, as 1 measured run says" in screen
    assert "as predicted without your runs" in screen


def test_higher_peaks_leave_less_room_and_a_smaller_chance(
    reserved: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = table(tmp_path / "mine.csv", row(1.15 * reserved), row(1.2 * reserved))
    plain, told = answer(capsys, *ESTIMATE), answer(capsys, *ESTIMATE, "--runs", mine)
    assert told["available_bytes"] < plain["available_bytes"]
    assert told["memory"]["fits_fraction"] <= plain["memory"]["fits_fraction"]


def test_a_run_out_of_memory_makes_less_of_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = table(tmp_path / "mine.csv", row("", out="y", checkpointing="op"))
    plain, told = answer(capsys, *ESTIMATE), answer(capsys, *ESTIMATE, "--runs", mine)
    assert told["available_bytes"] < plain["available_bytes"]
    assert told["learned"] is None


def test_a_plan_keeps_what_it_learned_of_memory(
    reserved: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = table(tmp_path / "mine.csv", row(1.05 * reserved), row(1.06 * reserved))
    asked = words(
        "recommend --model llama-3.1-8b --gpus 64 --hardware dgx-h100 --seq-len 8192 "
        "--global-batch 64 --tp 1 --pp 1 --cp 1"
    )
    assert answer(capsys, *asked, "--runs", mine)["cluster"]["device"]["learned_peaks"]["runs"] == 2
    explained = answer(capsys, "explain")
    assert (
        explained["available_bytes"] == answer(capsys, *ESTIMATE, "--runs", mine)["available_bytes"]
    )


def test_rows_are_validated_after_learning_from_others_of_their_peaks(
    reserved: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(1.08 * reserved, seconds="1.4"), row(1.09 * reserved, seconds="1.4")]
    mine = table(tmp_path / "mine.csv", *rows, row(1.1 * reserved, seconds="1.4"))
    plain = answer(capsys, "validate", mine)["rows"]
    for learned in (
        answer(capsys, "validate", mine, "--runs", mine)["rows"],
        answer(capsys, "validate", mine, "--leave-one-out")["rows"],
    ):
        for before, after in zip(plain, learned, strict=True):
            assert abs(after["memory_error_fraction"]) < abs(before["memory_error_fraction"])


def test_a_table_that_tells_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = table(tmp_path / "mine.csv", row(""))
    assert exit_code_of([*ESTIMATE, "--runs", mine]) == 2
    assert "a step time or a peak of memory" in " ".join(capsys.readouterr().err.split())
